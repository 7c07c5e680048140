"""Colors are for terminals: what is piped has none. `test_ctrl_c.py` checks a training."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ESCAPE = "\x1b["
# What would decide in place of the output being a terminal or not.
CLEAN = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR", "CI", "TERM")}
CLEAN |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("arguments", [["--help"], ["recipes"], ["train", "--nothing"]])
def test_what_is_piped_has_none(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "ssl_vit", *arguments]
    done = subprocess.run(command, env=CLEAN, capture_output=True, text=True, timeout=240, check=False)
    text = done.stdout + done.stderr
    assert text.strip() and ESCAPE not in text
