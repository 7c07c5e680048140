from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ssl_vit.evaluators.labels import choose_labeled, held_out_split
from ssl_vit.evaluators.linear_probe import Config, Evaluator, probe_accuracy

CS = (1e-4, 1e-2, 1.0, 100.0)
LABELS = np.random.default_rng(0).choice([0, 1, 4], 150, p=[0.6, 0.3, 0.1])


def features(labels: np.ndarray, seed: int, noise: float = 1.5) -> np.ndarray:
    """Noisy class means on very different scales, with a constant feature among them."""
    means = np.random.default_rng(9).normal(size=(5, 8))
    generator = np.random.default_rng(seed)
    x = (means[labels] + noise * generator.normal(size=(len(labels), 8))) * 10.0 ** np.arange(-4, 4) + 5
    x[:, 3] = 2.5
    return x


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_split_is_stratified_disjoint_and_complete(share: float, seed: int) -> None:
    kept, held = held_out_split(LABELS, share, seed)
    assert sorted([*kept, *held]) == list(range(150))
    assert kept.tolist() == sorted(kept)
    assert held.tolist() == sorted(held)
    for label in (0, 1, 4):
        count = int((label == LABELS).sum())
        assert abs((LABELS[held] == label).sum() - share * count) <= 0.5
        assert (LABELS[kept] == label).any()


def test_held_out_split_depends_on_the_seed_alone() -> None:
    first, again, other = (held_out_split(LABELS, 0.2, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[1], other[1])


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_single_image_of_a_class_is_never_held_out(share: float) -> None:
    labels = np.array([0] * 10 + [1] + [2] * 2)
    kept, held = held_out_split(labels, share, 0)
    assert set(labels[kept]) == {0, 1, 2}
    assert 10 not in held


def test_images_without_a_label_are_on_neither_side() -> None:
    hidden = np.where(np.arange(150) % 2 == 0, LABELS, -1)
    kept, held = held_out_split(hidden, 0.3, 0)
    assert sorted([*kept, *held]) == list(range(0, 150, 2))


def reference_accuracy(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], c: float) -> float:
    """Standardized as MAE's affine-free BatchNorm (eps 1e-6) does, then scikit-learn's own logistic regression."""

    def normalized(x: np.ndarray) -> np.ndarray:
        mean, variance = torch.from_numpy(train[0].mean(0)), torch.from_numpy(train[0].var(0))
        return F.batch_norm(torch.from_numpy(x), mean, variance, eps=1e-6).numpy()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LogisticRegression(C=c, max_iter=1000).fit(normalized(train[0]), train[1])
        return float(model.score(normalized(test[0]), test[1]))


@pytest.mark.parametrize(("seed", "share"), [(0, 0.2), (1, 0.2), (0, 0.4)])
def test_c_is_chosen_on_held_out_images_and_the_fit_is_sklearns(seed: int, share: float) -> None:
    x, labels = features(LABELS, 1), LABELS
    test_labels = np.random.default_rng(5).choice([0, 1, 4], 200)
    test_x = features(test_labels, 2)
    kept, held = held_out_split(labels, share, seed)
    scores = [reference_accuracy((x[kept], labels[kept]), (x[held], labels[held]), c) for c in CS]
    assert len(set(scores)) > 1
    best = CS[scores.index(max(scores))]
    found = probe_accuracy(x, labels, test_x, test_labels, cs=CS, held_out=share, seed=seed)
    assert found == (pytest.approx(reference_accuracy((x, labels), (test_x, test_labels), best)), best)


def test_a_single_c_is_used_as_it_is() -> None:
    x = features(LABELS, 1)
    accuracy, c = probe_accuracy(x, LABELS, x, LABELS, cs=(0.5,))
    assert (accuracy, c) == (pytest.approx(reference_accuracy((x, LABELS), (x, LABELS), 0.5)), 0.5)


@pytest.mark.parametrize("cs", [CS, CS[::-1]])
def test_one_image_a_class_works_with_the_middle_c(cs: tuple[float, ...]) -> None:
    labels = np.array([4, 0, 1])
    x = features(labels, 1, noise=0.1)
    test_labels = np.array([0, 0, 1, 4, 4])
    accuracy, c = probe_accuracy(x, labels, features(test_labels, 2, noise=0.1), test_labels, cs=cs)
    assert c == 1.0
    assert accuracy == 1.0


def test_the_accuracy_is_of_the_test_images() -> None:
    x = features(LABELS, 1, noise=0.01)
    right = probe_accuracy(x, LABELS, x[:10], LABELS[:10], cs=CS)[0]
    wrong = probe_accuracy(x, LABELS, x[:10], (LABELS[:10] + 1) % 5, cs=CS)[0]
    assert right == 1.0
    assert wrong <= 0.5


@pytest.mark.parametrize("budget", ["all", 6, "20%"])
def test_the_evaluator_uses_the_labels_it_was_allowed(array_task: Any, budget: int | str) -> None:
    x = features(LABELS, 1)
    test = features(LABELS, 2)
    task = array_task((x, LABELS), (test, LABELS))
    config = Config(cs=CS, labels_per_class=budget, seeds=(2, 3), held_out=0.3)
    found = list(Evaluator(config).measure(task, "trained", (budget,), (2, 3)))
    for seed, measured in zip((2, 3), found, strict=True):
        rows = choose_labeled(LABELS, budget, seed)
        accuracy, c = probe_accuracy(x[rows], LABELS[rows], test, LABELS, cs=CS, held_out=0.3, seed=seed)
        assert (measured.accuracy, measured.chosen, measured.labels) == (accuracy, {"C": c}, len(rows))
        assert measured.per_class[2:4] == (None, None), "classes without a test image have no accuracy"


def test_a_fit_that_was_cut_short_says_so(array_task: Any) -> None:
    x, y = features(LABELS, 1), LABELS
    task = array_task((x, y), (x, y))
    notes = {}
    for iterations in (3, 1000):
        judge = Evaluator(Config(cs=(1.0,), max_iterations=iterations))
        (measured,) = judge.measure(task, "trained", ("all",), (0,))
        notes[iterations] = measured.notes
    assert notes == {3: ("the logistic regression stopped at max_iterations before it had converged",), 1000: ()}


def test_on_real_digits_it_agrees_with_sklearn_to_a_tenth_of_a_point() -> None:
    data = load_digits()
    train, test = (data.data[:1437], data.target[:1437]), (data.data[1437:], data.target[1437:])
    for c in (1e-3, 0.1):
        found = probe_accuracy(*train, *test, cs=(c,))[0]
        model = make_pipeline(StandardScaler(), LogisticRegression(C=c, solver="newton-cg", tol=1e-8, max_iter=1000))
        assert found == pytest.approx(model.fit(*train).score(*test), abs=1e-3)
