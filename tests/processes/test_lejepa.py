"""LeJEPA's loss compares the images of all processes: two real processes follow one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssl_vit import execution, recipe
from tests.processes.reading import rows, weights, world_size


def test_two_processes_follow_one(world: Callable[..., Any], digits: Path, tmp_path: Path) -> None:
    """Batch norm, the characteristic function and the ranks are those of the whole batch, in value and gradient."""
    keys = [f"data.train={digits}/train", "encoder.width=32", "encoder.depth=2", "encoder.heads=2"]
    keys += ["training.trackers={}", "training.steps=15", "training.batch_size=24", "training.log_every=1"]
    keys += ["optim.name=sgd", "optim.lr=0.05", "optim.warmup_steps=5"]
    pair = world(2, "command_line", "train", "digits_lejepa", *keys, f"run={tmp_path / 'two'}")
    one = execution.train(recipe.load_recipe("digits_lejepa", [*keys, f"run={tmp_path / 'one'}"]), quiet=True)
    assert [process.wait() for process in pair] == [0, 0], pair[0].text + pair[1].text
    two = tmp_path / "two"
    assert (world_size(one), world_size(two)) == (1, 2)
    for name in ("loss", "invariance", "sigreg", "feature_rank", "projection_rank", "grad_norm"):
        expected, found = ([row[name] for row in rows(run)] for run in (one, two))
        assert len(expected) == 15 and found == pytest.approx(expected, rel=1e-4), name
    trained, other = weights(one), weights(two)
    assert trained.keys() == other.keys()
    for name, value in trained.items():
        np.testing.assert_allclose(other[name], value, atol=1e-5, err_msg=name)
