"""The statistics against hand-made and independent numbers, and a verdict that claims no more than they allow."""

from __future__ import annotations

import io
import math
import random
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from ssl_vit.report import plots
from ssl_vit.report.cells import flat
from ssl_vit.report.compared import section
from ssl_vit.report.statistics import summarize
from ssl_vit.report.tables import cost_table, terminal_table


def comparison(scores: Any, evaluator: str = "fine_tune") -> dict[str, Any]:
    """{arm: {labels a class: [accuracy of seed 0, of seed 1, ...; None where missing]}} -> results."""
    arms = [("ssl", 0, {"images_seen": 192000, "seconds": 80.2, "parameters": 207000}), ("scratch", 0, None)]
    arms += [("supervised", 1437, {"images_seen": 192000, "seconds": 70.0, "parameters": 207000})]
    return {
        "kind": "comparison",
        "seeds": [0, 1, 2],
        "arms": [
            {"name": name, "label": f"the {name} arm [bold]", "run": spent and name, "labels_used": used}
            | {"pretraining": spent}
            for name, used, spent in arms
        ],
        "evaluators": {
            "fine_tune": {"title": "Fine-tuning", "trains_encoder": True},
            "few_shot": {"title": "Few-shot", "trains_encoder": False},
        },
        "measurements": [
            {"arm": arm, "evaluator": evaluator, "labels_per_class": labels, "seed": seed, "accuracy": accuracy}
            for arm, budgets in scores.items()
            for labels, accuracies in budgets.items()
            for seed, accuracy in enumerate(accuracies)
            if accuracy is not None
        ],
    }


