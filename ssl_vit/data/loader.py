"""Loader processes: each makes its part of every step and writes it to memory that it shares with the main process.

Every worker has its own memory and its own pipe, so that one that dies or hangs holds nothing that others wait for.
Through the pipe the main process hands out free slots of the memory, and the worker reports which it has filled; a
worker whose main process is gone finds the pipe closed and ends; on Linux, the kernel ends it at once.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import traceback
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Protocol

import torch

from ssl_vit.data.samples import Chunk, one_thread
from ssl_vit.interfaces import RunError, UserError, end_with_parent


class Stream(Protocol):
    """What the loader runs.

    workers: processes (0: the main process does it). worker_timeout: seconds that one may take for a chunk (0: any).
    """

    workers: int
    worker_timeout: int

    def chunks(self, worker: int) -> Iterator[Chunk]:
        """One worker's chunks."""
        ...

    def blank(self, worker: int) -> Chunk:
        """A chunk with the shapes of the worker's chunks."""
        ...


def loaded(stream: Stream, prefetch: int) -> Generator[Chunk, None, None]:
    """The stream's chunks from all workers in turn, `prefetch` of each ahead. The tensors of a chunk may be overwritten
    once the next chunk of the same worker is asked for.

    Raises UserError and RunError of a worker; RunError for a worker that dies or takes longer than the timeout. The
    processes end with the iteration, at the latest when this process exits.
    """
    if not stream.workers:
        chunks = stream.chunks(0)
        while True:
            # Samples seed the generator that the training draws from.
            with torch.random.fork_rng(devices=[]), one_thread():
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk
    workers: list[_Worker] = []
    # At the exit multiprocessing would wait for workers, which ignore signals; atexit is not run in its processes.
    close = Finalize(None, _close, (workers,), exitpriority=100)
    try:
        for number in range(stream.workers):
            workers.append(_Worker(stream, number, prefetch + 1, [worker.ours for worker in workers]))
        active = list(workers)
        while active:
            for worker in list(active):
                if chunk := worker.take(stream.worker_timeout):
                    yield chunk
                else:
                    active.remove(worker)
    finally:
        close()


def _close(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.ours.close()


class _Worker:
    """One loader process, seen from the main process."""

    def __init__(self, stream: Stream, number: int, slots: int, siblings: list[Connection]) -> None:
        """siblings: the main process's ends of the other workers' pipes, which this worker must not keep open."""
        with torch.random.fork_rng(devices=[]):
            blank = stream.blank(number)
        self.slots = [{name: _shared(tensor) for name, tensor in blank.tensors.items()} for _ in range(slots)]
        self.name = f"loader worker {number} of {stream.workers} of process {os.environ.get('RANK', '0')}"
        self.ours, theirs = multiprocessing.Pipe()
        arguments = (stream, number, self.slots, theirs, [*siblings, self.ours])
        self.process = multiprocessing.get_context("fork").Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.free: int | None = None  # the slot of the chunk that was taken last
        for slot in range(slots):
            self._send(slot)

    def _send(self, slot: int) -> None:
        with suppress(OSError):  # it died: `take` says so
            self.ours.send(slot)

    def take(self, timeout: int) -> Chunk | None:
        """The next chunk; None after the last one."""
        if self.free is not None:
            self._send(self.free)
        try:
            if not self.ours.poll(timeout or None):
                raise RunError(
                    f"{self.name} (pid {self.process.pid}) made no batch for {timeout} s (data.worker_timeout); check "
                    "its storage, then run the same command to resume"
                )
            message = self.ours.recv()
        except (EOFError, OSError):
            self.process.join(2)
            raise RunError(
                f"{self.name} (pid {self.process.pid}) died ({self._how()}); if the memory ran out, lower data.workers "
                "or data.cache_mb, then run the same command to resume"
            ) from None
        if isinstance(message, (UserError, RunError)):
            raise message
        if isinstance(message, str):
            raise RuntimeError(f"{self.name}:\n{message}")
        if message is None:
            return None
        self.free, chunk = message
        return replace(chunk, tensors=self.slots[self.free])

    def _how(self) -> str:
        code = self.process.exitcode or 0
        return f"signal {-code}: {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"


def _shared(like: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor of this shape and layout that processes forked later share. Not of /dev/shm, which is small
    in containers."""
    memory = torch.frombuffer(mmap.mmap(-1, max(like.nbytes, 8)), dtype=torch.uint8)
    return memory[: like.nbytes].view(like.dtype).as_strided(like.size(), like.stride())


def _work(
    stream: Stream, number: int, slots: list[dict[str, torch.Tensor]], pipe: Connection, others: list[Connection]
) -> None:
    """The loader process. It ignores signals, which reach the process group: the main process saves, then ends it."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(kind, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)  # else it would hold the connections to other machines until a slow read ends
    for other in others:
        other.close()
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the main process is gone
        try:
            for chunk in stream.chunks(number):
                slot = pipe.recv()
                for name, tensor in chunk.tensors.items():
                    slots[slot][name].copy_(tensor)
                pipe.send((slot, replace(chunk, tensors={})))
            pipe.send(None)
        except (UserError, RunError) as error:
            pipe.send(type(error)(str(error)))  # without its cause, which may not be picklable
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception:
            pipe.send(traceback.format_exc())
