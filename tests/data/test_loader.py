"""Loader processes that die: told where the main process waits for them, and nowhere else."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ssl_vit.data.loader import loaded
from ssl_vit.data.samples import Chunk
from ssl_vit.interfaces import RunError


class Numbers(IterableDataset[Chunk]):
    """Chunks of the worker's own process id; after `end` of them, what `last` does."""

    def __init__(self, end: int = 10**9, last: str = "") -> None:
        self.end, self.last = end, last

    def __iter__(self) -> Iterator[Chunk]:
        for number in range(self.end):
            yield Chunk({"pid": torch.tensor([os.getpid(), get_worker_info().id, number])})
        if self.last == "exit" and get_worker_info().id == 1:
            os._exit(3)
        if self.last == "wait":
            time.sleep(1000)
        if self.last == "raise":
            raise LookupError("a mistake in the stream")


def start(stream: Numbers, timeout: int = 60) -> Iterator[Chunk]:
    return loaded(stream, 2, torch.device("cpu"), prefetch=2, timeout=timeout)


def pids(chunks: Iterator[Chunk]) -> list[int]:
    return [int(next(chunks).tensors["pid"][0]) for _ in range(2)]


@pytest.mark.parametrize("timeout", [60, 0])
def test_a_death_is_told_by_the_next_chunk_and_interrupts_nothing_else(timeout: int) -> None:
    chunks = start(Numbers(), timeout)
    first, second = pids(chunks)
    os.kill(second, signal.SIGKILL)
    while psutil.Process(second).status() != psutil.STATUS_ZOMBIE:  # SIGCHLD has come, torch's own handler has run
        time.sleep(0.01)
    time.sleep(0.05)
    with pytest.raises(
        RunError, match=rf"loader worker 1 of 2 of process 0 \(pid {second}\) died \(signal 9: Killed\)"
    ):
        list(zip(chunks, range(9), strict=False))
    psutil.wait_procs([psutil.Process(first)] if psutil.pid_exists(first) else [], 20)
    assert not psutil.pid_exists(first)


def test_a_worker_that_leaves_by_itself_is_named() -> None:
    with pytest.raises(RunError, match=r"loader worker 1 of 2 of process 0 \(pid \d+\) died \(exit code 3\)"):
        list(start(Numbers(3, "exit")))


def test_a_mistake_in_the_stream_stays_what_it_is() -> None:
    with pytest.raises(LookupError, match="a mistake in the stream"):
        list(start(Numbers(3, "raise")))


def test_workers_take_turns_and_end() -> None:
    found = [chunk.tensors["pid"].tolist() for chunk in start(Numbers(3))]
    assert [(worker, number) for _, worker, number in found] == [(w, n) for n in range(3) for w in range(2)]
    assert not any(psutil.pid_exists(pid) for pid, _, _ in found)


def test_an_exception_that_is_kept_keeps_no_worker() -> None:
    """As the end of the program does with the one that ends it; a first SIGTERM would not end the workers either."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(75)

    chunks = start(Numbers(3, "wait"))
    workers = [psutil.Process(pid) for pid in pids(chunks)]
    before = signal.signal(signal.SIGUSR2, stop)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    try:
        with pytest.raises(SystemExit) as told:
            list(chunks)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not psutil.wait_procs(workers, 30)[1], told
