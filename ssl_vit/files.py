"""Files that are whole or not there: written beside, flushed to the disk, then renamed. Torch-free."""

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
def whole_path(path: Path, tag: str = "") -> Iterator[Path]:
    """Where to write a file that appears under its name only when all of it is on the disk: `.TAG.tmp` ends its name
    until then.

    tag: tells writers of one folder apart (default: the process's number, and some of chance: containers and machines
    that share a disk may have the same numbers).
    """
    unfinished = path.with_name(f"{path.name}.{tag or _own_tag()}.tmp")
    try:
        yield unfinished
        flush(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _own_tag() -> str:
    return f"{os.getpid()}_{secrets.token_hex(4)}"


@contextmanager
def whole_file(path: Path, tag: str = "") -> Iterator[BinaryIO]:
    """The same, opened."""
    with whole_path(path, tag) as unfinished, unfinished.open("wb", buffering=1 << 20) as file:
        yield file
        file.flush()


def flush(path: Path) -> None:
    """To the disk: a file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, tag: str = "") -> None:
    """UTF-8, whole or not at all."""
    with whole_file(path, tag) as file:
        file.write(text.encode())


def write_json(path: Path, content: Any, tag: str = "") -> None:
    """Indented by one, whole or not at all."""
    write_text(path, json.dumps(content, indent=1) + "\n", tag)


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises UserError where it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path}: not valid JSON ({error}): delete it, and give the command that made it again"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def sha256(path: Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
