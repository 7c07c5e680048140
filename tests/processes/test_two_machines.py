"""Two machines: two network namespaces, joined by a cable (a veth pair) that can be pulled out.

`pytest -m slow tests/processes/test_two_machines.py`, as root on Linux.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.reading import losses, same, saved, weights, world_size

LAUNCH = Path(__file__).parents[2] / "recipes" / "launch" / "two_machines.yaml"
TIMEOUT = 10
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip"), reason="only root makes network namespaces, with ip"
    ),
]


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two namespaces with the addresses 10.77.0.1 and 10.77.0.2."""
    names = (f"sslvit{os.getpid()}a", f"sslvit{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            for device in ("cable", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)


def start(machines: tuple[str, str], digits: Path, run: Path, *more: str) -> list[subprocess.Popen[str]]:
    """The launch file's own command on both machines, with one CPU process each."""
    keys = [
        f"data.train={digits}/train",
        f"run={run}",
        "training.log_every=1",
        "encoder.depth=1",
        "training.steps=200",
    ]
    keys += ["training.checkpoint_every=5", "training.picture_every=0", f"training.timeout={TIMEOUT}", *more]
    started = []
    for rank, name in enumerate(machines):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", str(LAUNCH), "--num_processes", "2", "--main_process_ip", "10.77.0.1"]
        command += ["--machine_rank", str(rank), "-m", "ssl_vit", "train", "digits_ssl", *keys]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen(command, env=environment, text=True, **pipes))  # type: ignore[call-overload]
    return started


def test_a_machine_that_is_cut_off_ends_the_other_and_both_resume(
    machines: tuple[str, str], digits: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    both = start(machines, digits, run)
    deadline = time.monotonic() + 200
    while not saved(run) and time.monotonic() < deadline:
        time.sleep(0.02)
    ip("-n", machines[1], "link", "set", "cable", "down")  # no process is told anything: the packets are gone
    cut = time.monotonic()
    texts = [process.communicate(timeout=120)[0] for process in both]
    assert time.monotonic() - cut < TIMEOUT + 60  # the launcher's own end included
    assert all(process.returncode for process in both)
    reached = saved(run)
    assert 5 <= reached < 200
    told = f"another process of this run has not answered for {TIMEOUT} s (training.timeout)"
    assert all(told in text and f"last good checkpoint: {run}" in text for text in texts), texts[0] + texts[1]
    ip("-n", machines[1], "link", "set", "cable", "up")
    again = start(machines, digits, run)
    texts = [process.communicate(timeout=250)[0] for process in again]
    assert [process.returncode for process in again] == [0, 0], texts[0] + texts[1]
    assert f"resuming at step {reached} of 200" in texts[0]
    assert world_size(run) == 2
    whole = start(machines, digits, tmp_path / "whole", "training.checkpoint_every=0")
    assert [process.communicate(timeout=250) and process.returncode for process in whole] == [0, 0]
    assert same(weights(run), weights(tmp_path / "whole")) and losses(run) == losses(tmp_path / "whole")
    assert [step for step, _ in losses(run)] == list(range(1, 201))
