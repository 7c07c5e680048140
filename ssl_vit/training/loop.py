"""The only training loop: pretraining, supervised training and fine-tuning all pass through here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from ssl_vit.data.plan import LanePosition
from ssl_vit.data.samples import Chunk, Skip
from ssl_vit.interfaces import Batch, RunError, UserError
from ssl_vit.training import OptimConfig, TrainingConfig, checkpoint, optim
from ssl_vit.training.interrupt import StopRequest, stop_requests
from ssl_vit.training.metrics import MetricLog, Window
from ssl_vit.training.progress import Display

Batches = Callable[[list[LanePosition]], Iterator[tuple[Batch, Chunk]]]
Picture = Callable[[nn.Module, Batch, int], np.ndarray]


@dataclass
class Job:
    """One training run, wired.

    batches: from lane positions to this rank's endless batches. lanes: how many positions there are.
    run: the run directory; None keeps nothing on disk (short fine-tunings inside an evaluator).
    data: fingerprint of the shards; positions in a checkpoint mean nothing on others.
    picture: called on the main process every `training.picture_every` steps with the unwrapped objective, the batch
        and the step; returns the picture, uint8 (H, W, 3), for TensorBoard.
    """

    name: str
    objective: nn.Module
    batches: Batches
    lanes: int
    total_steps: int
    training: TrainingConfig
    optim: OptimConfig
    accelerator: Accelerator
    run: Path | None = None
    data: str = ""
    picture: Picture | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended: optimiser steps done, whether they were all, seconds over all its sessions, samples skipped."""

    steps: int
    finished: bool
    seconds: float
    skipped: tuple[Skip, ...]


def train(job: Job) -> Outcome:
    """Train to `total_steps`, resuming from the run's newest checkpoint; leaves the objective trained in place.

    Raises RunError on a non-finite loss (naming step, sample keys and the last good checkpoint) and on a disk that
    refuses a checkpoint; UserError for data that cannot be read and checkpoints that do not fit.
    """
    with stop_requests() as stop:
        return _Loop(job, stop).run()


