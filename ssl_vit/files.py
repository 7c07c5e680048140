"""Atomic files: written under a temporary name, flushed to disk, then renamed. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ssl_vit.interfaces import UserError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to `path` when the block ends without an error."""
    # Random digits too: containers that share a disk may have equal process ids.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}_{secrets.token_hex(4)}.tmp")
    try:
        yield unfinished
        flush(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """`atomic_path`, opened for writing bytes."""
    with atomic_path(path) as unfinished, unfinished.open("wb", buffering=1 << 20) as file:
        yield file
        file.flush()


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError where the file holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path}: not valid JSON ({error}); delete it and run the command that wrote it again"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
