"""Naming and reading shard sets: which tars there are, how many samples each holds, and their raw members.

Tar bytes are moved by WebDataset's own iterator and URLs are opened by fsspec; nothing is unpickled, and nothing
reaches a shell.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from ssl_vit.data import DataConfig, RemoteConfig
from ssl_vit.data.order import SampleSet
from ssl_vit.data.shards.cache import ShardCache, download
from ssl_vit.data.shards.listing import file_name, list_shards
from ssl_vit.data.shards.remote import RemoteFile
from ssl_vit.interfaces import RunError, UserError

Member = tuple[int, dict[str, bytes | str] | Exception]
_DEFAULT = RemoteConfig()
_LABEL = 64  # bytes that a class index may take


@dataclass(frozen=True)
class ShardSet:
    """Shards in a fixed order with their sample counts; the global index of a sample counts through them in order.

    classes: class names in label order, or None where the shards carry no `info.json` that names them.
    checksums, sizes: sha256 and bytes of each shard, "" and None where no `info.json` has them. headers: what tells
    such a shard from another, a hash of its members' names, sizes, times and labels.
    remote: how shards behind a URL are read.
    mixture: number of shards and weight of each set that was mixed into this one, in order.
    """

    spec: str
    urls: tuple[str, ...]
    counts: tuple[int, ...]
    classes: tuple[str, ...] | None = None
    source: str | None = None
    checksums: tuple[str, ...] = ()
    sizes: tuple[int | None, ...] = ()
    headers: tuple[str, ...] = ()
    remote: RemoteConfig = _DEFAULT
    license: str | None = None
    mixture: tuple[tuple[int, float | None], ...] = ()

    @property
    def samples(self) -> int:
        return sum(self.counts)

    @property
    def first_index(self) -> np.ndarray:
        """int64 (shards + 1,): the global index of each shard's first sample; the last entry is the total."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        """Tells shard sets apart: the shards' names, counts and checksums (`headers` where there are none), hashed."""
        names = [file_name(url) for url in self.urls]
        known = [self.headers] if any(self.headers) else []
        content = json.dumps([names, self.counts, self.checksums, *known, *([self.mixture] if self.mixture else [])])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def sets(self, keep: Sequence[np.ndarray] | None = None) -> list[SampleSet]:
        """What a plan needs to know: the one set, or the sets of the mixture. keep: as `members_of` gives it."""
        first, sets = 0, []
        for number, weight in self.mixture or [(len(self.counts), None)]:
            last = first + number
            kept = None if keep is None else keep[first:last]
            sets.append(SampleSet(self.counts[first:last], kept, first, weight))
            first = last
        return sets

    def read(self, shard: int) -> Iterator[Member]:
        """`read_members` of one shard, by its index."""
        return read_members(self.urls[shard], self.remote, self.sizes[shard], self.checksums[shard])

    def on_disk(self, shard: int) -> BinaryIO:
        """One shard as a seekable file: itself, or a remote one's copy in the cache or (without a name) in the folder
        for temporary files. Raises UserError for what is missing or refused, RunError when a server does not answer."""
        stream = open_url(self.urls[shard], self.remote, self.sizes[shard], self.checksums[shard])
        if stream.seekable():
            return stream
        with stream:
            try:
                copy = cast(BinaryIO, tempfile.TemporaryFile(prefix="ssl-vit-"))
                download(stream, copy, self.checksums[shard])
            except OSError as error:
                raise RunError(
                    f"{tempfile.gettempdir()}: a shard cannot be kept here while it is read: {error.strerror}; "
                    "free it, or name another folder by TMPDIR or data.remote.cache_dir"
                ) from None
        return copy

    def members_of(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Global sample indices -> sorted positions inside each shard (a plan's `keep`)."""
        wanted, first = np.unique(np.asarray(indices, dtype=np.int64)), self.first_index
        return [wanted[(wanted >= a) & (wanted < b)] - a for a, b in pairwise(first)]


def open_url(url: str, remote: RemoteConfig = _DEFAULT, size: int | None = None, sha256: str = "") -> BinaryIO:
    """A shard's bytes from a local path or a URL, from the first on; seekable where they are on a local disk.

    size (bytes), sha256: what a remote object must have, as far as it is known; the sum is checked where it is kept in
    the cache. Raises UserError for what is missing or refused, RunError when a server does not answer; so does reading.
    """
    if url.startswith("pipe:"):
        raise UserError(f"{url}: shell commands are not run; name a file or a URL")
    if "://" not in url:
        try:
            return Path(url).open("rb")
        except FileNotFoundError:
            raise UserError(f"{url}: no such shard") from None
        except OSError as error:
            raise RunError(f"{url}: cannot be read: {error.strerror}") from None
    file = RemoteFile(url, remote, size)
    if remote.cache_dir:
        if kept := ShardCache(remote).open(file, sha256):
            file.close()
            return kept
        file.restart()
    return cast(BinaryIO, file.connect())


