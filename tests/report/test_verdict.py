"""What a verdict says, and that it claims no more than the statistics allow."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssl_vit.records import ArmRecord, DataRecord, Look
from ssl_vit.report import sequential
from ssl_vit.report.intervals import interval
from ssl_vit.report.read import read
from ssl_vit.report.statistics import plan, points
from ssl_vit.report.summary import summarize
from ssl_vit.report.tables import place_tables
from ssl_vit.report.verdict import notes, verdict
from ssl_vit.results import Result, load, save
from tests.report.made import (
    ARMS,
    EVALUATORS,
    SUPERVISED,
    SWEEP,
    row,
    said,
    summary,
    two_arms,
    write_comparison,
    write_run,
)

COMPUTE = "Compute: with all seeds and sweeps, masked patch prediction used"


def test_the_headline_is_the_mean_over_budgets_and_names_the_method(folder: Path) -> None:
    text = said(folder, two_arms(0.2))
    first = text.splitlines()[0]
    assert first.startswith("Masked patch prediction is better than training from scratch: +20.0 ± ")
    assert "(73.5% against 53.5%), the mean over 5 and 10 labels per class (Fine-tuning, 3 seeds, 100 test" in first
    assert "was pretrained only once" in first
    assert "SSL" not in text


@pytest.mark.parametrize(
    ("gain", "changes", "expected"),
    [
        (-0.2, {}, "Masked patch prediction is worse than training from scratch: -20.0 ± "),
        (0.0, {"margin": 0.2}, "Masked patch prediction and training from scratch are equivalent within 20 points"),
        (0.01, {}, "Undecided between masked patch prediction and training from scratch: +1.0 ± "),
    ],
)
def test_other_outcomes(folder: Path, gain: float, changes: dict[str, Any], expected: str) -> None:
    text = said(folder, two_arms(gain), **changes)
    assert text.startswith(expected)
    assert "times as many" in text and "add an arm with compute_of" not in text, "advised only of a better arm"


def test_label_efficiency_and_compute(folder: Path) -> None:
    gains = {"ssl": 0.05, "scratch": 0.0}
    rows = [
        row(arm, budget, seed, 0.5 + 0.1 * place + gain)
        for arm, gain in gains.items()
        for place, budget in enumerate((5, 20, 80))
        for seed in range(3)
    ]
    text = said(folder, rows)
    assert (
        "training from scratch needs 10 labels per class for the accuracy of masked patch prediction with 5 labels"
        in text
    ), "half way between 5 and 20 on a logarithmic axis"
    # One pretraining of 6e9 and 9 fine-tunings of 1e9, against 9 of these; 4 x 1,800 and 9 x 2 seconds against 9 x 2.
    assert "used 1.5e+10 training FLOPs, 1.67 times as many as training from scratch, in 401 times the pro" in text
    assert "7.00 times as many. With as much compute, training from scratch may be as accurate" in text
    assert "add an arm with compute_of: ssl" in text


def test_scratch_with_the_compute_of_pretraining_is_part_of_the_verdict(folder: Path) -> None:
    longer = ArmRecord(name="longer", label="longer", kind="scratch", compute_of="ssl")
    rows = two_arms(0.1)
    rows += [replace(one, arm="longer") for one in two_arms(0.3) if one.arm == "ssl"]
    text = said(folder, rows, arms=(*ARMS, longer))
    assert "is better than training from scratch: +10.0" in text and "add an arm with compute_of" not in text
    assert "masked patch prediction minus training from scratch with the compute of pretraining -20.0" in text
    assert "compute of pretraining" not in said(folder / "without", two_arms(0.1))


def test_the_evaluator_that_trains_the_encoder_makes_the_headline(folder: Path) -> None:
    frozen = two_arms(-0.2, evaluator="few_shot")
    frozen = [replace(one, arm="untrained") if one.arm == "scratch" else one for one in frozen]
    pixels = [replace(one, arm="pixels") for one in two_arms(0.1, evaluator="few_shot") if one.arm == "ssl"]
    both = said(folder, [*frozen, *pixels, *two_arms(0.2)])
    assert both.startswith("Masked patch prediction is better than training from scratch")
    assert "Caution: Few-shot: masked patch prediction is worse than raw pixels (-30.0" in both
    assert "Caution: Few-shot: masked patch prediction is worse than the untrained encoder (-20.0" in both
    alone = said(folder.parent / "frozen", frozen, arms=ARMS[:1])
    assert alone.startswith("Masked patch prediction is worse than the untrained encoder: -20.0")
    assert "Caution: Few-shot" not in alone, "the headline says it"


def test_pretrainings_are_the_unit_where_they_are_fewer_than_seeds(folder: Path) -> None:
    rows = [
        row(arm, 5, seed, 0.5 + (0.2 if arm == "ssl" else 0) + 0.02 * seed, pretraining_seed=seed % made)
        for arm, made in (("ssl", 2), ("scratch", 1))
        for seed in range(4)
    ]
    head = summary(folder, rows).headlines[0]
    assert (head.unit, head.estimate.units, head.seeds, head.fixed) == ("pretraining", 2, 4, ())
    text = said(folder.parent / "again", rows)
    assert "(Fine-tuning, 2 pretrainings, 4 seeds, 100 test images)" in text
    assert "pretrained only once" not in text
    assert "% from pretrainings and their seeds, " in text
    each = [replace(one, pretraining_seed=one.seed) if one.arm == "ssl" else one for one in rows]
    assert summary(folder.parent / "each", each).headlines[0].unit == "seed"


def test_the_verdict_says_where_its_uncertainty_comes_from(folder: Path) -> None:
    (head,) = summary(folder, two_arms(0.02)).headlines
    seeds, images, rest = (f"{100 * share:.0f}%" for share in head.estimate.variance_shares)
    text = said(folder.with_name("d"), two_arms(0.02))
    said_so = f"Estimated variance of this difference: {seeds} from seeds, {images} from test images, {rest} from their"
    assert said_so in text
    assert "Estimated variance" not in said(folder.with_name("e"), two_arms(0.02, seeds=1)), "no interval"


def test_what_would_decide_is_counted_in_the_unit_that_was_used(folder: Path) -> None:
    each = "seeds with one pretraining each"
    for made, planned, unit in ((1, 1, "seeds"), (2, 2, "pretrainings"), (4, 4, each), (1, 4, "seeds")):
        rows = [
            row(arm, 5, seed, 0.5 + gain, images=40, pretraining_seed=seed % made if arm == "ssl" else 0)
            for arm, gains in (("ssl", (0.1, -0.1, 0.1, -0.1)), ("scratch", (0, 0, 0, 0)))
            for seed, gain in enumerate(gains)
        ]
        text = said(folder / f"{made} of {planned}", rows, pretrainings=planned)
        assert text.startswith("Undecided") and f"Neither more {unit} nor more test images alone" in text


def test_the_interval_is_described_by_the_units_and_the_confidence_that_were_used(folder: Path) -> None:
    def described(name: str, rows: list[Result], **changes: Any) -> str:
        comparison = read([write_comparison(folder / name, rows, **changes)])
        return interval(comparison, summarize(comparison))

    rows = [replace(one, pretraining_seed=one.seed % 2) for one in two_arms(0.2, seeds=4)]
    pretrained = (ARMS[0], ARMS[1].model_copy(update={"kind": "pretrained"}))
    assert "95% interval that covers seeds and test images (Stu" in described("seeds", two_arms(0.2))
    assert "covers pretrainings and test images (Stu" in described("pretrainings", rows, arms=pretrained)
    mixed = "covers seeds (pretrainings, where an arm has several but fewer than seeds) and test images (Stu"
    assert mixed in described("mixed", [one if one.arm == "ssl" else replace(one, pretraining_seed=0) for one in rows])
    looks = tuple(Look(seeds=seeds, pretrainings=1, outcomes={}) for seeds in (2, 3))
    levels = sequential.levels([2 / 5, 3 / 5])
    text = described("looks", two_arms(0.2), looks=looks, max_seeds=5)
    assert f"With these looks, intervals of differences have {100 * (1 - levels[-1]):.1f}% confidence." in text
    few = "intervals cover the truth a little less often"
    assert few in text and few not in described("six", two_arms(0.2, seeds=6))
    assert few not in described("two seeds", two_arms(0.2, seeds=2)), "their intervals are wider"
    alone = described("one", two_arms(0.2, budgets=(5,)))
    assert "declares the headline." in alone and "xploratory" not in alone and "Holm" not in alone and few in alone
    assert "in one fold" not in alone and "selected run" not in alone
    swept = described("swept", two_arms(0.2), sweeps={"ssl": SWEEP, "scratch": SWEEP})
    assert "the result of the first seed may be that of the selected run" in swept
    others = [*two_arms(0.2), *(replace(one, arm="supervised") for one in two_arms(0.1) if one.arm == "ssl")]
    more = described("others", others, arms=(*ARMS, SUPERVISED))
    assert "all other differences are exploratory" in more and "Holm" in more
    run = read([write_run(folder / "run", "run", 0.5)])
    assert "xploratory" not in interval(run, summarize(run)) and "Holm" not in interval(run, summarize(run))


def test_the_compute_of_imported_weights_is_unknown(folder: Path) -> None:
    given = ArmRecord(name="ssl", label="given", kind="weights", run="w", starts_from="my.safetensors")
    rows = [replace(one, flops=0.0) for one in two_arms(0.2)]
    assert "Compute: unknown; given started from pretrained weights." in said(folder, rows, arms=(given, ARMS[1]))


def test_an_unfinished_comparison_says_so(folder: Path) -> None:
    text = said(folder, two_arms(0.2), missing=["digits-fine_tune-ssl-5-0-0"])
    assert "2 seeds" in text, "only seeds with all label budgets count"
    assert "has not finished (1 of 13 tasks are missing), so the numbers may change." in text
    everything = [f"digits-fine_tune-ssl-{budget}-0-{seed}" for budget in (5, 10) for seed in range(3)]
    assert said(folder.parent / "none", two_arms(0.2), missing=everything).startswith("No verdict yet")
    frozen = [replace(one, arm="untrained") if one.arm == "scratch" else one for one in two_arms(evaluator="few_shot")]
    both = said(folder.parent / "both", [*two_arms(0.2), *frozen], missing=everything)
    assert both.startswith("No verdict yet"), "another evaluator's result is no substitute for the declared one"


def test_the_headline_covers_all_planned_label_budgets_and_datasets(folder: Path) -> None:
    second = [f"digits-fine_tune-{arm}-10-0-{seed}" for arm in ("ssl", "scratch") for seed in range(3)]
    assert said(folder, two_arms(0.2), missing=second).startswith("No verdict yet")
    rows = two_arms(0.2) + [replace(one, data="pets") for one in two_arms(-0.2)]
    of_pets = [f"pets-fine_tune-{arm}-{n}-0-{s}" for arm in ("ssl", "scratch") for n in (5, 10) for s in range(3)]
    (part,) = summary(folder.parent / "part", rows, missing=of_pets).headlines
    (alone,) = summary(folder.parent / "alone", two_arms(0.2)).headlines
    assert part.estimate.confidence == 0.975 and alone.estimate.confidence == 0.95
    (first,) = summary(folder.parent / "first", two_arms(0.2), missing=second).differences
    assert first.estimate.confidence == 0.975, "adjusted for the one that is missing, too"


def test_the_table_of_differences_has_the_interval_of_the_verdict(folder: Path) -> None:
    for budgets in ((5,), (5, 10)):
        arms = two_arms(0.2, budgets=budgets)
        comparison = read(
            [write_comparison(folder / str(len(budgets)), arms + [replace(one, data="b") for one in arms])]
        )
        found = summarize(comparison)
        for head in found.headlines:
            _, differences, *_ = place_tables(comparison, found, head.place)
            assert points(head.estimate) in differences.frame["mean" if len(budgets) > 1 else "5"].tolist()


def test_an_accuracy_outside_of_the_measured_curve_is_not_called_equal(folder: Path) -> None:
    text = said(folder, two_arms(0.2, seeds=5))
    assert "needs more than 10 labels per class for the accuracy of masked patch prediction with 5" in text
    text = said(folder.parent / "less", two_arms(-0.2, seeds=5))
    assert "needs fewer than 5 labels per class for" in text


def test_given_weights_of_a_supervised_run_are_not_under_test(folder: Path) -> None:
    weights = [
        ArmRecord(name=name, label=name, kind="weights", run=name, uses_labels=name == "supervised")
        for name in ("supervised", "ssl")
    ]
    rows = [*two_arms(0.2), *(replace(one, arm="supervised") for one in two_arms(0.3) if one.arm == "ssl")]
    assert said(folder, rows, arms=[*weights, ARMS[1]]).startswith("Ssl is better than training from scratch: +20.0")


def test_imported_weights_are_not_under_test_beside_a_pretrained_arm(folder: Path) -> None:
    imported = ArmRecord(name="imported", label="imported", kind="weights", run="w")
    rows = [*two_arms(0.2), *(replace(one, arm="imported") for one in two_arms(0.3) if one.arm == "ssl")]
    rows = [replace(one, arm=one.arm.replace("ssl", "supervised")) for one in rows]
    text = said(folder, rows, arms=[ARMS[1], SUPERVISED, imported])
    assert text.startswith("Supervised pretraining is better than training from scratch: +20.0")


def test_the_compute_of_a_headline_excludes_other_datasets_and_evaluators(folder: Path) -> None:
    rows = [*two_arms(0.2), *(replace(one, data="other", flops=7e9) for one in two_arms(0.2))]
    probes = [replace(one, evaluator="few_shot", flops=5e9) for one in two_arms(0.2) if one.arm == "ssl"]
    text = said(folder, [*rows, *probes], sweeps={"ssl": SWEEP, "scratch": SWEEP})
    assert f"digits: {COMPUTE} 1.4e+10 training FLOPs, 1.75 times" in text
    assert f"other: {COMPUTE} 4.8e+10 training FLOPs, 1.14 times" in text


def test_a_single_run_says_what_it_did_and_scored(folder: Path) -> None:
    found = read([write_run(folder, "ssl", 0.6)])
    first, scores = verdict(found, summarize(found))
    assert first == "ssl: masked patch prediction, 1,234 parameters, 10 steps, 640 images seen, 1,800 s."
    assert scores.startswith("Few-shot on data/test: 10 labels per class 60.0 ± ")
    (folder / "summary.json").unlink()
    found = read([folder])
    assert "has not finished" in verdict(found, summarize(found))[0]
    (folder / "recipe.yaml").write_text("init_from: runs/before\n")
    assert read([folder]).record.arms[0].starts_from == "runs/before"
    (folder / "recipe.yaml").unlink()
    found = read([folder])
    assert "it holds weights alone" in verdict(found, summarize(found))[0]
    assert found.record.arms[0].starts_from == str(folder), "what they cost to train is unknown"


def test_repeated_looks_widen_the_interval_and_are_named(tmp_path: Path) -> None:
    rows = two_arms(0.1, seeds=4)
    once = summarize(read([write_comparison(tmp_path / "once", rows)])).headlines[0]
    looks = tuple(Look(seeds=seeds, pretrainings=1, outcomes={"digits": "undecided"}) for seeds in (2, 4))
    found = read([write_comparison(tmp_path / "looks", rows, max_seeds=8, looks=looks)])
    twice = summarize(found).headlines[0]
    assert {one.estimate.confidence for one in summarize(found).means} == {found.confidence}
    assert once.estimate.confidence == 0.95
    assert twice.estimate.confidence == pytest.approx(1 - sequential.levels([0.25, 0.5])[-1])
    assert (twice.estimate.half_width or 0) > (once.estimate.half_width or 0)
    said = verdict(found, summarize(found))[0]
    assert "After 2 looks" in said
    assert "at most 8 seeds" in said
    both = rows + [replace(one, data="pets") for one in rows]
    found = read([write_comparison(tmp_path / "both", both, max_seeds=8, looks=looks)])
    assert found.confidence == sequential.confidence([0.25, 0.5], 2) > sequential.confidence([0.25, 0.5])


def test_after_the_last_look_no_more_seeds_are_advised(folder: Path) -> None:
    looks = tuple(Look(seeds=seeds, pretrainings=1, outcomes={"digits": "undecided"}) for seeds in (2, 4))
    for most in (4, 8):
        text = said(folder / str(most), two_arms(0.02, seeds=4), max_seeds=most, looks=looks)
        assert text.startswith("Undecided") and ("would decide" in text) == (most == 8)
        assert ("maximum number of seeds" in text) == (most == 4)


def test_one_test_image_gives_no_interval(folder: Path) -> None:
    rows = [row(arm, 5, seed, float(arm == "ssl"), images=1) for arm in ("ssl", "scratch") for seed in range(3)]
    assert "at least 2 images" in said(folder, rows)


def test_between_two_looks_only_the_seeds_of_the_last_one_count(tmp_path: Path) -> None:
    done = tuple(Look(seeds=seeds, pretrainings=1, outcomes={"digits": "undecided"}) for seeds in (2, 4))
    frozen = [replace(one, arm="untrained") for one in two_arms(evaluator="few_shot", seeds=6) if one.arm == "scratch"]
    frozen += [one for one in two_arms(evaluator="few_shot", seeds=6) if one.arm == "ssl"]
    for name, rows, arms in (("fine", [*two_arms(seeds=6), *frozen], ARMS), ("frozen", frozen, ARMS[:1])):
        found = read([write_comparison(tmp_path / name, rows, arms=arms, max_seeds=8, looks=done)])
        (head,) = summarize(found).headlines
        assert head.seeds == 4 and head.estimate.confidence == 1 - sequential.levels([0.25, 0.5])[-1]
        counted = {place: set(part["seed"]) for place, part in found.table.frame.groupby("evaluator")}
        assert counted.pop("few_shot") == {*range(4 if name == "frozen" else 6)}
        assert all(seeds == {0, 1, 2, 3} for seeds in counted.values()) and len(found.measured.results) == len(rows)
    found = read([write_comparison(tmp_path / "first", two_arms(seeds=4), max_seeds=8, missing=("pretrain-ssl",))])
    assert summarize(found).headlines[0].estimate.confidence == 1 - sequential.levels([0.5])[-1]
    assert f"{100 * found.confidence:.1f}% confidence" in interval(found, summarize(found))


def test_what_pretraining_saw_and_an_arms_own_settings_are_notes(folder: Path) -> None:
    own = ARMS[1].model_copy(update={"evaluators": {"fine_tune": {"optim": {"lr": 0.5}}}})
    arms = (ARMS[0], own, SUPERVISED)
    found = read([write_comparison(folder, two_arms(0.2), arms=arms, sweeps={"ssl": SWEEP, "scratch": SWEEP})])
    text = "\n".join(notes(found))
    assert "SSL [50%] (without labels); all labels (with labels)" in text
    assert "Settings of scratch alone: fine_tune: optim.lr=0.5." in text
    apart = (ARMS[0].model_copy(update={"saw": ()}), ARMS[1])
    found = read([write_comparison(folder, two_arms(0.2), arms=apart, sweeps={"ssl": SWEEP})])
    assert "Pretraining may have used" not in "\n".join(notes(found))


def test_what_pretraining_saw_is_a_note_where_seeds_select_settings(folder: Path) -> None:
    for name, values in (("one", [0.1]), ("several", [0.1, 1.0])):
        settings = {"digits": {"sweep": {"c": values}}}
        evaluators = {"few_shot": EVALUATORS["few_shot"].model_copy(update={"settings": settings})}
        rows = two_arms(0.2, evaluator="few_shot")
        found = read([write_comparison(folder / name, rows, arms=(ARMS[0], SUPERVISED), evaluators=evaluators)])
        assert ("all labels (with labels)" in "\n".join(notes(found))) == (name == "several")


def test_what_a_seed_draws_and_a_probe_selects_is_said_only_where_it_does(folder: Path) -> None:
    for name, budgets, values in (("part", ("10%", "all"), [0.1]), ("whole", ("all",), [0.1, 1.0])):
        swept = EVALUATORS["few_shot"].model_copy(update={"settings": {"digits": {"sweep": {"l2": values}}}})
        rows = [replace(one, labels=40 if one.labels_per_class == "10%" else 400) for one in two_arms(budgets=budgets)]
        found = read([write_comparison(folder / name, rows, evaluators=EVALUATORS | {"few_shot": swept})])
        covered, drawn = interval(found, summarize(found)), notes(found)[0]
        for text in ("the draw of the labeled images" in covered, "draws the labeled images" in drawn):
            assert text == (name == "part")
        assert ("select their settings anew" in covered) == (name == "whole")
        over = {"part": ", the mean over 10% of the labels and all labels (", "whole": " with all labels ("}[name]
        assert over in verdict(found, summarize(found))[0]


def test_budgets_have_adjusted_intervals(folder: Path) -> None:
    rows = two_arms(0.2, budgets=(5, 10, 25))
    found = summary(folder, rows)
    alone = [summary(folder.parent / str(n), [one for one in rows if one.labels_per_class == n]) for n in (5, 10, 25)]
    wider = [
        (one.estimate.half_width or 0) > (single.headlines[0].estimate.half_width or 0) * 1.05
        for one, single in zip(found.differences, alone, strict=True)
    ]
    assert sum(wider) == 2, "the last one of three by Holm's rule is not adjusted"
    assert "By labels per class: 5: +20.0 ± " in said(folder.parent / "again", rows)


def test_every_data_set_has_its_headline_adjusted_for_their_number(folder: Path) -> None:
    rows = two_arms(0.2) + [replace(one, data="pets") for one in two_arms(-0.2)]
    text = said(folder, rows)
    assert text.startswith("digits: Masked patch prediction is better than")
    assert "pets: Masked patch prediction is worse than" in text
    alone = summary(folder.parent / "alone", two_arms(0.2)).headlines[0].estimate
    found = summary(folder.parent / "both", rows).headlines[0].estimate
    assert found.half_width and alone.half_width and found.half_width >= alone.half_width


def test_given_weights_are_one_pretraining(folder: Path) -> None:
    given = ArmRecord(name="ssl", label="mine", kind="weights", run="mine", architecture=ARMS[0].architecture)
    head = summary(folder, two_arms(0.2), arms=(given, ARMS[1])).headlines[0]
    assert (head.unit, head.fixed) == ("seed", ("ssl",))
    for arm, own in ((given, False), (ARMS[0], True)):
        written = write_comparison(folder / arm.kind, two_arms(0.2), arms=(arm, ARMS[1]), pretrainings=3)
        comparison = read([written])
        covered = " ".join([interval(comparison, summarize(comparison)), *notes(comparison)])
        assert ("each with its own pretraining" in covered) == ("has 3 pretrainings" in covered) == own


def test_only_what_is_pretrained_in_each_fold_is_said_to_be(folder: Path) -> None:
    rows = [replace(one, fold=fold, evaluator="few_shot") for one in two_arms(0.2) for fold in (0, 1)]
    rows = [replace(one, arm="untrained") if one.arm == "scratch" else one for one in rows]
    tests = {f"digits test of fold {fold}": DataRecord(path="data", samples=107) for fold in (0, 1)}
    given = ARMS[0].model_copy(update={"kind": "weights"})
    for arm, once in ((ARMS[0], "was pretrained only once per fold: "), (given, "was pretrained only once: ")):
        text = said(folder / arm.kind, rows, arms=(arm,), folds=2, data=tests)
        comparison = read([folder / arm.kind])
        assert "a test image in one fold and a training image in the others" in interval(
            comparison, summarize(comparison)
        )
        assert once in text and "the untrained encoder was initialized only once: " in text.lower()


def test_initializations_are_the_unit_of_an_untrained_encoder(folder: Path) -> None:
    rows = [
        row(arm, 5, seed, 0.5 + gain, evaluator="few_shot", pretraining_seed=seed % 2)
        for arm, gain in (("ssl", 0.2), ("untrained", 0.0))
        for seed in range(6)
    ]
    found = summary(folder, rows, arms=ARMS[:1])
    assert {one.arm: one.estimate.units for one in found.accuracies} == {"ssl": 2, "untrained": 2}
    assert found.headlines[0].fixed == ()


def test_the_accuracies_of_a_headline_differ_by_its_estimate(folder: Path) -> None:
    """Three pretrainings of eight seeds: one has fewer seeds than the others."""
    rows = [row("ssl", 5, seed, (0.9, 0.7, 0.5)[seed % 3], pretraining_seed=seed % 3) for seed in range(8)]
    rows += [row("scratch", 5, seed, 0.5) for seed in range(8)]
    head = summary(folder, rows).headlines[0]
    assert head.means == pytest.approx((0.7, 0.5))
    assert head.means[0] - head.means[1] == pytest.approx(head.estimate.mean)


def test_each_dataset_has_its_own_label_budgets_and_label_efficiency(folder: Path) -> None:
    rows = two_arms(0.02, seeds=5)
    rows += [replace(one, data="pets") for one in two_arms(0.03, budgets=(20, 40), seeds=5)]
    lines = said(folder, rows).splitlines()
    for data, first, second in (("digits", 5, 10), ("pets", 20, 40)):
        text = "\n".join(line for line in lines if line.startswith(f"{data}: "))
        assert f", the mean over {first} and {second} labels per class (" in text
        assert f"{data}: By labels per class: {first}: " in text and text.count(f", {second}: ") == 1
        assert f"for the accuracy of masked patch prediction with {first} labels per class (" in text


def test_what_would_decide_counts_all_headlines_and_looks(folder: Path) -> None:
    """The headline of digits is decided, so that of pets has the interval of a single test: to call it equivalent takes
    a wider one."""
    rows = [row(arm, 5, n, 0.5 + 0.2 * (arm == "ssl"), images=400) for arm in ("ssl", "scratch") for n in range(4)]
    gains = (0.005, -0.005, 0.005, -0.005)
    rows += [
        row(arm, 5, n, 0.5 + (gain if arm == "ssl" else 0), images=400, data="pets")
        for arm in ("ssl", "scratch")
        for n, gain in enumerate(gains)
    ]
    looks = tuple(Look(seeds=seeds, pretrainings=1, outcomes={}) for seeds in (2, 4))
    once = {"seeds": (0, 1)}  # evaluators on frozen features have more, which are those that count
    cases: dict[str, dict[str, Any]] = {"once": once, "looks": {"looks": looks, "max_seeds": 8}}
    for name, changes in cases.items():
        comparison = read([write_comparison(folder / name, rows, **changes)])
        found = summarize(comparison)
        units, images = plan(found.headlines[1].estimate, 0.01, 2, comparison.confidence)
        assert units and images and units != images
        text = "\n".join(verdict(comparison, found))
        assert f"the same, {units:,} more seeds or {images:,} more test images would decide." in text
        assert ("4 of at most 8 seeds are left" in text) == (name == "looks")
        most = re.search(r"--max-seeds (\d+)`: it adds seeds", text)
        assert (most is not None) == (name == "once")
        if most:  # an interval of the last of four looks, at the maximum, decides
            confidence = sequential.confidence([*np.linspace(4 / int(most[1]), 1, 4)], 2)
            estimate = replace(found.headlines[1].estimate, confidence=confidence)
            needed, _ = plan(estimate, 0.01, 2, confidence)
            assert needed and units < needed <= int(most[1]) - 4


def test_the_advised_maximum_counts_seeds_also_where_pretrainings_are_added(folder: Path) -> None:
    for made, added in ((3, "pretrainings or seeds"), (6, "seeds with one pretraining each"), (1, "seeds")):
        rows = [
            row(arm, 5, n, 0.5 + gain * (arm == "ssl"), images=400, pretraining_seed=n % made if arm == "ssl" else 0)
            for arm in ("ssl", "scratch")
            for n, gain in enumerate((0.09, 0.0, 0.03, 0.08, 0.0, 0.04))
        ]
        comparison = read([write_comparison(folder / str(made), rows, pretrainings=made)])
        (head,) = summarize(comparison).headlines
        text = verdict(comparison, summarize(comparison))[0]
        most = re.search(rf"`--until-decided --max-seeds (\d+)`: it adds {added} step by step", text)
        assert text.startswith("Undecided") and most
        seeds, units = int(most[1]), head.estimate.units
        last = sequential.confidence([*np.linspace(6 / seeds, 1, 4)])
        more, _ = plan(head.estimate.at(last), 0.01)
        assert more and (seeds - 6) / (6 // units) >= more, "they decide at the last look"


def test_the_compute_of_a_headline_is_known_although_another_arm_has_imported_weights(folder: Path) -> None:
    given = ArmRecord(name="given", label="given", kind="weights", run="w", starts_from="my.safetensors")
    rows = [*two_arms(0.2), *(replace(one, arm="given") for one in two_arms(0.3) if one.arm == "ssl")]
    assert f"{COMPUTE} 1.2e+10 training FLOPs" in said(folder, rows, arms=(*ARMS, given))


def test_the_difference_with_equal_compute_is_said_once_and_of_the_headline(folder: Path) -> None:
    longer = ArmRecord(name="longer", label="longer", kind="scratch", compute_of="ssl")
    rows = [replace(one, arm="longer") if one.arm == "scratch" else one for one in two_arms(0.1)]
    assert "Exploratory" not in said(folder / "headline", rows, arms=(ARMS[0], longer))
    rows = [*two_arms(0.1), *(one for one in rows if one.arm == "longer")]
    rows += [replace(one, data="pets") for one in rows]
    text = said(folder / "both", rows, arms=(*ARMS, longer))
    for data in ("digits", "pets"):
        (sentence,) = (line for line in text.splitlines() if line.startswith(f"{data}: Exploratory"))
        assert sentence.count("masked patch prediction minus") == 1


def test_references_are_in_no_exploratory_difference(folder: Path) -> None:
    frozen = two_arms(0.2, evaluator="few_shot")
    rows = [replace(one, arm="untrained") if one.arm == "scratch" else one for one in frozen]
    rows += [replace(one, arm="pixels") for one in frozen if one.arm == "scratch"]
    text = said(folder, rows, arms=ARMS[:1])
    assert text.startswith("Masked patch prediction is better than the untrained encoder") and "Exploratory" not in text


def test_the_verdict_names_the_other_methods(folder: Path) -> None:
    mae = ARMS[0].model_copy(update={"name": "mae", "label": "MAE", "objective": "masked_autoencoder"})
    rows = [*two_arms(0.1), *(replace(one, arm="supervised") for one in two_arms(0.3) if one.arm == "ssl")]
    rows += [replace(one, arm="mae") for one in two_arms(0.2) if one.arm == "ssl"]
    text = said(folder, rows, arms=(*ARMS, SUPERVISED, mae))
    (sentence,) = (line for line in text.splitlines() if line.startswith("Exploratory differences"))
    pairs = [pair.rsplit(" ± ")[0] for pair in sentence.partition(": ")[2].split("; ")]
    assert sorted(pairs) == [
        "MAE minus training from scratch +20.0",
        "masked patch prediction minus MAE -10.0",
        "masked patch prediction minus supervised pretraining -20.0",
        "supervised pretraining minus training from scratch +30.0",
    ]


def test_the_training_of_a_sweeps_winner_is_paid_by_the_sweep_alone(folder: Path) -> None:
    rows = two_arms(0.2, budgets=(5,))
    write_comparison(folder, rows, sweeps={"ssl": SWEEP, "scratch": SWEEP})
    tasks = folder / "tasks"
    for arm in ("ssl", "scratch"):  # the sweep trained this model
        swept, measured = tasks / f"sweep-{arm}.json", tasks / f"digits-fine_tune-{arm}-5-0-0.json"
        save(swept, load(measured)[0], **load(swept)[1])
        save(measured, [], **load(measured)[1])
    found = read([folder])
    text = "\n".join(verdict(found, summarize(found)))
    # A pretraining of 6e9, a sweep of 2e9 and two trainings of 1e9; training from scratch: the last two.
    assert "3 seeds" in text and "used 1e+10 training FLOPs, 2.50 times" in text


def test_the_interval_of_label_efficiency_is_over_pretrainings_where_they_are_the_unit(folder: Path) -> None:
    for made, known in ((1, True), (2, False)):  # six seeds are enough to be resampled, two pretrainings are not
        rows = [replace(one, pretraining_seed=one.seed % made * (one.arm == "ssl")) for one in two_arms(0.02, seeds=6)]
        found = summary(folder / str(made), rows).efficiencies
        assert found and all(math.isnan(one.low) != known for one in found)
