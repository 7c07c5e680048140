"""The live display of a run: two lines that move on a terminal, one plain line a log interval elsewhere."""

from __future__ import annotations

import multiprocessing
import sys
from types import TracebackType

import psutil
import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text


def memory_bytes(device: torch.device) -> int:
    """Peak memory of the GPU, or this process's resident memory on other devices."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


class Display:
    """Shows step, loss, images/s, share of time spent waiting for data, ETA and memory on the main process."""

    def __init__(self, name: str, total: int, step: int, device: torch.device, enabled: bool) -> None:
        self.name, self.total, self.device, self.enabled = name, total, device, enabled
        self.console = Console(stderr=True)
        self.note = ""  # shown after each log line's values
        self.bar: Progress | None = None
        # Processes that share a terminal must not each move a line on it.
        if enabled and self.console.is_terminal and multiprocessing.parent_process() is None:
            self.bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task(name, total=total, completed=step)
            self.status = Text(style="dim")
            self.live = Live(Group(self.bar, self.status), console=self.console, transient=True)

    def __enter__(self) -> Display:
        if self.bar:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.live.stop()
            if self.status.plain:
                self.say(f"{self.name}  {self.status.plain}")

    def step(self, step: int) -> None:
        if self.bar:
            self.bar.update(self.task, completed=step)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show a log line's values: the keys are those of `metrics.jsonl`."""
        if not self.enabled or "loss" not in values:
            return
        shown = f"loss {values['loss']:.4f}"
        if "constant_loss" in values:
            shown += f" (constant guess {values['constant_loss']:.4f})"
        if "accuracy" in values:
            shown += f"  accuracy {values['accuracy']:.1%}"
        if "constant_accuracy" in values:
            shown += f" (constant guess {values['constant_accuracy']:.1%})"
        shown += (
            f"  {values['images_per_second']:,.0f} images/s  data wait {values['data_wait']:.0%}"
            f"  {memory_bytes(self.device) / 2**30:.1f} GiB" + (f"  {self.note}" if self.note else "")
        )
        if self.bar:
            self.bar.update(self.task, completed=step)
            self.status.plain = shown
        else:
            left = (self.total - step) * values["seconds_per_step"]
            print(f"{self.name}  {step}/{self.total}  {shown}  {_clock(left)} left", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self.enabled:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
