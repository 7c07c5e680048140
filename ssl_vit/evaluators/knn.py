"""Weighted k-nearest neighbors on frozen features, as DINO and DINOv2 do it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from ssl_vit.evaluators import Counts
from ssl_vit.evaluators.base import Classifier, LabeledConfig, Scored
from ssl_vit.evaluators.base import Evaluator as BaseEvaluator
from ssl_vit.evaluators.features import FeatureConfig, ImageSet
from ssl_vit.results import Prediction

_SIMILARITIES = 1 << 25  # computed at once: 128 MiB


class Config(FeatureConfig, LabeledConfig):
    """ks: numbers of neighbors (a comparison uses the first).

    temperature: a vote has the weight exp(similarity / temperature), which would overflow below 0.0015; at least 0.002.
    """

    ks: Counts = (10, 20)
    temperature: float = Field(0.07, ge=0.002)


class Evaluator(BaseEvaluator):
    """One variant per k; its probabilities are the shares of the votes."""

    title = "Nearest neighbors on frozen features"

    def fit(self, train: ImageSet, seed: int) -> Classifier:
        c: Config = self.config
        features = train.features(c)

        def classify(images: ImageSet) -> list[Scored]:
            test = images.features(c)
            votes = knn_votes(features.vectors, features.labels, test.vectors, ks=c.ks, temperature=c.temperature)
            return [
                Scored(
                    Prediction(test.images, test.labels, classes, shares),
                    variant=f"k={k}" if len(c.ks) > 1 else "",
                    primary=k == c.ks[0],
                    labels=len(features.labels),
                )
                for k, (classes, shares) in votes.items()
            ]

        return classify


def knn_votes(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    *,
    ks: Sequence[int] = (10, 20),
    temperature: float = 0.07,
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """By k: the classes with most votes, int64 (m,), and their shares of the votes, float32 (m,).

    Cosine similarity, votes weighted by exp(similarity / temperature). Of equally similar neighbors the earlier one
    counts first, of classes with equal votes the lower one. A k larger than the training set counts all of it.
    features: float (n, d). labels: int (n,).
    """
    train, test = _unit(train_features), _unit(test_features)
    classes, targets = np.unique(train_labels, return_inverse=True)
    most = min(max(ks), len(train))
    best = {k: (np.empty(len(test), np.int64), np.empty(len(test), np.float32)) for k in ks}
    rows = max(1, _SIMILARITIES // len(train))
    for start in range(0, len(test), rows):
        similarity = test[start : start + rows] @ train.T
        nearest = _nearest(similarity, most)
        weights = np.exp(np.take_along_axis(similarity, nearest, 1).astype(np.float64) / temperature)
        for k in ks:
            votes = np.zeros((len(similarity), len(classes)))
            owners = np.repeat(np.arange(len(similarity)), min(k, most))
            np.add.at(votes, (owners, targets[nearest[:, :k]].ravel()), weights[:, :k].ravel())
            best[k][0][start : start + rows] = classes[votes.argmax(1)]
            best[k][1][start : start + rows] = votes.max(1) / votes.sum(1)
    return best


def _nearest(similarity: np.ndarray, count: int) -> np.ndarray:
    """The columns of the `count` largest values of each row, largest first, the first of equals first."""
    least = np.partition(similarity, -count, axis=1)[:, -count]
    nearest = np.empty((len(similarity), count), dtype=np.int64)
    for row, (values, bound) in enumerate(zip(similarity, least, strict=True)):
        candidates = np.flatnonzero(values >= bound)
        nearest[row] = candidates[np.argsort(-values[candidates], kind="stable")[:count]]
    return nearest


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
