"""Two real CPU processes under `accelerate launch` train as one does: same global batches, same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
STEPS = 20


def launch(processes: int, run: Path, digits: Path, recipe: str, *more: str) -> list[float]:
    """Train by `accelerate launch` on that many processes; returns the loss of every step."""
    python = [sys.executable, "-m"]
    if processes > 1:  # without a GPU, --multi_gpu starts CPU processes over gloo; --cpu would silently start one
        python += ["accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
        python += [
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "--main_process_port",
            "0",
        ]
        python += ["-m"]
    keys = [f"data.train={digits}/train", f"run={run}", f"training.steps={STEPS}", "training.log_every=1"]
    command = [*python, "ssl_vit", "train", recipe, *keys, "training.picture_every=0", *more]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    environment = json.loads((run / "environment.json").read_text())
    assert environment["world_size"] == processes
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


@pytest.mark.parametrize("recipe", ["digits_ssl", "digits_supervised"])
def test_two_processes_follow_the_single_process_curve(digits: Path, tmp_path: Path, recipe: str) -> None:
    one = launch(1, tmp_path / "one", digits, recipe)
    two = launch(2, tmp_path / "two", digits, recipe, "data.workers=1")
    assert two == pytest.approx(one, rel=2e-5)
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["processes"] == 2


def test_accumulation_follows_the_single_process_curve(digits: Path, tmp_path: Path) -> None:
    one = launch(1, tmp_path / "one", digits, "digits_ssl")
    two = launch(1, tmp_path / "two", digits, "digits_ssl", "training.accumulate=2")
    assert two == pytest.approx(one, rel=2e-5)


def test_a_run_goes_on_with_another_number_of_processes(digits: Path, tmp_path: Path) -> None:
    """Stopped on two processes, resumed on one: no sample lost or repeated, so the losses go on as if nothing was."""
    whole = launch(1, tmp_path / "whole", digits, "digits_ssl")
    keys = [f"data.train={digits}/train", f"run={tmp_path / 'moved'}", "training.log_every=1"]
    keys += [
        f"training.steps={STEPS}",
        "training.checkpoint_every=8",
        "training.keep_last=9",
        "training.picture_every=0",
    ]
    python = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    python += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    subprocess.run(
        [*python, "-m", "ssl_vit", "train", "digits_ssl", *keys],
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
        timeout=280,
    )
    # Take the run back to its checkpoint of step 8, as a kill after it would have left it.
    for name in ("step_00000020", "step_00000016"):
        folder = tmp_path / "moved" / "checkpoints" / name
        if folder.exists():
            folder.rename(folder.with_name(f".gone_{name}"))
    left = sorted(path.name for path in (tmp_path / "moved" / "checkpoints").glob("step_*"))
    if not left:
        pytest.fail("no checkpoint of step 8 was kept")
    moved = launch(1, tmp_path / "moved", digits, "digits_ssl", "training.checkpoint_every=8")
    assert moved == pytest.approx(whole, rel=2e-5)
