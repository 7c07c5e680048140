"""Shard sets: which tars there are, how many samples each holds, and how one is opened."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations, zip_longest
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import Any, BinaryIO

import numpy as np

from ssl_vit.data import DataConfig, RemoteConfig
from ssl_vit.data.order import SampleSet
from ssl_vit.data.shards.info import Info
from ssl_vit.data.shards.listing import file_name, list_shards
from ssl_vit.data.shards.reading import ShardFile
from ssl_vit.interfaces import RunError, UserError

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
    conflict: why the labels of the sets of a mixture do not fit together; "" where they do.
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
    conflict: str = ""

    @property
    def samples(self) -> int:
        return sum(self.counts)

    @property
    def labeled(self) -> bool:
        """Whether the first sample has a label."""
        return any("cls" in sample.members for sample in self.open(0).samples[:1])

    @property
    def first_index(self) -> np.ndarray:
        """int64 (shards + 1,): the global index of each shard's first sample; the last entry is the total."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        """Hash of what tells shard sets apart: names, counts and checksums (or `headers`) of shards, and classes."""
        names = [  # of a remote shard whose content is unknown, the address
            file_name(url) if checksum or header or "://" not in url else f"{url.partition('?')[0]} {size}"
            for url, checksum, header, size in zip_longest(self.urls, self.checksums, self.headers, self.sizes)
        ]
        content = json.dumps([names, self.counts, self.checksums, self.headers, self.mixture, self.classes])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def in_common(self, other: ShardSet) -> int:
        """How many shards of this set the other one has too, by their address, checksum or headers."""
        keys = ("urls", "checksums", "headers")
        known = [{*getattr(other, key)} - {""} for key in keys]
        each = zip_longest(*(getattr(self, key) for key in keys), fillvalue="")
        return sum(any(one in of_other for one, of_other in zip(shard, known, strict=True)) for shard in each)

    def sets(self, keep: Sequence[np.ndarray] | None = None) -> list[SampleSet]:
        """For `order`: the one set, or the sets of the mixture. keep: as `members_of` gives it."""
        first, sets = 0, []
        for number, weight in self.mixture or [(len(self.counts), None)]:
            last = first + number
            members = None if keep is None else keep[first:last]
            sets.append(SampleSet(self.counts[first:last], members, first, weight))
            first = last
        return sets

    def open(self, shard: int) -> ShardFile:
        """Open a shard by its index. Raises UserError for a shard that is missing, compressed, cannot be accessed or
        cannot hold the number of samples that is listed for it; RunError when a disk or server fails."""
        url, listed = self.urls[shard], self.counts[shard]
        file = ShardFile(open_url(url, self.remote, self.sizes[shard], self.checksums[shard]), url)
        if len(file.samples) > listed or file.size < listed * BLOCKSIZE:  # a sample has at least a header
            raise UserError(
                f"{url}: it holds {len(file.samples)} samples, and info.json lists {listed}; make the shards again"
            )
        return file

    def members_of(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Global sample indices -> sorted positions inside each shard (`keep` of `train_source`)."""
        wanted, first = np.unique(np.asarray(indices, dtype=np.int64)), self.first_index
        by_shard = np.split(wanted, np.searchsorted(wanted, first[1:-1]))
        return [part - start for part, start in zip(by_shard, first, strict=False)]


def open_url(url: str, remote: RemoteConfig = _DEFAULT, size: int | None = None, sha256: str = "") -> BinaryIO:
    """A shard as an open, seekable local file: itself, or a copy of the object behind a URL.

    size (bytes), sha256: expected values of a remote object, where they are known. Raises UserError for a shard that is
    missing or cannot be accessed, RunError when the disk or a server fails.
    """
    if "://" in url:
        from ssl_vit.data.shards.cache import open_remote

        return open_remote(url, remote, size, sha256)
    try:
        return Path(url).open("rb")
    except FileNotFoundError:
        raise UserError(f"{url}: no such shard") from None
    except OSError as error:
        raise RunError(f"{url}: cannot be read: {error.strerror}") from None


def open_shards(spec: str | Sequence[str], remote: RemoteConfig = _DEFAULT) -> ShardSet:
    """Find the shards that `spec` names (a folder, a tar, a glob, a brace range; local or URL) and count them; several
    sets count as one, as `open_training` has them. Images that are not shards are packed into a cache first; see
    `packing.cache.folder_of` for what may be named.

    Counts and class names come from the `info.json` beside the shards; tars without it are counted by their headers,
    remote ones by downloading them. Raises UserError when nothing is found, RunError when a server does not answer.
    """
    if not isinstance(spec, str):
        return _together([(open_shards(one, remote), None) for one in spec], remote)
    if spec.startswith("pipe:"):
        raise UserError(f"{spec}: shell commands are not run; name a file or a URL")
    from ssl_vit.data.packing.cache import folder_of

    urls, content = list_shards(folder_of(spec), remote)
    info = content or Info(samples=0, shards=[])
    entries = {entry.file: entry for entry in info.shards}
    listed = [entries.get(file_name(url)) for url in urls]
    if (unknown := listed.count(None)) and any("://" in url for url in urls):
        print(f"{spec}: {unknown} shard(s) are in no info.json and are downloaded to be counted", file=sys.stderr)
    counted = [
        (entry.samples, "") if entry and (entry.sha256 or "://" in url) else _read_headers(url, remote)
        for url, entry in zip(urls, listed, strict=True)
    ]
    counts = tuple(entry.samples if entry else count for entry, (count, _) in zip(listed, counted, strict=True))
    return ShardSet(
        spec,
        tuple(urls),
        counts,
        headers=tuple(header for _, header in counted),
        classes=tuple(info.classes) if info.classes else None,
        source=info.source,
        checksums=tuple(entry.sha256 if entry else "" for entry in listed),
        sizes=tuple(entry.bytes if entry else None for entry in listed),
        remote=remote,
        license=info.license,
    )


def open_training(data: DataConfig) -> ShardSet:
    """The shards of `data.train`: one set, or a mixture as one whose shards and global indices count through its sets.

    A mixture has classes where all its sets name the same ones, else none: labels of different meanings are no labels.
    Raises UserError where a set is missing, RunError where a server does not answer.
    """
    if isinstance(data.train, str):
        return open_shards(data.train, data.remote)
    return _together([(open_shards(part.shards, data.remote), part.weight) for part in data.train], data.remote)


def _together(parts: Sequence[tuple[ShardSet, float | None]], remote: RemoteConfig) -> ShardSet:
    """Sets with their weights as one."""
    sets, conflict = [opened for opened, _ in parts], ""
    try:
        for one, other in combinations(sets, 2):
            check_same_classes(one.classes, other.classes, f"{one.spec} and {other.spec}")
    except UserError as error:
        conflict = str(error)
    names = ("urls", "counts", "checksums", "sizes", "headers")
    joined: dict[str, Any] = {name: tuple(chain.from_iterable(getattr(one, name) for one in sets)) for name in names}
    return ShardSet(
        **joined,
        spec=" + ".join(opened.spec for opened in sets),
        classes=sets[0].classes if len({opened.classes for opened in sets}) == 1 else None,
        source=" + ".join(opened.source or opened.spec for opened in sets),
        remote=remote,
        license=" + ".join(sorted({opened.license for opened in sets if opened.license})) or None,
        mixture=tuple((len(opened.urls), weight) for opened, weight in parts),
        conflict=conflict,
    )


def _read_headers(url: str, remote: RemoteConfig) -> tuple[int, str]:
    """How many samples a tar has, and a hash of its headers and labels. Damage counts as one sample more, which the
    stream then reports."""
    shard, content = ShardFile(open_url(url, remote), url), hashlib.sha256()
    if shard.damage and not shard.samples:
        raise UserError(f"{url}: not a readable tar ({shard.damage})")
    for position, sample in enumerate(shard.samples):
        for extension, span in sample.members.items():
            line = f"{sample.key}.{extension} {span.size} {span.mtime}\n"
            content.update(line.encode(errors="surrogateescape"))
        if "cls" in sample.members and sample.members["cls"].size < _LABEL:
            content.update(shard.read(position, ("cls",))["cls"])
    return len(shard.samples) + bool(shard.damage), content.hexdigest()


def check_same_classes(ours: Sequence[str] | None, theirs: Sequence[str] | None, where: str) -> None:
    """Raises UserError where the same number means another class. One list may be longer; sets that do not name their
    classes are trusted."""
    for number, (one, other) in enumerate(zip(ours or (), theirs or (), strict=False)):
        if one != other:
            raise UserError(
                f"{where} have different classes: class {number} is {one} in one, {other} in the other; "
                "pack both parts from folders that have all classes"
            )
