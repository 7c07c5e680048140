"""Losses and gradients that are not finite: stopped at, or skipped and counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ssl_vit.interfaces import RunError, StepOutput
from ssl_vit.models.encoder import Encoder
from ssl_vit.objectives import masked_patch
from ssl_vit.training import loop

Train = Callable[..., Path]
Lines = Callable[[Path], list[dict[str, Any]]]
Spoil = Callable[[dict[int, float]], list[Any]]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Multiply the loss of some forward passes (counted from 1) by a number; returns the batches seen."""
    forward = masked_patch.Objective.forward

    def install(factors: dict[int, float]) -> list[Any]:
        seen: list[Any] = []

        def spoiled(self: Any, batch: Any) -> StepOutput:
            output = forward(self, batch)
            if self.training and batch.images.device.type != "meta":  # where operations are only counted
                seen.append(batch)
                output.loss = output.loss * factors.get(len(seen), 1.0)
            return output

        monkeypatch.setattr(masked_patch.Objective, "forward", spoiled)
        return seen

    return install


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_samples(
    train: Train, tmp_path: Path, spoil: Spoil
) -> None:
    spoil({8: math.nan})
    with pytest.raises(RunError, match=r"not finite at step 8; .*\nlast good checkpoint: .*step_00000006"):
        train(tmp_path / "run", "training.checkpoint_every=3", "training.log_every=2")
    seen = spoil({3: math.inf})
    with pytest.raises(RunError) as raised:
        train(tmp_path / "none")
    assert "not finite at step 3" in str(raised.value) and "last good checkpoint: none" in str(raised.value)
    assert ", ".join(seen[2].keys[:8]) in str(raised.value) and "and 24 more" in str(raised.value)


def test_a_gradient_that_is_not_finite_is_seen_without_clipping_before_its_step_is_saved(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = masked_patch.Objective.forward
    count = 0

    def spoiled(self: Any, batch: Any) -> StepOutput:
        nonlocal count
        output = forward(self, batch)
        count += batch.images.device.type != "meta"
        if count == 4:  # the loss is what it was, its gradient is not
            output.loss.register_hook(lambda gradient: gradient * math.nan)
        return output

    monkeypatch.setattr(masked_patch.Objective, "forward", spoiled)
    with pytest.raises(RunError, match=r"gradient was not finite at step 4; .*\nlast good checkpoint: .*step_00000002"):
        train(tmp_path / "run", "optim.clip_norm=0", "training.checkpoint_every=2", "training.keep_last=1")


def test_a_skipped_step_leaves_running_statistics_as_they_were(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["objective.head=probe", "training.on_nonfinite=skip", "optim.schedule=constant"]
    expected = train(tmp_path / "shorter", "training.steps=11", *keys, name="digits_supervised")
    represent, count = Encoder.represent, 0

    def spoiled(self: Encoder, images: torch.Tensor, *arguments: Any) -> torch.Tensor:
        nonlocal count
        count += images.device.type != "meta"
        return represent(self, images, *arguments) * (math.inf if count == 12 else 1)

    monkeypatch.setattr(Encoder, "represent", spoiled)
    found = train(tmp_path / "skipped", *keys, name="digits_supervised")
    one, other = (
        load_file(sorted((run / "checkpoints").iterdir())[-1] / "objective.safetensors") for run in (found, expected)
    )
    assert count == 12 and one.keys() == other.keys() and any("running_mean" in key for key in one)
    assert all(torch.equal(one[key], value) for key, value in other.items())


def test_skipped_steps_are_counted_and_training_continues(
    train: Train, lines: Lines, tmp_path: Path, spoil: Spoil
) -> None:
    seen = spoil({4: math.nan, 5: math.inf, 9: math.nan})
    run = train(tmp_path / "run", "training.on_nonfinite=skip", "training.ema=0.9")
    rows = lines(run)
    events = [row for row in rows if row.get("event") == "skipped_step"]
    assert [(row["step"], row["total"]) for row in events] == [(4, 1), (5, 2), (9, 3)]
    assert events[0]["samples"] == seen[3].keys
    assert [row["step"] for row in rows if "lr" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 6, 7, 8, 10, 11, 12]
    last = sorted((run / "checkpoints").iterdir())[-1]
    for name in ("encoder", "training"):
        assert all(tensor.isfinite().all() for tensor in load_file(last / f"{name}.safetensors").values())


def test_a_skipped_step_changes_neither_weights_nor_optimizer(train: Train, tmp_path: Path, spoil: Spoil) -> None:
    spoil({12: math.nan})
    found = train(tmp_path / "skipped", "training.on_nonfinite=skip", "optim.schedule=constant")
    spoil({})
    expected = train(tmp_path / "shorter", "training.steps=11", "optim.schedule=constant")
    for name in ("encoder.safetensors", "optimizer/shard-00001-model-00001-of-00001.safetensors"):
        one, other = (
            load_file(run / "checkpoints" / step / name)
            for run, step in ((found, "step_00000012"), (expected, "step_00000011"))
        )
        assert all(torch.equal(one[key], value) for key, value in other.items())


def test_too_many_in_a_row_stop_the_run(train: Train, tmp_path: Path, spoil: Spoil) -> None:
    spoil({n: math.nan for n in range(2, 99)})
    with pytest.raises(RunError, match="11 steps in a row, up to step 12, were not finite"):
        train(tmp_path / "run", "training.on_nonfinite=skip")


@pytest.mark.parametrize(("bad", "stops"), [(30, False), (1000, True)])
def test_gradients_that_no_loss_scale_makes_finite_stop_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines, bad: int, stops: bool
) -> None:
    """A few overflows in a row are how the scale finds its size; a scaler on a CPU works as one on a GPU."""
    steps = 0

    def overflowing(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return gradient * math.inf if steps <= bad else gradient

    start = loop.Trainer.__init__

    def hooked(self: Any, job: Any) -> None:
        job.objective.mask_token.register_hook(overflowing)
        start(self, job)

    monkeypatch.setattr(loop, "get_grad_scaler", lambda *_, **__: torch.amp.GradScaler("cpu"))
    monkeypatch.setattr(loop.Trainer, "__init__", hooked)
    keys = ("training.steps=130", "training.log_every=10")
    if not stops:
        assert lines(train(tmp_path / "run", *keys))[-1]["grad_norm"] > 0
        return
    with pytest.raises(RunError, match=r"not finite in 110 steps in a row, up to step 110(.|\n)*precision=bf16"):
        train(tmp_path / "run", *keys)
