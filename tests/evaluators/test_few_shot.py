from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

from ssl_vit.evaluators import runner
from ssl_vit.evaluators.features import EvalContext
from ssl_vit.evaluators.few_shot import Config, Evaluator, Ridge, few_shot_accuracy

Build = Callable[..., EvalContext]
Split = tuple[np.ndarray, np.ndarray]


def published_shots(labels: np.ndarray, shots: int, seed: int, classes: int) -> np.ndarray:
    """The rule of the published protocol: every class's indices permuted by one generator, in label order."""
    generator = np.random.default_rng(seed)
    permuted = []
    for label in range(classes):
        permuted.append(generator.permutation(np.where(labels == label)[0]))
    return np.concatenate([indices[:shots] for indices in permuted])


def prepared(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Standardized by train's mean and population deviation + 1e-5, and the constant feature 100, in float64."""
    train, test = train.astype(np.float64), test.astype(np.float64)
    mean = train.sum(0) / len(train)
    deviation = np.sqrt(((train - mean) ** 2).sum(0) / len(train)) + 1e-5
    train, test = (train - mean) / deviation, (test - mean) / deviation
    return np.column_stack([train, [100.0] * len(train)]), np.column_stack([test, [100.0] * len(test)])


def scores_by_solve(train: Split, test: np.ndarray, l2: float) -> np.ndarray:
    """Normal equations, one dense solve."""
    x, queries = prepared(train[0], test)
    targets = np.where(np.equal.outer(train[1], np.unique(train[1])), 1.0, -1.0)
    return queries @ np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ targets)


def feature_set(name: str) -> tuple[Split, Split]:
    """(train, test): noisy class means; what is special about the features is in the name."""
    generator = np.random.default_rng(len(name))
    width = {"n<d": 300}.get(name, 6)
    classes = 4
    train_labels, test_labels = generator.integers(0, classes, 200), generator.integers(0, classes, 90)
    if name == "short class":
        train_labels = np.concatenate([np.repeat([0, 1, 2], 40), [3, 3, 3]])
    if name == "label gap":
        train_labels, test_labels = train_labels * 3, test_labels * 3
    means = generator.normal(size=(20, width))

    def noisy(labels: np.ndarray) -> np.ndarray:
        x = means[labels] + 1.5 * generator.normal(size=(len(labels), width))
        if name == "constant":
            x[:, 1], x[:, 4] = 7.25, 0.0
        if name == "duplicated":
            x[:, 2], x[:, 5] = x[:, 0], -3 * x[:, 1] + 4
        return x.astype(np.float32)

    return (noisy(train_labels), train_labels), (noisy(test_labels), test_labels)


NAMES = ["n<d", "n>d", "short class", "constant", "duplicated", "label gap"]


@pytest.mark.parametrize("l2", [2.0**10, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_accuracy_and_every_prediction_agree_with_a_dense_solver(name: str, l2: float) -> None:
    train, test = feature_set(name)
    classes = np.unique(train[1])
    shots, seeds = (1, 5, 10, 25), (0, 1, 2)
    short = pytest.warns(UserWarning, match=r"1 class\(es\) have fewer than 25 .*\[3\]")
    with short if name == "short class" else nullcontext():
        given: dict[str, Any] = {} if l2 == 2.0**10 else {"l2": l2}  # the authors' number is the default
        found = few_shot_accuracy(*train, *test, shots=shots, seeds=seeds, **given)
    assert set(found) == {(k, seed) for k in shots for seed in seeds}
    assert len(set(found.values())) > 3
    for (k, seed), accuracy in found.items():
        chosen = published_shots(train[1], k, seed, int(classes.max()) + 1)
        scores = scores_by_solve((train[0][chosen], train[1][chosen]), test[0], l2)
        best_two = np.sort(scores, axis=1)[:, -2:]
        clear = best_two[:, 1] - best_two[:, 0] > 1e-9 * np.abs(scores).max()
        assert clear.mean() > 0.95
        predictions = classes[scores.argmax(1)]
        assert accuracy == pytest.approx(np.mean(predictions == test[1]), abs=1 - clear.mean())
        # Scored against the reference's predictions, only sample-for-sample agreement gives 1.
        with warnings.catch_warnings(action="ignore"):
            same = few_shot_accuracy(*train, test[0][clear], predictions[clear], shots=(k,), seeds=(seed,), l2=l2)
        assert same == {(k, seed): 1.0}


def test_features_may_be_a_sequence_of_vectors() -> None:
    features, labels = np.random.default_rng(0).normal(size=(8, 3)), np.arange(8) % 2
    expected = few_shot_accuracy(features, labels, features, labels, shots=(2,), seeds=(0,))
    column = pd.DataFrame({"embedding": [*features]})["embedding"]
    assert few_shot_accuracy(column, labels, [*features], labels, shots=(2,), seeds=(0,)) == expected
    numbers: dict[str, Any] = {"shots": np.array([2]), "seeds": np.arange(1)}
    assert few_shot_accuracy(features, labels, features, labels, **numbers) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shots": [0]}, "shots must be integers of 1 or larger"),
        ({"shots": [1.5]}, "shots must be integers of 1 or larger"),
        ({"test_labels": np.array([[0], [1]])}, "one dimension"),
        ({"l2": math.nan}, "l2 must be larger than 0"),
        ({"l2": 0.0}, "l2 must be larger than 0"),
        ({"train_features": np.zeros(2), "test_features": np.zeros(2)}, "do not fit"),
        ({"train_labels": np.array([0.0, 1.0])}, "labels must be integers"),
        ({"test_labels": np.array(["a", "b"])}, "labels must be integers"),
        ({"test_labels": np.array([0, -1])}, "labels of test images must be 0 or larger"),
    ],
)
def test_arguments_without_a_meaning_are_refused(changed: dict[str, Any], message: str) -> None:
    arrays: dict[str, Any] = {f"{part}_features": np.eye(2) for part in ("train", "test")}
    arrays |= {f"{part}_labels": np.arange(2) for part in ("train", "test")}
    with pytest.raises(ValueError, match=message):
        few_shot_accuracy(**(arrays | {"shots": [1]} | changed))


