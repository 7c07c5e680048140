"""Colors are for terminals: what is piped has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ESCAPE = "\x1b["
STEPS = ["training.steps=2", "training.log_every=1"]
# What would decide in place of the output being a terminal or not.
CLEAN = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR", "CI", "TERM")}
CLEAN |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}


def piped(*arguments: str, cwd: Path | None = None) -> str:
    command = [sys.executable, "-m", "ssl_vit", *arguments]
    done = subprocess.run(command, cwd=cwd, env=CLEAN, capture_output=True, text=True, timeout=240, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["recipes"], ["train", "--nothing"]])
def test_what_is_piped_has_none(arguments: list[str]) -> None:
    text = piped(*arguments)
    assert text.strip() and ESCAPE not in text


def test_training_has_none_in_a_pipe(few_digits: Path, tmp_path: Path) -> None:
    text = piped("train", "digits_ssl", f"data.train={few_digits}/train", "run=run", *STEPS, cwd=tmp_path)
    assert "loss" in text and ESCAPE not in text
