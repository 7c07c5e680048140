"""Real processes, several of them in a world of their own; shards on disk."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import runpy
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from tests.tars import packed

SCRIPT = Path(__file__).with_name("every_process.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """As the processes beside this one; two threads that wait for each other on a busy machine take minutes."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ and test/ shards of the embedded digits."""
    folder = tmp_path_factory.mktemp("digits")
    for split in ("train", "test"):
        packed("digits", folder / split, split, shards=8)
    return folder


@dataclass
class Started:
    """One process of a world; its output lies in a file."""

    process: BaseProcess
    output: Path

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid

    @property
    def text(self) -> str:
        """What it printed, without what torch 2.9 tells of every group of processes."""
        lines = self.output.read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))

    def signal(self, number: signal.Signals) -> None:
        """To its loader workers too, as schedulers do."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it does not lead a group of its own yet
            os.kill(self.pid, number)

    def wait(self, seconds: float = 200) -> int:
        """The exit code; a process that has not ended by then fails the test."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds} s:\n{self.text}"
        return self.process.exitcode


World = Callable[..., list[Started]]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Start every_process.py's SCENARIO in the processes of one world, as Slurm would: no launcher watches over them.

    They are forked from a process that has imported torch already, which saves seconds each. Variables: by keyword.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ssl_vit.execution", "ssl_vit.cli"])
    started: list[Started] = []
    numbers, outputs = itertools.count(), tmp_path_factory.mktemp("outputs")

    def start(processes: int, scenario: str, *arguments: object, **variables: object) -> list[Started]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
        for rank in range(processes):
            own = {**shared, "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {}
            output = outputs / f"{next(numbers)}.txt"
            environment = {name: str(value) for name, value in {**ENVIRONMENT, **own, **variables}.items()}
            what = {"output": str(output), "environment": environment, "arguments": [scenario, *map(str, arguments)]}
            process = context.Process(target=runpy.run_path, args=(str(SCRIPT), what, "__main__"))
            process.start()
            started.append(Started(process, output))
        return started[-processes:]

    yield start
    for one in started:
        if one.process.is_alive():
            one.signal(signal.SIGKILL)
        one.process.join()
