"""A comparison that is stopped or killed takes its processes with it; stopped, its training saves first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
KEYS = [
    "seeds=[0]",
    "labels_per_class=[2]",
    "evaluators.few_shot.shots=[1]",
    "evaluators.fine_tune.steps=[2]",
    "evaluators.fine_tune.lrs=[0.003]",
    "arms.supervised.overrides=[training.steps=2]",
]


def wait_until(condition, seconds: float = 60) -> bool:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "demo"
    long = ["arms.ssl.overrides=[training.steps=100000,training.batch_size=16,training.checkpoint_every=20]"]
    command = [sys.executable, "-m", "ssl_vit", "demo", "--out", str(out), *KEYS]
    process = subprocess.Popen([*command, *long], env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    checkpoints = out / "ssl" / "checkpoints"
    assert wait_until(lambda: any(checkpoints.glob("step_*")), 120)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(number)
    assert process.wait(60) == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    assert wait_until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
    saved = max(int(path.name[5:]) for path in checkpoints.glob("step_*"))
    if number == signal.SIGTERM:
        assert saved % 20, "the training that was stopped did not save where it stood"
