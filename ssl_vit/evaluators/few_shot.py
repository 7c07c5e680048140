"""Few-shot linear evaluation: the closed-form ridge protocol of the paper's authors (big_vision, `fewshot_lsr`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field

from ssl_vit.evaluators.features import Task
from ssl_vit.evaluators.labels import choose_shots
from ssl_vit.interfaces import Config as BaseConfig
from ssl_vit.models.backbone import Pooling

_BIAS = 100.0  # the constant feature; regularised like the rest, so its size sets how free the bias is


class Config(BaseConfig):
    """shots: labelled images a class. seeds: of the choice of shots. l2: the published protocol uses 2**10.

    pooling: the representation: `token`, `mean` (of the patches), `both`, or `patches` (all side by side).
    """

    shots: tuple[int, ...] = (1, 5, 10, 25)
    seeds: tuple[int, ...] = (0, 1, 2)
    l2: float = Field(2.0**10, gt=0)
    pooling: Pooling = "mean"


def few_shot_accuracy(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: Sequence[int] = (0, 1, 2),
    l2: float = 2.0**10,
) -> dict[tuple[int, int], float]:
    """Test accuracy (0..1) of ridge regression on one-hot +1/-1 targets, for every (shots, seed).

    features: float (n, d). labels: int (n,). Features are standardised by the chosen shots' own mean and population
    standard deviation (+ 1e-5); a constant feature of 100 carries the bias and is regularised like the rest. Solved in
    float64 through an eigendecomposition. Warns about classes with fewer images than shots. Raises ValueError for
    arrays that do not fit together.
    """
    if len(train_features) != len(train_labels) or len(test_features) != len(test_labels) or not len(test_labels):
        raise ValueError("features and labels must have equal, non-zero lengths")
    if train_features.shape[1:] != test_features.shape[1:]:
        raise ValueError(f"train features {train_features.shape} and test features {test_features.shape} do not fit")
    classes, counts = np.unique(train_labels[train_labels >= 0], return_counts=True)
    short = classes[counts < max(shots)]
    if len(short):
        warnings.warn(
            f"{len(short)} class(es) have fewer than {max(shots)} images and give all they have: {short[:10].tolist()}",
            stacklevel=2,
        )
    return {
        (k, seed): _accuracy(train_features, train_labels, test_features, test_labels, classes, k, seed, l2)
        for seed in seeds
        for k in shots
    }


def _accuracy(
    train: np.ndarray,
    train_labels: np.ndarray,
    test: np.ndarray,
    test_labels: np.ndarray,
    classes: np.ndarray,
    shots: int,
    seed: int,
    l2: float,
) -> float:
    chosen = choose_shots(train_labels, shots, seed)
    x = train[chosen].astype(np.float64)
    mean, deviation = x.mean(0), x.std(0) + 1e-5
    x = _with_bias((x - mean) / deviation)
    y = np.where(train_labels[chosen][:, None] == classes, 1.0, -1.0)
    weights = ridge(x, y, l2)
    scores = _with_bias((test.astype(np.float64) - mean) / deviation) @ weights
    return float(np.mean(classes[scores.argmax(1)] == test_labels))


def _with_bias(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, np.full((len(x), 1), _BIAS)], axis=1)


def ridge(x: np.ndarray, y: np.ndarray, l2: float) -> np.ndarray:
    """argmin_w |x w - y|^2 + l2 |w|^2 for x (n, d) and y (n, k) -> w (d, k), through the smaller Gram matrix."""
    n, d = x.shape
    if n >= d:
        values, vectors = np.linalg.eigh(x.T @ x)
        return vectors @ ((vectors.T @ (x.T @ y)) / (np.maximum(values, 0) + l2)[:, None])
    values, vectors = np.linalg.eigh(x @ x.T)
    return x.T @ (vectors @ ((vectors.T @ y) / (np.maximum(values, 0) + l2)[:, None]))


class Evaluator:
    """Accuracy of every (shots, seed) and its mean and standard deviation over seeds, for each feature source."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def run(self, task: Task) -> Iterator[tuple[str, float]]:
        c = self.config
        for source in task.sources():
            train, test = (task.features(source, split, c.pooling) for split in ("train", "test"))
            accuracies = few_shot_accuracy(
                train.vectors, train.labels, test.vectors, test.labels, shots=c.shots, seeds=c.seeds, l2=c.l2
            )
            for shots in c.shots:
                values = [accuracies[shots, seed] for seed in c.seeds]
                yield f"{source}/{shots}-shot/mean", float(np.mean(values))
                yield f"{source}/{shots}-shot/std", float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
                for seed, value in zip(c.seeds, values, strict=True):
                    yield f"{source}/{shots}-shot/seed{seed}", value