def open_shards(spec: str, remote: RemoteConfig = _DEFAULT) -> ShardSet:
    """Find the shards that `spec` names (a folder, a tar, a glob, a brace range; local or URL) and count them.

    Counts and class names come from the `info.json` beside the shards; without it tars are counted by reading them,
    local ones by their headers alone. Raises UserError when nothing is found, RunError when a server does not answer.
    """
    if remote.cache_dir and "://" in spec:
        ShardCache(remote)  # a folder that cannot be written is known before anything else
    if spec.startswith("pipe:"):
        raise UserError(f"{spec}: shell commands are not run; name a file or a URL")
    urls, info = list_shards(os.path.expanduser(spec), remote)
    entries = {entry.file: entry for entry in info.shards} if info else {}
    known = [entries.get(file_name(url)) for url in urls]
    if (unknown := known.count(None)) and any("://" in url for url in urls):
        print(f"{spec}: {unknown} shard(s) are in no info.json and are read to be counted", file=sys.stderr)
    told = [
        (entry.samples, "") if entry else _read_headers(url, remote) for url, entry in zip(urls, known, strict=True)
    ]
    return ShardSet(
        spec,
        tuple(urls),
        tuple(count for count, _ in told),
        headers=tuple(header for _, header in told),
        classes=tuple(info.classes) if info and info.classes else None,
        source=info.source if info else None,
        checksums=tuple(entry.sha256 if entry else "" for entry in known),
        sizes=tuple(entry.bytes if entry else None for entry in known),
        remote=remote,
        license=info.license if info else None,
    )


def open_training(data: DataConfig) -> ShardSet:
    """The shards of `data.train`: one set, or a mixture as one whose shards and global indices count through its sets.

    A mixture has classes where all its sets name the same ones, else none: labels of different meanings are no labels.
    Raises UserError where a set is missing, RunError where a server does not answer.
    """
    if isinstance(data.train, str):
        return open_shards(data.train, data.remote)
    parts = [(part, open_shards(part.shards, data.remote)) for part in data.train]
    sets = [opened for _, opened in parts]
    return ShardSet(
        spec=" + ".join(part.shards for part, _ in parts),
        urls=tuple(chain.from_iterable(opened.urls for opened in sets)),
        counts=tuple(chain.from_iterable(opened.counts for opened in sets)),
        classes=sets[0].classes if len({opened.classes for opened in sets}) == 1 else None,
        source=" + ".join(opened.source or part.shards for part, opened in parts),
        checksums=tuple(chain.from_iterable(opened.checksums for opened in sets)),
        sizes=tuple(chain.from_iterable(opened.sizes for opened in sets)),
        headers=tuple(chain.from_iterable(opened.headers for opened in sets)),
        remote=data.remote,
        license=" + ".join(sorted({opened.license for opened in sets if opened.license})) or None,
        mixture=tuple((len(opened.urls), part.weight) for part, opened in parts),
    )


def _read_headers(url: str, remote: RemoteConfig) -> tuple[int, str]:
    """How many samples a tar has, and a hash of its headers and labels. On a local disk nothing else is read; a tar cut
    short counts as far as its headers go."""
    from webdataset.tariterators import base_plus_ext  # imports torch, which packing processes do without

    keys, content = dict[str, None](), hashlib.sha256()
    with open_url(url, remote) as stream:
        try:
            tar = tarfile.open(fileobj=stream, mode="r:" if stream.seekable() else "r|*", bufsize=1 << 20)
            for member in tar:
                key, extension = base_plus_ext(member.name)
                if member.isreg() and key is not None:
                    keys[key] = None
                    content.update(f"{member.name} {member.size} {member.mtime}\n".encode(errors="surrogateescape"))
                    if extension == "cls" and member.size < _LABEL and (label := tar.extractfile(member)):
                        content.update(label.read())
        except tarfile.ReadError as error:
            if not keys:
                raise UserError(f"{url}: not a readable tar ({error})") from None
    return len(keys), content.hexdigest()


def check_same_classes(ours: Sequence[str] | None, theirs: Sequence[str] | None, where: str) -> None:
    """Raises UserError where the same number means another class. One list may be longer; sets that do not name their
    classes are trusted."""
    for number, (one, other) in enumerate(zip(ours or (), theirs or (), strict=False)):
        if one != other:
            raise UserError(
                f"{where} have other classes: class {number} is {one} in one, {other} in the other; "
                "pack both parts from folders that have all classes"
            )


def read_members(
    url: str, remote: RemoteConfig = _DEFAULT, size: int | None = None, sha256: str = ""
) -> Iterator[Member]:
    """Read a shard front to back: (position, sample) for each sample, as raw bytes by extension plus `__key__`.

    Damage (a duplicate member, a tar cut short) is yielded in place as an exception; after a cut nothing follows. What
    keeps a whole shard from being read is raised, as by `open_url`.
    """
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    damage: list[Exception] = []

    def note(error: Exception) -> bool:
        if isinstance(error, (UserError, RunError)):  # not damage; WebDataset has appended the file's description
            raise type(error)(str(error).rpartition(" @ ")[0])
        damage.append(error)
        return True

    with open_url(url, remote, size, sha256) as stream:
        position = 0
        try:
            # A large read buffer: tar headers are 512 bytes, and every one would cost a system call.
            files = tar_file_iterator(io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20), handler=note)
            named = ({**file, "__url__": url} for file in files)
            for sample in group_by_keys(named, handler=note):
                while damage:
                    yield position, damage.pop()
                yield position, sample
                position += 1
        except (tarfile.TarError, OSError, EOFError) as error:
            damage.append(error)
        while damage:
            yield position, damage.pop()
