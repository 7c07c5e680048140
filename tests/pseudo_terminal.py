"""A process on a terminal of its own."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Mapping, Sequence


def on_a_terminal(command: Sequence[str], environment: Mapping[str, str], stdout: int | None = None) -> tuple[str, str]:
    """(what the terminal showed, what came through a pipe). stdout: `subprocess.PIPE`; None is the terminal too."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, env=environment, stdin=theirs, stdout=stdout or theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        shown += part
    piped, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0
    return shown.decode(), (piped or b"").decode()
