"""What a run tells as it goes: `metrics.jsonl`, the trackers and the display, all written by the main process."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ssl_vit.data.samples import Skip
from ssl_vit.training.checkpoint import Progress
from ssl_vit.training.distributed import gather, shared_errors
from ssl_vit.training.metrics import MetricLog
from ssl_vit.training.progress import Display
from ssl_vit.training.trackers import Settings, Trackers


class Records:
    """Open while a run goes on. Every process must make the same calls: an error of writing reaches all of them.

    run: its directory; None keeps nothing but the display. progress: where it starts. settings, recipe: see `Trackers`.
    skipped: the samples that were told of as left out, of all processes.
    """

    def __init__(
        self, display: Display, run: Path | None, progress: Progress, settings: Settings, recipe: dict[str, Any]
    ) -> None:
        self.display, self.run, self.progress, self.settings, self.recipe = display, run, progress, settings, recipe
        self.log: MetricLog | None = None
        self.trackers: Trackers | None = None
        self.skipped: list[Skip] = []

    def __enter__(self) -> Records:
        self.display.__enter__()
        with shared_errors():
            if self.run:
                step = self.progress.step
                self.log = MetricLog(self.run, step, self.progress.probed)
                self.trackers = Trackers(self.run, self.settings, self.recipe, step, self.display.say)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.log and self.trackers:
            self.log.close()
            self.trackers.close()
        self.display.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        self.display.say(text)

    def event(self, step: int, values: dict[str, Any]) -> None:
        """A line of `metrics.jsonl` that is no measurement."""
        with shared_errors():
            if self.log:
                self.log.write(step, values)

    def values(self, step: int, values: dict[str, float]) -> None:
        """A log interval's numbers."""
        self.event(step, values)
        if self.trackers:
            self.trackers.log(step, values)
        self.display.log(step, values)

    def skips(self, step: int, own: list[Skip]) -> None:
        """Which samples all processes left out since the last call; `own` are this one's."""
        skips = [skip for part in gather(own) for skip in part]
        if not skips:
            return
        self.skipped += skips
        total, first = len(self.skipped), skips[0]
        self.say(f"skipped {len(skips)} sample(s), {total} in all; {first.shard}: sample {first.key}: {first.reason}")
        samples = [{"shard": skip.shard, "key": skip.key, "reason": skip.reason} for skip in skips]
        self.event(step, {"event": "skipped_samples", "total": total, "samples": samples})

    def picture(self, name: str, pixels_HWC: np.ndarray, step: int) -> None:
        """A uint8 picture."""
        if self.trackers:
            self.trackers.picture(name, pixels_HWC, step)

    def go_back(self, progress: Progress) -> None:
        """Drop what was written later: it will be trained on from there."""
        with shared_errors():
            if self.log:
                self.log.go_back(progress.step, progress.probed)
