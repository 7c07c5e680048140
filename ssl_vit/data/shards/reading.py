"""One shard on the local disk: where each of its samples lies, and their bytes on demand.

Training reads a shard in shuffled order, so a shard is not read front to back into memory: its headers are walked once
(about 10 microseconds a sample) and every sample is then one `pread`. What a stream holds does not grow with the shard.
"""

from __future__ import annotations

import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import BinaryIO

from ssl_vit.data.shards import ShardSet
from ssl_vit.interfaces import RunError, UserError

_BLOCK = tarfile.BLOCKSIZE
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


class BadSample(Exception):
    """A sample that cannot be used; the message says why. The stream skips, counts and names it."""


@dataclass(frozen=True)
class _Span:
    """A member's bytes, by place; WebDataset's grouping carries it where it would carry the bytes."""

    offset: int
    size: int


class ShardFile:
    """An open shard: found samples, read one by one. It closes its file when it is dropped."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Take over an open, seekable tar and find its samples; damage ends the list and is kept for `read`.

        Raises UserError for a compressed tar.
        """
        self.file, self.name = file, name
        if os.pread(file.fileno(), 6, 0).startswith(_COMPRESSED):
            raise UserError(f"{name}: a compressed tar cannot be read by place: decompress it (images do not shrink)")
        self.damage = ""
        self.samples: list[dict[str, str | _Span]] = list(self._group())

    def _group(self) -> Iterator[dict[str, str | _Span]]:
        from webdataset.tariterators import group_by_keys  # imports torch, which packing processes do without

        def note(error: Exception) -> bool:
            self.damage = str(error).partition(" @ ")[0] or type(error).__name__
            return True

        try:
            members = ({"fname": name, "data": span, "__url__": self.name} for name, span in _members(self.file))
            yield from group_by_keys(members, handler=note)
        except (tarfile.TarError, OSError, EOFError) as error:
            note(error)

    def read(self, position: int) -> dict[str, bytes | str]:
        """One sample's raw members by extension, plus `__key__`. Raises BadSample where the shard ends before it,
        RunError where the disk refuses."""
        if position >= len(self.samples):
            why = f"the shard is damaged ({self.damage})" if self.damage else "the shard ends before it"
            raise BadSample(f"missing: {why}")
        content: dict[str, bytes | str] = {}
        for name, value in self.samples[position].items():
            if isinstance(value, _Span):
                try:
                    content[name] = os.pread(self.file.fileno(), value.size, value.offset)
                except OSError as error:  # of the disk or the network: the sample may be good
                    raise RunError(f"{self.name}: cannot be read: {error.strerror}") from None
                if len(content[name]) < value.size:
                    raise BadSample("missing: the shard was cut short while it was read")
            else:
                content[name] = value
        return content


def _members(file: BinaryIO) -> Iterator[tuple[str, _Span]]:
    """Regular members in order. Plain headers are read here, five times faster than `tarfile` does; from the first
    header of another kind (long names, directories, damage) on, `tarfile` takes over and judges.
    """
    descriptor, offset = file.fileno(), 0
    length = os.fstat(descriptor).st_size
    while (plain := _plain(os.pread(descriptor, _BLOCK, offset))) is not None:
        name, size = plain
        if offset + _BLOCK + size > length:
            raise tarfile.ReadError("unexpected end of data")
        yield name, _Span(offset + _BLOCK, size)
        offset += _BLOCK + (size + _BLOCK - 1) // _BLOCK * _BLOCK
    file.seek(offset)
    if length == offset or os.pread(descriptor, _BLOCK, offset) == bytes(_BLOCK):
        return
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            if member.isreg():
                if member.offset_data + member.size > length:
                    raise tarfile.ReadError("unexpected end of data")
                yield member.name, _Span(member.offset_data, member.size)


def _plain(header: bytes) -> tuple[str, int] | None:
    """Name and size of a regular member with a sound ustar header that needs nothing else; None for all others."""
    if (
        len(header) < _BLOCK
        or header[257:262] != b"ustar"
        or header[156:157] not in _PLAIN
        or header[345]
        or header[124] & 0x80
    ):
        return None
    try:
        checksum = int(header[148:156].rstrip(b"\0 ") or b"0", 8)
        size = int(header[124:136].rstrip(b"\0 ") or b"0", 8)
        name = header[: header.find(b"\0", 0, 100) if b"\0" in header[:100] else 100].decode("ascii")
    except ValueError:
        return None
    if sum(header) - sum(header[148:156]) + 256 != checksum:
        return None
    return name, size


class OpenShards:
    """The shards of a set that a reader has open, the least recently used making room; the next ones are opened ahead,
    each in a thread of its own, so that nothing waits for a slow disk or a download.

    A shard behind a URL is kept whole in an unnamed temporary file while it is open (in `data.remote.cache_dir` where
    there is one).
    """

    def __init__(self, shards: ShardSet, most: int) -> None:
        self.shards, self.most = shards, most
        self.open: OrderedDict[int, Future[ShardFile]] = OrderedDict()

    def ahead(self, shard: int) -> None:
        """Begin to open a shard."""
        if shard in self.open:
            return
        future: Future[ShardFile] = Future()
        self.open[shard] = future
        Thread(target=self._open, args=(shard, future), daemon=True).start()

    def get(self, shard: int) -> ShardFile:
        """The open shard. Raises UserError or RunError where it cannot be opened."""
        if shard not in self.open:
            self.open[shard] = Future()
            self._open(shard, self.open[shard])
        self.open.move_to_end(shard)
        while len(self.open) > self.most:
            self.open.popitem(last=False)
        return self.open[shard].result()

    def _open(self, shard: int, future: Future[ShardFile]) -> None:
        url = self.shards.urls[shard]
        try:
            future.set_result(ShardFile(self.shards.on_disk(shard), url))
        except BaseException as error:
            future.set_exception(error)
