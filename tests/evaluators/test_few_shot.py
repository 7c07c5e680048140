from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge
from threadpoolctl import threadpool_limits

from ssl_vit.evaluators import few_shot
from ssl_vit.evaluators.features import Features, Representation
from ssl_vit.evaluators.few_shot import Config, Evaluator, RidgePath, few_shot_accuracy, fit_all, select
from ssl_vit.evaluators.labels import choose_each, choose_shots

Split = tuple[np.ndarray, np.ndarray]
Scores = Callable[[Split, np.ndarray, float], np.ndarray]


def published_shots(labels: np.ndarray, shots: int, seed: int, classes: int) -> np.ndarray:
    """The rule of the published protocol: every class's indices permuted by one generator, in label order."""
    generator = np.random.default_rng(seed)
    permuted = []
    for label in range(classes):
        permuted.append(generator.permutation(np.where(labels == label)[0]))
    return np.concatenate([indices[:shots] for indices in permuted])


def shots_of(train: Split, shots: Sequence[int], seeds: Sequence[int]) -> dict[tuple[int | str, int], Split]:
    """The images of every (shots, seed)."""
    x, labels = train
    return {place: (x[rows], labels[rows]) for place, rows in choose_each(labels, shots, seeds).items()}


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


def scores_by_sklearn(train: Split, test: np.ndarray, l2: float) -> np.ndarray:
    x, queries = prepared(train[0], test)
    targets = np.where(np.equal.outer(train[1], np.unique(train[1])), 1.0, -1.0)
    return np.asarray(Ridge(alpha=l2, fit_intercept=False, solver="cholesky").fit(x, targets).predict(queries))


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


@pytest.mark.filterwarnings("ignore:1 class")
@pytest.mark.parametrize("l2", [2.0**10, 1.0])
@pytest.mark.parametrize("scores_of", [scores_by_solve, scores_by_sklearn])
@pytest.mark.parametrize("name", NAMES)
def test_accuracy_and_every_prediction_agree_with_dense_solvers(name: str, scores_of: Scores, l2: float) -> None:
    train, test = feature_set(name)
    classes = np.unique(train[1])
    shots, seeds = (1, 5, 10, 25), (0, 1, 2)
    found = few_shot_accuracy(*train, *test, shots=shots, seeds=seeds, l2=l2)
    assert set(found) == {(k, seed) for k in shots for seed in seeds}
    assert len(set(found.values())) > 3
    for (k, seed), accuracy in found.items():
        chosen = published_shots(train[1], k, seed, int(classes.max()) + 1)
        scores = scores_of((train[0][chosen], train[1][chosen]), test[0], l2)
        best_two = np.sort(scores, axis=1)[:, -2:]
        clear = best_two[:, 1] - best_two[:, 0] > 1e-9 * np.abs(scores).max()
        assert clear.mean() > 0.95
        predictions = classes[scores.argmax(1)]
        assert accuracy == pytest.approx(np.mean(predictions == test[1]), abs=1 - clear.mean())
        # Scored against the reference's predictions, only sample-for-sample agreement gives 1.
        same = few_shot_accuracy(*train, test[0][clear], predictions[clear], shots=(k,), seeds=(seed,), l2=l2)
        assert same == {(k, seed): 1.0}


