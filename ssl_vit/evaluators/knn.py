"""Weighted k-nearest neighbours on frozen features, as DINO and DINOv2 do it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field

from ssl_vit.evaluators.features import Task
from ssl_vit.interfaces import Config as BaseConfig
from ssl_vit.interfaces import UserError
from ssl_vit.models.backbone import Pooling

_ROWS = 1024  # test images scored at once: bounds the similarity matrix in memory


class Config(BaseConfig):
    """ks: numbers of neighbours. temperature: votes weigh exp(similarity / temperature). pooling: see few_shot.

    labels_per_class, seed: neighbours come from that many images a class, chosen as few_shot does (None: all).
    """

    ks: tuple[int, ...] = (10, 20)
    temperature: float = Field(0.07, gt=0)
    pooling: Pooling = "mean"
    labels_per_class: int | None = Field(None, ge=1)
    seed: int = 0


def knn_accuracy(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    *,
    ks: Sequence[int] = (10, 20),
    temperature: float = 0.07,
) -> dict[int, float]:
    """Test accuracy (0..1) for each k: cosine similarity, votes weighted exp(similarity / temperature).

    features: float (n, d); labels: int (n,). k larger than the training set counts all of it.
    """
    train, test = _unit(train_features), _unit(test_features)
    classes, targets = np.unique(train_labels, return_inverse=True)
    most = min(max(ks), len(train))
    hits = dict.fromkeys(ks, 0)
    for start in range(0, len(test), _ROWS):
        similarity = test[start : start + _ROWS] @ train.T
        nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :most]
        weights = np.exp(np.take_along_axis(similarity, nearest, 1) / temperature)
        for k in ks:
            votes = np.zeros((len(similarity), len(classes)))
            rows = np.repeat(np.arange(len(similarity)), min(k, most))
            np.add.at(votes, (rows, targets[nearest[:, :k]].ravel()), weights[:, :k].ravel())
            hits[k] += int((classes[votes.argmax(1)] == test_labels[start : start + _ROWS]).sum())
    return {k: count / len(test) for k, count in hits.items()}


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


class Evaluator:
    """Accuracy for each k and feature source."""

    def __init__(self, config: Config) -> None:
        if not config.ks:
            raise UserError("knn: ks must name at least one number of neighbours")
        self.config = config

    def run(self, task: Task) -> Iterator[tuple[str, float]]:
        c = self.config
        for source in task.sources():
            train = task.labelled_features(source, c.pooling, c.labels_per_class, c.seed)
            test = task.features(source, "test", c.pooling)
            accuracies = knn_accuracy(
                train.vectors, train.labels, test.vectors, test.labels, ks=c.ks, temperature=c.temperature
            )
            for k, accuracy in accuracies.items():
                yield f"{source}/k={k}", accuracy
