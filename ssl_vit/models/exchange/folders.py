"""A new folder appears complete or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ssl_vit.interfaces import RunError, UserError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside `out`; at the end it is renamed to `out`, after an error it is deleted.

    Raises UserError where `out` is a file or holds files, RunError when it cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty: give another folder, or delete that one")
    out = out.resolve()
    unfinished = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        if out.exists():
            out.rmdir()  # empty; only POSIX would rename over it
        unfinished.rename(out)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own
        raise RunError(f"{out}: cannot write there: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
