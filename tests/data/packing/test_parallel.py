"""Work on several processes: what it returns, and how errors, kills and Ctrl-C end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from ssl_vit.data.packing import parallel
from ssl_vit.interfaces import RunError


def square(job: int) -> int:
    time.sleep(0.02 * (job % 3))
    return job * job


def fail(job: int) -> int:
    if job == 2:
        raise OSError(28, "No space left on device", "out.tar")
    time.sleep(30 if job < 2 else 0)
    return job


def die(job: int) -> None:
    if job == 3:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("processes", [1, 3])
def test_every_result_arrives_with_its_job(processes: int) -> None:
    received: dict[int, int] = {}
    parallel.run(square, iter(range(20)), processes, received.__setitem__)
    assert received == {number: number**2 for number in range(20)}
    parallel.run(square, [], processes, received.__setitem__)


def test_an_error_ends_all_at_once_and_keeps_its_type() -> None:
    start = time.monotonic()
    with pytest.raises(OSError, match="No space left on device") as caught:
        parallel.run(fail, [3] * 20 + [0, 1, 2] * 20, 3, lambda job, result: None)
    assert (caught.value.errno, caught.value.filename) == (28, "out.tar")
    assert time.monotonic() - start < 20  # the other jobs sleep for 30 seconds


def test_a_killed_process_is_an_error() -> None:
    with pytest.raises(RunError, match=r"was killed .*fewer --jobs"):
        parallel.run(die, range(6), 2, lambda job, result: None)


def test_no_process_outlives_its_parent(tmp_path: Path) -> None:
    """From a script without `if __name__ == "__main__"`, as in a notebook."""
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        from ssl_vit.data.packing import parallel

        def forever(job):
            os.write(1, f"{os.getpid()}\\n".encode())  # at once, beside the other's
            while True:
                time.sleep(0.1)

        parallel.run(forever, range(4), 2, print)
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as main:
        assert main.stdout is not None
        workers = [psutil.Process(int(main.stdout.readline())) for _ in range(2)]
        main.kill()
        assert not psutil.wait_procs(workers, timeout=15)[1]


def test_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cpu_count", lambda: 8)
    count = parallel.process_count
    assert [count(None, 100, 10**6), count(None, 5, None), count(None, 100, 3500)] == [8, 5, 3]
    assert [count(None, 100, 0), count(20, 100, 0), count(20, 0, 0)] == [1, 20, 1]