def test_the_same_arrays_give_the_same_bits_on_any_number_of_threads() -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(500) % 20
    features = (generator.normal(size=(500, 300)) + labels[:, None] / 20).astype(np.float32)
    found = []
    for threads in (1, 2, 3):
        with threadpool_limits(threads):
            ridge = Ridge(features, labels)
            found.append((ridge.basis.tobytes(), ridge.targets.tobytes()))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "lengths",
    [
        {"train_features": (10, 3), "train_labels": 9, "test_features": (5, 3), "test_labels": 5},
        {"train_features": (10, 3), "train_labels": 10, "test_features": (5, 3), "test_labels": 4},
        {"train_features": (10, 3), "train_labels": 10, "test_features": (0, 3), "test_labels": 0},
        {"train_features": (10, 3), "train_labels": 10, "test_features": (5, 4), "test_labels": 5},
    ],
)
def test_arrays_that_do_not_fit_are_refused(lengths: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"length|fit"):
        few_shot_accuracy(**{name: np.zeros(shape, dtype=int) for name, shape in lengths.items()}, shots=(1,))


def test_features_that_are_not_finite_and_no_labels_are_refused() -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6) % 2
    bad = np.where(x == 3, np.nan, x)
    for train, labels, test in ((bad, y, x), (x, y, bad), (x, -np.ones_like(y), x)):
        with pytest.raises(ValueError, match=r"finite|label"):
            few_shot_accuracy(train, labels, test, y, shots=(1,))
    assert set(few_shot_accuracy(x, y, x, y, shots=(1,), seeds=(0,), l2=float(np.float32(2)))) == {(1, 0)}


def digits() -> tuple[Split, Split]:
    data = load_digits()
    return (data.data[:1437], data.target[:1437]), (data.data[1437:], data.target[1437:])


@pytest.mark.parametrize("seeds", [(0, 1, 2), (4,)])
def test_the_evaluator_is_the_function_on_every_source(array_context: Build, seeds: tuple[int, ...]) -> None:
    (train_x, train_y), (test_x, test_y) = digits()
    context = array_context(*digits())
    config = Config(labels_per_class=(1, 5), seeds=seeds, l2=3.0, pooling="both", block=2)
    rows, sweeps = runner.evaluate(Evaluator(config), context)
    assert not sweeps and len(rows) == 3 * 2 * len(seeds)
    representations = {key[2] for key in context.features.asked}  # type: ignore[attr-defined]
    assert representations == {("both", 2, None, "timm"), None}
    for source in ("trained", "untrained", "pixels"):
        every = 2 if source == "pixels" else 1
        arrays = (train_x[:, ::every], train_y, test_x[:, ::every], test_y)
        expected = few_shot_accuracy(*arrays, shots=(1, 5), seeds=seeds, l2=3.0)
        found = {(row.labels_per_class, row.seed): row.accuracy for row in rows if row.arm == source}
        assert found == expected


def test_l2_can_be_selected_on_a_part_of_the_shots(array_context: Build) -> None:
    evaluator = Evaluator(
        Config.model_validate({"labels_per_class": [1, 10], "seeds": 0, "sweep": {"l2": [1e6, 1e-2, 10]}})
    )
    one, ten = runner.measure(evaluator, array_context(*digits()), "trained", (1, 10), (0,))
    assert one.selected == {"l2": 10} and "could be held out" in one.notes[0], "the middle one"
    assert ten.selected["l2"] != 1e6 and not ten.notes
    best = float(str(ten.selected["l2"]))
    expected = few_shot_accuracy(*digits()[0], *digits()[1], shots=(10,), seeds=(0,), l2=best)
    assert ten.accuracy == expected[10, 0]


@pytest.mark.parametrize("name", ["n<d", "n>d"])
def test_images_may_come_in_any_order(name: str) -> None:
    """As those of all labels do; a number of shots gives them class by class."""
    train, test = feature_set(name)
    assert (np.diff(train[1]) < 0).any()
    scores = scores_by_solve(train, test[0], 1.0)
    np.testing.assert_array_equal(Ridge(*train).predict(test[0], 1.0), np.unique(train[1])[scores.argmax(1)])
