"""An optimizer step against one worked out by hand: the schedule, clipping and accumulation that the loop applies."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ssl_vit import stage
from ssl_vit.data.order import LanePosition
from ssl_vit.data.shards import open_training
from ssl_vit.interfaces import StepOutput
from ssl_vit.objectives import masked_patch
from ssl_vit.recipe import Recipe
from ssl_vit.training import checkpoint, flops
from ssl_vit.training.distributed import make_accelerator
from ssl_vit.training.loop import Job

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
    monkeypatch.setattr(flops, "_known", {})  # the unused parameters of this forward pass are no other's
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


def test_supervised_pretraining_and_fine_tuning_draw_other_crops(settings: Callable[..., Recipe]) -> None:
    """Of the same images, with the same seed; another objective draws its noise first."""
    recipe = settings(Path("run"), "data.augment.flip=true", "data.workers=0", name="digits_supervised")
    shards, engine = open_training(recipe.data), make_accelerator()
    pretraining = stage.build(recipe, shards, engine, quiet=True)
    given = stage.build(recipe, shards, engine, encoder=pretraining.objective.encoder, quiet=True)

    def views(job: Job) -> dict[int, tuple[bool, bytes]]:
        batches = islice(job.batches([LanePosition()] * job.lanes), 10)
        rows = [zip(b.indices.tolist(), b.flip.tolist(), b.images, strict=True) for b, _ in batches]
        return {index: (flip, image.numpy().tobytes()) for index, flip, image in chain.from_iterable(rows)}

    first, again, tuned = views(pretraining), views(pretraining), views(given)
    both = first.keys() & tuned.keys()
    assert first == again and len(both) > 50
    assert np.mean([first[index][1] == tuned[index][1] for index in both]) < 0.3, "there are few crops of 8x8 pixels"
    assert 0.2 < np.mean([first[index][0] == tuned[index][0] for index in both]) < 0.8


def test_the_first_step_keeps_at_most_a_tenth_of_the_initial_weights_in_their_average(
    train: Callable[..., Path], tmp_path: Path
) -> None:
    kept = {}
    for ema in (0.05, 0.9):
        keys = [f"training.ema={ema}", "training.steps=1", "optim.lr=0.1", "optim.warmup_steps=0"]
        saved = checkpoint.folders(train(tmp_path / str(ema), *keys))[-1]
        trained, averaged = (load_file(saved / f"{name}.safetensors") for name in ("training", "encoder"))
        name = "blocks.0.mlp.fc1.weight"
        kept[ema] = averaged[name] - trained[f"encoder.network.{name}"]
    torch.testing.assert_close(kept[0.9], 2 * kept[0.05], rtol=1e-3, atol=1e-6)
    assert kept[0.9].abs().max() > 1e-3
