"""The same work for many shards, on all cores, with a progress bar."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ssl_vit.interfaces import RunError, UserError

# A process takes half a second to start (two where it imports torch) and decodes 20 to 70 MB of JPEG a second.
BYTES_A_PROCESS = 20_000_000
SECONDS_A_LINE = 30  # between lines of progress where there is no terminal
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")
Work = Callable[[_Job, Callable[[], None]], _Result]


def processes(asked: int | None, jobs: int, size: int) -> int:
    """How many processes to use: what was asked for, or every core this process may use, though not so many that one
    would have less than 20 MB to read; never more than there are jobs."""
    if asked is not None and asked < 1:
        raise UserError(f"jobs must be at least 1, not {asked}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(asked or min(cores, size // BYTES_A_PROCESS), jobs))


def run(
    work: Work[_Job, _Result], jobs: Iterable[_Job], *, on: int, what: str, total: int | None, progress: bool
) -> list[_Result]:
    """`work(job, advance)` for every job, on so many processes (1: this one); the results in the order of the jobs.

    work: picklable where there are several processes; it calls `advance()` after each of the `total` images.
    Jobs are taken one by one as processes become free. What a job raises ends all of them, and so does the end of
    this process, however it comes: no process outlives it.
    """
    with _bar(what, total, progress) as show:
        if on == 1:
            return _run_here(work, jobs, show)
        return _run_apart(work, jobs, on, show)


def _run_here(work: Work[_Job, _Result], jobs: Iterable[_Job], show: Callable[[int], None]) -> list[_Result]:
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        show(done)

    return [work(job, advance) for job in jobs]


def _run_apart(work: Work[_Job, _Result], jobs: Iterable[_Job], on: int, show: Callable[[int], None]) -> list[_Result]:
    # A fresh interpreter a process: a fork would copy the locks of this one's threads (torch's, Arrow's, the bar's).
    context = get_context("spawn")
    counter = context.Value("q", 0)
    theirs, lifeline = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(on, context, _start, (work, counter, theirs))
    results: dict[int, _Result] = {}
    running: dict[Future[_Result], int] = {}
    waiting = enumerate(jobs)
    try:
        while True:
            while len(running) < 2 * on and (numbered := next(waiting, None)):
                running[pool.submit(_run_one, numbered[1])] = numbered[0]
            if not running:
                return [results[number] for number in sorted(results)]
            for future in wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done:
                results[running.pop(future)] = future.result()
            show(counter.get_obj().value)  # without the lock: a process that was killed may hold it
    except BrokenProcessPool:
        raise RunError(
            "a process died: killed, out of memory, or started by a script without `if __name__ == '__main__':`; "
            "run the same command to go on, with fewer --jobs"
        ) from None
    finally:
        if running:  # something went wrong: do not wait until their shards are done
            lifeline.close()
        pool.shutdown(cancel_futures=True)
        lifeline.close()


_work: Work[Any, Any]
_counter: Any


def _start(work: Work[Any, Any], counter: Any, lifeline: Connection) -> None:
    """Runs first in every process."""
    global _work, _counter
    _work, _counter = work, counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first process ends the others

    def end_with_the_first() -> None:
        try:
            lifeline.recv()
        except EOFError:
            os._exit(1)

    threading.Thread(target=end_with_the_first, daemon=True).start()


def _run_one(job: Any) -> Any:
    return _work(job, _advance)


def _advance() -> None:
    with _counter.get_lock():
        _counter.value += 1


@contextmanager
def _bar(what: str, total: int | None, progress: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the number of images done: a bar on a terminal, a line now and then elsewhere."""
    if progress and sys.stderr.isatty():
        from rich import progress as rich
        from rich.console import Console

        class Rate(rich.ProgressColumn):
            def render(self, task: rich.Task) -> str:
                return f"{task.speed or 0:,.0f} images/s"

        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), Rate())
        bar = rich.Progress(*columns, rich.TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        with bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)
    elif progress:
        start = last = time.monotonic()

        def line(done: int) -> None:
            nonlocal last
            if (now := time.monotonic()) - last < SECONDS_A_LINE:
                return
            last, rate = now, done / (now - start)
            if total and rate:
                left = timedelta(seconds=round((total - done) / rate))
                text = f"{done:,} of {total:,} images, {left} left"
            else:
                text = f"{done:,} images"
            print(f"{what}: {text} ({rate:,.0f} images/s)", file=sys.stderr, flush=True)

        yield line
    else:
        yield lambda done: None
