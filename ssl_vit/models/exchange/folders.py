"""A new folder appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ssl_vit.interfaces import RunError, UserError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside `out`, which becomes `out` at the end and is deleted when anything goes wrong.

    Raises UserError where `out` is a file or holds files, RunError where the disk refuses.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already and not empty: give another folder, or delete that one")
    whole = out.resolve()
    beside = whole.with_name(f".{whole.name}.tmp")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        if whole.exists():
            whole.rmdir()  # it is empty; only POSIX would rename over it
        beside.rename(whole)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own
        raise RunError(f"{out}: cannot write there: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
