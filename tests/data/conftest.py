"""Fixtures of the data tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .servers import digit_shards, no_waiting, serve

__all__ = ["digit_shards", "no_waiting", "serve", "unprivileged"]


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder, seen as a user who is not root: root may read everything."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield folder
        os.seteuid(0)
    else:
        yield folder
    shutil.rmtree(folder)
