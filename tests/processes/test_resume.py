"""A run killed at a random step and started again ends as the uninterrupted one does, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

STEPS = 60


def command(digits: Path, run: Path, workers: int, *more: str) -> list[str]:
    keys = [
        f"data.train={digits}/train",
        f"run={run}",
        f"data.workers={workers}",
        "backbone.dropout=0.1",  # dropout draws from the checkpointed generator
        "data.augment.crop=shift",
        "data.augment.padding=1",
        "data.augment.flip=true",
        "training.batch_size=32",
        f"training.steps={STEPS}",
        "training.log_every=5",
        "training.checkpoint_every=4",
        "training.picture_every=0",
        "optim.warmup_steps=5",
        *more,
    ]
    return [sys.executable, "-m", "ssl_vit", "train", "digits_ssl", *keys]


def train(arguments: list[str]) -> None:
    subprocess.run(arguments, env=ENVIRONMENT, check=True, capture_output=True, timeout=240)


def weights(run: Path) -> dict[str, bytes]:
    last = sorted((run / "checkpoints").glob("step_*"))[-1]
    assert last.name == f"step_{STEPS:08d}"
    found = {}
    for name in ("backbone.safetensors", "objective.safetensors"):
        with safe_open(last / name, "pt") as tensors:
            found |= {key: tensors.get_tensor(key).numpy().tobytes() for key in tensors.keys()}  # noqa: SIM118
    return found


def losses(run: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def kill_after_checkpoint(arguments: list[str], run: Path, at_least: int, number: signal.Signals) -> int:
    """Start the run and send the signal once a checkpoint of `at_least` steps is there; returns the exit code."""
    process = subprocess.Popen(
        arguments, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if any(int(p.name[5:]) >= at_least for p in (run / "checkpoints").glob("step_*")):
            break
        time.sleep(0.01)
    time.sleep(random.random() * 0.1)  # somewhere in the steps after it
    os.killpg(process.pid, number)  # the loader workers too, as launchers and schedulers do
    return process.wait(60)


@pytest.mark.parametrize("workers", [0, 2])
def test_sigkill_and_restart_is_bit_identical(digits: Path, tmp_path: Path, workers: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(command(digits, whole, workers))
    again = command(digits, broken, workers)
    code = kill_after_checkpoint(again, broken, random.randrange(4, STEPS // 3), signal.SIGKILL)
    assert code == -signal.SIGKILL, "the run ended before it could be killed"
    reached = max(int(p.name[5:]) for p in (broken / "checkpoints").glob("step_*"))
    assert 0 < reached < STEPS
    train(again)
    assert weights(broken) == weights(whole)
    assert losses(broken) == losses(whole)


@pytest.mark.parametrize("workers", [0, 1])
def test_sigterm_saves_first_and_the_next_start_goes_on(digits: Path, tmp_path: Path, workers: int) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(command(digits, whole, workers))
    again = command(digits, stopped, workers, "training.checkpoint_every=15")
    assert kill_after_checkpoint(again, stopped, 15, signal.SIGTERM) == 1
    reached = max(int(p.name[5:]) for p in (stopped / "checkpoints").glob("step_*"))
    assert 15 <= reached < STEPS, "SIGTERM was not answered by a checkpoint before the end"
    train(again)
    assert weights(stopped) == weights(whole)


def test_a_finished_run_is_left_alone(digits: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = command(digits, run, 0)
    train(arguments)
    before = weights(run), losses(run)
    train(arguments)
    assert (weights(run), losses(run)) == before


def test_other_worker_counts_see_the_same_data(digits: Path, tmp_path: Path) -> None:
    """The order belongs to the lanes: 0, 2 and 4 workers train the same weights."""
    runs = [tmp_path / f"workers{n}" for n in (0, 4)]
    for run, workers in zip(runs, (0, 4), strict=True):
        train(command(digits, run, workers))
    assert weights(runs[0]) == weights(runs[1])
