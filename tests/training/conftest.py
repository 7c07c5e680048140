"""Shards of the embedded digits, and a short training of a tiny ViT on them in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tars import packed

    return packed("digits", tmp_path_factory.mktemp("digits"), "train", shards=4)


@pytest.fixture
def settings(digits: Path) -> Callable[..., Any]:
    """The recipe `name` for a run directory, small and with a log line a step; further keys come last."""
    from ssl_vit import recipe

    def load(folder: Path, *more: str, name: str = "digits_ssl") -> recipe.Recipe:
        keys = [
            f"data.train={digits}",
            f"run={folder}",
            "data.lanes=4",
            "training.batch_size=32",
            "training.log_every=1",
        ]
        keys += ["training.steps=12", "training.picture_every=0", "training.trackers={}", "training.checkpoint_every=0"]
        keys += ["encoder.width=32", "encoder.depth=2", "encoder.heads=2", "optim.warmup_steps=5"]
        return recipe.load_recipe(name, [*keys, *more])

    return load


@pytest.fixture
def train(settings: Callable[..., Any]) -> Callable[..., Path]:
    """Train `settings` into its run directory. Returns the directory."""
    import torch

    from ssl_vit import execution

    torch.set_num_threads(1)
    return lambda folder, *more, **name: execution.train(settings(folder, *more, **name), quiet=True)
