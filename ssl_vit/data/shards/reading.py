"""One shard on the local disk: where each of its samples lies, and their bytes on demand.

Training reads a shard in shuffled order, so its headers are walked once (about 10 microseconds per sample) and every
sample is then one `pread` per member. What a stream holds does not grow with the shard. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import IO, BinaryIO, cast

from ssl_vit.data.shards.info import IMAGE_EXTENSIONS, MAX_MEMBER_BYTES
from ssl_vit.interfaces import BadSample, RunError, UserError, printable

READ_EXTENSIONS = (*IMAGE_EXTENSIONS, "cls")
_MAX_HEADER_BYTES = 1 << 20  # of a long name or a pax header
_BLOCK = tarfile.BLOCKSIZE
_PADDING = 1 << 20  # bytes after the end mark that must be zero; tar pads to 10 KiB
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
_MOST_CLASSES = 10_000_000
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


@dataclass(frozen=True)
class Span:
    """A member's place in the tar: bytes. mtime: seconds."""

    offset: int
    size: int
    mtime: int


@dataclass
class Entry:
    """A sample: consecutive members of one key, by extension (lower case)."""

    key: str
    members: dict[str, Span]


class ShardFile:
    """An open shard. It closes its file when it is dropped.

    size: size of the file (bytes). samples: in order. end: the byte where the list of members ends. damage: why it ends
    before the file does ("": no damage was seen). duplicates: names of members that a sample has twice; the first one
    is used.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Take over an open, seekable tar and find its samples.

        Raises UserError for a compressed tar, RunError where the disk fails.
        """
        self.file, self.name = file, name
        self.samples: list[Entry] = []
        self.duplicates: list[str] = []
        self.damage, self.end = "", 0
        try:
            self.size = os.fstat(file.fileno()).st_size
            compressed = os.pread(file.fileno(), 6, 0).startswith(_COMPRESSED)
            if not compressed:
                self._find_samples()
        except OSError as error:
            raise RunError(f"{name}: cannot be read: {error.strerror or error}") from None
        if compressed:
            raise UserError(f"{name}: a compressed tar cannot be read in random order; decompress it")

    def _find_samples(self) -> None:
        from webdataset.tariterators import base_plus_ext  # imports torch, which packing does without

        try:
            for member, span in self._members():
                folder, slash, name = member.rpartition("/")  # of a long path, its expression takes quadratic time
                stem, extension = base_plus_ext(name)
                if stem is None:  # a hidden file, such as macOS's FOLDER/._NAME, or one without an extension
                    continue
                key = folder + slash + stem
                if not self.samples or self.samples[-1].key != key:
                    self.samples.append(Entry(key, {}))
                members = self.samples[-1].members
                if extension.lower() in members:
                    self.duplicates.append(member)
                members.setdefault(extension.lower(), span)
        except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
            self.damage = str(error) or type(error).__name__

    def _members(self) -> Iterator[tuple[str, Span]]:
        """Regular members in order. Plain headers are parsed here, five times faster than by `tarfile`; from the first
        header of another kind (long names, directories, damage) on, `tarfile` does it. Raises tarfile.ReadError, also
        where the members end before the file does: `tarfile` takes a damaged header for the end."""
        descriptor, length = self.file.fileno(), self.size
        while (plain := _plain(os.pread(descriptor, _BLOCK, self.end))) is not None:
            name, size, mtime = plain
            _check_size(name, self.end + _BLOCK + size, length)
            yield name, Span(self.end + _BLOCK, size, mtime)
            self.end += _BLOCK + (size + _BLOCK - 1) // _BLOCK * _BLOCK
        if self.end < length and os.pread(descriptor, _BLOCK, self.end) != bytes(_BLOCK):
            self.file.seek(self.end)
            headers = _Headers(self.file, length)
            with tarfile.open(fileobj=cast(IO[bytes], headers), mode="r:") as tar:
                for member in tar:
                    headers.bytes = 0  # of the next member
                    if member.issparse() or member.size < 0:
                        raise tarfile.ReadError(f"{member.name[:80]} is a sparse member or of negative size")
                    if member.isreg():
                        _check_size(member.name, member.offset_data + member.size, length)
                        yield member.name, Span(member.offset_data, member.size, int(member.mtime))
                self.end = tar.offset
        if os.pread(descriptor, _PADDING, self.end).strip(b"\0"):
            raise tarfile.ReadError(f"nothing after byte {self.end} can be read")

    def read(self, position: int, extensions: tuple[str, ...] = READ_EXTENSIONS) -> dict[str, bytes]:
        """One sample's members with these extensions.

        Raises BadSample where the shard ends before it, RunError where the disk fails.
        """
        if position >= len(self.samples):
            raise BadSample(f"missing: {f'the shard is damaged ({self.damage})' if self.damage else 'the shard ends'}")
        members = self.samples[position].members
        return {name: self._bytes(members[name]) for name in extensions if name in members}

    def file_name(self, position: int) -> str | None:
        """The file that a sample was packed from, where its `.json` names one. Raises as `read` does."""
        with suppress(ValueError, RecursionError):
            content = json.loads(self.read(position, ("json",)).get("json", b"null"))
            if isinstance(content, dict) and isinstance(content.get("file"), str):
                return printable(content["file"])
        return None

    def _bytes(self, span: Span) -> bytes:
        if span.size > MAX_MEMBER_BYTES:
            raise BadSample(f"a member of {span.size} bytes is too large")
        try:
            content = os.pread(self.file.fileno(), span.size, span.offset)
        except OSError as error:  # of the disk or the network: the sample may be good
            raise RunError(f"{self.name}: cannot be read: {error.strerror}") from None
        if len(content) < span.size:
            raise BadSample("missing: the shard was cut short while it was read")
        return content


