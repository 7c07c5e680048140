"""Loader processes: started, listened to, and named when one of them dies or hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_all_start_methods
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import FrameType

import torch
from torch.utils.data import DataLoader, IterableDataset

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
    chunks, number = iter(loader), 0
    watch = _Watch(chunks._workers, timeout) if workers and timeout else None  # type: ignore[attr-defined]
    try:
        while True:
            try:
                if watch:
                    watch.asked = time.monotonic()
                chunk = next(chunks)
            except StopIteration:
                return
            except Exception as error:  # whatever the end of a killed worker looks like
                if watch is None or not watch.struck:
                    raise
                worker, processes = number % workers, chunks._workers  # type: ignore[attr-defined]
                raise RunError(
                    f"loader worker {worker} of {workers} of process {_rank()} (pid {processes[worker].pid}) gave "
                    f"nothing for {timeout} s (data.worker_timeout): is its storage gone? Run the same command to go on"
                ) from error
            finally:
                if watch:
                    watch.asked = None
            yield chunk
            number += 1
    finally:
        if watch:
            watch.over.set()
        del chunks


class _Watch(threading.Thread):
    """Kills the workers once the main process has waited for one of them for too long.

    torch's own timeout does not see a worker that has announced its chunk and hangs before it hands it over.
    """

    def __init__(self, workers: Sequence[BaseProcess], timeout: int) -> None:
        super().__init__(daemon=True)
        self.workers, self.timeout = workers, timeout
        self.asked: float | None = None
        self.struck, self.over = False, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(min(1.0, self.timeout / 4)):
            asked = self.asked
            if asked is not None and time.monotonic() - asked > self.timeout:
                self.struck = True
                for worker in self.workers:
                    worker.kill()
                return


@contextmanager
def worker_deaths() -> Iterator[None]:
    """Turn the death of a loader process, which torch raises wherever the main one is, into a plain RunError."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = str(error).splitlines()[0].removeprefix("DataLoader worker").strip(" .")
        raise RunError(
            f"a loader worker of process {_rank()} died: {reason}; if the memory ran out, lower data.workers or "
            "data.cache_mb; run the same command to go on"
        ) from error


def _rank() -> str:
    return os.environ.get("RANK", "0")
