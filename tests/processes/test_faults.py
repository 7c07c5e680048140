"""What breaks while processes train: nothing saved is lost, every process ends, and the message says what to do."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssl_vit import execution, recipe
from ssl_vit.data.order import LanePosition, lane_stream
from ssl_vit.data.shards import open_shards
from ssl_vit.interfaces import RunError
from ssl_vit.models import factory
from ssl_vit.training import checkpoint
from tests.processes.reading import losses, same, saved, weights

World = Callable[..., Any]
SMALL = ("encoder.width=32", "encoder.depth=2", "encoder.heads=2", "training.picture_every=0", "training.batch_size=48")


def settings(digits: Path, run: Path, *more: str) -> list[str]:
    keys = [f"data.train={digits}/train", f"run={run}", "data.lanes=12", "training.log_every=1", "training.trackers={}"]
    return [*keys, *SMALL, *more]


def train(digits: Path, run: Path, *more: str) -> Path:
    """In this process."""
    return execution.train(recipe.load_recipe("digits_ssl", settings(digits, run, *more)), quiet=True)


def wait_for_step(run: Path, step: int, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while saved(run) < step:
        assert time.monotonic() < deadline, "no such checkpoint came"
        time.sleep(0.02)


def test_a_preempted_process_makes_all_save_and_leave_with_75(world: World, digits: Path, tmp_path: Path) -> None:
    """SIGUSR1 reaches one of two processes; another number of processes continues unaffected."""
    run, keys = tmp_path / "run", ["training.steps=20", "training.checkpoint_every=4"]
    command = ["train", "digits_ssl", *settings(digits, run, *keys)]
    both = world(2, "signaled", signal.SIGUSR1.value, 1, 4, *command)
    assert [process.wait(60) for process in both] == [75, 75], both[0].text + both[1].text
    assert "stopped by SIGUSR1; saved" in both[0].text and "stopped" not in both[1].text
    before = losses(run)
    assert [step for step, _ in before] == list(range(1, 6)) and saved(run) == 5  # where it stood
    train(digits, run, *keys)
    whole = train(digits, tmp_path / "whole", *keys)
    assert dict(losses(run)) == pytest.approx(dict(losses(whole)), abs=1e-4)
    assert [step for step, _ in losses(run)] == list(range(1, 21)) and losses(run)[:5] == before


@pytest.mark.parametrize("killed", [0, 1])
def test_the_end_of_one_process_ends_the_others(world: World, digits: Path, tmp_path: Path, killed: int) -> None:
    """The first one holds what the others find each other by."""
    run, keys = tmp_path / "run", ["training.steps=20000", "training.checkpoint_every=4"]
    both = world(2, "command_line", "train", "digits_ssl", *settings(digits, run, *keys))
    wait_for_step(run, 4)
    os.kill(both[killed].pid, signal.SIGKILL)
    start = time.monotonic()
    assert both[1 - killed].wait(30) == 1
    assert time.monotonic() - start < 15
    text = both[1 - killed].text
    assert "another process of this run has ended" in text and "training.timeout" not in text
    assert "Traceback" not in text
    assert f"last good checkpoint: {run}/checkpoints/step_" in text


def test_an_error_of_one_process_ends_all_in_plain_words(world: World, digits: Path, tmp_path: Path) -> None:
    bad = tmp_path / "shards"
    shutil.copytree(digits, bad)
    spoil_a_sample_of_lane(11, bad / "train", batch=48)
    main, other = world(2, "errors_of_one", digits, tmp_path, bad)
    assert (main.wait(), other.wait()) == (0, 0), main.text + other.text
    lines = [dict(line.split(": ", 1) for line in one.text.splitlines() if ": " in line[:10]) for one in (main, other)]
    for told in lines:
        assert told["occupied"].startswith("UserError everywhere=True") and "holds no run" in told["occupied"]
        assert told["full"].startswith("RunError everywhere=True") and "No space left on device" in told["full"]
    kept = sorted(path.name for path in (tmp_path / "full" / "checkpoints").iterdir())
    assert kept == ["step_00000004", "step_00000008"]  # nothing half-made beside them
    factory.load(tmp_path / "full")
    assert lines[1]["bad"].startswith("UserError everywhere=False") and "on_bad_sample=fail" in lines[1]["bad"]
    assert lines[0]["bad"].startswith("RunError everywhere=False another process of this run has ended")


def spoil_a_sample_of_lane(lane: int, folder: Path, batch: int) -> None:
    """Overwrite an image that this lane reads in its third step."""
    shards = open_shards(str(folder))
    pieces = lane_stream(0, shards.sets(None), 12, lane, LanePosition())
    members = [
        (piece.shard, int(member)) for piece, _ in zip(pieces, range(3), strict=False) for member in piece.members
    ]
    shard, member = members[2 * batch // 12]
    path = Path(shards.urls[shard])
    with tarfile.open(path) as tar:
        keys = sorted({name.split(".")[0] for name in tar.getnames()})
        entry = next(entry for entry in tar if entry.name.startswith(f"{keys[member]}.png"))
    with path.open("r+b") as file:
        file.seek(entry.offset_data)
        file.write(b"no picture".ljust(entry.size, b"!"))


def test_a_full_and_a_read_only_disk_lose_nothing(world: World, digits: Path, tmp_path: Path) -> None:
    trial = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run(trial, capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("this user cannot mount a disk, as in most containers")
    process = world(1, "disk", digits, tmp_path)[0]
    assert process.wait() == 0, process.text
    told = dict(line.split(": ", 1) for line in process.text.splitlines() if ": " in line[:12])
    assert told["full"].startswith("RunError") and "could not save checkpoint" in told["full"]
    assert "last good checkpoint" in process.text
    left = told["left"].split()
    assert left == [f"step_{step:08d}" for step in range(2, 2 * len(left) + 1, 2)] and 0 < len(left) < 10
    assert told["read-only"].startswith("RunError") and "Read-only file system" in told["read-only"]
    assert told["fixed"] == "done"
    assert told["steps"].split() == [str(step) for step in range(1, 21)]


def test_a_broken_checkpoint_is_put_aside(digits: Path, tmp_path: Path) -> None:
    """A flipped bit in each kind of file: the one before it is used, and the end is the same, bit for bit."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    keys = ["training.steps=8", "training.checkpoint_every=2", "training.keep_last=9", "training.ema=0.9"]
    train(digits, whole, *keys)
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns(".lock"))
    names = ["optimizer.safetensors", "encoder.safetensors", "SHA256SUMS"]
    for step, name in zip((8, 6, 4), names, strict=True):
        file = run / "checkpoints" / f"step_{step:08d}" / name
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    train(digits, run, *keys)
    broken = sorted(path.name for path in (run / "checkpoints").glob("broken_*"))
    assert broken == [f"broken_step_{step:08d}" for step in (4, 6, 8)]
    for name in ("encoder", "objective", "training", "optimizer"):
        assert same(weights(run, name), weights(whole, name)), name
    assert losses(run) == losses(whole)


def test_a_disk_that_does_not_answer_breaks_no_checkpoint(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, keys = tmp_path / "run", ["training.steps=4", "training.checkpoint_every=2", "training.keep_last=9"]
    train(digits, run, *keys)
    log = (run / "metrics.jsonl").read_text()

    def fails(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "sha256", fails)
        with pytest.raises(RunError, match=r"step_00000004: cannot be read .*run the command again"):
            train(digits, run, *keys)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000002", "step_00000004"]
    train(digits, run, *keys)
    assert (run / "metrics.jsonl").read_text() == log
