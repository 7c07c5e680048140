"""Real processes: shards on disk, commands as a user types them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ssl_vit.data import pack, sources

Run = Callable[..., "subprocess.CompletedProcess[str]"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ and test/ shards of the embedded digits."""
    folder = tmp_path_factory.mktemp("digits")
    for split in ("train", "test"):
        pack.make(sources.open_source("digits", split=split), folder / split, shards=8, progress=False)
    return folder


@pytest.fixture
def ssl_vit(tmp_path: Path) -> Run:
    """Run `python -m ssl_vit ...` in a directory of its own; the result carries its exit code and both outputs."""

    def run(*arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ssl_vit", *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run
