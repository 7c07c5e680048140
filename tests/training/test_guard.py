"""Losses and gradients that are not finite stop a run."""

from __future__ import annotations

import itertools
import json
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from ssl_vit.data import loader, stream
from ssl_vit.interfaces import Diverged, RunError, StepOutput, Stopped, UserError
from ssl_vit.objectives import masked_patch
from ssl_vit.training import callbacks, loop

Train = Callable[..., Path]
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


def test_gradients_that_no_loss_scale_makes_finite_stop_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scaler on a CPU works as one on a GPU."""
    start, scaler = loop.Trainer.__init__, torch.amp.GradScaler

    def hooked(self: Any, job: Any) -> None:
        job.objective.mask_token.register_hook(lambda gradient: gradient * math.inf)
        start(self, job)

    monkeypatch.setattr(torch.amp, "GradScaler", lambda *_, **__: scaler("cpu"))
    monkeypatch.setattr(loop.Trainer, "__init__", hooked)
    keys = ("training.steps=130", "training.log_every=10")
    with pytest.raises(RunError, match=r"not finite in 110 steps in a row, up to step 110(.|\n)*precision=bf16"):
        train(tmp_path / "run", *keys)


def test_a_gradient_that_overflows_now_and_then_stops_no_run() -> None:
    means = {"loss": torch.ones(3), "grad_norm": torch.tensor([1.0, math.inf, 1.0])}
    window, scaler = SimpleNamespace(means=lambda: means, steps=range(3)), SimpleNamespace(is_enabled=lambda: True)
    trainer: Any = SimpleNamespace(window_ends=True, window=window, scaler=scaler)
    guard = callbacks.NanGuard()
    guard.after_step(trainer)
    assert guard.overflows == 0


def test_an_error_of_a_step_that_is_kept_keeps_no_loader_process(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil
) -> None:
    """A notebook keeps the last exception, with all its frames."""
    workers, others = list[psutil.Process](), psutil.Process().children()
    step = loop.Trainer.train_step

    def counted(self: loop.Trainer, batch: Any) -> Any:
        workers[:] = [child for child in psutil.Process().children() if child not in others]
        return step(self, batch)

    monkeypatch.setattr(loop.Trainer, "train_step", counted)
    spoil({3: math.nan})
    with pytest.raises(Diverged) as kept:
        train(tmp_path / "run", "data.workers=2")
    assert len(workers) == 2 and not psutil.wait_procs(workers, 5)[1], kept


def test_an_error_of_the_data_saves_and_no_signal_ends_that(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[bool] = []
    end = callbacks.Checkpointing.end

    def breaks(*arguments: Any) -> Iterator[Any]:
        yield from itertools.islice(loader.loaded(*arguments), 5)
        raise RunError("the disk is gone")

    def ends(self: callbacks.Checkpointing, trainer: loop.Trainer) -> None:
        waiting.append(trainer.request.waiting)
        end(self, trainer)

    with monkeypatch.context() as patch:
        patch.setattr(stream, "loaded", breaks)
        patch.setattr(callbacks.Checkpointing, "end", ends)
        with pytest.raises(RunError, match="the disk is gone"):
            train(tmp_path / "run", "data.workers=0")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000005"]
    assert waiting == [False]
    train(tmp_path / "run", "data.workers=0")
    train(tmp_path / "whole", "data.workers=0")
    assert (tmp_path / "run/encoder.safetensors").read_bytes() == (tmp_path / "whole/encoder.safetensors").read_bytes()


@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_steps_before_an_interrupted_wait_are_checked_and_logged_before_they_are_saved(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, factor: float
) -> None:
    wait, waits = loop.Trainer.interruptible, 0

    @contextmanager
    def interrupted(self: loop.Trainer, *errors: Any) -> Iterator[None]:
        nonlocal waits
        with wait(self, *errors):
            waits += 1
            if waits == 6:
                raise Stopped(signal.SIGTERM)
            yield

    spoil({5: factor})
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "interruptible", interrupted)
        with pytest.raises(Stopped if factor == 1.0 else Diverged, match=None if factor == 1.0 else "step 5"):
            train(tmp_path / "run", "training.checkpoint_every=3", "training.log_every=4")
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    logged = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (saved[-1], logged) == (("step_00000005", [3, 4, 5]) if factor == 1.0 else ("step_00000003", [3, 4]))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (lambda seen: {"loss": torch.ones(())}, "named loss"),
        (lambda seen: {"lr": torch.ones(())}, "named lr"),
        (lambda seen: {"share": 0.5}, "share is 0.5"),
        (lambda seen: {"share": torch.ones(())} if seen < 3 else {}, "must not change"),
        (lambda seen: {"share": torch.ones(1 + seen)}, "must not change"),
    ],
)
def test_metrics_that_cannot_be_averaged_stop_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: Callable[[int], Any], message: str
) -> None:
    forward, seen = masked_patch.Objective.forward, 0

    def with_metrics(self: Any, batch: Any) -> StepOutput:
        nonlocal seen
        seen += batch.images.device.type != "meta"
        return StepOutput(forward(self, batch).loss, metrics(seen))

    monkeypatch.setattr(masked_patch.Objective, "forward", with_metrics)
    monkeypatch.setattr(masked_patch.Objective, "summarize", lambda self, means: means)
    for accumulate in (1, 2):
        seen = 0
        with pytest.raises(UserError, match=message):
            train(tmp_path / f"run{accumulate}", "training.log_every=4", f"training.accumulate={accumulate}")
