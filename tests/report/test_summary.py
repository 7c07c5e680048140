"""Which arms a comparison pairs, and the mean of the per-class accuracies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ssl_vit.records import ArmRecord, DataRecord, Look
from tests.report.made import ARMS, SUMMARY, SUPERVISED, row, said, summary, two_arms


def test_every_pair_of_arms_is_compared(folder: Path) -> None:
    weights = ArmRecord(name="given", label="imported", kind="weights", run="w")
    rows = two_arms(0.2, budgets=(5,))
    rows += [row(arm, 5, seed, 0.9) for arm in ("supervised", "given") for seed in range(3)]
    found = summary(folder, rows, arms=(*ARMS, SUPERVISED, weights))
    assert [(one.arm, one.against, one.role) for one in found.means] == [
        ("ssl", "scratch", "baseline"),
        ("ssl", "supervised", "supervised"),
        ("ssl", "given", "other"),
        ("supervised", "scratch", "baseline"),
        ("supervised", "given", "other"),
        ("given", "scratch", "baseline"),
    ]
    assert found.means[2].means == pytest.approx((0.71, 0.9))


def test_the_headline_may_be_against_a_chosen_arm(folder: Path) -> None:
    others = [row(arm, 5, seed, 0.65) for arm in ("supervised", "mae") for seed in range(3)]
    arms = (*ARMS, SUPERVISED, ARMS[0].model_copy(update={"name": "mae", "label": "MAE"}))
    rows = [*two_arms(0.2, budgets=(5,)), *others]
    for chosen, against in {None: "scratch", "supervised": "supervised", "scratch": "scratch", "mae": "mae"}.items():
        (head,) = summary(folder / str(chosen), rows, arms=arms, baseline=chosen).headlines
        assert (head.arm, head.against) == ("ssl", against)
    (head,) = summary(folder / "ssl", rows, arms=arms, baseline="ssl").headlines
    assert (head.arm, head.against, head.outcome) == ("mae", "ssl", "worse")
    three = [one for one in rows if one.arm != "mae"]
    text = said(folder / "three", three, arms=(*ARMS, SUPERVISED), baseline="ssl")
    assert text.startswith("Supervised pretraining is worse than") and "self-test" not in text, "that is of scratch"
    alone = [one for one in rows if one.arm in ("ssl", "supervised")]
    (head,) = summary(folder / "alone", alone, arms=(ARMS[0], SUPERVISED), baseline="supervised").headlines
    assert head.place.evaluator == "fine_tune" and head.against == "supervised"
    looks = {"max_seeds": 8, "looks": (Look(seeds=2, pretrainings=1, outcomes={}),)}
    (head,) = summary(folder / "look", alone, arms=(ARMS[0], SUPERVISED), baseline="supervised", **looks).headlines
    assert head.seeds == 2, "the third is of the next look"
    assert not summary(folder / "none", alone, arms=(ARMS[0], SUPERVISED)).headlines


def test_a_study_compares_arms_of_the_same_size(folder: Path) -> None:
    samples = {"vit_small": 500, "vit_large": 900, "resnet_small": 500, "resnet_large": 900}
    arms = [
        SUPERVISED.model_copy(
            update={"name": name, "label": name, "summary": SUMMARY.model_copy(update={"samples": size})}
        )
        for name, size in samples.items()
    ]
    rows = [
        row(arm, 5, seed, 0.5, evaluator="few_shot") for arm in (*samples, "untrained", "pixels") for seed in (0, 1)
    ]
    found = summary(folder, rows, arms=arms, study="samples", missing=[f"pretrain-{arm}" for arm in samples])
    others = [("vit_small", other, "supervised") for other in ("vit_large", "resnet_small", "resnet_large")]
    assert [(one.arm, one.against, one.role) for one in found.means] == [
        ("vit_small", "untrained", "baseline"),
        *others,
        ("vit_small", "pixels", "reference"),
        ("vit_large", "untrained", "baseline"),
        ("vit_large", "resnet_large", "other"),
        ("resnet_small", "untrained", "baseline"),
        ("resnet_large", "untrained", "baseline"),
    ]
    (head,) = summary(folder / "chosen", rows, arms=arms, study="samples", baseline="resnet_large").headlines
    assert (head.arm, head.against) == ("vit_small", "resnet_large"), "of another size"


def test_the_baseline_has_the_same_architecture(folder: Path) -> None:
    arms = [ARMS[0], ARMS[1], ARMS[1].model_copy(update={"name": "wide", "label": "wide scratch"})]
    arms = [arm.model_copy(update={"architecture": made}) for arm, made in zip(arms, "wnw", strict=True)]
    rows = [*two_arms(0.2, budgets=(5,)), *(row("wide", 5, seed, 0.6) for seed in range(3))]
    assert summary(folder, rows, arms=arms).headlines[0].against == "wide"


def test_the_baseline_is_plain_training_from_scratch_whatever_the_order_of_arms(folder: Path) -> None:
    longer = ARMS[1].model_copy(update={"name": "longer", "label": "longer", "compute_of": "ssl"})
    rows = [*two_arms(0.2, budgets=(5,)), *(row("longer", 5, seed, 0.6) for seed in range(3))]
    for number, arms in enumerate(([ARMS[0], longer, ARMS[1]], [ARMS[0], ARMS[1], longer])):
        assert summary(folder / str(number), rows, arms=arms).headlines[0].against == "scratch"


def test_the_mean_of_the_per_class_accuracies_weights_images(folder: Path) -> None:
    rows = two_arms(0.2, budgets=(5,))
    uneven = np.arange(100) < 90
    rows = [
        replace(
            one,
            prediction=replace(
                one.prediction, labels=uneven * 1, predicted=np.where(one.prediction.correct, uneven, 2)
            ),
        )
        for one in rows
    ]
    head = summary(folder, rows, metrics={"digits": "mean_per_class"}).headlines[0]
    expected = [
        np.mean([one.prediction.correct[uneven == label].mean() for label in (True, False)])
        for one in rows
        if one.arm == "ssl"
    ]
    assert head.means[0] == pytest.approx(np.mean(expected))


def test_budgets_are_in_the_order_of_their_size_where_classes_have_too_few_images(folder: Path) -> None:
    found = summary(folder, two_arms(budgets=(5, 10, "all"), labels=18))
    labels = {row.labels_per_class: row.labels for row in found.accuracies}
    assert labels == {5: 4.5, 10: 4.5, "all": 4.5} and [*labels] == [5, 10, "all"]


def test_classes_without_training_images_do_not_lower_the_labels_per_class(folder: Path) -> None:
    data = {"digits train": DataRecord(path="train", classes=tuple("abcd"), labeled_classes=3)}
    found = summary(folder, two_arms(budgets=(5, 10), labels=15), data=data)
    assert {row.labels_per_class: row.labels for row in found.accuracies} == {5: 5.0, 10: 5.0}
