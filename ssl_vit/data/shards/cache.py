"""Shards behind URLs as local files: in a bounded cache that any number of processes share, or without a name.

A shard is downloaded to NAME.part under a lock for this shard, checked and renamed, so NAME is always whole. The kernel
releases a killed process's locks. Eviction unlinks: an open shard keeps its bytes until its reader closes it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO, cast

from filelock import FileLock, Timeout

from ssl_vit.data import RemoteConfig
from ssl_vit.data.shards.remote import download, find_filesystem, retried
from ssl_vit.files import expanded, flush
from ssl_vit.interfaces import RunError, UserError

_NAME = re.compile(r"[0-9a-f]{32}-")  # other files in the folder are not touched
# What tells the versions of an object apart, as S3, Google, Hugging Face and HTTP servers name it.
_VERSIONS = ("ETag", "etag", "generation", "VersionId", "LastModified", "Last-Modified", "mtime", "blob_id", "lfs")
_said: set[Path] = set()


def open_remote(url: str, remote: RemoteConfig, size: int | None = None, sha256: str = "") -> BinaryIO:
    """An object as an open, seekable local file: its copy in the cache, or in the folder for temporary files.

    size (bytes), sha256: expected values, where they are known. Raises UserError for an object that is missing, cannot
    be accessed or differs from them, RunError when a server does not answer or the disk is full.
    """
    if remote.cache_dir and (file := _cached(cache_folder(remote), url, remote, size, sha256)):
        return file
    try:
        copy = cast(BinaryIO, tempfile.TemporaryFile(prefix="ssl-vit-"))
        download(url, f"/dev/fd/{copy.fileno()}", remote, size, sha256)
    except OSError as error:
        raise RunError(
            f"{tempfile.gettempdir()}: a shard cannot be kept here while it is read: {error.strerror}; "
            "free space, or name another folder by TMPDIR or data.remote.cache_dir"
        ) from None
    return copy


def cache_folder(remote: RemoteConfig) -> Path:
    """`data.remote.cache_dir`, made where it is missing. Raises UserError where it cannot be written."""
    folder = expanded(remote.cache_dir or "")
    try:
        (folder / ".locks").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.remote.cache_dir={folder}: cannot be used: {error.strerror}") from None
    return folder


def _cached(folder: Path, url: str, remote: RemoteConfig, size: int | None, sha256: str) -> BinaryIO | None:
    """The shard in the cache, downloaded if need be; None where it cannot be kept."""
    known, place, version = bool(sha256) and size is not None, url.partition("?")[0], sha256
    if not known:
        served, version = _size_and_version(url, remote)
        size = served if size is None else size  # `download` compares it with what arrives
    if size is None:
        _say(folder, f"{url}: the server does not say how large it is")
        return None
    label = re.sub(r"[^\w.-]", "_", os.path.basename(place))[-80:]
    address = place if known else url  # a signed URL is renewed, its content is the same
    name = hashlib.sha256(f"{address}\n{version}\n{size}".encode()).hexdigest()[:32] + f"-{label}"
    try:
        with FileLock(folder / ".locks" / name):
            if file := _opened(folder / name, size):
                return file
            part = folder / f"{name}.{size}.part"
            if not _reserve(folder, part, size, remote):
                return None
            try:
                download(url, str(part), remote, size, sha256)
                flush(part)
                with FileLock(folder / ".locks" / "space"):  # or a count of the folder could miss it between its names
                    part.replace(folder / name)
                    return (folder / name).open("rb")  # afterwards, another process may remove it to make room
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"data.remote.cache_dir={folder}: cannot be written: {error.strerror or error}; free space, or lower "
            "data.remote.cache_gb"
        ) from None


def _opened(path: Path, size: int) -> BinaryIO | None:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    if os.fstat(file.fileno()).st_size != size:  # something else wrote to it
        file.close()
        return None
    os.utime(file.fileno())  # the time of its last use
    return file


def _reserve(folder: Path, part: Path, size: int, remote: RemoteConfig) -> bool:
    """Begin the part, whose name says how much it takes, after removing the least recently used shards if needed."""
    with FileLock(folder / ".locks" / "space"):
        cached = [path for path in folder.iterdir() if _NAME.match(path.name) and path != part]
        parts = [path for path in cached if path.suffix == ".part" and not _abandoned(path)]
        shards = [(path.stat(), path) for path in cached if path.suffix != ".part"]
        held = sum(int(path.name.split(".")[-2]) for path in parts) + sum(about.st_size for about, _ in shards)
        limit = int(remote.cache_gb * 2**30)
        for about, path in sorted(shards, key=lambda shard: shard[0].st_mtime_ns) if size <= limit else ():
            if held + size <= limit and shutil.disk_usage(folder).free >= size:
                break
            path.unlink()
            held -= about.st_size
        if held + size > limit:
            _say(folder, f"data.remote.cache_gb={remote.cache_gb:g} is too small for a shard of {size} bytes")
            return False
        part.unlink(missing_ok=True)  # of a killed download, or a link to another file
        part.touch(exist_ok=False)
        return True


def _abandoned(part: Path) -> bool:
    """Remove a part whose download was killed: nobody holds its lock."""
    try:
        with FileLock(part.parent / ".locks" / part.name.rsplit(".", 2)[0], timeout=0):
            part.unlink(missing_ok=True)
            return True
    except Timeout:
        return False


def _size_and_version(url: str, remote: RemoteConfig) -> tuple[int | None, str]:
    filesystem, path = find_filesystem(url, remote.timeout)
    about = retried(url, remote, filesystem.info, path)
    return about.get("size"), "|".join(str(about[name]) for name in _VERSIONS if about.get(name))


def _say(folder: Path, why: str) -> None:
    if folder not in _said:
        _said.add(folder)
        print(f"data.remote.cache_dir={folder}: shards are downloaded again each time: {why}", file=sys.stderr)
