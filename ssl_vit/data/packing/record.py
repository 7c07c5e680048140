"""`packing.jsonl`: what a folder of shards was packed from, and which of its shards are finished.

The first line is the plan, all that decides the bytes; then comes one line per finished shard. A folder with it and
without info.json was not finished; the same command resumes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ssl_vit.data.packing.writer import WrittenShard
from ssl_vit.data.shards.info import INFO, RECORD
from ssl_vit.files import write_text
from ssl_vit.interfaces import RunError, UserError

_LOCK = ".packing.lock"
_OWN_FILES = re.compile(rf"(\d{{6,}}\.tar|{re.escape(INFO)}|{re.escape(RECORD)})(\.\w+\.tmp)?")

PackingPlan = dict[str, Any]
Finished = dict[str, WrittenShard]  # by file name


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Create the folder and keep other packing processes out of it; remove unfinished files at both ends.

    Raises UserError where another process has it, RunError when the disk is full or not writable.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder to write the shards into")
    created = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / _LOCK, timeout=0):
            try:
                _remove_unfinished(out)
                yield
            finally:
                _remove_unfinished(out)
                (out / _LOCK).unlink(missing_ok=True)
                if created:
                    with suppress(OSError):  # not empty
                        out.rmdir()
    except Timeout:
        raise UserError(f"{out}: another process is packing into this folder; wait for it") from None
    except OSError as error:
        raise RunError(f"{out}: packing stopped: {error}; run the same command again to resume") from error


def prepare(out: Path, plan: PackingPlan, folders: list[Path], overwrite: bool) -> dict[Path, Finished]:
    """Make `out` ready for the plan, and return the shards that are finished, by folder.

    folders: `out`, or with a holdout its sub-folders.

    overwrite: remove the shards in `out`; unfinished shards of the same plan are resumed.

    Raises UserError where `out` holds anything else.
    """
    records = {folder: _read(folder) for folder in folders}
    old = [recorded for recorded, _ in records.values() if recorded is not None]
    complete = all((folder / INFO).exists() for folder in folders)
    if not old or old.count(plan) < len(old) or (overwrite and complete):
        if overwrite:
            clear(out, folders)
        elif old:
            changed = sorted({key for other in old for key in plan if other.get(key) != plan[key]})
            raise UserError(
                f"{out} holds other shards (different {', '.join(changed)}): pass --overwrite to replace them, "
                "or choose another folder"
            )
        elif any(path.name != _LOCK for path in out.iterdir()):
            raise UserError(f"{out} is not empty; choose another folder, or pass --overwrite to replace its shards")
        records = {folder: (plan, {}) for folder in folders}
    for folder, (_, finished) in records.items():
        folder.mkdir(exist_ok=True)
        lines = [json.dumps(plan), *(shard.model_dump_json() for shard in finished.values())]
        write_text(folder / RECORD, "".join(f"{line}\n" for line in lines))
    return {folder: finished for folder, (_, finished) in records.items()}


def add(folder: Path, shard: WrittenShard) -> None:
    """Record a finished shard."""
    with (folder / RECORD).open("a", encoding="utf-8") as file:
        file.write(f"{shard.model_dump_json()}\n")


def clear(out: Path, folders: list[Path]) -> None:
    """Remove the shard set in `out`, and of its sub-folders those in `folders` and those of an earlier holdout or
    cross-validation; no file that packing does not write."""
    for folder in _possible(out):
        plan = _read(folder)[0] or {}
        if folder in (out, *folders) or plan.get("holdout") or plan.get("folds"):
            # This first, and the record last: meanwhile the set counts as unfinished.
            (folder / INFO).unlink(missing_ok=True)
            _remove(folder, "*.tar")
            _remove(folder, "*")
            if folder != out:
                with suppress(OSError):  # not there, or with other files in it
                    folder.rmdir()


def _possible(out: Path) -> list[Path]:
    """The folders that packing into `out` may have written."""
    return [out, out / "train", out / "test", *sorted(out.glob("fold_*"))]


def _remove_unfinished(out: Path) -> None:
    for folder in _possible(out):
        if folder == out or not (folder / _LOCK).exists():  # another process may be packing into the sub-folder
            _remove(folder, "*.tmp")
            if folder != out:  # without its record: the disk was full
                with suppress(OSError):  # not there, or not empty
                    folder.rmdir()


def _remove(folder: Path, pattern: str) -> None:
    for file in folder.glob(pattern):
        if file.is_file() and _OWN_FILES.fullmatch(file.name):
            file.unlink()


def _read(folder: Path) -> tuple[PackingPlan | None, Finished]:
    """(plan, finished shards); (None, {}) where nothing is recorded. A line that was cut is ignored, and so is a shard
    that is not there with the size that was recorded."""
    try:
        lines = (folder / RECORD).read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None, {}
    plan: PackingPlan = {}
    finished: Finished = {}
    with suppress(ValueError, TypeError, IndexError):
        plan = dict(json.loads(lines[0]))
        for line in lines[1:]:
            shard = WrittenShard.model_validate_json(line)
            path = folder / shard.entry.file
            if not shard.entry.samples or (path.is_file() and path.stat().st_size == shard.entry.bytes):
                finished[path.name] = shard
    return plan, finished