def row(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (found,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return found


def test_mean_std_and_interval_of_an_arm() -> None:
    found = row(summarize(comparison({"ssl": {10: [0.6, 0.7, 0.8]}}))["accuracy"], arm="ssl", labels_per_class=10)
    assert found["n"] == 3
    assert found["mean"] == pytest.approx(0.7)
    assert found["std"] == pytest.approx(0.1)  # ddof=1; the population's would be 0.0816
    assert found["half_width"] == pytest.approx(4.302653 * 0.1 / math.sqrt(3))  # t(0.975, 2) from a printed table


def test_paired_difference_agrees_with_scipy() -> None:
    generator = np.random.default_rng(0)
    ours, theirs = generator.uniform(0.5, 0.9, 5), generator.uniform(0.3, 0.8, 5)
    results = comparison({"ssl": {10: ours.tolist()}, "scratch": {10: theirs.tolist()}})
    found = row(summarize(results)["differences"], arm="ssl", against="scratch")
    low, high = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert found["mean"] - found["half_width"] == pytest.approx(low)
    assert found["mean"] + found["half_width"] == pytest.approx(high)


def test_differences_are_paired_by_seed_not_by_position() -> None:
    results = comparison({"ssl": {10: [None, 0.8, 0.9]}, "scratch": {10: [0.1, 0.5, 0.6]}})
    random.Random(0).shuffle(results["measurements"])
    found = row(summarize(results)["differences"], against="scratch")
    assert (found["n"], found["arm_mean"], found["against_mean"]) == (2, pytest.approx(0.85), pytest.approx(0.55))
    assert found["mean"] == pytest.approx(0.3)


def test_frozen_features_are_compared_with_the_untrained_encoder_and_pixels() -> None:
    scores = {
        "ssl": {5: [0.6, 0.7]},
        "untrained": {5: [0.3, 0.3]},
        "pixels": {5: [0.8, 0.91]},
        "supervised": {5: [0.9]},
    }
    summary = summarize(comparison(scores, "few_shot"))
    assert [found["against"] for found in summary["differences"]] == ["untrained", "supervised", "pixels"]
    assert row(summary["differences"], against="pixels")["mean"] == pytest.approx(-0.205)
    assert "with 5 labels a class: better with raw pixels than with SSL pretraining" in summary["verdict"]


def test_verdict_of_a_clear_gain_that_stops() -> None:
    ssl = {10: [0.90, 0.91, 0.89], 25: [0.95, 0.96, 0.94], 100: [0.97, 0.98, 0.97]}
    scratch = {10: [0.55, 0.57, 0.58], 25: [0.83, 0.84, 0.83], 100: [0.97, 0.97, 0.98]}
    sentences = summarize(comparison({"ssl": ssl, "scratch": scratch}))["sentences"]
    assert sentences == [
        "With 10 labels a class, SSL pretraining gains +33.3 ± 5.2 points over training from scratch "
        "(90.0% against 56.7%, 3 seeds); the gain ends at about 76 labels a class, between 25 and 100.",
        "With 25 labels a class SSL pretraining gains +11.7 ± 1.4 points; with 100 labels a class these seeds show no "
        "difference (+0.0 ± 2.5 points).",
    ]
    # By hand: the intervals' lower ends are 11.667 - 1.434 and 0 - 2.484.
    assert round(25 * 4 ** (10.232 / (10.232 + 2.484))) == 76


def test_no_end_of_a_gain_is_claimed_where_it_comes_back_or_never_was() -> None:
    flat = {budget: [0.5, 0.5, 0.5] for budget in (5, 10, 25)}
    gain, none, loss = [0.60, 0.61, 0.62], [0.4, 0.5, 0.6], [0.40, 0.41, 0.42]
    for rows, ends in (
        ((gain, none, gain), False),
        ((none, none, none), False),
        ((gain, gain, gain), False),
        ((loss, none, loss), False),
        ((gain, [0.6], none), False),
        ((gain, none, loss), True),
        ((gain, loss, loss), True),
    ):
        verdict = summarize(comparison({"ssl": dict(zip(flat, rows, strict=True)), "scratch": flat}))["verdict"]
        assert ("; the gain ends at about" in verdict) == ends, verdict


def test_a_gain_shrinks_only_where_the_intervals_do_not_touch() -> None:
    scratch = {5: [0.3, 0.3, 0.3], 10: [0.3, 0.3, 0.3]}
    apart = comparison({"ssl": {5: [0.80, 0.81, 0.82], 10: [0.40, 0.41, 0.42]}, "scratch": scratch})
    touching = comparison({"ssl": {5: [0.5, 0.6, 0.7], 10: [0.48, 0.58, 0.65]}, "scratch": scratch})
    assert "The gain shrinks with more labels but holds at every budget" in summarize(apart)["verdict"]
    assert "The gain holds at every budget" in summarize(touching)["verdict"]


def test_verdict_says_so_when_ssl_loses() -> None:
    results = comparison({"ssl": {10: [0.50, 0.51, 0.52]}, "scratch": {10: [0.60, 0.61, 0.63]}})
    assert "SSL pretraining loses 10.3 ± 1.4 points against training from scratch" in summarize(results)["verdict"]
    assert " gain" not in summarize(results)["verdict"]


def test_verdict_claims_nothing_where_the_interval_holds_zero() -> None:
    results = comparison({"ssl": {10: [0.9, 0.5, 0.7]}, "scratch": {10: [0.5, 0.6, 0.6]}})
    verdict = summarize(results)["verdict"]
    assert "no difference between SSL pretraining and training from scratch that these seeds can show" in verdict
    assert " gain" not in verdict


def test_one_seed_gives_no_interval_and_says_so() -> None:
    summary = summarize(comparison({"ssl": {10: [0.9], 25: [0.95]}, "scratch": {10: [0.5], 25: [0.9]}}))
    assert row(summary["differences"], labels_per_class=10)["half_width"] is None
    assert row(summary["accuracy"], labels_per_class=10, arm="ssl")["std"] is None
    assert "on one seed: there is no interval, so this may be chance" in summary["verdict"]
    assert " gain" not in summary["verdict"]
    assert "±" not in summary["verdict"]


def test_the_verdict_is_about_the_smallest_budget_whatever_the_others_say() -> None:
    results = comparison({"ssl": {25: [0.9, 0.9], 5: [0.2, 0.2]}, "scratch": {25: [0.1, 0.1], 5: [0.299, 0.301]}})
    assert summarize(results)["verdict"].startswith("With 5 labels a class, SSL pretraining loses 10.0 ± 1.3 points")


def test_seeds_that_vary_nothing_make_no_interval_and_no_claim() -> None:
    """A fifth of the images more at every seed, where nothing was drawn: one observation, three times."""
    ssl, scratch = {1: [0.3] * 3, 5: [0.7, 0.6, 0.5]}, {1: [0.1] * 3, 5: [0.5, 0.4, 0.3]}
    summary = summarize(comparison({"ssl": ssl, "scratch": scratch}))
    assert all(found["half_width"] is None for found in summary["differences"])
    assert " gain" not in summary["verdict"] and "±" not in summary["verdict"]
    assert "(+20.0 points), the same at all 3 seeds: they show no variation" in summary["verdict"]
    few = comparison({"ssl": {5: [0.3] * 3}, "untrained": {5: [0.2] * 3}, "pixels": {5: [0.4] * 3}}, "few_shot")
    assert "with 5 labels a class: better with raw pixels than with SSL pretraining" in summarize(few)["verdict"]
    assert row(summary["accuracy"], labels_per_class=5, arm="ssl")["half_width"] > 0.2


@pytest.mark.parametrize("accuracy", [None, math.nan])
def test_incomplete_comparisons(accuracy: float | None) -> None:
    results = comparison({"ssl": {10: [0.9]}})
    results["measurements"].append(results["measurements"][0] | {"seed": 1, "accuracy": accuracy})
    results["finished"] = False
    summary = summarize(results)
    assert row(summary["accuracy"], arm="ssl")["n"] == 1
    assert summary["verdict"].startswith("No verdict yet")
    assert "has not finished" in summary["verdict"]
    assert summarize({"kind": "comparison"})["accuracy"] == []


def test_terminal_table_shows_names_as_they_are_and_marks_missing_seeds() -> None:
    scores = {"ssl": {10: [0.9, 0.91, 0.92]}, "scratch": {10: [0.5, 0.6], 25: [0.7]}}
    console = Console(width=160, file=io.StringIO())
    console.print(terminal_table(comparison(scores)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "the ssl arm [bold]" in text
    assert "91.0 ± 1.0 " in text
    assert "55.0 ± 7.1 (2 seeds)" in text
    assert "70.0 (1 seed)" in text
    assert "192,000" in text and "1,437" in text and "207,000" in text


def terminal_lines(results: dict[str, Any], width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(terminal_table(results))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_costs_fit_80_columns_with_the_sweep_and_how_many_pieces_ran_side_by_side() -> None:
    results = comparison({"ssl": {10: [0.9, 0.91]}, "scratch": {10: [0.5, 0.6]}})
    for seed, found in enumerate(results["measurements"]):
        found |= {"images_seen": 123_456_000, "seconds": 1000.25 + seed}
    results["arms"][0]["pretraining"] = {"images_seen": 1_281_167_000, "seconds": 98765.4, "parameters": 22_050_664}
    results["arms"][0]["pretraining"] |= {"flops": 3.21e21, "device_hours": 219.4787}
    results["arms"][0]["choices"] = [{"tried": [{}, {}, {}]}, {"tried": [{}]}]
    results["arms"][0]["tuning"] = {"images_seen": 345_678_000, "seconds": 4321.5}
    results["arms"][1]["tuning"] = None
    results["jobs"] = 3
    lines = terminal_lines(results, 80)
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    cells = {
        name: values for name, *values in ([cell.strip() for cell in line.strip("│").split("│")] for line in lines)
    }
    assert cells["Pretraining labels"] == ["0", "none", "1,437"]
    assert cells["Settings tried"] == ["4", "–", "–"]
    assert cells["Pretraining FLOPs"] == ["3.21e21", "–", "–"]
    assert cells["Pretraining device-hours"] == ["219", "–", "–"]
    assert cells["Parameters"] == ["22,050,664", "–", "207,000"]
    assert cells["Pretraining images"] == ["1,281,167,000", "–", "192,000"]
    assert cells["Pretraining seconds"] == ["98,765.4", "–", "70.0"]
    assert cells["Sweep images"] == ["345,678,000", "–", "–"]
    assert cells["Sweep seconds"] == ["4,321.5", "–", "–"]
    assert cells["Fine-tuning images"] == ["246,912,000", "246,912,000", "–"]
    assert cells["Fine-tuning seconds"] == ["2,001.5", "2,005.5", "–"]
    assert "Seconds were measured with 3 pieces running side by side" in " ".join(map(str.strip, lines))


def test_percent_and_whole_budgets_stand_where_their_labels_put_them() -> None:
    results = comparison({"ssl": {"10%": [0.5, 0.6], 2: [0.4, 0.5], "all": [0.9, 0.95]}, "scratch": {2: [0.1, 0.3]}})
    results["sets"] = {"": {"classes": 10, "metric": "accuracy"}}
    for found in results["measurements"]:
        found["labels"] = {"10%": 150, 2: 20, "all": 1500}[found["labels_per_class"]]
    rows = [r for r in summarize(results)["accuracy"] if r["arm"] == "ssl"]
    assert [(r["labels_per_class"], r["x"]) for r in rows] == [(2, 2.0), ("10%", 15.0), ("all", 150.0)]


def test_the_metric_of_a_data_set_is_what_is_counted() -> None:
    results = comparison({"ssl": {5: [0.9, 0.8]}, "scratch": {5: [0.1, 0.2]}})
    for found in results["measurements"]:
        found["mean_per_class"] = found["accuracy"] / 2
    results["sets"] = {"": {"classes": 10, "metric": "mean_per_class"}}
    assert row(summarize(results)["accuracy"], arm="ssl")["mean"] == pytest.approx(0.425)


def test_the_first_arm_without_labels_is_held_against_the_others() -> None:
    spent = {"images_seen": 1, "seconds": 1.0, "parameters": 1, "flops": 1}
    results = comparison({"ssl": {5: [0.6, 0.8]}, "ssl_15": {5: [0.5, 0.6]}, "scratch": {5: [0.4, 0.4]}})
    results["arms"].append({"name": "ssl_15", "label": "15%", "run": "ssl_15", "labels_used": 0, "pretraining": spent})
    differences = summarize(results)["differences"]
    pairs = [(found["arm"], found["against"], found["role"]) for found in differences]
    assert pairs == [("ssl", "scratch", "baseline"), ("ssl", "ssl_15", "variant"), ("ssl_15", "scratch", "baseline")]
    assert row(differences, role="variant")["mean"] == pytest.approx(0.15)
    drawn = section(results, summarize(results), plots.arm_styles(["ssl", "ssl_15", "scratch"]), "", "fine_tune")
    assert drawn["under_test"] == "the ssl arm [bold]" and drawn["gain"]["inline"].count("minus") == 2
    results["study"] = "flops"
    assert "variant" not in {found["role"] for found in summarize(results)["differences"]}


def test_each_data_set_gets_its_sentences_and_its_tables() -> None:
    results = comparison({"ssl": {5: [0.9, 0.8]}, "scratch": {5: [0.25, 0.16]}})
    other = comparison({"ssl": {5: [0.3, 0.41]}, "scratch": {5: [0.8, 0.9]}})["measurements"]
    results["measurements"] = [found | {"data": "pets"} for found in results["measurements"]]
    results["measurements"] += [found | {"data": "birds"} for found in other]
    results["sets"] = {"birds": {}, "pets": {}}
    sentences = [s for s in summarize(results)["sentences"] if "5 labels" in s]
    assert [s.split(",")[0] for s in sentences] == ["birds: With 5 labels a class", "pets: With 5 labels a class"]
    assert "loses 49.5" in sentences[0] and "gains +64.5" in sentences[1]
    text = "\n".join(terminal_lines(results, 120))
    assert text.index("birds: Fine-tuning") < text.index("pets: Fine-tuning")


def test_no_pretraining_means_the_same_architecture() -> None:
    results = comparison({"ssl": {5: [0.9, 0.8]}, "small": {5: [0.3, 0.5]}, "scratch": {5: [0.1, 0.2]}})
    results["arms"][0]["architecture"], results["arms"][1]["architecture"] = "large", "small"
    results["arms"].append({"name": "small", "label": "small scratch", "architecture": "large"})
    assert [r["against"] for r in summarize(results)["differences"]] == ["small"]
    few = comparison({"ssl": {5: [0.9]}, "untrained": {5: [0.3]}, "untrained_b": {5: [0.4]}}, "few_shot")
    few["arms"][0]["architecture"] = "large"
    few["references"] = {"untrained": "small", "untrained_b": "large", "pixels": "small"}
    assert [r["against"] for r in summarize(few)["differences"]] == ["untrained_b"]


def test_arms_that_were_not_tuned_alike_are_named() -> None:
    results = comparison({"ssl": {5: [0.9, 0.8]}, "scratch": {5: [0.1, 0.2]}})
    assert "tuned" not in summarize(results)["verdict"]
    results["arms"][0]["choices"] = [{"tried": [{}, {}]}]
    expected = (
        "not tuned alike (settings tried: SSL pretraining 2, training from scratch 0 and supervised pretraining 0)"
    )
    assert expected in summarize(results)["verdict"]


def test_sweeps_that_ended_at_their_longest_training_are_named() -> None:
    results = comparison({"ssl": {5: [0.9, 0.8]}, "scratch": {5: [0.1, 0.2]}})
    tried = [{"lr": 0.1, "steps": steps} for steps in (100, 1000)]
    for arm, chosen in zip(results["arms"], tried, strict=False):
        arm["choices"] = [{"tried": tried, "chosen": chosen}]
    sentence = (
        "Caution: the longest fine-tuning tried (1,000 steps) served training from scratch best; with a longer one"
    )
    assert sentence in summarize(results)["verdict"]
    results["arms"][1]["choices"] = [{"tried": tried, "chosen": tried[0]}]
    assert "longest" not in summarize(results)["verdict"]
    for arm in results["arms"][:2]:
        arm["choices"] = [{"tried": tried[:1], "chosen": tried[0]}]
    assert "Caution: one length of fine-tuning was tried (100 steps)" in summarize(results)["verdict"]


def test_a_study_says_where_its_ends_are() -> None:
    results = comparison({"ssl": {5: [0.5, 0.6]}, "ssl_large": {5: [0.7, 0.8]}, "scratch": {5: [0.1, 0.2]}})
    results["study"] = "samples"
    results["arms"][0] |= {"pretraining": {"samples": 1000}, "series": "SSL"}
    results["arms"].append({"name": "ssl_large", "series": "SSL", "pretraining": {"samples": 50_000}, "labels_used": 0})
    summary = summarize(results)
    assert [(r["arm"], r["size"], r["series"]) for r in summary["study"]] == [
        ("ssl", 1000, "SSL"),
        ("ssl_large", 50_000, "SSL"),
    ]
    sentence = "With 5 labels a class: accuracy goes from 55.0% with 1,000 pretraining images to 75.0% with 50,000 "
    assert sentence + "(+20.0 points, the same at every seed)." in summary["sentences"]
    results["measurements"][2]["accuracy"] = 0.95  # the larger's first seed: its gain is not the second's
    again = summarize(results)
    assert any("which these seeds cannot tell from none" in text for text in again["sentences"])
    (ends,) = again["ends"]
    assert (ends["sizes"], ends["n"], ends["mean"]) == ([1000, 50_000], 2, pytest.approx(0.325))


@pytest.mark.parametrize("more", [{}, {"jobs": 1, "skipped": []}])
def test_nothing_is_said_of_jobs_and_skipped_samples_where_there_are_none(more: dict[str, Any]) -> None:
    text = " ".join(terminal_lines(comparison({"ssl": {10: [0.9]}}) | more, 160))
    assert "side by side" not in text
    assert "left out" not in text


def test_skipped_samples_follow_the_tables() -> None:
    skipped = [{"shard": "[b].tar", "key": f"{key:08d}", "reason": "not an image"} for key in range(7)]
    lines = terminal_lines(comparison({"ssl": {10: [0.9]}}) | {"skipped": skipped}, 2000)
    names = "; ".join(f"[b].tar: 0000000{key} (not an image)" for key in range(5))
    assert lines[-1].strip() == f"Caution: the evaluations left out 7 unreadable sample(s): {names}; and 2 more."


def test_sessions_in_a_list_are_numbered() -> None:
    sessions = {"git": "c", "before": [{"git": "a", "hardware": {"cores": 2}}, {"git": "b"}]}
    expected = {"git": "c", "before.1.git": "a", "before.1.hardware.cores": "2", "before.2.git": "b"}
    assert flat(sessions) == expected


def test_the_costs_of_many_arms_fit_a_terminal() -> None:
    results = comparison({"ssl": {10: [0.9]}, "scratch": {10: [0.5]}})
    results["arms"] = [
        {"name": f"ssl_{n}", "label": f"arm{n}", "run": "x", "labels_used": 0, "pretraining": {"seconds": 1000.0 + n}}
        for n in range(9)
    ]
    lines = terminal_lines(results, 80)
    heads = [re.findall(r"arm\d", line) for line in lines if "Cost" in line]
    assert heads == [["arm0", "arm1", "arm2", "arm3"], ["arm4", "arm5", "arm6", "arm7"], ["arm8"]]
    assert all(f"1,00{n}.0" in " ".join(lines) for n in range(9))
    assert sum("Pretraining: one run" in line for line in lines) == 1


def test_what_made_the_weights_that_an_arm_began_with_is_not_passed_off_as_nothing() -> None:
    results = comparison({})
    given = {"name": "timm", "label": "timm's", "run": "hub/b", "labels_used": None, "pretraining": None}
    results["arms"] = [{**given, "starts_from": "hub/b"}, {**results["arms"][0], "starts_from": "runs/first"}]
    table = cost_table(results)
    assert table.rows[0] == ["Pretraining labels", "unknown", "0"]
    assert table.title.endswith(
        "Not counted: what made the weights that these started from: timm (hub/b), ssl (runs/first)"
    )
    assert cost_table(comparison({})).rows[0][2] == "none"
