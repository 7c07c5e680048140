"""Repetitions with other random numbers, which must come out equal."""

from __future__ import annotations

from typing import Any

import numpy as np

from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.dry_run import dry_run_comparison
from ssl_vit.report.read import Comparison
from ssl_vit.report.self_test import SAME, self_tests
from ssl_vit.report.summary import summarize

from .conftest import TUNING, Mini, quietly, stamps

EVALUATORS: dict[str, Any] = {"few_shot": {"labels_per_class": [1, 2]}, "knn": {"ks": [1]}, "fine_tune": TUNING}


def pairs(found: Comparison) -> list[tuple[str, str, str]]:
    tests = self_tests(found)
    assert all(test.expected == SAME for test in tests)
    return [(test.difference.place.evaluator, test.difference.arm, test.difference.against) for test in tests]


def test_two_untrained_encoders_per_seed_are_compared_by_default(mini: Mini) -> None:
    recipe = mini(evaluators=EVALUATORS, controls="frozen", seeds=[0, 1], frozen_seeds=[0, 1, 2])
    dry = dry_run_comparison(load_comparison(recipe))
    assert dry.arms["control"].features_hours > 0
    found = quietly(recipe)
    assert pairs(found) == [("few_shot", "control_repeated", "control")]
    frame = found.table.frame
    one, other = (frame[frame["arm"] == arm] for arm in ("control", "control_repeated"))
    assert list(one["seed"].unique()) == list(other["seed"].unique()) == [0, 1, 2]
    assert (one["accuracy"].to_numpy() != other["accuracy"].to_numpy()).any()
    assert len(one.groupby("seed")) == 3
    assert {row.arm for row in summarize(found).accuracies} == {"ssl", "scratch", "untrained", "pixels"}
    before = stamps(found.paths[0])
    quietly(recipe)
    assert stamps(found.paths[0]) == before


def test_training_from_scratch_is_repeated_with_its_own_sweep_s_settings(mini: Mini) -> None:
    found = quietly(mini(evaluators={"fine_tune": TUNING}, controls=True, seeds=[0, 1]))
    assert pairs(found) == [("fine_tune", "scratch_repeated", "scratch")]
    sweeps = {task.arm for task in found.record.tasks if task.kind == "sweep"}
    assert sweeps == {"ssl", "scratch"}
    rows = {(row.arm, row.seed): row for row in found.table.results}
    for seed in (0, 1):
        one, other = rows["scratch", seed], rows["scratch_repeated", seed]
        assert (one.selected, one.labels) == (other.selected, other.labels)
        assert not np.array_equal(np.asarray(one.prediction.confidence), np.asarray(other.prediction.confidence))
