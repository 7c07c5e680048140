from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ssl_vit.evaluators import runner
from ssl_vit.evaluators.features import EvalContext
from ssl_vit.evaluators.knn import Config, Evaluator, knn_votes
from ssl_vit.evaluators.labels import choose_labeled

Build = Callable[..., EvalContext]
TRAIN_X = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
TRAIN_Y = np.random.default_rng(1).choice([2, 3, 7], 60)
TEST_X = np.random.default_rng(2).normal(size=(40, 5)).astype(np.float32)
TEST_Y = np.random.default_rng(3).choice([2, 3, 7], 40)


def accuracies(
    train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray, **settings: Any
) -> dict[int, float]:
    """Test accuracy (0..1) for each k."""
    found = knn_votes(train, train_labels, test, **settings)
    return {k: float((classes == test_labels).mean()) for k, (classes, _) in found.items()}


def naive_votes(k: int, temperature: float) -> list[dict[int, float]]:
    """One query and one neighbor at a time, in float64: the share of every class."""
    found = []
    for query in TEST_X.astype(np.float64):
        similar = []
        for vector, label in zip(TRAIN_X.astype(np.float64), TRAIN_Y, strict=True):
            cosine = sum(query * vector) / math.sqrt(sum(query**2)) / math.sqrt(sum(vector**2))
            similar.append((cosine, int(label)))
        similar.sort(reverse=True)
        votes = dict.fromkeys([2, 3, 7], 0.0)
        for cosine, label in similar[:k]:
            votes[label] += math.exp(cosine / temperature)
        found.append({label: vote / sum(votes.values()) for label, vote in votes.items()})
    return found


def naive_predictions(k: int, temperature: float) -> np.ndarray:
    return np.array([max(votes, key=lambda label: votes[label]) for votes in naive_votes(k, temperature)])


@pytest.mark.parametrize("temperature", [0.07, 1.0, 0.02])
@pytest.mark.parametrize("k", [1, 10, 20, 60, 1000])
def test_every_prediction_agrees_with_a_naive_loop(k: int, temperature: float) -> None:
    predictions = naive_predictions(k, temperature)
    accuracy = accuracies(TRAIN_X, TRAIN_Y, TEST_X, TEST_Y, ks=(k,), temperature=temperature)
    assert accuracy == {k: np.mean(predictions == TEST_Y)}
    assert accuracies(TRAIN_X, TRAIN_Y, TEST_X, predictions, ks=(k,), temperature=temperature) == {k: 1.0}


def test_shares_of_the_votes_are_the_probabilities() -> None:
    classes, shares = knn_votes(TRAIN_X, TRAIN_Y, TEST_X, ks=(20,), temperature=0.5)[20]
    assert shares.dtype == np.float32
    expected = naive_votes(20, 0.5)
    assert classes.tolist() == [max(votes, key=lambda label: votes[label]) for votes in expected]
    assert shares == pytest.approx([max(votes.values()) for votes in expected], abs=1e-5)


@pytest.mark.parametrize("budget", ["all", 4, "50%"])
def test_the_evaluator_uses_the_labels_it_was_allowed(array_context: Build, budget: int | str) -> None:
    context = array_context((TRAIN_X, TRAIN_Y), (TEST_X, TEST_Y))
    config = Config.model_validate({"ks": (20, 1), "labels_per_class": budget, "seeds": 3, "temperature": 0.5})
    images = choose_labeled(TRAIN_Y, budget, 3)
    expected = accuracies(TRAIN_X[images], TRAIN_Y[images], TEST_X, TEST_Y, ks=(20, 1), temperature=0.5)
    rows, _ = runner.evaluate(Evaluator(config), context)
    assert [(row.arm, row.variant, row.primary) for row in rows] == [
        (source, f"k={k}", k == 20) for source in ("trained", "untrained", "pixels") for k in (20, 1)
    ]
    assert {row.labels for row in rows} == {len(images)}
    assert [row.accuracy for row in rows[:2]] == list(expected.values())


def test_a_comparison_uses_the_first_k(array_context: Build) -> None:
    context = array_context((TRAIN_X, TRAIN_Y), (TEST_X, TEST_Y))
    rows, _ = runner.evaluate(Evaluator(Config(ks=(1, 20, 5))), context)
    assert {row.variant for row in rows if row.primary} == {"k=1"}


def test_of_many_equally_similar_neighbors_the_earlier_count() -> None:
    """More than numpy's default sort keeps in their order."""
    generator = np.random.default_rng(0)
    train, labels = np.eye(2)[generator.integers(2, size=2000)], np.zeros(2000, dtype=np.int64)
    labels[np.flatnonzero(train[:, 0])[:5]] = 7
    classes, shares = knn_votes(train, labels, np.array([[1.0, 0.0]]), ks=(5,))[5]
    assert classes == [7] and shares == [1.0]


def test_labeled_images_that_cannot_be_read_are_not_counted(array_context: Build) -> None:
    context = array_context((TRAIN_X, TRAIN_Y), (TEST_X, TEST_Y), (3, 7))
    (row,) = runner.measure(Evaluator(Config(ks=(1,))), context, "trained", ("all",), (0,))
    assert row.labels == 58 and "2 of 60 labeled images could not be read" in row.notes[-1]
