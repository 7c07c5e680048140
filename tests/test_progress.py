"""Progress: bars on a terminal, a line now and then elsewhere, nothing where it is not wanted."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from ssl_vit import progress
from ssl_vit.progress import progress_bar

TWO = """
import time
from ssl_vit.progress import progress_bar
with progress_bar("outside", 2) as outer:
    for _ in range(2):
        with progress_bar("inside", 3) as inner:
            for _ in range(3):
                time.sleep(0.2)
                inner(1)
        print("a line")
        outer(1)
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_come_after_ten_seconds_of_silence(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("sweep", 4) as outer:
        for _ in range(4):
            with progress_bar("training", 2) as inner:
                for _ in range(2):
                    clock[0] += 3
                    inner(1)
            outer(1)
    assert capsys.readouterr().err.splitlines() == [
        "sweep  1/4, training  2/2, 0:00:36 left",
        "sweep  3/4, training  2/2, 0:00:08 left",
    ]


def test_short_work_and_other_processes_print_nothing(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):  # each begins a silence of its own
        with progress_bar("short", 3) as advance:
            clock[0] += 9
            advance(3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for show, rank in ((False, "0"), (True, "1")):
        monkeypatch.setenv("RANK", rank)
        with progress_bar("long", None, show) as advance:
            clock[0] += 90
            advance(1)
    assert capsys.readouterr().err == ""


def test_long_work_prints_fewer_lines(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("packing", None) as advance:
        for _ in range(10_000):
            clock[0] += 1
            advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "packing  10" and 30 < len(lines) < 80


def test_a_terminal_shows_both_bars() -> None:
    reader, terminal = pty.openpty()
    command = [sys.executable, "-c", TWO]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, env=os.environ | {"TERM": "xterm"})
    os.close(terminal)
    drawn = b""
    while True:
        try:
            part = os.read(reader, 4096)
        except OSError:  # closed on the other side
            break
        if not part:
            break
        drawn += part
    assert done.wait() == 0 and done.stdout and done.stdout.read() == b"a line\na line\n"
    assert b"outside" in drawn and b"inside" in drawn and b"1/2" in drawn
