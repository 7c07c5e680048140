"""Weighted k-nearest neighbors on frozen features, as DINO and DINOv2 do it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field

from ssl_vit.evaluators import ALL, Counts, budget_words
from ssl_vit.evaluators.base import Choice, Judge, LabeledConfig, score
from ssl_vit.evaluators.features import Task
from ssl_vit.evaluators.labels import short_note
from ssl_vit.interfaces import Measurement

_SIMILARITIES = 1 << 25  # computed at once: 128 MiB


class Config(LabeledConfig):
    """ks: numbers of neighbors (a comparison uses the first). temperature: votes weigh exp(similarity / it)."""

    ks: Counts = Field((10, 20), min_length=1)
    temperature: float = Field(0.07, gt=0)


def knn_predictions(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    *,
    ks: Sequence[int] = (10, 20),
    temperature: float = 0.07,
) -> dict[int, np.ndarray]:
    """The predicted class of every test image for each k: cosine similarity, votes weighted exp(similarity /
    temperature); of equally similar neighbors the earlier counts first.

    features: float (n, d); labels: int (n,). k larger than the training set counts all of it.
    """
    train, test = _unit(train_features), _unit(test_features)
    classes, targets = np.unique(train_labels, return_inverse=True)
    most = min(max(ks), len(train))
    found = {k: np.empty(len(test), dtype=np.int64) for k in ks}
    rows = max(1, _SIMILARITIES // len(train))
    for start in range(0, len(test), rows):
        similarity = test[start : start + rows] @ train.T
        nearest = _nearest(similarity, most)
        weights = np.exp(np.take_along_axis(similarity, nearest, 1).astype(np.float64) / temperature)
        for k in ks:
            votes = np.zeros((len(similarity), len(classes)))
            owners = np.repeat(np.arange(len(similarity)), min(k, most))
            np.add.at(votes, (owners, targets[nearest[:, :k]].ravel()), weights[:, :k].ravel())
            found[k][start : start + rows] = classes[votes.argmax(1)]
    return found


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


class Evaluator(Judge):
    """Accuracy of every k, label budget and seed."""

    title = "Nearest neighbors on frozen features"

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
        for (budget, seed), train in task.labeled_features(source, c.representation, budgets, seeds):
            arrays = (train.vectors, train.labels, test.vectors)
            for k, predicted in knn_predictions(*arrays, ks=c.ks, temperature=c.temperature).items():
                yield Measurement(
                    name=f"k={k}" if budget == ALL else f"k={k}, {budget_words(budget)}",
                    labels_per_class=budget,
                    labels=len(train.labels),
                    seed=seed,
                    main=k == c.ks[0],
                    notes=short_note(train.labels, budget, task.train_labels),
                    **score(predicted, test.labels, task.classes),
                )
