"""The training loop: pretraining, supervised training and fine-tuning all run here."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import nn
from torch.distributed.tensor import DTensor

from ssl_vit.data.order import LanePosition
from ssl_vit.data.samples import Chunk
from ssl_vit.interfaces import Batch, RunError, StepOutput, Stopped, UserError
from ssl_vit.models.objective import Objective
from ssl_vit.records import SkippedSample
from ssl_vit.training import OptimConfig, TrainingConfig, checkpoint, distributed, memory
from ssl_vit.training.distributed import Engine
from ssl_vit.training.logging import RunLogger, StepResult, Window
from ssl_vit.training.optim import WeightAverage, build_optimizer, lr_factor, peak_lr, set_lr, start_momentum
from ssl_vit.training.signals import StopRequest, stop_requests
from ssl_vit.training.state import Progress, State

Batches = Callable[[list[LanePosition]], Generator[tuple[Batch, Chunk], None, None]]


class Callback:
    """Base of callbacks. Every process calls the same methods at the same steps. An exception ends training; the
    callbacks after it are not called.

    name: key of its state in checkpoints; "" has no state.
    """

    name = ""

    def start(self, trainer: Trainer) -> None:
        """Before the first step of a session, with a checkpoint's state loaded."""

    def ends_window(self, trainer: Trainer) -> bool:
        """Whether `after_step` needs the metrics up to this step logged and checked."""
        return False

    def after_step(self, trainer: Trainer) -> None:
        """After each optimizer step: `trainer.batch`, `trainer.result` and `trainer.window` describe it."""

    def end(self, trainer: Trainer) -> None:
        """After the last step of a training that no error ended."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclass
class Job:
    """One training run, made by `stage.build`.

    batches: from lane positions to this process's endless batches, all of them full. lanes: number of lanes.
    run: the run directory; None keeps nothing on disk (short trainings inside an evaluator).
    data: fingerprint of the shards; positions in a checkpoint mean nothing on others.
    classes: names of the labels.
    callbacks: in the order in which they are called.
    recipe: flat, for the trackers that store one.
    """

    objective: Objective
    batches: Batches
    lanes: int
    total_steps: int
    training: TrainingConfig
    optim: OptimConfig
    accelerator: Engine
    run: Path | None = None
    data: str = ""
    classes: tuple[str, ...] = ()
    callbacks: Sequence[Callback] = ()
    recipe: dict[str, Any] = field(default_factory=dict)
    quiet: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended: steps and seconds of all sessions, and the samples skipped in this one.

    signal: a signal that arrived at or after the last step and should end the program (0: none).
    """

    steps: int
    seconds: float
    skipped: tuple[SkippedSample, ...]
    signal: int = 0


def train(job: Job) -> Outcome:
    """Train to `total_steps`, resuming from the run's newest checkpoint; leaves the objective trained in place.

    Raises Stopped after a signal, once everything is saved; Diverged where the loss is not finite (naming step, sample
    keys and the last good checkpoint); RunError for a full disk or GPU, or when another process has ended;
    UserError for data that cannot be read and checkpoints that do not fit.
    """
    saved, gone = partial(checkpoint.last_saved, job.run), False
    with distributed.others_watched(saved), stop_requests() as request:
        try:
            with memory.out_of_memory(lambda: f"{memory.USE_LESS}\n{saved()}"):
                outcome = Trainer(job).run(request)
        except RuntimeError:
            gone = distributed.several()  # freeing could wait for what another process no longer takes part in
            raise
        finally:
            if not gone:
                job.accelerator.free_memory()
    return outcome if distributed.several() else replace(outcome, signal=request.number)  # also one during free_memory