def decode_label(sample: Mapping[str, bytes], classes: int | None) -> int:
    """The sample's class index, -1 where it has no `.cls`. Raises BadSample for text or a class out of range."""
    if "cls" not in sample:
        return -1
    text = sample["cls"].decode("ascii", "replace").strip()
    # Python rejects numbers with thousands of digits by itself.
    if not text.removeprefix("-").isdecimal() or len(text) >= 19 or (label := int(text)) > _MOST_CLASSES:
        raise BadSample(f"label {text[:20]!r} is not a class index")
    if label < 0 or (classes is not None and label >= classes):
        raise BadSample(f"label {label} is outside the classes 0..{classes - 1 if classes else '?'}")
    return label


def _check_size(name: str, end: int, length: int) -> None:
    if end > length:
        raise tarfile.ReadError(f"{name[:80]} ends at byte {end} of {length}")


class _Headers:
    """A file that `tarfile` reads headers from. It rejects seeks and reads that only a false size can ask for.

    bytes: read for one member. Newer versions of `tarfile` read a long header in parts.
    """

    def __init__(self, file: BinaryIO, length: int) -> None:
        self.file, self.length, self.tell, self.bytes = file, length, file.tell, 0

    def seek(self, position: int) -> int:
        if not 0 <= position <= self.length:
            raise tarfile.ReadError(f"a header points to byte {position} of {self.length}")
        return self.file.seek(position)

    def read(self, size: int) -> bytes:
        self.bytes += size
        if size < 0 or self.bytes > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.bytes} bytes or more")
        return self.file.read(size)


def _plain(header: bytes) -> tuple[str, int, int] | None:
    """Name, size and time of a regular member with a sound ustar header that needs nothing else; None for others."""
    if (
        len(header) < _BLOCK
        or header[257:262] != b"ustar"
        or header[156:157] not in _PLAIN
        or header[345]
        or header[124] & 0x80
    ):
        return None
    try:
        fields = (header[124:136], header[136:148], header[148:156])
        size, mtime, checksum = (int(number.rstrip(b"\0 ") or b"0", 8) for number in fields)
        name = header[:100].partition(b"\0")[0].decode("ascii")
    except ValueError:
        return None
    return (name, size, mtime) if sum(header) - sum(header[148:156]) + 256 == checksum and size >= 0 else None


class OpenShards:
    """The shards that a reader has open, at most `most`; the next ones are opened ahead, each in its own thread, so
    that nothing waits for a slow disk or a download."""

    def __init__(self, open_shard: Callable[[int], ShardFile], most: int) -> None:
        self.open_shard, self.most = open_shard, most
        self.open: OrderedDict[int, Future[ShardFile]] = OrderedDict()

    def ahead(self, shard: int) -> None:
        """Begin to open a shard."""
        if shard not in self.open:
            self.open[shard] = Future()
            Thread(target=self._open, args=(shard, self.open[shard]), daemon=True).start()

    def get(self, shard: int) -> ShardFile:
        """The open shard. Raises UserError or RunError where it cannot be opened."""
        self.ahead(shard)
        self.open.move_to_end(shard)
        while len(self.open) > self.most:
            self.open.popitem(last=False)
        return self.open[shard].result()

    def _open(self, shard: int, future: Future[ShardFile]) -> None:
        try:
            future.set_result(self.open_shard(shard))
        except BaseException as error:
            future.set_exception(error)
