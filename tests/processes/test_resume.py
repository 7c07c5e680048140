"""A run that is killed again and again, or stopped, ends as the undisturbed one does, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssl_vit import execution, recipe
from ssl_vit.results import Result, evaluations, load
from tests.processes.reading import losses, same, saved, weights

World = Callable[..., Any]
ALL = ("encoder", "objective", "training", "optimizer")


def settings(digits: Path, run: Path, *more: str) -> list[str]:
    return [
        f"data.train={digits}/train",
        f"run={run}",
        "encoder.depth=2",
        "encoder.dropout=0.1",  # draws from the checkpointed generator
        "data.augment.crop=shift",
        "data.augment.padding=1",
        "data.augment.flip=true",
        "training.batch_size=32",
        "training.log_every=1",
        "training.picture_every=0",
        "training.ema=0.99",
        "optim.warmup_steps=5",
        *more,
    ]


def train(digits: Path, run: Path, *more: str, name: str = "digits_ssl") -> Path:
    """In this process."""
    return execution.train(recipe.load_recipe(name, settings(digits, run, *more)), quiet=True)


def unfinished(run: Path) -> bool:
    """Whether a checkpoint is being written, or was when the run was killed."""
    return any((run / "checkpoints").glob(".*step_*"))


@pytest.mark.parametrize(
    ("kills", "inside", "workers"),
    [
        (3, 0, 2),
        pytest.param(20, 5, 0, marks=pytest.mark.slow),
        pytest.param(15, 5, 2, marks=pytest.mark.slow),
    ],
)
def test_random_sigkills_leave_no_trace(
    world: World, digits: Path, tmp_path: Path, kills: int, inside: int, workers: int
) -> None:
    """Every second kill waits for an unfinished checkpoint. inside: how many kills must leave one behind."""
    dice, run, left = random.Random(kills), tmp_path / "run", 0
    length = f"training.steps={10 * kills}"
    keys = [length, "training.checkpoint_every=1", f"data.workers={workers}"]
    for number in range(kills):
        before = saved(run)
        process = world(1, "command_line", "train", "digits_ssl", *settings(digits, run, *keys))[0]
        early = dice.random() < 0.1  # in this session, no step is waited for
        deadline = time.monotonic() + 60
        while saved(run) == before and not early and process.process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(dice.random() * 0.2)
        while number % 2 and not early and not unfinished(run):
            assert time.monotonic() < deadline
        process.signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL, process.text
        left += unfinished(run)
    assert 0 < saved(run) < 10 * kills
    assert left >= inside, f"{left} of {kills} kills left an unfinished checkpoint"
    print(f"{left} of {kills} kills left an unfinished checkpoint")
    train(digits, run, *keys)
    whole = train(digits, tmp_path / "whole", length)
    assert same(weights(run, *ALL), weights(whole, *ALL))
    assert losses(run) == losses(whole) and [step for step, _ in losses(run)] == list(range(1, 10 * kills + 1))


def test_three_processes_resume_bit_for_bit(world: World, digits: Path, tmp_path: Path) -> None:
    """Three summands give other bits in another order, and a new process group begins with an order of its own."""
    three = world(3, "resumed", digits, tmp_path)
    assert [process.wait() for process in three] == [0] * 3, "".join(process.text for process in three)
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    for name in ("encoder", "objective", "optimizer"):
        assert same(weights(tmp_path / "again", name), weights(tmp_path / "whole", name)), name


@pytest.mark.parametrize("name", ["digits_ssl", "digits_lejepa"])
def test_a_preempted_run_saves_within_a_step_and_the_next_start_resumes(
    world: World, digits: Path, tmp_path: Path, name: str
) -> None:
    """The signal comes at the end of step 10, to its loader worker too."""
    whole = train(digits, tmp_path / "whole", "training.steps=14", "training.checkpoint_every=0", name=name)
    run, keys = tmp_path / "run", ["training.steps=14", "training.checkpoint_every=10", "data.workers=1"]
    command = ["train", name, *settings(digits, run, *keys)]
    process = world(1, "signaled", signal.SIGTERM.value, 0, 10, *command)[0]
    assert process.wait(60) == 75, process.text
    assert saved(run) == losses(run)[-1][0] == 11
    assert "stopped by SIGTERM; saved, run the same command to resume at step 11" in process.text
    train(digits, run, *keys, name=name)
    assert same(weights(run, *ALL), weights(whole, *ALL)) and losses(run) == losses(whole)


def test_a_signal_ends_a_training_that_waits_for_data(world: World, digits: Path, tmp_path: Path) -> None:
    """It saves the steps that are done; the next start resumes from there."""
    run, keys = tmp_path / "run", ["training.steps=12", "training.checkpoint_every=0", "data.workers=0"]
    process = world(1, "stalled", 7, "train", "digits_ssl", *settings(digits, run, *keys))[0]
    assert process.wait(60) == 75, process.text
    assert saved(run) == 7
    train(digits, run, *keys)
    whole = train(digits, tmp_path / "whole", *keys)
    assert same(weights(run, *ALL), weights(whole, *ALL)) and losses(run) == losses(whole)


def test_an_evaluation_that_was_killed_resumes(world: World, digits: Path, tmp_path: Path) -> None:
    """What it had finished is not measured again, but for one damaged part."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    shutil.copytree(train(digits, whole, "training.steps=2"), killed)
    data = (f"{digits}/train", f"{digits}/test")
    keys = ["training.steps=4", "training.batch_size=16", "sweep={optim.lr: [0.001, 0.003]}", "labels_per_class=[5,10]"]
    keys += ["seeds=[0,1]"]
    process = world(1, "command_line", "eval", killed, "fine_tune", "--data", data[0], "--test", data[1], *keys)[0]

    def finished() -> list[Path]:
        return [part for part in killed.glob("results/*.unfinished/*.json") if "candidate" not in part.name]

    while len(finished()) < 3 and process.process.is_alive():
        time.sleep(0.01)
    assert process.process.is_alive(), process.text
    process.signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL, process.text
    parts = finished()
    assert 3 <= len(parts) < 8 and not evaluations(killed)[0]
    parts[-1].write_text("{")  # damaged: runs again
    stored = {part.stem: load(part) for part in parts[:-1]}
    said: list[str] = []
    resumed = execution.evaluate(killed, "fine_tune", *data, keys, say=said.append)
    known = {line.removesuffix(": already finished") for line in said if line.endswith(": already finished")}
    assert {name for name in known if "candidate" not in name} == {name.replace("_", " ") for name in stored}

    def comparable(rows: list[Result]) -> list[Result]:
        return [replace(row, seconds=0.0) for row in rows]

    expected = execution.evaluate(whole, "fine_tune", *data, keys)
    assert comparable(resumed.results) == comparable(expected.results)
    assert [sweep.best for sweep in resumed.about.sweeps] == [sweep.best for sweep in expected.about.sweeps]
    assert {row.seconds for rows, _ in stored.values() for row in rows} <= {row.seconds for row in resumed.results}
    assert resumed.about.seconds >= sum(about["seconds"] for _, about in stored.values())
    assert resumed.path and not [*killed.glob("results/*.unfinished")]
