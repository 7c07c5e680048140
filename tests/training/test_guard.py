"""Losses that are not finite, and losses that jump: stopped, left out, or gone back from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ssl_vit import api
from ssl_vit.interfaces import RunError, StepOutput
from ssl_vit.models.encoder import Encoder
from ssl_vit.objectives import masked_patch
from ssl_vit.training.distributed import make_accelerator
from ssl_vit.training.guard import Guard
from ssl_vit.training.step import Stepper

Train = Callable[..., Path]
Lines = Callable[[Path], list[dict[str, Any]]]


def test_a_spike_is_measured_against_the_median_of_the_losses_before() -> None:
    guard = Guard(2.0, [])
    assert guard.spike([9.0] * 9 + [1.0] * 10) is None and guard.spike([100.0]) is None  # of 20 losses none is one
    assert guard.spike([1.0] * 30) is None
    assert guard.spike([1.9, 2.1, 1.0]) == (1, 1.0)
    assert list(guard.recent)[-1] == 1.9  # neither the spike nor what follows is usual
    assert guard.spike([5.0]) == (0, 1.0)
    long = Guard(2.0, [float(n) for n in range(1000)])
    assert len(long.recent) == 100 and long.spike([1900.0]) == (0, 949.5) and long.spike([1898.0]) is None


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, float]], list[Any]]:
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
    train: Train, tmp_path: Path, spoil: Callable[..., Any]
) -> None:
    seen = spoil({8: math.nan})
    with pytest.raises(
        RunError, match=r"not finite at step 8; samples there: .*\nlast good checkpoint: .*step_00000006"
    ):
        train(tmp_path / "run", "training.checkpoint_every=3", "training.log_every=2")
    seen = spoil({3: math.inf})
    with pytest.raises(RunError) as told:
        train(tmp_path / "none")
    assert "not finite at step 3" in str(told.value) and "last good checkpoint: none" in str(told.value)
    assert ", ".join(seen[2].keys[:8]) in str(told.value) and "and 24 more" in str(told.value)


def test_a_gradient_that_is_not_finite_is_seen_without_clipping_before_its_step_is_kept(
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


def test_a_left_out_step_leaves_running_statistics_as_they_were(
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
    found = train(tmp_path / "left_out", *keys, name="digits_supervised")
    one, other = (
        load_file(sorted((run / "checkpoints").iterdir())[-1] / "objective.safetensors") for run in (found, expected)
    )
    assert count == 12 and one.keys() == other.keys() and any("running_mean" in key for key in one)
    assert all(torch.equal(one[key], value) for key, value in other.items())


def test_steps_that_are_not_finite_are_left_out_counted_and_gone_on_from(
    train: Train, lines: Lines, tmp_path: Path, spoil: Callable[..., Any]
) -> None:
    seen = spoil({4: math.nan, 5: math.inf, 9: math.nan})
    run = train(tmp_path / "run", "training.on_nonfinite=skip", "training.ema=0.9")
    rows = lines(run)
    events = [row for row in rows if row.get("event") == "left_out_step"]
    assert [(row["step"], row["total"]) for row in events] == [(4, 1), (5, 2), (9, 3)]
    assert events[0]["samples"] == seen[3].keys
    assert [row["step"] for row in rows if "lr" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 6, 7, 8, 10, 11, 12]
    last = sorted((run / "checkpoints").iterdir())[-1]
    for name in ("encoder", "training"):
        assert all(tensor.isfinite().all() for tensor in load_file(last / f"{name}.safetensors").values())


def test_a_left_out_step_changes_neither_weights_nor_optimizer(
    train: Train, tmp_path: Path, spoil: Callable[..., Any]
) -> None:
    spoil({12: math.nan})
    found = train(tmp_path / "left_out", "training.on_nonfinite=skip", "optim.schedule=constant")
    spoil({})
    expected = train(tmp_path / "shorter", "training.steps=11", "optim.schedule=constant")
    for name in ("encoder.safetensors", "optimizer/shard-00001-model-00001-of-00001.safetensors"):
        one, other = (
            load_file(run / "checkpoints" / step / name)
            for run, step in ((found, "step_00000012"), (expected, "step_00000011"))
        )
        assert all(torch.equal(one[key], value) for key, value in other.items())


def test_too_many_in_a_row_stop_the_run(train: Train, tmp_path: Path, spoil: Callable[..., Any]) -> None:
    spoil({n: math.nan for n in range(2, 99)})
    with pytest.raises(RunError, match="11 steps in a row, up to step 12, were not finite"):
        train(tmp_path / "run", "training.on_nonfinite=skip")


@pytest.mark.parametrize(("bad", "stops"), [(30, False), (1000, True)])
def test_gradients_that_no_loss_scale_makes_finite_stop_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines, bad: int, stops: bool
) -> None:
    """A few overflows in a row are how the scale finds its size; a scaler on a CPU works as one on a GPU."""

    def scaled(*arguments: Any, **more: Any) -> Any:
        accelerator = make_accelerator(*arguments, **more)
        accelerator.scaler = torch.amp.GradScaler("cpu")
        return accelerator

    steps = 0

    def overflowing(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return gradient * math.inf if steps <= bad else gradient

    start = Stepper.__init__

    def hooked(self: Any, objective: Any, *more: Any) -> None:
        objective.mask_token.register_hook(overflowing)
        start(self, objective, *more)

    monkeypatch.setattr(api, "make_accelerator", scaled)
    monkeypatch.setattr(Stepper, "__init__", hooked)
    keys = ("training.steps=130", "training.log_every=10")
    if not stops:
        assert lines(train(tmp_path / "run", *keys))[-1]["grad_norm"] > 0
        return
    with pytest.raises(
        RunError,
        match=r"not finite in 110 steps in a row, up to step 110, whatever the loss scale(.|\n)*precision=bf16",
    ):
        train(tmp_path / "run", *keys)


def test_a_spike_takes_the_run_back_and_on_with_other_samples(
    train: Train, lines: Lines, tmp_path: Path, spoil: Callable[..., Any]
) -> None:
    """At the 34th forward pass; the log then holds every step once, and training has seen other samples instead."""
    keys = ["training.steps=40", "training.checkpoint_every=6", "training.on_spike=rewind"]
    seen = spoil({34: 50.0})
    run = train(tmp_path / "run", *keys)
    rows = lines(run)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 41))
    rewind = next(row for row in rows if row.get("event") == "rewind")
    assert (rewind["step"], rewind["spike_step"]) == (30, 34) and rewind["spike_loss"] > 10 * rewind["usual_loss"]
    assert len(seen) == 44  # 34, and 10 from step 31 on
    batches = spoil({})
    other = train(tmp_path / "undisturbed", *keys, "training.steps=44")
    assert [batch.keys for batch in batches] == [batch.keys for batch in seen]  # the data went on, none came again
    ends = [
        json.loads((sorted((one / "checkpoints").iterdir())[-1] / "state.json").read_text()) for one in (run, other)
    ]
    assert ends[0]["lanes"] == ends[1]["lanes"]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["images_seen"]) == (40, 44 * 32), "what was taken back was computed too"


def test_a_spike_without_a_checkpoint_or_after_three_rewinds_stops_the_run(
    train: Train, lines: Lines, tmp_path: Path, spoil: Callable[..., Any]
) -> None:
    spoil({34: 50.0})
    with pytest.raises(RunError, match=r"the loss rose to .* at step 34, from .*\nlast good checkpoint: none; lower"):
        train(tmp_path / "none", "training.steps=40", "training.on_spike=rewind")
    spoil({n: 50.0 for n in (34, 36, 38, 40)})
    with pytest.raises(RunError, match=r"after each of 3 rewinds"):
        train(tmp_path / "run", "training.steps=40", "training.checkpoint_every=30", "training.on_spike=rewind")
    assert len([row for row in lines(tmp_path / "run") if row.get("event") == "rewind"]) == 3
    spoil({34: 50.0})
    with pytest.raises(RunError, match=r"at step 34.*\nlast good checkpoint: .*step_00000030"):
        train(tmp_path / "stop", "training.steps=40", "training.checkpoint_every=30", "training.on_spike=stop")


def test_a_resumed_run_remembers_what_is_usual(
    train: Train, lines: Lines, tmp_path: Path, spoil: Callable[..., Any]
) -> None:
    """The losses before the checkpoint count: a spike in the first step after it is found."""
    keys = ["training.steps=40", "training.checkpoint_every=30", "training.on_spike=rewind"]
    spoil({32: math.nan})
    with pytest.raises(RunError, match="not finite"):
        train(tmp_path / "run", *keys)
    spoil({1: 50.0})
    rows = lines(train(tmp_path / "run", *keys))
    assert [(row["step"], row["spike_step"]) for row in rows if row.get("event") == "rewind"] == [(30, 31)]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 41))
