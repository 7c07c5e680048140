"""Ctrl-C ends every command cleanly: one line, exit code 1, no traceback from any of its processes, none left behind.

A terminal sends the signal to all processes of the foreground group, so the tests do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

LONG = "training.steps=100000,training.batch_size=16,training.checkpoint_every=20"
FEW = ["seeds=[0]", "evaluators.few_shot.labels_per_class=[1]", "evaluators.fine_tune=null", "pictures=false"]


def wait_until(condition: Callable[[], object], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, f"ended before it could be interrupted:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"did not start its work:\n{log.read_text()}"
        time.sleep(0.05)


def interrupt(tmp_path: Path, arguments: list[str], at_work: Callable[[psutil.Process], object]) -> str:
    """Start `ssl-vit ARGUMENTS`, press Ctrl-C once `at_work`; everything it printed."""
    log = tmp_path / "log.txt"
    decides_colors = ("FORCE_COLOR", "NO_COLOR", "CI")
    environment = {name: value for name, value in os.environ.items() if name not in decides_colors}
    environment |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "ssl_vit", *arguments],
            cwd=tmp_path, env=environment, stdout=file, stderr=file, start_new_session=True,
            # A shell starts what runs in its background, such as these tests, with Ctrl-C ignored.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
    try:
        watched = psutil.Process(process.pid)
        wait_until(lambda: at_work(watched), process, log)
        children = watched.children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(120)
        _, left = psutil.wait_procs(children, 30)
        assert not left
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    text = log.read_text()
    assert code == 1, text
    assert "Traceback" not in text and "KeyboardInterrupt" not in text, text
    assert text.rstrip().rpartition("\n")[2].startswith("stopped; run the same command to "), text
    return text


def test_train(few_digits: Path, tmp_path: Path) -> None:
    keys = [f"data.train={few_digits}/train", "run=run", "data.workers=1", *LONG.split(",")]
    text = interrupt(tmp_path, ["train", "digits_ssl", *keys], lambda _: any(tmp_path.glob("run/checkpoints/step_*")))
    assert "loss" in text and "\x1b[" not in text, "colors outside of a terminal"
    steps = [int(path.name[5:]) for path in tmp_path.glob("run/checkpoints/step_*")]
    assert max(steps) % 20, "the training that was stopped did not save where it stood"
    assert f"stopped by SIGINT; saved, run the same command to resume at step {max(steps)}" in text


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_compare(few_digits: Path, tmp_path: Path, jobs: int) -> None:
    keys = [f"data={{folds: [], train: {few_digits}/train, test: {few_digits}/test}}", "run=run", f"jobs={jobs}", *FEW]
    keys += [f"arms.{arm}.overrides=[{LONG}]" for arm in ("ssl", "supervised")]
    interrupt(tmp_path, ["compare", "demo_digits", *keys], lambda _: any(tmp_path.glob("run/ssl/checkpoints/step_*")))
    assert not list(tmp_path.glob("run/tasks/*.json"))


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    keys = [*FEW, *(f"arms.{arm}.overrides=[{LONG}]" for arm in ("ssl", "supervised"))]
    interrupt(tmp_path, ["demo", *keys], lambda _: any(tmp_path.glob("runs/demo/ssl-fold0/checkpoints/step_*")))


@pytest.mark.slow
def test_eval(few_digits: Path, tmp_path: Path) -> None:
    """While loader workers read, and before any result is written."""
    keys = [f"data.train={few_digits}/train", "run=run", "data.workers=1"]
    command = [sys.executable, "-m", "ssl_vit", "train", "digits_ssl", *keys, "training.steps=2"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=240)
    keys = ["training.steps=100000", "sweep={}", "seeds=[0]"]
    interrupt(tmp_path, ["eval", "run", "fine_tune", "--data", str(few_digits), *keys], lambda one: one.children())
    assert not any(tmp_path.glob("run/results/*.json"))


def test_shards_make(tmp_path: Path) -> None:
    folder = tmp_path / "images" / "noise"
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (800, 800, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "one.jpg", quality=95)
    for n in range(150):
        os.link(tmp_path / "one.jpg", folder / f"{n}.jpg")
    arguments = ["shards", "make", "images", "out", "--resize", "400", "--shards", "30", "--jobs", "2"]
    interrupt(tmp_path, arguments, lambda _: any((tmp_path / "out").glob("*.tar")))
    assert not (tmp_path / "out/info.json").exists()
    subprocess.run([sys.executable, "-m", "ssl_vit", *arguments], cwd=tmp_path, check=True, timeout=240)
    assert (tmp_path / "out/info.json").exists()
