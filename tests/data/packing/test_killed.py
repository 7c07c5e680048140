"""Packing that is killed again and again writes the shards of an undisturbed one: by its command, and on first use."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ssl_vit.files import sha256

from .pictures import encoded, write

KILLS = 10
SMALL = ["encoder.width=16", "encoder.depth=1", "encoder.heads=2", "training.steps=3", "training.batch_size=16"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of 300 PNGs of noise, one of them broken."""
    root = tmp_path_factory.mktemp("source") / "images"
    for number in range(600):
        write(root / "ab"[number % 2] / f"{number}.png", encoded("PNG", number, (120, 90)))
    (root / "b" / "5.png").write_bytes(b"no image")
    return root


@dataclass
class Kills:
    """How many there were while shards were missing, and how many of them while the file of one was being written."""

    all: int = 0
    inside: int = 0


def files(folder: Path) -> set[str]:
    """Shards, finished or not."""
    return {path.name for path in folder.rglob("*.tar*")}


def kill_again_and_again(command: list[str], out: Path, parts: int, environment: dict[str, str]) -> Kills:
    """At random moments, the whole group or the main process alone, whose workers must end by themselves.

    out: where so many sets come to lie; removed when they are complete before there were enough kills.
    """
    dice, kills = random.Random(0), Kills()
    while kills.all < KILLS:
        before = files(out)
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            while process.poll() is None and files(out) <= before:
                time.sleep(0.002)
            time.sleep(dice.random() * 0.3)
            dice.choice((os.kill, os.killpg))(process.pid, signal.SIGKILL)
        if len([*out.rglob("info.json")]) == parts:
            shutil.rmtree(out)
        else:
            assert process.returncode == -signal.SIGKILL
            kills.all += 1
            kills.inside += any(name.endswith(".tmp") for name in files(out))
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=100)
    return kills


def checksums(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256(path) for name in ("*.tar*", "info.json") for path in folder.rglob(name)
    }


@pytest.mark.slow
def test_the_command(images: Path, tmp_path: Path) -> None:
    options = ["--shards", "60", "--resize", "60", "--holdout", "0.2", "--jobs", "2"]
    command = [sys.executable, "-m", "ssl_vit", "shards", "make", str(images)]
    kills = kill_again_and_again([*command, str(tmp_path / "killed"), *options], tmp_path / "killed", 2, {**os.environ})
    subprocess.run([*command, str(tmp_path / "whole"), *options], check=True, capture_output=True)
    assert checksums(tmp_path / "killed") == checksums(tmp_path / "whole")
    assert len(checksums(tmp_path / "whole")) == 75 + 2
    print(kills)
    assert kills.all == KILLS and kills.inside >= 3


@pytest.mark.slow
def test_the_first_use_of_a_folder(images: Path, tmp_path: Path) -> None:
    """By training, which ends with the same weights."""
    sums, weights = [], []
    for name in ("killed", "whole"):
        cache, run = tmp_path / name / "cache", tmp_path / name / "run"
        command = [sys.executable, "-m", "ssl_vit", "train", "digits_ssl", f"data.train={images}#train", f"run={run}"]
        command += [*SMALL, "data.workers=0"]
        environment = {**os.environ, "SSL_VIT_CACHE": str(cache)}
        if name == "killed":
            kills = kill_again_and_again(command, cache, 2, environment)
        else:
            subprocess.run(command, env=environment, check=True, capture_output=True)
        sums.append(checksums(cache))
        weights.append(sha256(run / "encoder.safetensors"))
    assert sums[0] == sums[1] and len(sums[1]) > 4
    assert weights[0] == weights[1]
    print(kills)
    assert kills.all == KILLS and kills.inside >= 3
