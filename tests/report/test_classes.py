"""Confusion, accuracy per class and calibration, against loops over predictions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ssl_vit.report.classes import BINS, calibration, classes
from ssl_vit.report.page import write_report
from ssl_vit.report.plots import confusion_matrix
from ssl_vit.report.read import read
from ssl_vit.report.statistics import crossed_mean
from ssl_vit.report.summary import EvaluationKey
from ssl_vit.report.tables import class_table
from ssl_vit.results import Prediction
from tests.report.made import row, two_arms, write_comparison

GENERATOR = np.random.default_rng(0)
FINE_TUNE = EvaluationKey("digits", "fine_tune")


def scored(images: int = 400, classes: int = 4) -> Prediction:
    labels = GENERATOR.integers(classes, size=images)
    confidence = GENERATOR.dirichlet([0.4] * classes, size=images).max(1).astype(np.float32)
    best = np.where(GENERATOR.random(images) < 0.6, labels, (labels + 1) % classes)
    return Prediction(np.arange(images), labels, best, confidence)


def test_confusion_and_accuracy_are_those_of_a_loop(tmp_path: Path) -> None:
    cells = itertools.product(("ssl", "scratch"), (5, 10), (0, 1))
    rows = [row(arm, budget, seed, 0.0, prediction=scored()) for arm, budget, seed in cells]
    comparison = read([write_comparison(tmp_path, rows)])
    found = classes(comparison, FINE_TUNE)
    own = [one.prediction for one in rows if (one.arm, one.labels_per_class) == ("ssl", 10)]
    pairs = [pair for one in own for pair in zip(one.labels.tolist(), one.predicted.tolist(), strict=True)]
    for true in range(4):
        of_class = [predicted for label, predicted in pairs if label == true]
        for predicted in range(4):
            expected = of_class.count(predicted) / len(of_class)
            assert found.confusion["ssl"][true, predicted] == pytest.approx(expected)
    assert found.budget == 10 and found.names == ("a", "b", "c", "d")


def test_thousands_of_classes_have_no_confusion_matrix(tmp_path: Path) -> None:
    rows = [row(arm, 10, seed, 0.0, prediction=scored(3000, 1001)) for arm in ("ssl", "scratch") for seed in (0, 1)]
    comparison = read([write_comparison(tmp_path, rows)])
    found = classes(comparison, FINE_TUNE)
    assert not found.confusion and len(found.accuracies["ssl"]) == 1001
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "Test accuracy by class" in page and "onfusion" not in page


def test_long_names_of_classes_are_cut() -> None:
    text = confusion_matrix(np.eye(3), ["HerbaceousVegetation", "Industrial bui", "a b"])
    assert all(f">{name}<" in text for name in ("HerbaceousVeg…", "Industrial bui", "a b"))


def test_a_class_without_test_images_has_no_accuracy(tmp_path: Path) -> None:
    rows = two_arms(budgets=(5,))
    rows[0].prediction.predicted[:3] = 6
    rows[0] = replace(rows[0], accuracy=float(rows[0].prediction.correct.mean()))
    comparison = read([write_comparison(tmp_path, rows)])
    found = classes(comparison, FINE_TUNE)
    assert found.names == ("a", "b", "c", "d", "6") and found.images[-1] == 0
    assert found.accuracies["ssl"][-1] is None and np.isnan(found.confusion["ssl"][-1]).all()
    table = class_table(comparison, found).frame
    assert table["Class"].tolist() == ["a", "b", "c", "d"] and table["Test images"].tolist() == ["25"] * 4
    correct = np.stack([one.prediction.correct[one.prediction.labels == 1] for one in rows if one.arm == "ssl"])
    estimate = crossed_mean(correct)
    assert table["SSL [50%]"][1] == f"{100 * estimate.mean:.1f} ± {100 * (estimate.half_width or 0):.1f}"
    write_report([tmp_path], tmp_path / "report.html")


def test_the_unit_of_an_untrained_encoder_is_its_initialization(tmp_path: Path) -> None:
    rows = [row("untrained", 5, seed, 0.5, pretraining_seed=seed % 3, evaluator="few_shot") for seed in range(6)]
    comparison = read([write_comparison(tmp_path, [*two_arms(budgets=(5,)), *rows])])
    of_class = classes(comparison, EvaluationKey("digits", "few_shot")).accuracies["untrained"][1]
    assert of_class is not None and of_class.units == 3


def test_of_many_classes_those_that_differ_most_are_shown(tmp_path: Path) -> None:
    labels = np.arange(100)
    right = Prediction(labels, labels, labels)
    wrong = Prediction(labels, labels, np.where(labels < 90, labels, 0))
    both = {"ssl": right, "scratch": wrong}
    rows = [row(arm, 5, seed, 0.0, prediction=both[arm]) for arm in both for seed in (0, 1)]
    comparison = read([write_comparison(tmp_path, rows, data={})])
    table = class_table(comparison, classes(comparison, FINE_TUNE))
    assert "40 of 100 classes" in table.title
    assert table.frame["Class"].tolist() == [str(n) for n in (*range(30), *range(90, 100))]


def test_the_calibration_error_is_that_of_a_loop() -> None:
    seeds = [scored(), scored()]
    found = calibration(seeds)
    assert found and found.share.sum() == pytest.approx(1)
    errors = []
    for one in seeds:
        assert one.confidence is not None
        confidence, error = one.confidence.astype(float), 0.0
        for place in range(BINS):
            inside = (confidence > place / BINS) & (confidence <= (place + 1) / BINS)
            if inside.any():
                error += inside.mean() * abs(confidence[inside].mean() - one.correct[inside].mean())
        errors.append(error)
    assert found.error == pytest.approx(np.mean(errors))


def test_a_calibrated_classifier_has_no_error() -> None:
    labels, zeros = np.arange(1000) % 10, np.zeros(1000, dtype=np.int64)
    found = calibration([Prediction(labels, labels, zeros, np.full(1000, 0.1, dtype=np.float32))])
    assert found and found.error == pytest.approx(0, abs=1e-6)
    assert calibration([Prediction(labels, labels, zeros)]) is None, "no probabilities"
