"""An optimizer step against one worked out by hand: the schedule, clipping and accumulation that the loop applies."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssl_vit.interfaces import StepOutput
from ssl_vit.objectives import masked_patch

STEPS, RATE = 6, 0.5
# Two steps of warm-up, then half a cosine over the other four.
FACTORS = [0.5, 1.0, *((1 + math.cos(math.pi * step / 4)) / 2 for step in range(4))]


@pytest.mark.parametrize(("clip_norm", "scale"), [(1.0, 0.2), (7.0, 1.0), (0.0, 1.0)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_subtracts_the_clipped_gradient_times_the_scheduled_rate(
    train: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accumulate: int,
    clip_norm: float,
    scale: float,
) -> None:
    """The loss is linear in the position embeddings: its gradient has the norm 5 at every step and in every part."""
    seen: list[torch.Tensor] = []

    def forward(self: Any, batch: Any) -> StepOutput:
        positions = self.encoder.network.pos_embed
        if positions.device.type != "meta":  # where operations are only counted
            seen.append(positions.detach().clone())
        gradient = torch.full_like(positions, 5 / math.sqrt(positions.numel()))
        return StepOutput((positions * gradient).sum(), {})

    monkeypatch.setattr(masked_patch.Objective, "forward", forward)
    monkeypatch.setattr(masked_patch.Objective, "summarize", lambda self, means: means)
    keys: tuple[str, ...] = ("optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0", "optim.warmup_steps=2")
    keys += (f"optim.lr={RATE}", f"optim.clip_norm={clip_norm}", "optim.schedule=cosine", f"training.steps={STEPS}")
    run = train(tmp_path / "run", *keys, f"training.accumulate={accumulate}", "training.checkpoint_every=1")
    steps = seen[::accumulate]
    assert len(seen) == STEPS * accumulate and len(steps) == STEPS
    for before, after, factor in zip(steps, steps[1:], FACTORS, strict=False):
        expected = torch.full_like(before, RATE * factor * scale * 5 / math.sqrt(before.numel()))
        torch.testing.assert_close(before - after, expected, rtol=1e-4, atol=1e-6)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if "lr" in line]
    assert rates == pytest.approx([RATE * factor for factor in FACTORS])
