"""Whole shards kept on a local disk, within a bound of bytes, by any number of processes at once.

A shard is downloaded under a lock of its own to NAME.part, checked, synced and renamed, so NAME is always whole, and a
download that a kill cut short is thrown away by whoever comes next. The kernel releases a killed process's locks.
Shards are evicted by unlinking: one that is being read keeps its bytes (POSIX) until its reader closes it, so eviction
asks nobody, and the bound holds for the files with a name.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from ssl_vit.data import RemoteConfig
from ssl_vit.data.shards.remote import RemoteFile
from ssl_vit.interfaces import UserError

_CHUNK = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NAME = re.compile(r"[0-9a-f]{32}-")  # what else lies in the folder is not touched
_said: set[Path] = set()


class ShardCache:
    """The folder of `data.remote.cache_dir`. Raises UserError where it cannot be written."""

    def __init__(self, remote: RemoteConfig) -> None:
        self.folder, self.limit = Path(remote.cache_dir or "").expanduser(), int(remote.cache_gb * 2**30)
        self.locks = self.folder / ".locks"
        try:
            self.locks.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from None

    def open(self, file: RemoteFile, sha256: str = "") -> BinaryIO | None:
        """The object as a local file, downloaded if need be; None where it cannot be kept (too large, disk full), which
        is said once, so that it is streamed instead.

        sha256: of its bytes, as `info.json` has it; without it the server is asked which version it has. Raises
        UserError for an object with another sum, and what reading `file` raises.
        """
        if not (sha256 and file.size is not None):
            file.connect()
        identity = "\n".join([file.url, sha256 or file.tag, str(file.size)])
        label = re.sub(r"[^\w.-]", "_", os.path.basename(file.url.partition("?")[0]))[-80:]
        path = self.folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}-{label}"
        try:
            if kept := self._kept(path, file.size):
                return kept
            with FileLock(self.locks / path.name):
                return self._kept(path, file.size) or self._download(file, path, sha256)
        except OSError as error:
            if error.errno not in _FULL:
                raise self._unusable(error) from None
            self._decline(f"the disk refuses ({error.strerror})")
            return None

    def _kept(self, path: Path, size: int | None) -> BinaryIO | None:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        if os.fstat(file.fileno()).st_size != size:  # something else wrote to it
            file.close()
            return None
        os.utime(file.fileno())  # the time of its last use
        return file

    def _download(self, file: RemoteFile, path: Path, sha256: str) -> BinaryIO | None:
        if file.size is None:
            self._decline("the server does not say how large its objects are")
            return None
        part, whole = path.with_name(path.name + ".part"), False
        local = part.open("w+b")
        try:
            if self._reserve(local, part, file.size):
                download(file, local, sha256)
                os.fsync(local.fileno())
                whole = True
        finally:
            with FileLock(self.locks / "room"):
                if whole:
                    part.replace(path)
                else:
                    part.unlink()
                    local.close()
        return local if whole else None

    def _reserve(self, local: BinaryIO, part: Path, size: int) -> bool:
        """Give the part its final length, so that others count it, once what is unused for longest has made room."""
        with FileLock(self.locks / "room"):
            own = [other for other in self.folder.iterdir() if _NAME.match(other.name) and other != part]
            shards = {other: other.stat() for other in own if other.suffix != ".part"}
            parts = [other for other in own if other.suffix == ".part" and not self._left_over(other)]
            held = sum(about.st_size for about in (*shards.values(), *(other.stat() for other in parts)))
            for other, about in sorted(shards.items(), key=lambda item: item[1].st_mtime_ns):
                if held + size <= self.limit and shutil.disk_usage(self.folder).free >= size:
                    break
                other.unlink()
                held -= about.st_size
            if held + size > self.limit:
                self._decline(f"data.remote.cache_gb={self.limit / 2**30:g} has no room for one of {size} bytes more")
                return False
            local.truncate(size)
            return True

    def _left_over(self, part: Path) -> bool:
        """Remove a part whose download was killed: nobody holds its lock."""
        try:
            with FileLock(self.locks / part.name.removesuffix(".part"), timeout=0):
                part.unlink(missing_ok=True)
                return True
        except Timeout:
            return False

    def _decline(self, why: str) -> None:
        """Say, once a process, that what cannot be kept is streamed."""
        if self.folder not in _said:
            _said.add(self.folder)
            print(f"data.remote.cache_dir={self.folder}: shards are streamed, not kept: {why}", file=sys.stderr)

    def _unusable(self, error: OSError) -> UserError:
        return UserError(f"data.remote.cache_dir={self.folder}: cannot be used: {error.strerror or error}")


def download(source: Any, target: BinaryIO, sha256: str = "") -> None:
    """Write a whole `RemoteFile` (or other raw stream) to an open file and go back to its beginning.

    sha256: what the bytes must have. Raises UserError where they do not, twice, and what reading raises.
    """
    found = _copy(source, target)
    if sha256 and found != sha256:
        source.restart()  # a transfer can go wrong; twice in the same way it does not
        found = _copy(source, target)
    if sha256 and found != sha256:
        raise UserError(
            f"{source.url}: its sha256 is {found[:12]}..., where {sha256[:12]}... is expected: it was replaced or "
            "damaged; upload the shards and their info.json again"
        )


def _copy(source: io.RawIOBase, target: BinaryIO) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    target.seek(0)
    while count := source.readinto(buffer):
        digest.update(memoryview(buffer)[:count])
        target.write(memoryview(buffer)[:count])
    target.truncate()
    target.seek(0)
    return digest.hexdigest()
