"""What a run directory holds, for the tests of several processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Weights = dict[str, np.ndarray]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[int, float]]:
    """(step, loss) of every line that has one."""
    return [(row["step"], row["loss"]) for row in rows(run) if "loss" in row]


def saved(run: Path) -> int:
    """The newest checkpoint's step; 0: none."""
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step_*")), default=0)


def weights(run: Path, *names: str) -> Weights:
    """The newest checkpoint's tensors, of these files."""
    folder = run / "checkpoints" / f"step_{saved(run):08d}"
    found: Weights = {}
    for name in names or ("encoder", "objective"):
        found |= load_file(folder / f"{name}.safetensors")
    return found


def same(one: Weights, other: Weights) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], value) for name, value in other.items())


def world_size(run: Path) -> int:
    return int(json.loads((run / "environment.json").read_text())["world_size"])
