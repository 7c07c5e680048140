"""Linear probe, the exact way: features once, multinomial logistic regression by L-BFGS, C chosen on held-out train.

Features are standardised as by the affine-free BatchNorm of MAE's probe (`main_linprobe.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from ssl_vit.evaluators.features import Task
from ssl_vit.evaluators.labels import held_out_split
from ssl_vit.interfaces import Config as BaseConfig
from ssl_vit.models.backbone import Pooling


class Config(BaseConfig):
    """cs: inverse regularisation strengths to choose from. held_out: share of the labelled images that chooses.

    labels_per_class, seed: train on that many images a class, chosen as few_shot does (None: all). pooling: see
    few_shot. max_iterations: of L-BFGS.
    """

    cs: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    held_out: float = Field(0.2, gt=0, lt=1)
    labels_per_class: int | None = Field(None, ge=1)
    seed: int = 0
    pooling: Pooling = "mean"
    max_iterations: int = Field(1000, ge=1)


def probe_accuracy(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    *,
    cs: Sequence[float],
    held_out: float = 0.2,
    seed: int = 0,
    max_iterations: int = 1000,
) -> tuple[float, float]:
    """(test accuracy, chosen C): C is chosen on a held-out part of train, then the fit uses all of train.

    With so few labels that nothing can be held out (one image a class), the middle C is used.
    """

    def fit_score(fit: np.ndarray, c: float, x: np.ndarray, y: np.ndarray) -> float:
        mean = train_features[fit].mean(0)
        scale = np.sqrt(train_features[fit].var(0) + 1e-6)
        model = LogisticRegression(C=c, max_iter=max_iterations)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a cap on iterations is a setting, not an accident
            model.fit((train_features[fit] - mean) / scale, train_labels[fit])
        return float(np.mean(model.predict((x - mean) / scale) == y))

    kept, held = held_out_split(train_labels, held_out, seed)
    best = sorted(cs)[len(cs) // 2]
    if len(held) and len(cs) > 1:
        scores = [fit_score(kept, c, train_features[held], train_labels[held]) for c in cs]
        best = cs[int(np.argmax(scores))]
    return fit_score(np.arange(len(train_labels)), best, test_features, test_labels), best


class Evaluator:
    """Test accuracy and the chosen C for each feature source."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def run(self, task: Task) -> Iterator[tuple[str, float]]:
        c = self.config
        for source in task.sources():
            train = task.labelled_features(source, c.pooling, c.labels_per_class, c.seed)
            test = task.features(source, "test", c.pooling)
            accuracy, best = probe_accuracy(
                train.vectors,
                train.labels,
                test.vectors,
                test.labels,
                cs=c.cs,
                held_out=c.held_out,
                seed=c.seed,
                max_iterations=c.max_iterations,
            )
            yield f"{source}/accuracy", accuracy
            yield f"{source}/C", best
