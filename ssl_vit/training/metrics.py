"""What a run writes down as it goes: `metrics.jsonl`, and the window of steps not yet logged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ssl_vit.files import write_text
from ssl_vit.interfaces import Batch, RunError, StepOutput
from ssl_vit.training import distributed

Rows = dict[str, torch.Tensor]


class Window:
    """Losses and metrics of the steps since the last log line, left on the device so that no step waits for it."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []
        self.steps: list[int] = []
        self.keys: list[list[str]] = []
        self.sizes: dict[str, int] = {}

    def add(self, step: int, parts: list[Batch], outputs: list[StepOutput], grad_norm: torch.Tensor) -> None:
        """One optimizer step: its micro-batches, what the objective said of each, the gradient norm before clipping."""
        count = torch.stack([part.valid.sum() for part in parts]).float()
        share = count / count.sum().clamp(min=1)
        values = {"loss": torch.stack([output.loss.detach().float() for output in outputs])}
        values |= {name: torch.stack([o.metrics[name].float() for o in outputs]) for name in outputs[0].metrics}
        means = {name: torch.tensordot(share, stacked, 1) for name, stacked in values.items()}
        means["grad_norm"] = grad_norm.detach().float()
        self.sizes = {name: mean.numel() for name, mean in means.items()}
        # This process's sums over its samples; the number of samples comes last.
        row = torch.cat([mean.reshape(-1) for mean in means.values()]) * count.sum()
        self.rows.append(torch.cat([row, count.sum()[None]]))
        self.steps.append(step)
        self.keys.append([key for part in parts for key in part.keys])

    def flush(self) -> Rows:
        """Each step's means over its global batch, float64 (S,) or (S, M) on the CPU.

        The one place where the host waits for the device. Every process must call it at the same step.
        """
        # Row by row to the host: on XLA, a stack of so many rows would be a program of its own.
        sums = distributed.total(torch.stack([row.cpu() for row in self.rows]).double())
        means = sums[:, :-1] / sums[:, -1:].clamp(min=1)
        table = zip(self.sizes, means.split(list(self.sizes.values()), dim=1), strict=True)
        return {name: column[:, 0] if column.shape[1] == 1 else column for name, column in table}


def not_finite(rows: Rows, names: Sequence[str]) -> int | None:
    """The first step of a window in which one of these is not finite."""
    finite = torch.stack([rows[name].isfinite() for name in names if name in rows]).all(0).tolist()
    return finite.index(False) if False in finite else None


def finite_means(rows: Rows) -> dict[str, float]:
    """Means over the steps, without single values that are not finite (a gradient that the loss scale overflowed)."""
    finite = {name: column[column.isfinite()] for name, column in rows.items()}
    return {name: float(column.mean()) for name, column in finite.items() if len(column)}


def blamed(to_blame: bool, keys: list[str]) -> list[str]:
    """Keys of the samples of a bad step, from the processes that are to blame; from all where none is.

    Every process must call it.
    """
    found = distributed.gather((to_blame, keys))
    sure = any(blame for blame, _ in found)
    return [key for blame, names in found for key in names if blame or not sure]


def some(keys: list[str]) -> str:
    """The first of a bad step's samples, for a message."""
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return f"samples there: {', '.join(keys[:8])}{more}"


class MetricLog:
    """Appends to `metrics.jsonl`; on a resume, lines that the checkpoint does not know of are dropped first."""

    def __init__(self, run: Path, step: int, probed: int) -> None:
        self.path = run / "metrics.jsonl"
        self.go_back(step, probed)

    def go_back(self, step: int, probed: int) -> None:
        """Drop the lines after a step, and what was probed after `probed`: it will go on from there."""
        with self._refusals():
            if self.path.exists():
                kept = [
                    row
                    for row in _rows(self.path)
                    if row["step"] <= (probed if any(key.startswith("probe_") for key in row) else step)
                ]
                write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
            self.file = self.path.open("a", buffering=1)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One line: `step` and the values. Raises RunError when the disk refuses."""
        with self._refusals():
            self.file.write(json.dumps({"step": step, **values}) + "\n")

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"{self.path}: cannot write: {error}; mend that and run it again to go on") from error

    def close(self) -> None:
        self.file.close()


def _rows(path: Path) -> list[dict[str, Any]]:
    """Lines that are whole JSON objects: a kill may have cut the last one."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
