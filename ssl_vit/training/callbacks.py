"""A measure of the representation taken during training, and the end of training where it no longer rises."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ssl_vit.data.samples import Skip
from ssl_vit.training.checkpoint import Progress
from ssl_vit.training.records import Records


class Callback:
    """Base of what happens between the steps of a training."""


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """measure: from the unwrapped objective to a number that should rise; every process calls it at the same steps, and
    it leaves the objective in evaluation mode. every: steps. patience: measures in a row without a new best after which
    training ends (None: never). skipped: the samples that this process could not use for it, each told once.
    """

    measure: Callable[[nn.Module], float]
    every: int
    patience: int | None = None
    skipped: Callable[[], list[Skip]] = list

    def due(self, step: int, total: int) -> bool:
        return step % self.every == 0 or step == total

    def take(self, objective: nn.Module, progress: Progress, records: Records) -> None:
        """Measure, write it down and show it; sets `progress.done` where the patience is at its end."""
        start = time.perf_counter()
        value = self.measure(objective)
        progress.seconds += time.perf_counter() - start
        progress.probed = progress.step
        progress.since_best = 0 if value > progress.best else progress.since_best + 1
        progress.best = max(value, progress.best)
        records.values(progress.step, {"probe_accuracy": value, "probe_best": progress.best})
        records.display.note = f"few-shot probe {value:.1%} (best {progress.best:.1%})"
        records.say(f"step {progress.step}: {records.display.note}")
        if self.patience and progress.since_best >= self.patience:
            progress.done = True
            records.say(f"the probe has not risen {self.patience} times in a row (probe.patience): training ends here")
            records.event(progress.step, {"event": "early_stop", "probe_best": progress.best})
