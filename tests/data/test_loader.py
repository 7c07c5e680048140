"""Loader processes: their order, and what the main process does when one dies, hangs or fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
import torch

from ssl_vit.data.loader import loaded
from ssl_vit.data.order import LanePosition
from ssl_vit.data.samples import Chunk, join
from ssl_vit.interfaces import RunError, UserError


@dataclass
class Numbers:
    """Chunks of (process id, worker, number); after `end` of them, what `last` does."""

    end: int = 10**9
    last: str = ""
    workers: int = 2
    worker_timeout: int = 60

    def blank(self, worker: int) -> Chunk:
        return Chunk({"pid": torch.zeros(3, dtype=torch.int64), "images": torch.zeros(2, 4, 3, 1).permute(0, 3, 1, 2)})

    def chunks(self, worker: int) -> Iterator[Chunk]:
        for number in range(self.end):
            images = torch.full((2, 4, 3, 1), float(number)).permute(0, 3, 1, 2)
            tensors = {"pid": torch.tensor([os.getpid(), worker, number]), "images": images}
            yield Chunk(tensors, [f"{number}"], {worker: LanePosition(0, number)})
        if self.last == "exit" and worker == 1:
            os._exit(3)
        if self.last == "wait":
            time.sleep(1000)
        if self.last == "mistake":
            raise LookupError("a mistake in the stream")
        if self.last == "user error":
            raise UserError("x.tar: no such shard")


def pids(chunks: Iterator[Chunk]) -> list[int]:
    return [int(next(chunks).tensors["pid"][0]) for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_prepared_in_one_thread(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Others would wait for cores that are in use; the training has its threads again afterwards."""
    chunk = Chunk({"threads": torch.zeros(1, dtype=torch.int64)})
    monkeypatch.setattr(Numbers, "blank", lambda self, worker: chunk)
    counted = (Chunk({"threads": torch.tensor([torch.get_num_threads()])}) for _ in range(4))
    monkeypatch.setattr(Numbers, "chunks", lambda self, worker: counted)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        chunks = loaded(Numbers(workers=workers), 1)
        assert [int(next(chunks).tensors["threads"]) for _ in range(2)] == [1, 1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_parts_are_joined_in_their_layout() -> None:
    """In order, as rows of pixels, and as a copy: a worker overwrites its memory."""
    images = torch.arange(2 * 5 * 4 * 3, dtype=torch.uint8).view(2, 5, 4, 3).permute(0, 3, 1, 2)
    names = {"images": images, "noise": torch.rand(2, 0), "labels": torch.tensor([1, 2]), "flip": torch.ones(2) > 0}
    names |= {"indices": torch.arange(2), "valid": torch.ones(2) > 0}
    parts = [Chunk(names, ["a", "b"]), Chunk(names | {"images": images + 7}, ["c", "d"])]
    batch, _ = join(parts, torch.device("cpu"), 2, shared=True)
    assert torch.equal(batch.images, torch.cat([images, images + 7])) and batch.noise.shape == (4, 0)
    assert batch.images.stride() == images.stride() and batch.keys == ["a", "b", "c", "d"]
    (alone, _), (copied, _) = (join(parts[:1], torch.device("cpu"), 2, shared=shared) for shared in (False, True))
    assert alone.images.data_ptr() == images.data_ptr() != copied.images.data_ptr()
    assert torch.equal(copied.images, images)


def test_workers_take_turns_and_end() -> None:
    found = [
        (*chunk.tensors["pid"].tolist(), float(chunk.tensors["images"].mean()), chunk.keys, chunk.positions)
        for chunk in loaded(Numbers(9), 2)
    ]
    expected = [(w, n, float(n), [f"{n}"], {w: LanePosition(0, n)}) for n in range(9) for w in range(2)]
    assert [row[1:] for row in found] == expected
    processes = {row[0] for row in found}
    assert len(processes) == 2 and not any(psutil.pid_exists(pid) for pid in processes)


def test_a_chunk_keeps_its_content_and_layout_until_its_worker_is_asked_again() -> None:
    chunks = loaded(Numbers(), 1)
    first = next(chunks).tensors
    next(chunks)
    time.sleep(0.2)
    assert first["pid"][2] == 0 and first["images"].stride() == torch.empty(2, 4, 3, 1).permute(0, 3, 1, 2).stride()


@pytest.mark.parametrize("timeout", [60, 0])
def test_a_killed_worker_ends_the_run_at_its_turn(timeout: int) -> None:
    chunks = loaded(Numbers(worker_timeout=timeout), 2)
    first, second = pids(chunks)
    os.kill(second, signal.SIGKILL)
    message = rf"loader worker 1 of 2 of process 0 \(pid {second}\) died \(signal 9: Killed\)"
    with pytest.raises(RunError, match=message):
        list(zip(chunks, range(50), strict=False))
    assert not psutil.pid_exists(first)


def test_a_stopped_worker_ends_the_run_after_the_timeout() -> None:
    chunks = loaded(Numbers(worker_timeout=1), 2)
    first, second = pids(chunks)
    os.kill(second, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RunError, match=rf"worker 1 of 2 .*\(pid {second}\) made no batch for 1 s .*worker_timeout"):
        list(zip(chunks, range(50), strict=False))
    assert time.monotonic() - start < 10
    assert not psutil.pid_exists(first) and not psutil.pid_exists(second)


def test_a_worker_that_exits_is_named() -> None:
    with pytest.raises(RunError, match=r"loader worker 1 of 2 of process 0 \(pid \d+\) died \(exit code 3\)"):
        list(loaded(Numbers(3, "exit"), 2))


def test_errors_of_a_worker_are_raised_in_the_main_process() -> None:
    with pytest.raises(UserError, match=r"^x.tar: no such shard$"):
        list(loaded(Numbers(3, "user error"), 2))
    with pytest.raises(RuntimeError, match=r"(?s)loader worker 0 of 2.*LookupError: a mistake in the stream"):
        list(loaded(Numbers(3, "mistake"), 2))


def test_an_exception_that_is_kept_keeps_no_worker() -> None:
    """As the end of the program does with the one that ends it."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(75)

    chunks = loaded(Numbers(3, "wait"), 2)
    workers = [psutil.Process(pid) for pid in pids(chunks)]
    before = signal.signal(signal.SIGUSR2, stop)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    try:
        with pytest.raises(SystemExit) as kept:
            list(chunks)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not psutil.wait_procs(workers, 5)[1], kept


@pytest.mark.parametrize("end", ["return", "killed"])
def test_workers_neither_block_nor_outlive_the_main_process(end: str) -> None:
    """Two loaders, one of which waits for slow storage; a worker of the other stopped, and all of them signaled as a
    process group is."""
    program = f"""
import os, signal, sys, time
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_loader import Numbers, loaded, pids
kept = [loaded(Numbers(), 2), loaded(Numbers(5, "wait"), 2)]
workers = [pid for chunks in kept for pid in pids(chunks)]
for pid in workers:
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, kind)
if {end!r} == "return":
    os.kill(workers[0], signal.SIGSTOP)
print(*workers, flush=True)
if {end!r} == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (0 if end == "return" else -signal.SIGKILL), done.stderr
    workers = [psutil.Process(int(pid)) for pid in done.stdout.split() if psutil.pid_exists(int(pid))]
    alive = psutil.wait_procs(workers, 10)[1]
    for worker in workers:
        if worker.is_running():
            worker.kill()
    assert not alive
