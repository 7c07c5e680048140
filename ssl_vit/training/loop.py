"""The only training loop: pretraining, supervised training and fine-tuning all pass through here."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import nn

from ssl_vit.data.order import LanePosition
from ssl_vit.data.samples import Chunk, Skip
from ssl_vit.interfaces import Batch, Diverged, UserError
from ssl_vit.training import OptimConfig, TrainingConfig, checkpoint, distributed, metrics
from ssl_vit.training.callbacks import EarlyStopping
from ssl_vit.training.distributed import StopRequest, stop_requests, stopped
from ssl_vit.training.guard import OVERFLOWS_IN_A_ROW, REWINDS, SKIPS_IN_A_ROW, Guard
from ssl_vit.training.metrics import Window
from ssl_vit.training.progress import Display
from ssl_vit.training.records import Records
from ssl_vit.training.step import Stepper, Taken

Batches = Callable[[list[LanePosition]], Iterator[tuple[Batch, Chunk]]]
Picture = Callable[[nn.Module, Batch, int], np.ndarray]


@dataclass
class Job:
    """One training run, wired.

    batches: from lane positions to this rank's endless batches, every one of them full. lanes: how many there are.
    run: the run directory; None keeps nothing on disk (short fine-tunings inside an evaluator).
    data: fingerprint of the shards; positions in a checkpoint mean nothing on others. classes: the labels' names.
    picture: called on the main process every `training.picture_every` steps with the unwrapped objective, the batch
        and the step; returns the picture, uint8 (H, W, 3), for the trackers.
    watch: a measure that is taken now and then and may end the training early.
    recipe: flat, for the trackers that store one.
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
    classes: tuple[str, ...] = ()
    picture: Picture | None = None
    watch: EarlyStopping | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    quiet: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its steps, seconds, left-out steps and those taken back by rewinds, over all its sessions; the
    samples skipped in this one."""

    steps: int
    seconds: float
    skipped: tuple[Skip, ...]
    left_out: int = 0
    undone: int = 0


def train(job: Job) -> Outcome:
    """Train to `total_steps`, resuming from the run's newest checkpoint; leaves the objective trained in place.

    Raises Stopped after a signal, once everything is saved; Diverged on a non-finite loss (naming step, sample keys
    and the last good checkpoint) or a spike, RunError on a disk that refuses a checkpoint and when another process is
    gone; UserError for data that cannot be read and checkpoints that do not fit.
    """
    others_watched = distributed.others_watched(partial(checkpoint.last_saved, job.run))
    with others_watched, stop_requests() as stop:
        return _Loop(job, stop).run()


class _Loop:
    def __init__(self, job: Job, stop: StopRequest) -> None:
        self.job, self.stop, self.accelerator = job, stop, job.accelerator
        self.stepper = Stepper(job.objective, job.optim, job.training, job.total_steps, job.accelerator)
        self.state = self.stepper.state
        if self.state.sharded and (job.watch or (job.picture and job.training.picture_every)):
            raise UserError(
                "a sharded model is neither probed nor drawn: leave probe out, set training.picture_every=0"
            )
        self.progress = checkpoint.Progress(lanes=[LanePosition()] * job.lanes, data=job.data)
        self.saved, self.notes = (0, 0), list[str]()
        if job.run:
            saved, self.notes = checkpoint.newest(job.run)
            if saved:
                self.progress = self._loaded(saved)
        self.progress.classes = [*job.classes]
        self.to_search = job.training.auto_batch
        if not self.to_search:
            self.progress.accumulate = job.training.accumulate
        self.guard = Guard(job.training.spike_factor, self.progress.recent)
        self.skips, self.left_out_in_a_row, self.overflows = list[Skip](), 0, 0

    def _loaded(self, saved: Path) -> checkpoint.Progress:
        progress = checkpoint.load(saved, self.state)
        if progress.data != self.job.data:
            raise checkpoint.other_data(saved)
        self.saved = progress.step, progress.probed
        return progress

    def run(self) -> Outcome:
        job, step = self.job, self.progress.step
        main, training = self.accelerator.is_main_process, job.training
        display = Display(job.name, job.total_steps, step, self.accelerator.device, main and not job.quiet)
        with Records(display, job.run if main else None, self.progress, training.trackers, job.recipe) as self.records:
            resumed = [f"resuming at step {step} of {job.total_steps}"] if step else []
            for note in [*self.notes, *self._warnings(), *resumed]:
                self.records.say(note)
            number = self._steps()
        if number:
            raise stopped(number)
        self.stepper.share_buffers()
        progress = self.progress
        skipped = tuple(self.records.skipped)
        return Outcome(progress.step, progress.seconds, skipped, progress.left_out, progress.undone)

    def _steps(self) -> int:
        """Returns the signal that ended the steps early, or 0."""
        job, training = self.job, self.job.training
        self.stepper.model.train()
        self._watch()  # a stop may have come before it
        if self._over():
            return 0
        batches = job.batches(self.progress.lanes)
        self._new_window()
        while not self._over():
            asked = time.perf_counter()
            batch, chunk = next(batches)
            self.waited += time.perf_counter() - asked
            progress = self.progress
            if self.to_search:
                self._find_accumulation(batch)
            taken = self.stepper.take(batch, progress.step, progress.accumulate)
            progress.step += 1
            self._note(taken, batch)
            for lane, position in chunk.positions.items():
                progress.lanes[lane] = position
            self.skips += chunk.skipped
            self.records.display.step(progress.step)
            number = self.stop.agreed()
            last = bool(number) or progress.step == job.total_steps
            save = last or bool(training.checkpoint_every and progress.step % training.checkpoint_every == 0)
            if (save or self._watch_due() or progress.step % training.log_every == 0) and not self._log():
                continue  # gone back to a checkpoint
            if save:
                self._save()
            if number and (progress.step < job.total_steps or self._watch_due()):
                where = f"; saved, run the same command to go on from step {progress.step}" if job.run else ""
                self.records.say(f"stopped by {signal.Signals(number).name}{where}")
                return number
            self._watch()
            if job.picture and training.picture_every and (last or progress.step % training.picture_every == 0):
                self._draw(batch)
        return 0

    def _warnings(self) -> list[str]:
        warmup, total = self.job.optim.warmup_steps, self.job.total_steps
        never = f"optim.warmup_steps={warmup} of {total} steps in all: the learning rate never reaches its peak"
        return [never] if warmup > total else []

    def _over(self) -> bool:
        return self.progress.done or self.progress.step == self.job.total_steps

    def _watch_due(self) -> bool:
        watch, progress = self.job.watch, self.progress
        return watch is not None and progress.probed < progress.step and watch.due(progress.step, self.job.total_steps)

    def _watch(self) -> None:
        """The watched measure, where it is due; the checkpoint of this step, if there is one, is saved before it."""
        watch, progress = self.job.watch, self.progress
        if watch is None or not self._watch_due():
            return
        self.stepper.share_buffers()
        with self._published():
            watch.take(self.state.objective, progress, self.records)
        self.skips += watch.skipped()
        self._tell_skips()
        self.stepper.model.train()
        if self._over():
            self._save()  # with what the measure said
        self._new_window()

    def _published(self) -> AbstractContextManager[None]:
        """While it lasts, the objective is the one that a checkpoint publishes: with the average of the weights."""
        return self.state.average.in_place() if self.state.average else nullcontext()

    def _own_lanes(self) -> int:
        return self.job.lanes // self.accelerator.num_processes

    def _find_accumulation(self, batch: Batch) -> None:
        """The search begins with the number that the session before found: where it fits again, nothing changes."""
        self.to_search, least = False, max(self.progress.accumulate, self.job.training.accumulate)
        count = self.progress.accumulate = self.stepper.accumulation(batch, self._own_lanes(), least)
        size = len(batch.images) // count
        self.records.say(f"auto_batch: {count} micro-batch(es) of {size} images a step on each process")
        self.records.event(self.progress.step, {"event": "auto_batch", "accumulate": count, "micro_batch": size})

    def _note(self, taken: Taken, batch: Batch) -> None:
        """Keep a step for the log; or, where it was not finite, say that it was left out."""
        progress = self.progress
        if taken.finite:
            self.window.add(progress.step, taken.parts, taken.outputs, taken.norm)
            self.left_out_in_a_row = 0
            return
        blame = not all(bool(output.loss.isfinite()) for output in taken.outputs)
        keys = metrics.blamed(blame, batch.keys)
        progress.left_out += 1
        self.left_out_in_a_row += 1
        if self.left_out_in_a_row > SKIPS_IN_A_ROW:
            self._fail(f"{self.left_out_in_a_row} steps in a row, up to step {progress.step}, were not finite", keys)
        total = progress.left_out
        self.records.say(
            f"step {progress.step} left out: its loss or gradient was not finite ({total} in all); {metrics.some(keys)}"
        )
        self.records.event(progress.step, {"event": "left_out_step", "total": total, "samples": keys})

    def _log(self) -> bool:
        """Write the window since the last line. Stops the run, or takes it back to a checkpoint (False), if a loss in
        it is bad."""
        progress, window, training = self.progress, self.window, self.job.training
        steps = progress.step - self.logged_step
        if not steps:
            return True
        rows = window.flush() if window.rows else {}
        elapsed = time.perf_counter() - self.window_start
        progress.seconds += elapsed
        self._tell_skips()
        if rows:
            # With loss scaling, a gradient may overflow: that step is left out.
            watched = ("loss",) if self.accelerator.scaler else ("loss", "grad_norm")
            if (bad := metrics.not_finite(rows, watched)) is not None:
                keys = metrics.blamed(not bool(window.rows[bad][0].isfinite()), window.keys[bad])
                self._fail(f"the loss or its gradient was not finite at step {window.steps[bad]}", keys)
            self.overflows = 0 if rows["grad_norm"].isfinite().any() else self.overflows + len(window.steps)
            if self.overflows > OVERFLOWS_IN_A_ROW:
                self._fail(
                    f"the gradient was not finite in {self.overflows} steps in a row, up to step {progress.step}, "
                    "whatever the loss scale",
                    metrics.blamed(True, window.keys[-1]),
                    "or take training.precision=bf16",
                )
            losses = rows["loss"].tolist()
            if training.on_spike != "ignore" and (spike := self.guard.spike(losses)):
                self._spiked(window.steps[spike[0]], losses[spike[0]], spike[1])
                return False
            progress.recent = list(self.guard.recent)
            if hasattr(self.state.objective, "summarize"):
                rows = self.state.objective.summarize(rows)  # type: ignore[operator]
        batch_size = training.batch_size
        values = {
            **metrics.finite_means(rows),
            "lr": self.stepper.lr,
            "images_seen": (progress.step + progress.undone) * batch_size,
            "images_per_second": steps * batch_size / elapsed,
            "data_wait": self.waited / elapsed,
            "seconds_per_step": elapsed / steps,
            "seconds": progress.seconds,
        }
        self.records.values(progress.step, values)
        self._new_window()
        return True

    def _new_window(self) -> None:
        self.window, self.waited, self.logged_step = Window(), 0.0, self.progress.step
        self.window_start = time.perf_counter()

    def _fail(
        self, what: str, keys: list[str], mend: str = "or leave such steps out with training.on_nonfinite=skip"
    ) -> None:
        error = Diverged(
            f"{what}; {metrics.some(keys)}\n{checkpoint.last_saved(self.job.run)}; lower optim.lr, check those images, "
            f"{mend}"
        )
        error.everywhere, error.steps = True, self.progress.step
        raise error

    def _spiked(self, step: int, loss: float, usual: float) -> None:
        """Stop at a loss spike, or go back to the newest checkpoint and on with the data that comes next."""
        job, before = self.job, self.progress
        what = (
            f"the loss rose to {loss:.4g} at step {step}, from {usual:.4g} in the steps before (training.spike_factor)"
        )
        saved = checkpoint.newest(job.run)[0] if job.run and job.training.on_spike == "rewind" else None
        if saved is None or before.rewinds >= REWINDS:
            again = f"; it did so after each of {REWINDS} rewinds" if saved else ""
            error = Diverged(
                f"{what}{again}\n{checkpoint.last_saved(job.run)}; lower optim.lr or raise optim.warmup_steps"
            )
            error.everywhere, error.steps = True, before.step
            raise error
        back = self._loaded(saved)
        kept = {name: getattr(before, name) for name in ("lanes", "seconds", "accumulate", "left_out")}
        undone = before.undone + before.step - back.step
        self.progress = replace(back, **kept, rewinds=before.rewinds + 1, undone=undone)
        self.guard = Guard(job.training.spike_factor, back.recent)
        self.records.go_back(back)
        self.records.say(f"{what}: back to step {back.step}, and on with other samples")
        self.records.event(back.step, {"event": "rewind", "spike_step": step, "spike_loss": loss, "usual_loss": usual})
        self._watch()  # it is due again where that checkpoint was saved before it
        self._new_window()

    def _tell_skips(self) -> None:
        self.records.skips(self.progress.step, self.skips)
        self.skips = []

    def _draw(self, batch: Batch) -> None:
        if self.job.picture and self.accelerator.is_main_process:
            step = self.progress.step
            with self._published():
                drawn = self.job.picture(self.state.objective, batch, step)
            self.records.picture("reconstruction", drawn, step)
            self.stepper.model.train()

    def _save(self) -> None:
        """One checkpoint of all processes' state."""
        job, progress = self.job, self.progress
        if job.run is None or self.saved == (progress.step, progress.probed):
            return
        # Each rank knows where its own lanes are; together they know all.
        first = self.accelerator.process_index * self._own_lanes()
        own = progress.lanes[first : first + self._own_lanes()]
        progress.lanes = [position for part in distributed.gather(own) for position in part]
        progress.rewinds = 0
        checkpoint.save(job.run, progress, self.state, job.training.keep_last)
        self.saved = progress.step, progress.probed