class _Loop:
    def __init__(self, job: Job, stop: StopRequest) -> None:
        self.job, self.stop, self.accelerator = job, stop, job.accelerator
        device = self.accelerator.device
        optimizer = optim.build_optimizer(job.objective, job.optim, job.training.batch_size, device)
        self.model, self.optimizer = self.accelerator.prepare(job.objective, optimizer)
        self.objective = self.accelerator.unwrap_model(self.model)
        self.progress = checkpoint.Progress(lanes=[LanePosition()] * job.lanes, data=job.data)
        saved = checkpoint.folders(job.run) if job.run else []
        if saved:
            self.progress, state = checkpoint.load(saved[-1], self.objective)
            if self.progress.data != job.data:
                raise UserError(
                    f"{saved[-1]} was trained on other shards than data.train names now (repacked?): "
                    "start again with run=PATH, or put the old shards back"
                )
            self._restore(state)
        self.saved_step = self.progress.step if saved else -1
        self.window, self.waited = Window(), 0.0
        self.skips: list[Skip] = []
        self.skipped: list[Skip] = []

    def run(self) -> Outcome:
        job, progress = self.job, self.progress
        main = self.accelerator.is_main_process
        log = MetricLog(job.run, progress.step) if job.run and main else None
        shown = main and not job.quiet
        with Display(job.name, job.total_steps, progress.step, self.accelerator.device, shown) as display:
            if progress.step:
                display.say(f"resuming at step {progress.step} of {job.total_steps}")
            self.log, self.display = log, display
            try:
                self._steps()
            finally:
                if log:
                    log.close()
        return Outcome(progress.step, progress.step >= job.total_steps, progress.seconds, tuple(self.skipped))

    def _steps(self) -> None:
        job, progress, training = self.job, self.progress, self.job.training
        if progress.step >= job.total_steps:
            return
        self.model.train()
        batches = job.batches(progress.lanes)
        self.window_start = time.perf_counter()
        while progress.step < job.total_steps:
            asked = time.perf_counter()
            batch, chunk = next(batches)
            self.waited += time.perf_counter() - asked
            self._optimise(batch)
            progress.step += 1
            for lane, position in chunk.positions.items():
                progress.lanes[lane] = position
            self.skips += chunk.skipped
            self.display.step(progress.step)
            last = progress.step == job.total_steps or self.stop.agreed()
            save = last or bool(training.checkpoint_every and progress.step % training.checkpoint_every == 0)
            if save or progress.step % training.log_every == 0:
                self._log()
            if save and job.run:
                self._save()
            if job.picture and training.picture_every and (last or progress.step % training.picture_every == 0):
                self._draw(batch)
            if last and progress.step < job.total_steps:
                where = f"; saved, run the same command to go on from step {progress.step}" if job.run else ""
                self.display.say(
                    f"stopped by {self.stop.signal.name if self.stop.signal else 'another process'}{where}"
                )
                return

    def _optimise(self, batch: Batch) -> None:
        """One optimiser step over the rank's micro-batches. Nothing here waits for the device."""
        config, total = self.job.optim, self.job.total_steps
        peak = optim.peak_lr(config, self.job.training.batch_size)
        optim.set_lr(self.optimizer.param_groups, peak * optim.lr_factor(self.progress.step, total, config))
        parts = batch.split(self.job.training.accumulate)
        outputs = []
        for part in parts[:-1]:
            with self.accelerator.no_sync(self.model):
                outputs.append(self.model(part))
                self.accelerator.backward(outputs[-1].loss / len(parts))
        outputs.append(self.model(parts[-1]))
        self.accelerator.backward(outputs[-1].loss / len(parts))
        norm = None
        if config.clip_norm:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.window.add(outputs, norm, batch.keys)

    def _log(self) -> None:
        """Write the window since the last line; stop the run if a loss in it was not finite."""
        progress, keys = self.progress, self.window.keys
        steps = len(self.window.rows)
        means, bad = self.window.flush(self.accelerator)
        elapsed = time.perf_counter() - self.window_start
        if not steps:
            return
        self._report_skipped()
        progress.seconds += elapsed
        if bad is not None:
            step = progress.step - steps + bad + 1
            saved = checkpoint.folders(self.job.run) if self.job.run else []
            raise RunError(
                f"the loss or its gradient was not finite at step {step}; "
                f"this process's samples there: {', '.join(keys[bad][:8])}\n"
                f"last good checkpoint: {saved[-1] if saved else 'none'}; lower optim.lr or check those images"
            )
        self.window = Window()
        batch_size = self.job.training.batch_size
        values = {
            **means,
            "lr": self.optimizer.param_groups[0]["lr"],
            "images_seen": progress.step * batch_size,
            "images_per_second": steps * batch_size / elapsed,
            "data_wait": self.waited / elapsed,
            "seconds_per_step": elapsed / steps,
            "seconds": progress.seconds,
        }
        if self.log:
            self.log.write(progress.step, values)
        self.display.log(progress.step, values)
        self.waited, self.window_start = 0.0, time.perf_counter()

    def _report_skipped(self) -> None:
        """Say and write down which samples all ranks left out since the last log line."""
        skips, self.skips = gather_object(self.skips), []
        if not skips:
            return
        self.skipped += skips
        total, first = len(self.skipped), skips[0]
        self.display.say(
            f"skipped {len(skips)} sample(s), {total} in all; {first.shard}: sample {first.key}: {first.reason}"
        )
        if self.log:
            samples = [{"shard": s.shard, "key": s.key, "reason": s.reason} for s in skips]
            self.log.write(self.progress.step, {"event": "skipped_samples", "total": total, "samples": samples})

    def _draw(self, batch: Batch) -> None:
        if self.job.picture and self.log:
            self.log.picture(
                "reconstruction", self.job.picture(self.objective, batch, self.progress.step), self.progress.step
            )
            self.model.train()

    def _save(self) -> None:
        """One checkpoint of all ranks' state, written by the main process; the others wait for it."""
        assert self.job.run
        if self.saved_step == self.progress.step:
            return
        # Each rank knows where its own lanes are; together they know all.
        per_rank = len(self.progress.lanes) // self.accelerator.num_processes
        first = self.accelerator.process_index * per_rank
        own = [(p.epoch, p.position) for p in self.progress.lanes[first : first + per_rank]]
        self.progress.lanes = [LanePosition(*position) for position in gather_object(own)]
        random_states = gather_object([_random_state(self.accelerator.device)])
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            training = {
                "optimizer": self.optimizer.state_dict(),
                "scaler": scaler.state_dict() if scaler else {},
                "random": random_states,
            }
            keep = self.job.training.keep_last
            checkpoint.save(self.job.run, self.progress, self.objective, training, keep)
        self.accelerator.wait_for_everyone()
        self.saved_step = self.progress.step

    def _restore(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if self.accelerator.scaler and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        rank = self.accelerator.process_index
        if rank < len(state["random"]):  # with more processes than before, the new ones start from their seed
            _set_random_state(state["random"][rank], self.accelerator.device)


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