class Trainer:
    """A prepared job and its state.

    batch, result: those of the last step. window: steps since the last log line. window_ends: whether to log it now.
    last: whether the session ends with this step. signal: the signal that asked for that, or 0. finished: set by a
    callback that ends training early.
    """

    batch: Batch
    result: StepResult

    def __init__(self, job: Job) -> None:
        self.job, self.accelerator, training = job, job.accelerator, job.training
        device, sharded = job.accelerator.device, job.accelerator.is_fsdp2
        optimizer = build_optimizer(job.objective, job.optim, training.batch_size, device, sharded=sharded)
        if training.compile:
            job.objective.compile(dynamic=False)
        self.model, prepared = job.accelerator.prepare(job.objective, optimizer)
        self.objective: Objective = job.accelerator.unwrap_model(self.model)
        self.optimizer: torch.optim.Optimizer = prepared.optimizer
        start_momentum(self.optimizer)
        # Also for a sharded model: torch's ShardedGradScaler is for FSDP1.
        self.scaler = torch.amp.GradScaler(device.type, enabled=job.accelerator.precision == "fp16")
        self.average = WeightAverage(self.objective, training.ema) if training.ema else None
        self.progress = Progress([LanePosition()] * job.lanes, data=job.data, classes=job.classes)
        self.log = RunLogger(job.total_steps, job.run, job.accelerator, training.trackers, job.quiet)
        self.state = State(self.objective, self.optimizer, device, self.average)
        named = {callback.name: callback for callback in job.callbacks if callback.name}
        self.state.parts = {"progress": self.progress, "scaler": self.scaler, "log": self.log, **named}
        self.signal, self.last, self.window_ends, self.finished = 0, False, False, False
        self.skips: list[SkippedSample] = []
        self.request, self.window = StopRequest(), Window(self.progress.step)

    def run(self, request: StopRequest) -> Outcome:
        """The whole training; see `train`."""
        job, progress, self.request = self.job, self.progress, request
        notes = self._resume()
        with self.log:
            self.log.begin(progress.step, notes, job.recipe)
            self.model.train()
            self.window, first = Window(progress.step), progress.step
            for callback in job.callbacks:
                callback.start(self)
            with closing(job.batches(progress.lanes)) as batches:  # its processes end with an error, too
                while not self.finished and progress.step < job.total_steps:
                    asked = time.perf_counter()
                    with self.interruptible((Stopped, UserError, RunError)):
                        self.batch, chunk = next(batches)
                    self.window.waited += time.perf_counter() - asked
                    if progress.step == first:
                        self._prepare()
                    self.result = self.train_step(self.batch)
                    self._advance(chunk, request.agreed())
                    self._after_step()
            for callback in job.callbacks:
                callback.end(self)
        self.share_buffers()
        if self.average and job.run is None:  # no checkpoint publishes the average: the objective is the result
            self.average.apply()
        return Outcome(progress.step, progress.seconds, tuple(self.log.skipped.values()), request.agreed())

    @contextmanager
    def interruptible(self, errors: tuple[type[BaseException], ...] = (Stopped,)) -> Iterator[None]:
        """Context for long waits between two steps: where there is one process, a signal raises Stopped, and the errors
        save the steps done so far."""
        try:
            self.request.waiting = not distributed.several()  # several save together, at the end of a step
            yield
        except errors:
            self.request.waiting = False  # a signal must not end what follows
            if self.average:
                self.average.restore()  # the signal may have interrupted that
            if self.progress.step and not distributed.several():
                self.window_ends = bool(self.window.steps)  # they are checked before a checkpoint keeps their weights
                if self.window_ends:
                    self._after_step()
                for callback in self.job.callbacks:
                    callback.end(self)
            raise
        finally:
            self.request.waiting = False

    def train_step(self, batch: Batch) -> StepResult:
        """One optimizer step over this process's part of a batch. Nothing here waits for the device, except the loss
        scaler of fp16 with LARS or sharded SGD."""
        job, step = self.job, self.progress.step
        batch.step = step
        parts = batch.split(self.progress.accumulate)
        rate = peak_lr(job.optim, job.training.batch_size) * lr_factor(step, job.total_steps, job.optim)
        set_lr(self.optimizer.param_groups, rate)
        outputs: list[StepOutput] = []
        for number, part in enumerate(parts, 1):
            with self.accelerator.no_sync(self.model) if number < len(parts) else nullcontext():
                with self.accelerator.autocast():
                    outputs.append(self.model(part))
                self.scaler.scale(outputs[-1].loss / len(parts)).backward()
        self.scaler.unscale_(self.optimizer)
        # Without a limit too: a gradient that is not finite must be seen before its step is kept.
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), job.optim.clip_norm or torch.inf)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average:
            self.average.update(step)
        if self.accelerator.device.type == "xla":
            import torch_xla

            torch_xla.sync()  # one graph per step
        return StepResult(parts, outputs, norm)

    def _advance(self, chunk: Chunk, signal: int) -> None:
        """Record the step that was just taken."""
        progress = self.progress
        progress.step += 1
        for lane, position in chunk.positions.items():
            progress.lanes[lane] = position
        self.skips += chunk.skipped
        self.window.add(progress.step, self.result)
        self.signal, self.last = signal, bool(signal) or progress.step == self.job.total_steps
        self.window_ends = self.last or progress.step % self.job.training.log_every == 0
        self.window_ends |= any(callback.ends_window(self) for callback in self.job.callbacks)
        self.log.advance(progress.step)

    def _after_step(self) -> None:
        for callback in self.job.callbacks:
            callback.after_step(self)

    def _resume(self) -> list[str]:
        """Load the run's newest checkpoint. Returns notes for the user."""
        job, progress, notes = self.job, self.progress, list[str]()
        if (warmup := job.optim.warmup_steps) > job.total_steps:
            what = f"optim.warmup_steps={warmup} exceeds the {job.total_steps} steps of the run"
            notes.append(f"note: {what}; lower it, or train longer")
        saved, broken = checkpoint.newest(job.run) if job.run else (None, [])
        if saved:
            checkpoint.load(saved, self.state)
        progress.classes = job.classes
        if not job.training.auto_batch:
            progress.accumulate = job.training.accumulate
        return notes + broken

    def _prepare(self) -> None:
        """What a session needs before its first step, with the batch of that step."""
        if self.job.training.auto_batch:
            self._find_accumulation()
        accelerator = self.accelerator
        if self.job.run and accelerator.num_processes > 2 and not accelerator.is_fsdp2:
            # DDP groups gradients anew after its first backward pass, and the grouping sets the order in which three or
            # more summands are added. The first step of a resumed session must add them as later steps do.
            with memory.undisturbed(self.objective, accelerator):
                memory.forward_backward(self.model, self.batch.split(self.progress.accumulate)[0], accelerator)

    def _find_accumulation(self) -> None:
        """Apply `training.auto_batch`, starting from the number that the previous session found."""
        progress, job, begun = self.progress, self.job, bool(self.optimizer.state)
        what = (self.objective, self.batch, self.accelerator, job.training, job.optim)
        progress.accumulate = memory.find_accumulation(*what, least=progress.accumulate, begun=begun)
        size = len(self.batch.images) // self.batch.views // progress.accumulate
        self.log.say(f"auto_batch: {progress.accumulate} micro-batch(es) of {size} images per step and process")
        self.log.event(progress.step, {"event": "auto_batch", "accumulate": progress.accumulate, "micro_batch": size})

    def published(self) -> AbstractContextManager[None]:
        """Context in which the objective has the weights that a checkpoint publishes: averaged ones, if there are."""
        return self.average.swapped_in() if self.average else nullcontext()

    def share_buffers(self) -> None:
        """Copy the main process's buffers, such as running statistics, to all; checkpoints store only these."""
        if self.accelerator.num_processes > 1:
            buffers = list(self.objective.buffers())
            for buffer, shared in zip(buffers, broadcast(buffers), strict=True):
                buffer.copy_(shared)

    def log_skips(self) -> None:
        """Log the samples that all processes skipped since the last call."""
        self.log.skips(self.progress.step, self.skips)
        self.skips = []
