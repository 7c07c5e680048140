"""A comparison that is stopped or killed takes its processes with it, and its training saves first."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

KEYS = [
    "seeds=[0]",
    "labels_per_class=[2]",
    "evaluators.few_shot.labels_per_class=[1]",
    "evaluators.fine_tune=null",
    "arms.scratch=null",
    "arms.supervised=null",
    "controls=false",
    "pictures=false",
    "arms.ssl.overrides=[training.steps=100000,training.batch_size=16,training.checkpoint_every=0,training.log_every=1]",
]


def wait_until(condition, seconds: float = 60) -> bool:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(
    world: Callable[..., Any], digits: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "run"
    data = [f"run={out}", f"data={{folds: [], train: {digits}/train, test: {digits}/test}}", "pretrainings=1"]
    process = world(1, "command_line", "compare", "demo_digits", *data, *KEYS)[0]
    log = out / "ssl" / "metrics.jsonl"
    assert wait_until(lambda: log.exists() and log.read_text(), 120), process.text
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.kill(process.pid, number)
    assert process.wait(60) == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    assert wait_until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
    reached = json.loads(log.read_text().splitlines()[-1])["step"]
    saved = [path.name for path in (out / "ssl" / "checkpoints").glob("step_*")]
    assert saved == [f"step_{reached:08d}"], "the training that was stopped did not save where it stood"
