"""Fixtures of the report's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test writes its comparison."""
    return tmp_path / "c"
