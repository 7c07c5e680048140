"""A context whose features are arrays, without shards or an encoder; and one trained run for the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ssl_vit import execution, recipe
from ssl_vit.analysis import loaded
from ssl_vit.evaluators.features import EvalContext, Features

Arrays = tuple[np.ndarray, np.ndarray]
Build = Callable[..., EvalContext]


class ArrayFeatures(dict[object, Features]):
    """The features of every source, from arrays. asked: the keys of each question."""

    def __init__(self, arrays: dict[str, Arrays], unreadable: tuple[int, ...]) -> None:
        super().__init__()
        self.arrays, self.unreadable, self.asked = arrays, unreadable, list[Any]()

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: Any) -> Features:
        self.asked.append(key)
        source, split, _, indices = key
        vectors, labels = self.arrays[split]
        rows = np.setdiff1d(np.flatnonzero(labels >= 0), self.unreadable if split == "train" else ())
        found = Features(vectors[rows, :: 2 if source == "pixels" else 1], labels[rows], rows)
        return found if indices is None else found.of(np.frombuffer(indices, dtype=np.int64))


@pytest.fixture
def array_context() -> Build:
    """train, test: (features (n, d), labels (n,)). unreadable: training images without features. `pixels` have every
    second feature."""

    def build(train: Arrays, test: Arrays, unreadable: tuple[int, ...] = (), metric: Any = "accuracy") -> EvalContext:
        nothing, shards = cast(Any, None), cast(Any, SimpleNamespace(classes=None))
        context = EvalContext(nothing, shards, shards, nothing, nothing, metric=metric)
        context.features = ArrayFeatures({"train": train, "test": test}, unreadable)
        context.train_labels = train[1]
        return context

    return build


@pytest.fixture(scope="package")
def trained(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, a short SSL run, and the shards `train` and `test` of 400 and 100 digits."""
    folder = tmp_path_factory.mktemp("trained")
    for split in ("train", "test"):
        (folder / split).symlink_to(few_digits / split)
    keys = [f"data.train={folder}/train", f"run={folder}/run", "training.steps=3", "training.batch_size=16"]
    execution.train(recipe.load_recipe("digits_ssl", keys), quiet=True)
    return folder


@pytest.fixture
def context(trained: Path) -> EvalContext:
    return execution.make_context(loaded.load(trained / "run"), f"{trained}/train", f"{trained}/test")
