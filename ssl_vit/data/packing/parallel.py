"""The same work for many shards, on all cores."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import TypeVar

from loky import BrokenProcessPool, ProcessPoolExecutor, as_completed, cpu_count

from ssl_vit.interfaces import RunError, end_with_parent

IMAGES_PER_PROCESS = 1000  # a process takes about a second to start
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def process_count(asked: int | None, jobs: int, images: int | None) -> int:
    """How many processes to use: `asked`, or by default one per core, but not so many that one would get less than
    1,000 of the `images` (None: unknown); never more than there are jobs."""
    cores = cpu_count()
    useful = cores if images is None else min(cores, images // IMAGES_PER_PROCESS)
    return max(1, min(asked or useful, jobs))


def run(
    work: Callable[[_Job], _Result], jobs: Iterable[_Job], processes: int, receive: Callable[[_Job, _Result], None]
) -> None:
    """Call `receive(job, work(job))` for every job, in the order in which the results come.

    work: sent with each job. processes: 1: only this one.

    An exception of a job, Ctrl-C and a killed process end all of them at once. Raises RunError for a killed process.
    """
    if processes == 1:
        for job in jobs:
            receive(job, work(job))
        return
    # The timeout also ends processes whose parent was killed while they wait for work.
    executor = ProcessPoolExecutor(processes, timeout=5, initializer=end_with, initargs=(os.getpid(),))
    try:
        running = {executor.submit(work, job): job for job in jobs}
        for future in as_completed(list(running)):
            receive(running.pop(future), future.result())
    except BrokenProcessPool:
        raise RunError(
            "one of the processes was killed (out of memory?); run the same command again with fewer --jobs"
        ) from None
    finally:
        executor.shutdown(kill_workers=True)


def end_with(parent: int) -> None:
    """Ignore Ctrl-C, which the main process handles. On Linux, also end this process when `parent` has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before that
        signal.raise_signal(signal.SIGTERM)
