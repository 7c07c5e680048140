"""Loader processes: started, listened to, and named when one of them dies or hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_all_start_methods
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import signal_handling

from ssl_vit.data.samples import Chunk
from ssl_vit.interfaces import RunError


def ignore_signals(worker: int) -> None:
    """For loader workers: signals reach the whole process group, and the main process must save first.

    Workers end when the main process closes them or dies, or by a second SIGTERM: so multiprocessing ends those that
    wait for a server which does not answer.
    """

    def first_of_two(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, first_of_two)


def loaded(
    stream: IterableDataset[Chunk], workers: int, device: torch.device, *, prefetch: int, timeout: int
) -> Iterator[Chunk]:
    """The stream's chunks, made by loader processes (0: here) in turn, `prefetch` of each ahead.

    timeout: seconds that a worker may take for a chunk (0: for ever); RunError names the one that takes longer.
    The processes end with the iteration, at the latest when this process exits: multiprocessing would wait for them
    then for ever, since a first SIGTERM does not end them.
    """
    chunks = _loaded(stream, workers, device, prefetch, timeout)
    Finalize(chunks, _close, args=(weakref.ref(chunks),), exitpriority=100)
    return chunks


def _close(reference: weakref.ref[Generator[Chunk, None, None]]) -> None:
    if chunks := reference():
        chunks.close()


def _loaded(
    stream: IterableDataset[Chunk], workers: int, device: torch.device, prefetch: int, timeout: int
) -> Generator[Chunk, None, None]:
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        prefetch_factor=prefetch if workers else None,
        worker_init_fn=ignore_signals,
        # Python 3.14 no longer forks by itself; a fresh process would import torch again and need a picklable stream.
        multiprocessing_context="fork" if workers and "fork" in get_all_start_methods() else None,
        generator=torch.Generator(),  # else it would draw its base seed from the model's generator
    )
    if workers:
        yield from _watched(iter(loader), timeout)
    else:
        yield from loader


def _watched(chunks: Any, timeout: int) -> Generator[Chunk, None, None]:
    """What the loader processes make, in turn; the one that dies or hangs is named."""
    processes: list[BaseProcess] = chunks._workers
    signal_handling._remove_worker_pids(id(chunks))
    chunks._worker_pids_set = False
    watch, number = _Watch(processes, timeout), 0
    try:
        while True:
            try:
                watch.expect(number % len(processes))
                with _deaths_told(chunks):
                    chunk = next(chunks, None)
            except Exception as error:  # the end of a process looks like many things: a broken connection, a lost file
                if watch.struck is not None:
                    raise RunError(
                        f"{_named(watch.struck, processes)} gave nothing for {timeout} s (data.worker_timeout): is its "
                        "storage gone? Run the same command to go on"
                    ) from error
                if dead := _dead(processes):
                    raise RunError(
                        f"{_named(dead[0], processes)} died ({_how(processes[dead[0]])}); if the memory ran out, lower "
                        "data.workers or data.cache_mb; run the same command to go on"
                    ) from error
                raise
            finally:
                watch.expect(None)
            if chunk is None:
                return
            yield chunk
            number += 1
    finally:  # by hand, since an exception that somebody keeps would keep the iterator and its processes too
        watch.over.set()
        if watch.struck is not None or _dead(processes, 0):
            chunks._shutdown = True  # torch's own way waits for locks, and a dead process may hold one for ever
            if hasattr(chunks, "_pin_memory_thread_done_event"):
                chunks._pin_memory_thread_done_event.set()
        chunks._shutdown_workers()
        watch.ended.set()
        _kill(processes)


@contextmanager
def _deaths_told(chunks: Any) -> Iterator[None]:
    """Let torch raise a worker's death here alone; by itself it does so in the midst of whatever this process does."""
    signal_handling._set_worker_pids(id(chunks), tuple(process.pid for process in chunks._workers))
    try:
        signal_handling._error_if_any_worker_fails()  # one that died before
        yield
    finally:
        signal_handling._remove_worker_pids(id(chunks))


class _Watch(threading.Thread):
    """Kills the workers once the main process has waited for one of them for too long, or for their end.

    torch's own timeout does not see a worker that has announced its chunk and hangs before it hands it over.
    struck: the worker that hung.
    """

    def __init__(self, workers: Sequence[BaseProcess], timeout: int) -> None:
        super().__init__(daemon=True)
        self.workers, self.timeout = workers, timeout
        self.expected: tuple[int, float] | None = None
        self.struck: int | None = None
        self.over, self.ended = threading.Event(), threading.Event()
        self.start()

    def expect(self, worker: int | None) -> None:
        """The main process waits for this worker from now on (None: for none)."""
        self.expected = None if worker is None else (worker, time.monotonic())

    def run(self) -> None:
        while not self.over.wait(min(1.0, self.timeout / 4) if self.timeout else None):
            expected = self.expected
            if expected and time.monotonic() - expected[1] > self.timeout:
                self.struck = _frozen(self.workers, expected[0])
                _kill(self.workers)
                return
        if not self.ended.wait(_PATIENCE):
            _kill(self.workers)


_PATIENCE = 2.0  # seconds for workers to end by themselves, or for the end of one to be seen


def _frozen(processes: Sequence[BaseProcess], expected: int) -> int:
    """The worker that does not run, so that others wait for what it holds; else the one that was waited for."""
    still = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP)
    for number in (expected, *range(len(processes))):
        with suppress(psutil.Error):
            if psutil.Process(processes[number].pid).status() in still:
                return number
    return expected


def _dead(processes: Sequence[BaseProcess], seconds: float = _PATIENCE) -> list[int]:
    """The processes that died. A broken connection to one is seen a moment before its end is."""
    for sentinel in wait([process.sentinel for process in processes], seconds):
        next(process for process in processes if process.sentinel == sentinel).join(seconds)
    return [number for number, process in enumerate(processes) if process.exitcode]


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()


def _named(number: int, processes: Sequence[BaseProcess]) -> str:
    of_rank = os.environ.get("RANK", "0")
    return f"loader worker {number} of {len(processes)} of process {of_rank} (pid {processes[number].pid})"


def _how(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"signal {-code}: {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
