"""Progress on stderr: bars on a terminal and in notebooks, elsewhere a line now and then."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ssl_vit.interfaces import is_main_process, printable, printable_lines

Say = Callable[[str], None]
_SILENCE, _SHARE = 10.0, 0.1  # least seconds between lines, and as a share of the elapsed time


@dataclass
class _Work:
    what: str
    total: int | None
    begun: float
    shown: float  # when a line was last printed
    done: int = 0

    def __str__(self) -> str:
        return f"{self.what}  {self.done:,}" + (f"/{self.total:,}" if self.total else "")


def say(text: str) -> None:
    """Print a message, which may hold names from data, to stderr."""
    print(printable_lines(text), file=sys.stderr)


def silent(text: str) -> None:
    """Print nothing: `say` of a process that is not the main one."""


_open: list[_Work] = []  # in this process, the outermost first; a line names all of it


def _print_line() -> None:
    now, whole = time.monotonic(), _open[0]
    if now - whole.shown < max(_SILENCE, _SHARE * (now - whole.begun)):
        return
    whole.shown = now
    share = whole.done / whole.total if whole.total else 0
    left = f", {timedelta(seconds=round((now - whole.begun) * (1 / share - 1)))} left" if share else ""
    print(printable(f"{', '.join(map(str, _open))}{left}"), file=sys.stderr, flush=True)


@cache
def _bars() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    # What is printed while a bar is drawn goes above it; but a file or pipe keeps its lines.
    above = sys.stdout.isatty() or console.is_jupyter
    return Progress(*columns, console=console, transient=True, redirect_stdout=above)


@contextmanager
def progress_bar(what: str, total: int | None, show: bool = True) -> Iterator[Callable[[int], None]]:
    """A function to call with how many of `total` more are done. Bars may be open inside others.

    what: is done, before the numbers. show: False prints nothing; nor do processes other than the main one.
    """
    if not show or not is_main_process():
        yield lambda count: None
        return
    bars = _bars()
    notebook = bars.console.is_jupyter and find_spec("ipywidgets")  # rich draws with it
    if (bars.console.is_terminal or notebook) and multiprocessing.parent_process() is None:
        if not bars.task_ids:
            bars.start()
        task = bars.add_task(printable(what), total=total)
        try:
            yield lambda count: bars.advance(task, count)
        finally:
            bars.remove_task(task)
            if not bars.task_ids:
                bars.stop()
        return
    now = time.monotonic()
    work = _Work(what, total, begun=now, shown=now)
    _open.append(work)

    def advance(count: int) -> None:
        work.done += count
        _print_line()

    try:
        yield advance
    finally:
        _open.remove(work)
