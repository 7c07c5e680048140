"""Images that are not packed yet, by a name like that of shards: packed once into a cache, then read from there.

The cache is `$SSL_VIT_CACHE`, else `ssl-vit` in `$XDG_CACHE_HOME` or `~/.cache`. A folder in it is named by a hash of
what it was packed from: its path, the names, sizes, times and classes of the images, and the options. Each process
holds a shared lock on the sets that it uses. Others are removed, the least recently used first, before the cache
exceeds `$SSL_VIT_CACHE_GB` (GiB, default 50).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from filelock import FileLock

from ssl_vit.data import TEST
from ssl_vit.data.packing import pack, packing_plan
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import FOLDER, HUB, list_splits, open_source
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.data.places import check_outside, is_shards, names_of, part_of_shards, split_name
from ssl_vit.data.shards.info import INFO
from ssl_vit.files import expanded
from ssl_vit.interfaces import RunError, UserError, printable

HOLDOUT = 0.2  # of each class or all images, for `#test` of data without splits
_LARGE = 500_000  # bytes of an image; photographs of 12 megapixels have millions, ImageNet's a fifth of this
_BESIDE = 3 << 10  # bytes of headers, padding, label and name that a shard holds beside each image
_SET = re.compile(r".+-[0-9a-f]{16}")  # the name of a folder in the cache; see `_set`
_held: dict[Path, TextIO] = {}  # locks of the sets that this process uses, until it exits


def folder_of(spec: str) -> str:
    """The folder or URL of the shards that a data argument names; images are packed into the cache first.

    spec: shards; or images as `open_source` takes them, but a name on the hub only as `hf:NAME`. `PLACE#PART` is one
        part of either: a folder of shards in PLACE; a split of the images; or, where there is no split or one that is
        not for testing, `#train` and `#test` of a stratified holdout (a fifth of each class, or of images without
        classes). `#test` is the validation split where there is no test.

    Raises UserError for what cannot be found or read, RunError where the disk fails.
    """
    place, part = split_name(spec)
    if "://" in place:
        return f"{place.rstrip('/')}/{part}" if part else place
    if is_shards(place):
        return str(part_of_shards(expanded(place), part)) if part else place
    return str(_packed(place, part))


def _packed(place: str, part: str) -> Path:
    """The folder of one part of a source of images, packed if need be."""
    prefix = FOLDER if place.startswith(FOLDER) else ""
    parent = expanded(place.removeprefix(prefix)).resolve()
    is_split = parent.name in ("train", *TEST)  # other folders beside it are not read
    above = f"{prefix}{parent.parent}"
    if not part and is_split and parent.is_dir() and len(names := _layout(above)) > 1 and parent.name in names:
        place, part = above, parent.name  # the classes of a split are those of all splits
    splits = list_splits(place)
    if len(splits) > 1 or (part and set(splits) & set(TEST)):  # of a lone test split nothing is held out
        wanted = [name for name in names_of(part) if name in splits]
        if not wanted:
            wrong = f"has no part {part}" if part else "has several parts"
            raise UserError(f"{place} {wrong}; name one: {', '.join(f'{place}#{name}' for name in splits)}")
        return _set(place, {name: name for name in splits}) / wanted[0]
    if part not in ("train", "test") and part in splits:
        part = ""  # all there is
    if part and part not in ("train", "test"):
        raise UserError(f"{place} has no part {part}: it has no splits; name {place}, {place}#train or {place}#test")
    return _set(place, {"": splits[0] if splits else None}, HOLDOUT if part else 0) / part


def _layout(place: str) -> list[str]:
    try:
        return list_splits(place)
    except UserError:  # not a folder of images
        return []


def _set(place: str, splits: Mapping[str, str | None], holdout: float = 0) -> Path:
    """The packed copy of these splits, by part, in one folder of the cache."""
    options = Options(keep_names=True, holdout=holdout)
    with warnings.catch_warnings(record=True) as notes:  # such as of ignored files: printed only where they are packed
        warnings.simplefilter("always", UserWarning)
        sources = {part: open_source(place, split=split) for part, split in splits.items()}
    path = expanded(place.removeprefix(FOLDER))
    about = [[part, packing_plan(source, options), source.modified] for part, source in sources.items()]
    where = os.fsencode(path.resolve()) if path.exists() else b""
    key = hashlib.sha256(json.dumps(about).encode() + where).hexdigest()[:16]
    stem = re.sub(r"[^\w.-]+", "_", path.resolve().name if path.exists() else place.removeprefix(HUB))[-40:]
    folder = cache() / f"{stem}-{key}"
    check_outside(folder, [place])
    parts = ["train", "test"] if options.holdout else list(sources)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _held.get(folder) or (folder.parent / f".{folder.name}.lock").open("a+")  # NFS: shared needs reading
        waiting = False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{place}: waiting for another process packing {folder}", file=sys.stderr)
            waiting = True
            fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError as error:
        raise UserError(f"{folder.parent}: cannot write ({error.strerror}); set SSL_VIT_CACHE to a folder") from None
    while not all((folder / part / INFO).is_file() for part in parts):
        fcntl.flock(lock, fcntl.LOCK_UN)  # NFS keeps a shared lock while it waits: two processes would wait forever
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waiting:
                print(f"{place}: waiting for another process packing or using {folder}", file=sys.stderr)
            waiting = True
            # Until it is packed. An exclusive lock would also wait for a process that uses it, until that exits.
            fcntl.flock(lock, fcntl.LOCK_SH)
            time.sleep(random.uniform(0.02, 0.2))
            continue
        try:
            if not all((folder / part / INFO).is_file() for part in parts):
                needed = sum(source.bytes + _BESIDE * source.count for source in sources.values())
                _make_room(folder, place, needed, lock)
                for note in dict.fromkeys(str(warning.message) for warning in notes):
                    print(f"note: {printable(note)}", file=sys.stderr)
                _pack(place, sources, options, folder)
        finally:  # after an error, too: a notebook keeps the traceback, and with it the lock
            with suppress(OSError):  # nothing could be packed
                folder.rmdir()
            fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_SH)
    _held[folder] = lock
    os.utime(folder)
    return folder


def _pack(place: str, sources: dict[str, Source], options: Options, folder: Path) -> None:
    count = sum(source.count for source in sources.values())
    print(f"{place}: packing {count:,} images into {folder}", file=sys.stderr)
    for part, source in sources.items():
        # What is left of a set that was being removed may have lost its record.
        pack(source, folder / part, options, overwrite=not (folder / part / INFO).is_file())
    if (size := sum(source.bytes for source in sources.values()) / count) > _LARGE:
        faster = f"{size / 1e6:.1f} MB per image; `ssl-vit shards make --resize 256` makes shards that are read faster"
        print(f"note: {place}: {faster}", file=sys.stderr)
    if options.holdout:
        what = next(iter(sources.values())).held_out_from
        print(f"{place}: no test split: a fifth of {what} is held out as {place}#test", file=sys.stderr)


def cache() -> Path:
    if chosen := os.environ.get("SSL_VIT_CACHE"):
        return expanded(chosen).absolute()
    try:
        return expanded(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "ssl-vit"
    except RuntimeError:
        raise UserError("no home directory for the cache of images; set SSL_VIT_CACHE to a folder") from None


def _make_room(folder: Path, place: str, needed: int, lock: TextIO) -> None:
    """Remove the sets that were not used for longest until `needed` bytes fit beside the others; none that a process
    uses. The lock file then says how many bytes the set will have. Raises UserError where they do not fit."""
    try:
        limit = float(os.environ.get("SSL_VIT_CACHE_GB") or 50)
    except ValueError:
        raise UserError(f"SSL_VIT_CACHE_GB={os.environ['SSL_VIT_CACHE_GB']} is not a number (GiB)") from None
    if needed <= limit * 2**30:
        with FileLock(folder.parent / ".room.lock"):
            locks = {path: path.with_name(f".{path.name}.lock") for path in folder.parent.iterdir() if path != folder}
            others = [path for path, lock in locks.items() if _SET.fullmatch(path.name) and lock.exists()]
            sizes = {path: _size(path, locks[path]) for path in others}
            for path in sorted(others, key=lambda path: path.stat().st_mtime_ns):
                if needed + sum(sizes.values()) <= limit * 2**30:
                    break
                if _remove(path, locks[path]):
                    del sizes[path]
            if needed + sum(sizes.values()) <= limit * 2**30:
                try:
                    lock.truncate(0)
                    lock.write(str(needed))
                    lock.flush()
                    folder.mkdir(exist_ok=True)
                except OSError as error:
                    raise RunError(f"{folder.parent}: cannot write ({error.strerror})") from None
                return
    raise UserError(
        f"{place}: {needed / 2**30:.1f} GiB do not fit into {folder.parent}, which may hold {limit:g} GiB; "
        "set SSL_VIT_CACHE_GB, or pack it elsewhere with `ssl-vit shards make`"
    )


def _size(path: Path, lock: Path) -> int:
    """Bytes of a set; of one that another process is packing at least those that it will have."""
    written = sum(file.stat().st_size for file in path.rglob("*.tar"))
    with suppress(PermissionError, ValueError), lock.open() as file:  # another user's, or nothing is reserved yet
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return max(written, int(file.read()))
    return written


def _remove(path: Path, lock: Path) -> bool:
    """Remove a set, unless a process uses it or it is another user's. Without info.json first: what a killed process
    leaves is packed again."""
    try:
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for info in list(path.rglob(INFO)):
                info.unlink()
            shutil.rmtree(path)
    except (BlockingIOError, PermissionError):
        return False
    return True
