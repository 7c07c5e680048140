"""What happens between the steps of a training, in this fixed order.

The non-finite guard comes first: it must see a window's losses before they are logged and before a checkpoint keeps
weights that they spoiled. Then logging, checkpoint, stop on a signal, pictures, and the online probe with early
stopping (`evaluators/online.py`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import numpy as np
import torch

from ssl_vit.interfaces import Batch, Diverged
from ssl_vit.models.objective import Objective
from ssl_vit.records import SkippedSample
from ssl_vit.training import checkpoint, distributed
from ssl_vit.training.distributed import shared_errors
from ssl_vit.training.logging import Window
from ssl_vit.training.loop import Callback, Trainer
from ssl_vit.training.signals import stopped

_OVERFLOWS_IN_A_ROW = 100  # the loss scale has halved from 2^16 to 2^-84


class Dropped(Callback):
    """Logs the images that could not be packed, at the start of a run. samples: these images, on the main process."""

    def __init__(self, samples: list[SkippedSample]) -> None:
        self.samples = samples

    def start(self, trainer: Trainer) -> None:
        if trainer.progress.step == 0:
            trainer.skips += self.samples


class NanGuard(Callback):
    """Stops at a loss or gradient that is not finite."""

    def __init__(self) -> None:
        self.overflows = 0  # in a row

    def after_step(self, trainer: Trainer) -> None:
        if not trainer.window_ends:
            return
        window, means = trainer.window, trainer.window.means()
        # With loss scaling a gradient may overflow: the scaler skips that step.
        names = ("loss",) if trainer.scaler.is_enabled() else ("loss", "grad_norm")
        finite = torch.stack([means[name].isfinite() for name in names]).all(0).tolist()
        if False in finite:
            bad = finite.index(False)
            keys = _keys(not bool(window.rows[bad][0].isfinite()), window.keys[bad])
            raise _diverged(trainer, f"the loss or its gradient was not finite at step {window.steps[bad]}", keys)
        self.overflows = 0 if means["grad_norm"].isfinite().any() else self.overflows + len(window.steps)
        if self.overflows > _OVERFLOWS_IN_A_ROW:
            what = f"the gradient was not finite in {self.overflows} steps in a row, up to step {window.steps[-1]}"
            keys = _keys(True, window.keys[-1])
            raise _diverged(trainer, f"{what}, at any loss scale", keys, ", or set training.precision=bf16")


def _diverged(trainer: Trainer, what: str, keys: list[str], hint: str = "") -> Diverged:
    saved = checkpoint.last_saved(trainer.job.run)
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    samples = f"its samples: {', '.join(keys[:8])}{more}"
    error = Diverged(f"{what}; {samples}\n{saved}; lower optim.lr, check those images{hint}")
    error.everywhere, error.steps = True, trainer.progress.step
    return error


def _keys(to_blame: bool, keys: list[str]) -> list[str]:
    """Keys of a bad step's samples, of the processes that are to blame, or of all where none is. A collective call."""
    gathered = distributed.gather((to_blame, keys))
    sure = any(blame for blame, _ in gathered)
    blamed = (key for blame, names in gathered for key in names if blame or not sure)
    return list(dict.fromkeys(blamed))  # each once: views of an image share its key


class Logging(Callback):
    """Writes the means over the steps since the last log line."""

    def after_step(self, trainer: Trainer) -> None:
        if not trainer.window_ends:
            return
        progress, window, batch_size = trainer.progress, trainer.window, trainer.job.training.batch_size
        means = window.means()
        elapsed, steps = time.perf_counter() - window.start, progress.step - window.first
        progress.seconds += elapsed
        trainer.log_skips()
        means = trainer.objective.summarize(means)
        # Without single values that are not finite, such as a gradient that overflowed the loss scale.
        finite = {name: column[column.isfinite()] for name, column in means.items()}
        values = {
            **{name: float(column.mean()) for name, column in finite.items() if len(column)},
            "lr": float(trainer.optimizer.param_groups[0]["lr"]),
            "images_seen": progress.step * batch_size,
            "images_per_second": steps * batch_size / elapsed,
            "data_wait": window.waited / elapsed,
            "seconds_per_step": elapsed / steps,
            "seconds": progress.seconds,
        }
        trainer.log.values(progress.step, values)
        trainer.window = Window(trainer.progress.step)


class Checkpointing(Callback):
    """Saves every `training.checkpoint_every` steps, at the end and before a stop."""

    def __init__(self) -> None:
        self.saved = 0  # step

    def start(self, trainer: Trainer) -> None:
        self.saved = trainer.progress.step

    def ends_window(self, trainer: Trainer) -> bool:
        every = trainer.job.training.checkpoint_every
        return trainer.last or bool(every and trainer.progress.step % every == 0)

    def after_step(self, trainer: Trainer) -> None:
        if self.ends_window(trainer):
            self._save(trainer)

    def end(self, trainer: Trainer) -> None:
        if self.saved != trainer.progress.step:  # a probe or a signal ended the training between two saves
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        job, progress = trainer.job, trainer.progress
        if job.run is None:
            return
        # A process advances its own lanes alone, so the furthest position is that of the process that owns the lane.
        progress.lanes[:] = [max(lane) for lane in zip(*distributed.gather(progress.lanes), strict=True)]
        resize = job.recipe.get("data.evaluation_resize", 1.0)
        checkpoint.save(job.run, progress.step, trainer.state, job.training.keep_last, resize)
        self.saved = progress.step


class StopOnSignal(Callback):
    """Ctrl-C, SIGTERM and SIGUSR1 end the session once its checkpoint is saved."""

    def after_step(self, trainer: Trainer) -> None:
        step = trainer.progress.step
        if not trainer.signal or step == trainer.job.total_steps:
            return
        where = f"; saved, run the same command to resume at step {step}" if trainer.job.run else ""
        trainer.log.say(f"stopped by {signal.Signals(trainer.signal).name}{where}")
        raise stopped(trainer.signal)


class Pictures(Callback):
    """Draws what the objective predicts, on the main process.

    draw: from the unwrapped objective, the batch and the step to a picture, uint8 (H, W, 3).
    """

    def __init__(self, draw: Callable[[Objective, Batch, int], np.ndarray]) -> None:
        self.draw = draw

    def after_step(self, trainer: Trainer) -> None:
        step = trainer.progress.step
        if not (trainer.last or step % trainer.job.training.picture_every == 0):
            return
        with shared_errors(f"{trainer.job.run}: cannot write a picture"):
            if trainer.accelerator.is_main_process:
                with trainer.published():
                    picture = self.draw(trainer.objective, trainer.batch, step)
                trainer.log.reconstruction(picture, step)
                trainer.model.train()
