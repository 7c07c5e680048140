"""Work on several processes: results in order, and no process that outlives an error or the first one's end."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from ssl_vit.data.packing import parallel as jobs
from ssl_vit.interfaces import RunError, UserError

WORK = """
import os, signal, time

def square(job, advance):
    time.sleep(0.02 * (job % 3))
    advance()
    return job * job

def fail(job, advance):
    if job == 2:
        raise OSError(28, "No space left on device", "out.tar")
    time.sleep(30 if job < 2 else 0)

def die(job, advance):
    if job == 3:
        os.kill(os.getpid(), signal.SIGKILL)

def forever(job, advance):
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece, beside the other's
    time.sleep(60)
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that processes can import."""
    (tmp_path / "work_for_jobs.py").write_text(WORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    import work_for_jobs  # type: ignore[import-not-found]

    yield work_for_jobs
    del sys.modules["work_for_jobs"]


@pytest.mark.parametrize("on", [1, 3])
def test_results_come_in_the_order_of_the_jobs(work: ModuleType, on: int) -> None:
    assert jobs.run(work.square, iter(range(20)), on=on, what="x", total=20, progress=False) == [
        number**2 for number in range(20)
    ]
    assert jobs.run(work.square, [], on=on, what="x", total=0, progress=False) == []


def test_jobs_are_taken_as_processes_become_free(work: ModuleType) -> None:
    """So that a million jobs are not held in memory."""
    taken: list[int] = []

    def watched() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield 3 if number < 20 else 2

    with pytest.raises(OSError, match="No space left"):
        jobs.run(work.fail, watched(), on=2, what="x", total=100, progress=False)
    assert 20 < len(taken) < 30


def test_an_error_ends_all_at_once_and_keeps_its_kind(work: ModuleType) -> None:
    start = time.monotonic()
    with pytest.raises(OSError, match="No space left on device") as caught:
        jobs.run(work.fail, range(3), on=3, what="x", total=3, progress=False)
    assert (caught.value.errno, caught.value.filename) == (28, "out.tar")
    assert time.monotonic() - start < 15  # the other two jobs sleep for 30 seconds


def test_a_process_that_is_killed_is_told(work: ModuleType) -> None:
    with pytest.raises(RunError, match=r"a process died: .*run the same command to go on, with fewer --jobs"):
        jobs.run(work.die, range(6), on=2, what="x", total=6, progress=False)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_first(work: ModuleType, tmp_path: Path, sign: signal.Signals) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent("""
        import signal
        import work_for_jobs
        from ssl_vit.data.packing import parallel as jobs

        if __name__ == "__main__":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background inherit "ignored"
            jobs.run(work_for_jobs.forever, range(4), on=2, what="x", total=4, progress=False)
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as main:
        assert main.stdout is not None
        workers = [psutil.Process(int(main.stdout.readline())) for _ in range(2)]
        main.send_signal(sign)
        assert main.wait(15) != 0
        _, alive = psutil.wait_procs(workers, timeout=15)
        assert not alive


def test_how_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert jobs.processes(None, jobs=100, size=10**9) == 8
    assert jobs.processes(None, jobs=5, size=10**9) == 5
    assert jobs.processes(None, jobs=100, size=65_000_000) == 3
    assert jobs.processes(None, jobs=100, size=0) == 1
    assert jobs.processes(20, jobs=100, size=0) == 20
    assert jobs.processes(20, jobs=0, size=0) == 1
    with pytest.raises(UserError, match="jobs must be at least 1"):
        jobs.processes(0, jobs=100, size=0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_lines_elsewhere_and_silence_when_asked(
    work: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(jobs, "SECONDS_A_LINE", 0)
    said = {}
    for name, stream, progress in (
        ("terminal", Terminal(), True),
        ("file", io.StringIO(), True),
        ("silent", Terminal(), False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        jobs.run(work.square, range(12), on=1, what="packing", total=12, progress=progress)
        said[name] = stream.getvalue()
    assert "packing" in said["terminal"] and "12/12" in said["terminal"] and "images/s" in said["terminal"]
    assert re.search(r"packing: 6 of 12 images, 0:00:\d\d left \(\d+ images/s\)", said["file"])
    assert said["silent"] == ""


def test_a_short_job_says_nothing_where_there_is_no_terminal(
    work: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.run(work.square, range(12), on=1, what="packing", total=12, progress=True)
    assert capsys.readouterr() == ("", "")
