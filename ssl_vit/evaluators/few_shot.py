"""Few-shot linear evaluation: the closed-form ridge protocol of the paper's authors (big_vision, `fewshot_lsr`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pydantic import Field, field_validator
from threadpoolctl import threadpool_limits

from ssl_vit.evaluators import Counts, Numbers, Seeds
from ssl_vit.evaluators.base import Choice, FeatureConfig, Judge, score
from ssl_vit.evaluators.features import Task
from ssl_vit.evaluators.labels import choose_each, short_classes, short_note
from ssl_vit.interfaces import Measurement

_BIAS = 100.0  # the constant feature; regularized like the rest, so its size sets how free the bias is
Place = tuple[int | str, int]
"""(shots, seed)"""

_SCORES = 1 << 22  # scores computed at once by a thread: 32 MiB


class Config(FeatureConfig):
    """shots: labeled images a class. seeds: of the choice of shots.

    l2: the published protocol uses 2**10; several values cost hardly more than one. With `select_l2` the value of each
    (shots, seed) is the one with the best leave-one-out accuracy over the shots (each is held out once; ties go to the
    larger value, one shot a class to the middle one); without it, every value is reported.
    """

    shots: Counts = Field((1, 5, 10, 25), min_length=1)
    seeds: Seeds = (0, 1, 2)
    l2: Numbers = (2.0**10,)
    select_l2: bool = False

    @field_validator("l2")
    @classmethod
    def _positive(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if not values or min(values) <= 0:
            raise ValueError("give numbers greater than 0")
        return values


@dataclass(frozen=True)
class Fit:
    """Of one choice of images: by l2 the predicted class of every test image and (where asked for) the leave-one-out
    accuracy over the shots, None for one shot a class."""

    predicted: dict[float, np.ndarray]
    held_out: dict[float, float] | None


def fit_all(
    train: Mapping[Place, tuple[np.ndarray, np.ndarray]],
    test_features: np.ndarray,
    *,
    l2: Sequence[float],
    leave_one_out: bool = False,
) -> dict[Place, Fit]:
    """Ridge regression on one-hot +1/-1 targets for every choice of images, all l2 values from one eigendecomposition.

    train: (features, labels) by (shots, seed), rows class by class. features: float (n, d). labels: int (n,). Features
    are standardized by the chosen shots' own mean and population standard deviation (+ 1e-5); a constant feature of 100
    carries the bias and is regularized like the rest. Solved in float64. Each choice is solved by one thread whose
    linear algebra does not split further, so the same arrays give the same bits on any number of cores.
    """
    center = test_features.mean(0, dtype=np.float64)  # large offsets would cost digits below
    test = test_features - center

    def fit(place: Place) -> Fit:
        features, labels = train[place]
        if features.shape[1:] != test_features.shape[1:]:
            raise ValueError(f"train features {features.shape} and test features {test_features.shape} do not fit")
        return _fit(features - center, labels, test, l2, leave_one_out)

    places = sorted(train, reverse=True)  # the long ones first
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        fits = dict(zip(places, pool.map(fit, places), strict=True))
    return {place: fits[place] for place in train}


def _fit(x: np.ndarray, labels: np.ndarray, test: np.ndarray, l2: Sequence[float], leave_one_out: bool) -> Fit:
    """One choice of images; the rows of x (n, d) come class by class."""
    mean, deviation = x.mean(0), x.std(0) + 1e-5
    x = np.concatenate([(x - mean) / deviation, np.full((len(x), 1), _BIAS)], axis=1)
    classes, first = np.unique(labels, return_index=True)
    path = RidgePath(x, first)
    # Standardizing the basis instead of every test image: (t - mean) / deviation @ b = t @ (b / deviation) - ...
    basis = path.basis[:-1] / deviation[:, None]
    offset = _BIAS * path.basis[-1] - mean @ basis
    predicted = np.empty((len(l2), len(test)), dtype=np.int64)
    rows = max(1, _SCORES // max(basis.shape[1], len(classes)))
    for start in range(0, len(test), rows):
        block = slice(start, start + rows)
        projected = test[block] @ basis + offset
        for n, value in enumerate(l2):
            predicted[n, block] = classes[(projected @ path.coefficients(value)).argmax(1)]
    held_out = None
    if leave_one_out and len(x) > len(classes):
        scores = {value: path.leave_one_out(value) for value in l2}
        held_out = {value: float((classes[found.argmax(1)] == labels).mean()) for value, found in scores.items()}
    return Fit(dict(zip(l2, predicted, strict=True)), held_out)


class RidgePath:
    """argmin_w |x w - y|^2 + l2 |w|^2 for any l2, as w = basis @ coefficients(l2), through one eigendecomposition.

    x: float64 (n, d), rows class by class. first: int (k,), each class's first row. y (n, k) is +1 in a row's own class
    and -1 elsewhere. The smaller of the two Gram matrices is decomposed; basis is (d, min(n, d)).
    """

    def __init__(self, x: np.ndarray, first: np.ndarray) -> None:
        self.x, self.tall = x, len(x) >= x.shape[1]
        self.own = np.repeat(np.arange(len(first)), np.diff([*first, len(x)]))  # each row's class
        values, vectors = np.linalg.eigh(x.T @ x if self.tall else x @ x.T)
        self.values = np.maximum(values, 0)
        if self.tall:
            self.basis = vectors
            sums = np.add.reduceat(x, first, axis=0).T  # (d, k), of each class's rows
            self.targets = vectors.T @ (2 * sums - sums.sum(1, keepdims=True))
        else:
            self.vectors, self.basis = vectors, x.T @ vectors
            sums = np.add.reduceat(vectors, first, axis=0).T
            self.targets = 2 * sums - sums.sum(1, keepdims=True)

    def coefficients(self, l2: float) -> np.ndarray:
        """(min(n, d), k)"""
        return self.targets / (self.values + l2)[:, None]

    def leave_one_out(self, l2: float) -> np.ndarray:
        """The scores (n, k) of every row under the fit to all others: y - e / (1 - h), with e the residuals and h the
        diagonal of the hat matrix."""
        y = np.where(self.own[:, None] == np.arange(self.targets.shape[1]), 1.0, -1.0)
        if self.tall:
            residuals = y - self._projected @ self.coefficients(l2)
            left = 1 - self._projected**2 @ (1 / (self.values + l2))
        else:
            kept = l2 / (self.values + l2)
            residuals = self.vectors @ (kept[:, None] * self.targets)
            left = self.vectors**2 @ kept
        return y - residuals / left[:, None]

    @cached_property
    def _projected(self) -> np.ndarray:
        return self.x @ self.basis


def few_shot_accuracy(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: Sequence[int] = (0, 1, 2),
    l2: float | Sequence[float] = 2.0**10,
) -> dict[Any, float]:
    """{(shots, seed): test accuracy, 0..1}, or {(shots, seed, l2): ...} where a sequence of l2 is given; see `fit_all`.

    Warns about classes with fewer images than shots. Raises ValueError for arrays that do not fit together.
    """
    if len(train_features) != len(train_labels) or len(test_features) != len(test_labels) or not len(test_labels):
        raise ValueError("features and labels must have equal, non-zero lengths")
    short = short_classes(train_labels, max(shots), train_labels)
    if short:
        warnings.warn(
            f"{len(short)} class(es) have fewer than {max(shots)} images and give all they have: {short[:10]}",
            stacklevel=2,
        )
    values = (l2,) if isinstance(l2, (int, float)) else tuple(l2)
    chosen = choose_each(train_labels, shots, seeds)
    train = {place: (train_features[at], train_labels[at]) for place, at in chosen.items()}
    fits = fit_all(train, test_features, l2=values)
    found = {
        (shot, seed, value): float((fit.predicted[value] == test_labels).mean())
        for (shot, seed), fit in fits.items()
        for value in values
    }
    return {key[:2]: value for key, value in found.items()} if isinstance(l2, (int, float)) else found


class Evaluator(Judge):
    """Accuracy of every (shots, seed), and of every l2 where several are given and none is selected."""

    title = "Few-shot linear classifier on frozen features"

    def budgets(self, asked: Sequence[int | str]) -> Sequence[int | str]:
        """Its own shots: the published protocol does not change with a comparison's budgets."""
        return tuple(self.config.shots)

    def measure(
        self,
        task: Task,
        source: str,
        budgets: Sequence[int | str],
        seeds: Sequence[int],
        choice: Choice | None = None,
    ) -> Iterator[Measurement]:
        c: Config = self.config
        test = task.features(source, "test", c.representation)
        train = dict(task.labeled_features(source, c.representation, budgets, seeds))
        arrays = {place: (few.vectors, few.labels) for place, few in train.items()}
        for (shot, seed), fit in fit_all(arrays, test.vectors, l2=c.l2, leave_one_out=c.select_l2).items():
            labels = train[shot, seed].labels
            for value in [select(fit, c.l2)] if c.select_l2 else c.l2:
                yield Measurement(
                    name=f"{shot}-shot" if value == c.l2[0] or c.select_l2 else f"{shot}-shot, l2={value:g}",
                    labels_per_class=shot,
                    labels=len(labels),
                    seed=seed,
                    chosen={"l2": value} if c.select_l2 else {},
                    notes=short_note(labels, shot, task.train_labels),
                    main=value == c.l2[0] or c.select_l2,
                    **score(fit.predicted[value], test.labels, task.classes),
                )


def select(fit: Fit, l2: Sequence[float]) -> float:
    """The l2 with the best leave-one-out accuracy, the larger of equals; the middle one if nothing can be left out."""
    ordered = sorted(l2, reverse=True)
    if fit.held_out is None:
        return ordered[len(ordered) // 2]
    return max(ordered, key=fit.held_out.__getitem__)
