"""What a run writes down as it goes: `metrics.jsonl`, TensorBoard scalars, and the window of steps not yet logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.tensorboard import SummaryWriter

from ssl_vit.interfaces import StepOutput


class Window:
    """Losses and metrics of the steps since the last log line, left on the device so that no step waits for it."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []
        self.keys: list[list[str]] = []
        self.names: list[str] = []

    def add(self, outputs: list[StepOutput], grad_norm: torch.Tensor | None, keys: list[str]) -> None:
        """One optimiser step: its micro-batches' outputs, the gradient norm before clipping, its samples' keys."""
        values = {"loss": torch.stack([o.loss.detach() for o in outputs]).mean()}
        for name in outputs[0].metrics:
            values[name] = torch.stack([o.metrics[name] for o in outputs]).mean()
        if grad_norm is not None:
            values["grad_norm"] = grad_norm.detach()
        self.names = list(values)
        self.rows.append(torch.stack([value.float() for value in values.values()]))
        self.keys.append(keys)

    def flush(self, accelerator: Accelerator) -> tuple[dict[str, float], int | None]:
        """Means over the window's steps and all ranks, and how many steps into it loss or gradient were not finite.

        The one place where the host waits for the device. Every rank must call it at the same step.
        """
        if not self.rows:
            return {}, None
        table = accelerator.reduce(torch.stack(self.rows), reduction="mean").double().cpu()
        # With loss scaling, a gradient may overflow: that step is left out.
        watched = ("loss",) if accelerator.scaler else ("loss", "grad_norm")
        columns = [n for n, name in enumerate(self.names) if name in watched]
        finite = table[:, columns].isfinite().all(1).tolist()
        bad = finite.index(False) if False in finite else None
        means = dict(zip(self.names, table.mean(0).tolist(), strict=True))
        self.rows.clear()
        return means, bad


class MetricLog:
    """Appends to `metrics.jsonl` and TensorBoard; on a resume, lines after the checkpoint's step are dropped first."""

    def __init__(self, run: Path, resumed_step: int) -> None:
        self.path = run / "metrics.jsonl"
        if self.path.exists():
            kept = [line for line in _complete_lines(self.path) if json.loads(line)["step"] <= resumed_step]
            beside = self.path.with_suffix(".tmp")
            beside.write_text("".join(line + "\n" for line in kept))
            beside.replace(self.path)
        self.file = self.path.open("a", buffering=1)
        self.board = SummaryWriter(str(run), purge_step=resumed_step + 1 if resumed_step else None)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One line: `step` and the values; numbers go to TensorBoard too."""
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.board.add_scalar(name, value, step)

    def picture(self, name: str, pixels_HWC: np.ndarray, step: int) -> None:
        """A uint8 picture for TensorBoard."""
        self.board.add_image(name, pixels_HWC, step, dataformats="HWC")

    def close(self) -> None:
        self.file.close()
        self.board.close()


def _complete_lines(path: Path) -> list[str]:
    """Lines that are whole JSON objects: a kill may have cut the last one."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            json.loads(line)
        except ValueError:
            continue
        lines.append(line)
    return lines