def grouped(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, the rows' classes in order, and +1/-1 targets."""
    x = np.random.default_rng(0).normal(size=shape)
    classes = np.sort(np.arange(shape[0]) % 3)
    return x, classes, np.where(classes[:, None] == np.arange(3), 1.0, -1.0)


@pytest.mark.parametrize("shape", [(40, 7), (7, 40), (12, 12)])
def test_one_decomposition_gives_the_weights_of_every_l2(shape: tuple[int, int]) -> None:
    x, classes, y = grouped(shape)
    path = RidgePath(x, np.flatnonzero(np.diff(classes, prepend=-1)))
    for l2 in (1e-3, 1.0, 2.0**10):
        solved = np.linalg.solve(x.T @ x + l2 * np.eye(shape[1]), x.T @ y)
        fitted = Ridge(alpha=l2, fit_intercept=False).fit(x, y).coef_.T
        np.testing.assert_allclose(path.basis @ path.coefficients(l2), solved, rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(path.basis @ path.coefficients(l2), fitted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(40, 7), (7, 40), (12, 12)])
def test_leaving_one_out_is_fitting_without_it(shape: tuple[int, int]) -> None:
    x, classes, y = grouped(shape)
    path = RidgePath(x, np.flatnonzero(np.diff(classes, prepend=-1)))
    for l2 in (0.5, 2.0**10):
        for row, found in enumerate(path.leave_one_out(l2)):
            rest = np.delete(np.arange(len(x)), row)
            weights = Ridge(alpha=l2, fit_intercept=False, solver="cholesky").fit(x[rest], y[rest]).coef_
            np.testing.assert_allclose(found, weights @ x[row], rtol=1e-6, atol=1e-9)


def test_several_l2_at_once_are_the_single_ones() -> None:
    train, test = feature_set("n>d")
    together = few_shot_accuracy(*train, *test, shots=(1, 10), seeds=(0, 1), l2=[1.0, 64.0, 2.0**14])
    for (shots, seed, l2), accuracy in together.items():
        assert few_shot_accuracy(*train, *test, shots=(shots,), seeds=(seed,), l2=l2) == {(shots, seed): accuracy}
    assert len(together) == 12


def test_l2_is_selected_by_the_shots_alone() -> None:
    train, test = feature_set("n<d")
    l2 = (1e-2, 1.0, 1e2, 1e4, 1e6)
    fits = fit_all(shots_of(train, (1, 10), (0,)), test[0], l2=l2, leave_one_out=True)
    assert fits[1, 0].held_out is None
    assert select(fits[1, 0], l2) == 1e2, "nothing can be left out of one shot a class: the middle one"
    held_out = fits[10, 0].held_out
    assert held_out is not None and len(set(held_out.values())) > 1
    chosen = select(fits[10, 0], l2)
    assert held_out[chosen] == max(held_out.values())
    assert all(held_out[other] < held_out[chosen] for other in l2 if other > chosen), "the larger of equals"


def test_the_same_arrays_give_the_same_bits_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(2000) % 20
    train = (generator.normal(size=(2000, 300)) + labels[:, None] / 20).astype(np.float32)
    bits: dict[int, set[bytes]] = {}

    class Spy(RidgePath):
        def __init__(self, x: np.ndarray, first: np.ndarray) -> None:
            super().__init__(x, first)
            bits[threads].add(self.basis.tobytes())

    monkeypatch.setattr(few_shot, "RidgePath", Spy)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            bits[threads] = set()
            torch.set_num_threads(threads)
            with threadpool_limits(threads):
                fit_all(shots_of((train, labels), (1, 10, 25), (0, 1)), train, l2=(1.0, 1024.0))
    finally:
        torch.set_num_threads(before)
    assert len(bits[1]) == 6
    assert bits[1] == bits[2] == bits[3]


@pytest.mark.parametrize("labels", [np.arange(300) % 7, np.arange(300) % 5 * 2, np.array([2, 0, 1] * 9)])
@pytest.mark.parametrize("seed", [0, 1, 17])
def test_shots_are_the_published_permutations_and_nested(labels: np.ndarray, seed: int) -> None:
    before: set[int] = set()
    for shots in (1, 2, 5, 9):
        chosen = choose_shots(labels, shots, seed)
        np.testing.assert_array_equal(chosen, published_shots(labels, shots, seed, int(labels.max()) + 1))
        assert np.bincount(labels[chosen])[np.unique(labels)].tolist() == [shots] * len(np.unique(labels))
        assert before < set(chosen.tolist())
        before = set(chosen.tolist())


def test_other_seeds_choose_other_shots() -> None:
    labels = np.arange(100) % 5
    assert not np.array_equal(choose_shots(labels, 3, 0), choose_shots(labels, 3, 1))


def test_images_without_a_label_are_never_chosen_and_change_nothing() -> None:
    labels = np.array([1, 0, 1, 0, 0, 1])
    hidden = np.concatenate([labels, [-1, -1, -1]])
    np.testing.assert_array_equal(choose_shots(hidden, 2, 0), choose_shots(labels, 2, 0))
    assert sorted(choose_shots(hidden, 99, 0)) == [0, 1, 2, 3, 4, 5]


def test_classes_short_of_shots_are_named() -> None:
    train, test = feature_set("short class")
    with pytest.warns(UserWarning, match=r"1 class\(es\) have fewer than 25 .*\[3\]"):
        few_shot_accuracy(*train, *test)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few_shot_accuracy(*train, *test, shots=(1, 3))


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


def digits() -> tuple[Split, Split]:
    data = load_digits()
    return (data.data[:1437], data.target[:1437]), (data.data[1437:], data.target[1437:])


def test_raw_pixels_of_the_digits_give_the_known_accuracies() -> None:
    train, test = digits()
    assert len(test[1]) == 360
    accuracies = few_shot_accuracy(*train, *test)
    means = [100 * np.mean([accuracies[k, seed] for seed in (0, 1, 2)]) for k in (1, 5, 10, 25)]
    assert [round(mean) for mean in means] == [57, 73, 79, 84]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_the_precision_of_the_features_does_not_matter(dtype: type) -> None:
    train, test = digits()
    found = few_shot_accuracy(train[0].astype(dtype), train[1], test[0].astype(dtype), test[1], shots=(5,))
    assert found == few_shot_accuracy(*train, *test, shots=(5,))


@pytest.mark.parametrize("seeds", [(0, 1, 2), (4,)])
def test_the_evaluator_reports_each_seed_its_mean_and_deviation(array_task: Any, seeds: tuple[int, ...]) -> None:
    (train_x, train_y), (test_x, test_y) = digits()

    class TwoSources(array_task):  # type: ignore[misc]
        """The raw pixels are only some of the pixels."""

        def features(self, source: str, split: str, representation: Representation, images: Any = None) -> Features:
            assert representation == Representation("both", 2)
            found: Features = super().features(source, split, representation, images)
            return replace(found, vectors=found.vectors[:, :: 2 if source == "pixels" else 1])

    config = Config(shots=(1, 5), seeds=seeds, l2=3.0, pooling="both", block=2)
    found = dict(Evaluator(config).run(TwoSources(*digits())))
    expected = {}
    for source in ("trained", "untrained", "pixels"):
        every = 2 if source == "pixels" else 1
        arrays = (train_x[:, ::every], train_y, test_x[:, ::every], test_y)
        accuracies = few_shot_accuracy(*arrays, shots=(1, 5), seeds=seeds, l2=3.0)
        for k in (1, 5):
            values = [accuracies[k, seed] for seed in seeds]
            expected[f"{source}/{k}-shot/mean"] = sum(values) / len(values)
            spread = sum((value - sum(values) / len(values)) ** 2 for value in values)
            expected[f"{source}/{k}-shot/std"] = (spread / (len(values) - 1)) ** 0.5 if len(values) > 1 else 0.0
            expected |= {f"{source}/{k}-shot/seed{seed}": value for seed, value in zip(seeds, values, strict=True)}
    assert found == pytest.approx(expected)


def test_a_measurement_tells_classes_labels_and_what_was_chosen(array_task: Any) -> None:
    config = Config(shots=(5,), seeds=(0,), l2=(1.0, 100.0), select_l2=True)
    (found,) = Evaluator(config).measure(array_task(*digits()), "trained", (5,), (0,))
    train, test = digits()
    fit = fit_all(shots_of(train, (5,), (0,)), test[0], l2=(1.0, 100.0), leave_one_out=True)[5, 0]
    predicted = fit.predicted[select(fit, (1.0, 100.0))]
    assert found.chosen == {"l2": select(fit, (1.0, 100.0))}
    assert (found.labels, found.labels_per_class, found.seed, found.main) == (50, 5, 0, True)
    each = [float((predicted[test[1] == label] == label).mean()) for label in range(10)]
    assert found.per_class == pytest.approx(each, abs=1e-6)
    assert found.mean_per_class == pytest.approx(sum(each) / 10)
    assert found.accuracy == pytest.approx((predicted == test[1]).mean())


def test_every_l2_is_shown_but_a_comparison_counts_the_first(array_task: Any) -> None:
    config = Config(shots=(5,), seeds=(0, 1), l2=(7.0, 100.0))
    found = list(Evaluator(config).measure(array_task(*digits()), "trained", (5,), (0, 1)))
    assert [(m.name, m.seed, m.main) for m in found] == [
        ("5-shot", 0, True),
        ("5-shot, l2=100", 0, False),
        ("5-shot", 1, True),
        ("5-shot, l2=100", 1, False),
    ]


def test_a_class_short_of_shots_is_noted_in_the_measurement(array_task: Any) -> None:
    (train_x, train_y), test = digits()
    few = np.flatnonzero((train_y != 3) | (np.cumsum(train_y == 3) <= 2))
    task = array_task((train_x[few], train_y[few]), test)
    found = {m.labels_per_class: m for m in Evaluator(Config(shots=(1, 5))).measure(task, "trained", (1, 5), (0,))}
    assert found[1].notes == ()
    assert found[5].notes == ("1 class(es) gave fewer than 5 images, all that could be used: [3]",)
    assert found[5].labels == 47


def test_only_the_chosen_images_are_read(array_task: Any) -> None:
    (train_x, train_y), test = digits()
    labels = np.where(np.arange(len(train_y)) % 50 == 0, -1, train_y)
    task = array_task((train_x, labels), test)
    config = Config(shots=(1, 5), seeds=(0, 1))
    found = {(m.labels_per_class, m.seed): m for m in Evaluator(config).measure(task, "trained", (1, 5), (0, 1))}
    wanted = np.unique(np.concatenate([choose_shots(labels, 5, seed) for seed in (0, 1)]))
    assert task.read == [len(test[1]), len(wanted)], "all test images, and each shot once"
    accuracies = few_shot_accuracy(train_x, labels, *test, shots=(1, 5), seeds=(0, 1))
    assert {place: one.accuracy for place, one in found.items()} == pytest.approx(accuracies)


def test_a_chosen_image_that_cannot_be_read_is_missing_and_noted(array_task: Any) -> None:
    train, test = digits()
    broken = int(choose_shots(train[1], 5, 0)[12])
    (found,) = Evaluator(Config(shots=(5,))).measure(array_task(train, test, (broken,)), "trained", (5,), (0,))
    assert found.labels == 49
    nothing = tuple(np.flatnonzero(train[1] == 2))
    (without,) = Evaluator(Config(shots=(5,))).measure(array_task(train, test, nothing), "trained", (5,), (0,))
    assert (without.labels, without.notes) == (45, found.notes), "a class that gave none is short too"
    assert found.notes == ("1 class(es) gave fewer than 5 images, all that could be used: [2]",)
