"""Cautions: what a verdict says may be wrong with its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ssl_vit.records import ArmRecord, DataRecord, EvaluatorRecord, SkippedSample, SweepRecord, TaskRecord
from ssl_vit.report.cautions import _narrow_interval, architecture_differences, by_dataset
from ssl_vit.report.read import read
from ssl_vit.report.statistics import crossed_mean
from ssl_vit.report.verdict import notes
from tests.report.made import ARMS, EVALUATORS, SUPERVISED, SWEEP, row, said, two_arms, write_comparison


def test_a_single_length_of_fine_tuning_is_a_caution(folder: Path) -> None:
    def cautioned(name: str, *, arms: Sequence[ArmRecord] = ARMS, **settings: object) -> str:
        evaluators = {"fine_tune": EVALUATORS["fine_tune"].model_copy(update={"settings": {"digits": settings}})}
        return said(folder / name, two_arms(0.2), arms=arms, evaluators=evaluators)

    rates, caution = {"optim.lr": [0.1, 0.2]}, "no sweep selected the length of fine-tuning"
    assert f"{caution} (1,200 steps)" in cautioned("steps", training={"steps": 1200, "epochs": None}, sweep=rates)
    assert f"{caution} (7 epochs)" in cautioned("epochs", training={"steps": None, "epochs": 7}, sweep=rates)
    assert caution in cautioned("one", sweep={"training.steps": [100]})
    assert caution not in cautioned("swept", training={"steps": 100}, sweep=rates | {"training.steps": [100, 400]})
    of_arm = {"fine_tune": {"sweep.training.steps": [100, 400]}}
    longer = [arm.model_copy(update={"evaluators": of_arm}) for arm in ARMS]
    assert caution not in cautioned("each", arms=longer, sweep=rates)
    assert caution in cautioned("only the first", arms=[longer[0], *ARMS[1:]], sweep=rates)
    shorter = [arm.model_copy(update={"evaluators": {"fine_tune": {"sweep.training.steps": [100]}}}) for arm in ARMS]
    assert caution in cautioned("none", arms=shorter, sweep={"training.steps": [100, 400]})
    none = {"fine_tune": {"sweep.training.steps": None}}  # another protocol may sweep other keys
    without = [arm.model_copy(update={"evaluators": none}) for arm in ARMS]
    assert caution in cautioned("no key", arms=without, sweep={"training.steps": [100, 400]})
    of_set = [arm.model_copy(update={"evaluators": {"digits fine_tune": of_arm["fine_tune"]}}) for arm in ARMS]
    assert caution not in cautioned("of a dataset", arms=of_set, sweep=rates)
    extended = ARMS[0].model_copy(update={"evaluators": {"fine_tune": {"extra_steps": 1500}}})
    text = cautioned("extended", arms=[extended, *ARMS[1:]], training={"steps": 1200, "epochs": None}, sweep=rates)
    assert f"{caution} (1,200 steps, 1,500 more for {ARMS[0].label})" in text and "often has to be longer" not in text
    of_arm = {"fine_tune": {"sweep.training.steps": [4000]}}
    other = [ARMS[0].model_copy(update={"evaluators": of_arm}), *ARMS[1:]]
    lengths = f"({ARMS[0].label}: 4,000 steps; {ARMS[1].label}: 400 steps)"
    assert f"{caution} {lengths}" in cautioned("other", arms=other, sweep={"training.steps": [400]})
    text = cautioned("others", arms=longer, sweep=rates | {"training.steps": [100, 4000]})
    assert "try different lengths" not in text, "both have their own"
    text = cautioned("unlike", arms=[longer[0], *ARMS[1:]], sweep=rates | {"training.steps": [100, 4000]})
    assert caution not in text and "sweeps try different lengths of fine-tuning" in text
    frozen = [replace(one, evaluator="few_shot") for one in two_arms(0.2)]
    assert caution not in said(folder / "frozen", frozen)


def test_cautions(folder: Path) -> None:
    more = SWEEP.model_copy(update={"candidates": (*SWEEP.candidates, {"optim.lr": 0.05, "held_out_accuracy": 0.1})})
    skipped = [SkippedSample(shard="a.tar", key=str(n), reason="cut") for n in range(7)]
    text = said(folder, two_arms(0.2), sweeps={"ssl": more, "scratch": SWEEP})
    assert "different numbers of settings in their sweeps (masked patch prediction 3, training from scratch 2)" in text
    assert "edge of the sweep: optim.lr 0.1 (training from scratch)" in text, "0.1 of 0.05, 0.1, 0.2 is no edge"
    comparison = read([write_comparison(folder.parent / "again", two_arms(0.2), skipped=skipped, notes=("a note",))])
    assert {"a note"} < set(notes(comparison))
    assert "7 sample(s) could not be used: a.tar: 0 (cut); " in notes(comparison)[-1]


@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_seeds_that_differ_less_than_images_make_them_are_a_caution(spread: float) -> None:
    values = np.random.default_rng(0).normal(0.02, 0.5, (5, 2000))
    values -= values.mean(axis=1, keepdims=True)
    values += 0.02 + spread * np.linspace(-0.02, 0.02, 5)[:, None]
    head: Any = SimpleNamespace(estimate=crossed_mean(values), unit="seed")
    found = [*_narrow_interval(head)]
    assert len(found) == (spread < 1)
    for sentence in found:
        half_width = sentence.rpartition("± ")[2].partition(",")[0]
        assert float(half_width) > 100 * head.estimate.half_width + 0.1
        assert float(half_width) > 100 * 1.96 * 0.5 / math.sqrt(values.size), "that of independent values"


def test_what_holds_for_some_of_several_datasets_names_them() -> None:
    several: Any = SimpleNamespace(record=SimpleNamespace(metrics={"a": "accuracy", "b": "accuracy"}))
    found = [("a", "one."), ("b", "both."), ("a", "both."), ("a", "one."), ("", "all.")]
    assert by_dataset(several, found) == ["a: one.", "both.", "all."]
    alone: Any = SimpleNamespace(record=SimpleNamespace(metrics={"a": "accuracy"}))
    assert by_dataset(alone, [("a", "one."), ("a", "one.")]) == ["one."]


def test_dropout_that_differs_in_fine_tuning_is_a_caution(folder: Path) -> None:
    def cautioned(
        name: str, kept: float | None, sweep: Sequence[str] = (), low: float | None = 0.0, **own: dict[str, float]
    ) -> bool:
        settings = {"digits": {"dropout": kept, "drop_path": 0.1, "sweep": dict.fromkeys(sweep, (low, 0.1))}}
        evaluators = {"fine_tune": EVALUATORS["fine_tune"].model_copy(update={"settings": settings})}
        rates = ({"dropout": 0.0, "drop_path": 0.0}, {"dropout": 0.1, "drop_path": 0.1})
        arms = [arm.model_copy(update={"encoder": {"encoder": r}}) for arm, r in zip(ARMS, rates, strict=True)]
        arms[0] = arms[0].model_copy(update={"evaluators": own})
        return "keeps the dropout" in said(folder / name, two_arms(0.2), arms=arms, evaluators=evaluators)

    assert cautioned("kept", None)
    assert not cautioned("set", 0.0)
    assert not cautioned("swept", None, ["dropout"]) and cautioned("another swept", None, ["drop_path"])
    assert cautioned("kept by a candidate", None, ["dropout"], low=None)
    assert not cautioned("set for one arm", None, fine_tune={"dropout": 0.2})


def test_selection_with_more_than_twice_the_labels_of_the_budget_is_a_caution(folder: Path) -> None:
    rich = SWEEP.model_copy(update={"labels": 70, "held_out": 30})
    text = said(folder, two_arms(0.2), sweeps={"ssl": rich, "scratch": rich})
    assert "settings for 5 labels per class (20 labeled images) were selected with 70 labeled images" in text
    other = EVALUATORS["fine_tune"].model_copy(update={"settings": {"digits": {"sweep_labels_per_class": 20}}})
    evaluators = {"fine_tune": other}  # these sweeps, with 5 labels per class, selected nothing
    assert "were selected with" not in said(folder, two_arms(0.2), sweeps={"ssl": rich}, evaluators=evaluators)
    for labels in (20, 40):  # up to twice those of the budget
        few = SWEEP.model_copy(update={"labels": labels, "held_out": 20})
        assert "were selected with" not in said(folder, two_arms(0.2), sweeps={"ssl": few, "scratch": few})
    larger = SWEEP.model_copy(update={"labels": 44, "held_out": 4})  # from a sweep_labels_per_class of 10
    assert "were selected with 44" in said(folder, two_arms(0.2), sweeps={"ssl": larger, "scratch": larger})


def test_the_smallest_possible_value_is_no_edge(folder: Path) -> None:
    candidates = tuple({"head.mixup": value, "held_out_accuracy": 0.5} for value in (0.0, 0.2, 0.8))
    none = SweepRecord(candidates=candidates, best={"head.mixup": 0.0})
    assert "edge of the sweep" not in said(folder, two_arms(0.2), sweeps={"ssl": none, "scratch": none})
    most = SweepRecord(candidates=candidates, best={"head.mixup": 0.8})
    assert "head.mixup 0.8" in said(folder, two_arms(0.2), sweeps={"ssl": none, "scratch": most})
    unset = tuple({"drop_path": value, "held_out_accuracy": 0.5} for value in (None, 0.0, 0.1))
    null = SweepRecord(candidates=unset, best={"drop_path": None})
    assert "edge of the sweep" not in said(folder, two_arms(0.2), sweeps={"ssl": null, "scratch": null})
    both = tuple({"augment.flip": value, "held_out_accuracy": 0.5} for value in (True, False))
    flip = SweepRecord(candidates=both, best={"augment.flip": True})
    assert "edge of the sweep" not in said(folder, two_arms(0.2), sweeps={"ssl": flip, "scratch": flip})


def test_arms_of_another_architecture_are_named_with_what_differs(folder: Path) -> None:
    def encoder(depth: int, dropout: float, precision: str) -> dict[str, Any]:
        return {"encoder": {"depth": depth, "dropout": dropout}, "prepared": {"training": {"precision": precision}}}

    sizes = {"labels": encoder(4, 0.1, "bf16"), "ssl": encoder(4, 0.0, "bf16"), "other": encoder(6, 0.1, "fp32")}
    arms = [
        ArmRecord(name=n, label=n, kind="pretrained", uses_labels=n == "labels", encoder=one, architecture=a)
        for (n, one), a in zip(sizes.items(), "aab", strict=True)
    ]
    words = ["other: encoder.depth 6 (ssl: 4), training.precision fp32 (ssl: bf16)"]
    assert architecture_differences(arms) == words, "dropout is not of the architecture"
    scratch = ArmRecord(name="scratch", label="scratch", kind="scratch", architecture="a")
    rows = [row(arm.name, 5, seed, 0.5 + 0.01 * seed) for arm in (*arms, scratch) for seed in range(3)]
    assert f"differ in architecture, image preparation or precision. {words[0]}." in said(
        folder, rows, arms=[*arms, scratch]
    )


def test_settings_that_seeds_select_at_the_edge_are_a_caution(folder: Path) -> None:
    def settings_of(sweep: Sequence[float]) -> dict[str, Any]:
        return {"digits": {"sweep": {"lr": list(sweep)}}}

    def cautioned(name: str, *rates: float, sweep: Sequence[float] = (0.1, 0.2, 0.3)) -> str:
        evaluators = {"few_shot": EVALUATORS["few_shot"].model_copy(update={"settings": settings_of(sweep)})}
        rows = [replace(row("ssl", 5, n, 0.5), evaluator="few_shot", selected={"lr": r}) for n, r in enumerate(rates)]
        return said(folder / name, rows, evaluators=evaluators)

    edge = "edge of the sweep: Few-shot: lr 0.3 (masked patch prediction, 2 of 3 selections)"
    assert edge in cautioned("most", 0.3, 0.3, 0.2)
    assert "edge of the sweep" not in cautioned("half", 0.3, 0.3, 0.2, 0.2)
    assert "edge of the sweep" not in cautioned("zero", 0.0, 0.0, sweep=(0.0, 0.1, 0.2))
    assert "edge of the sweep" not in cautioned("two values", 0.3, 0.3, sweep=(0.1, 0.3))
    evaluators = {"few_shot": EVALUATORS["few_shot"].model_copy(update={"settings": settings_of((0.1, 0.2, 0.3))})}
    chosen = [(0, 0, 0.3), (0, 1, 0.2), (1, 0, 0.3), (1, 1, 0.3)]  # (seed, fold, rate)
    rows = [replace(row("ssl", 5, n, 0.5), evaluator="few_shot", fold=f, selected={"lr": r}) for n, f, r in chosen]
    tests = {f"digits test of fold {fold}": DataRecord(path="data", samples=107) for fold in (0, 1)}
    text = said(folder / "folds", rows, evaluators=evaluators, folds=2, data=tests)
    assert "lr 0.3 (masked patch prediction, 3 of 4 selections)" in text


def test_the_edge_is_that_of_an_arms_own_sweep(folder: Path) -> None:
    settings = {"digits": {"sweep": {"lr": [0.1, 0.2, 0.3]}}}
    evaluators = {"few_shot": EVALUATORS["few_shot"].model_copy(update={"settings": settings})}
    wider = ARMS[0].model_copy(update={"evaluators": {"few_shot": {"sweep.lr": [0.1, 0.3, 0.9]}}})
    for rate in (0.3, 0.9):
        rows = [replace(row("ssl", 5, n, 0.5), evaluator="few_shot", selected={"lr": rate}) for n in range(3)]
        text = said(folder / str(rate), rows, evaluators=evaluators, arms=(wider, ARMS[1]))
        assert ("edge of the sweep: Few-shot: lr 0.9" in text) == (rate == 0.9)
        assert ("edge of the sweep" in text) == (rate == 0.9)
    one = ARMS[0].model_copy(update={"evaluators": {"few_shot": {"lr": 0.3, "sweep.lr": None}}})
    rows = [replace(row("ssl", 5, n, 0.5), evaluator="few_shot") for n in range(3)]
    text = said(folder / "none", rows, evaluators=evaluators, arms=(one, ARMS[1]))
    text += "\n".join(notes(read([folder / "none"])))
    assert "edge of the sweep" not in text and "settings are selected on" not in text


def test_only_the_arm_under_test_and_only_where_it_is_worse_is_a_caution(folder: Path) -> None:
    pixels = [replace(one, arm="pixels") for one in two_arms(0.0, evaluator="few_shot") if one.arm == "ssl"]
    rows = [*two_arms(0.2), *pixels]
    for arm, gain in (("ssl", 0.0), ("supervised", -0.2)):
        rows += [replace(one, arm=arm) for one in two_arms(gain, evaluator="few_shot") if one.arm == "ssl"]
    text = said(folder, rows, arms=(*ARMS, SUPERVISED))
    assert "is worse than" not in text
    rows = [*two_arms(0.2), *pixels, *(one for one in two_arms(-0.2, evaluator="few_shot") if one.arm == "ssl")]
    assert "Caution: Few-shot: masked patch prediction is worse than raw pixels (-20.0" in said(folder / "worse", rows)
    mae = ArmRecord(name="mae", label="MAE", kind="pretrained", objective="mae")
    rows += [replace(one, arm="mae") for one in two_arms(-0.1, evaluator="few_shot") if one.arm == "ssl"]
    assert "is worse than raw pixels (-10.0" in said(folder / "both", rows, arms=(*ARMS, mae)), "each without labels"


def test_what_another_evaluator_says_against_the_headline_is_a_caution(folder: Path) -> None:
    evaluators = EVALUATORS | {"other": EvaluatorRecord(title="Other", trains_encoder=True)}
    text = said(folder, [*two_arms(0.2), *two_arms(-0.2, evaluator="other")], evaluators=evaluators)
    assert text.startswith("Masked patch prediction is better than training from scratch")
    assert "Caution: Other: masked patch prediction is worse than training from scratch (-20.0" in text


def test_unequal_sweeps_of_an_unfinished_comparison_are_no_caution(folder: Path) -> None:
    text = said(folder, two_arms(0.2), sweeps={"ssl": SWEEP, "scratch": SWEEP}, missing=["sweep-scratch"])
    assert "has not finished" in text and "different numbers of settings" not in text
    frozen = [replace(one, arm="untrained") if one.arm == "scratch" else one for one in two_arms(evaluator="few_shot")]
    missing = ["digits-few_shot-ssl-5-0-0"]
    text = said(folder, [*two_arms(0.2), *frozen], sweeps={"ssl": SWEEP}, missing=missing)
    assert "so the numbers may change" in text and "different numbers of settings" in text, "the sweeps are done"


def test_missing_pictures_change_no_numbers(folder: Path) -> None:
    measured = read([write_comparison(folder, two_arms(0.2))]).record.tasks
    drawn = TaskRecord(id="pictures-ssl", kind="pictures", arm="ssl", fingerprint="f-pictures-ssl")
    text = said(folder, two_arms(0.2), tasks=(*measured, drawn), missing=[drawn.id])
    assert "has not finished (1 of 14 tasks are missing)." in text and "numbers may change" not in text


def test_a_study_of_several_architectures_has_no_caution_about_them(folder: Path) -> None:
    arms = [arm.model_copy(update={"architecture": arm.name}) for arm in ARMS]
    assert "differ in architecture" in said(folder / "comparison", two_arms(0.2), arms=arms)
    assert "differ in architecture" not in said(folder / "study", two_arms(0.2), arms=arms, study="samples")


def test_every_arm_s_selection_at_the_edge_is_named(folder: Path) -> None:
    settings = {"digits": {"sweep": {"lr": [0.1, 0.2, 0.3]}}}
    evaluators = {"few_shot": EVALUATORS["few_shot"].model_copy(update={"settings": settings})}
    rows = [
        row(arm, 5, seed, 0.5, evaluator="few_shot", selected={"lr": rate})
        for arm, rate in (("ssl", 0.2), ("untrained", 0.3))
        for seed in range(2)
    ]
    text = said(folder, rows, evaluators=evaluators)
    assert "edge of the sweep: Few-shot: lr 0.3 (the untrained encoder, 2 of 2 selections)." in text
