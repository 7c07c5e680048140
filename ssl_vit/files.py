"""Files: atomic ones, written under a temporary name, flushed to disk, then renamed; and untrusted ones. Torch-free."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safetensors import SafetensorError

from ssl_vit.interfaces import RunError, UserError

if TYPE_CHECKING:
    import numpy as np

WEIGHTS = "encoder.safetensors"
_EXPANDED_FREELY, _EXPANSION = 1 << 28, 20  # bytes; larger archives may expand by this factor


def expanded(place: str | os.PathLike[str]) -> Path:
    """The path, with `~` and `~USER` replaced where there is such a user (`Path.expanduser` raises where not)."""
    return Path(os.path.expanduser(place))


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first. From step 100,000,000 on, their names are longer."""
    return sorted(run.glob("checkpoints/step_*"), key=lambda path: (len(path.name), path.name))


def weights_file(folder: Path) -> Path | None:
    """The encoder of a run or weights folder, else of its newest checkpoint that has one; None: there is none."""
    return next(filter(Path.is_file, (place / WEIGHTS for place in (folder, *reversed(checkpoints(folder))))), None)


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


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside `out`; at the end it is renamed to `out`, after an error it is deleted.

    Raises UserError where `out` is a file or holds files, RunError when it cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty: give another folder, or delete that one")
    out = out.resolve()
    unfinished = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")  # not shared with another process
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(out)  # over an empty folder, too
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own
        raise RunError(f"{out}: cannot write there: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def writable(folder: Path, otherwise: str) -> Path:
    """The folder, created if it does not exist. Raises RunError, with what to do `otherwise`, where no file can be
    written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RunError(f"{folder}: cannot write there ({error.strerror}); {otherwise}") from None
    return folder


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk (fsync). Some file systems refuse that for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF) or not path.is_dir():
            raise
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
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not valid JSON ({error}); delete it and run the command that wrote it again"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def check_archive(path: Path) -> None:
    """Raises ValueError for a zip file that would fill the memory: arrays and weights hardly shrink."""
    with zipfile.ZipFile(path) as archive:
        size, stored = sum(member.file_size for member in archive.infolist()), path.stat().st_size
    if size > _EXPANDED_FREELY and size > _EXPANSION * stored:
        raise ValueError(f"{stored} bytes that would expand to {size}")


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a `.npz` file. Raises ValueError or OSError for any other file, and for objects in it, which are
    not loaded."""
    import numpy as np

    try:
        check_archive(path)
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except OSError:
        raise
    except Exception as error:  # NumPy and zipfile raise many types for damaged members
        raise ValueError(str(error)) from None


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
