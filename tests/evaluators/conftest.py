"""A task whose features are arrays: what an evaluator makes of them, without shards or an encoder."""

from __future__ import annotations

import numpy as np
import pytest

from ssl_vit.evaluators.features import Features, Representation, Task

Arrays = tuple[np.ndarray, np.ndarray]


class ArrayTask(Task):
    """train, test: (features (n, d), labels (n,)). unreadable: training images that are found broken when read."""

    def __init__(self, train: Arrays, test: Arrays, unreadable: tuple[int, ...] = ()) -> None:
        self.arrays, self.unreadable = {"train": train, "test": test}, unreadable
        self.read: list[int] = []  # how many images were asked for each time

    @property
    def classes(self) -> int:
        return int(max(labels.max() for _, labels in self.arrays.values())) + 1

    @property
    def train_labels(self) -> np.ndarray:
        return self.arrays["train"][1]

    def features(
        self, source: str, split: str, representation: Representation, images: np.ndarray | None = None
    ) -> Features:
        vectors, labels = self.arrays[split]
        wanted = np.arange(len(labels)) if images is None else images
        self.read.append(len(wanted))
        broken = self.unreadable if split == "train" else ()
        rows = np.setdiff1d(np.flatnonzero(labels >= 0), broken)
        return Features(vectors[rows], labels[rows], rows).of(wanted)


@pytest.fixture
def array_task() -> type[ArrayTask]:
    return ArrayTask
