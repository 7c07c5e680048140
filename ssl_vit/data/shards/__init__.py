"""Shard sets: which tars there are, how many samples each holds, and how one is opened."""

from __future__ import annotations

import errno
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import BinaryIO

import numpy as np

from ssl_vit.data import DataConfig, RemoteConfig
from ssl_vit.data.order import SampleSet
from ssl_vit.data.shards.info import Info, ShardEntry
from ssl_vit.data.shards.listing import file_name, list_shards
from ssl_vit.data.shards.reading import ShardFile
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.records import SkippedSample

_DEFAULT = RemoteConfig()
_LABEL = 64  # bytes that a class index may take


@dataclass(frozen=True)
class Shard:
    """One shard.

    samples: their number.
    checksum, size: sha256 and bytes, "" and None where no `info.json` has them.
    header: what tells such a shard from another, a hash of its members' names, sizes, times and labels.
    """

    url: str
    samples: int
    checksum: str = ""
    size: int | None = None
    header: str = ""


@dataclass(frozen=True)
class ShardSet:
    """Shards in a fixed order with their sample counts; the global index of a sample counts through them in order.

    places: the data arguments that name it; several of a mixture.
    sources: what they were packed from, as far as an `info.json` says.
    classes: class names in label order, or None where the shards carry no `info.json` that names them.
    remote: how shards behind a URL are read.
    mixture: number of shards and weight of each set that was mixed into this one, in order.
    conflict: why the labels of the sets of a mixture do not fit together; "" where they do.
    dropped: the images that could not be packed on first use; empty for shards.
    """

    places: tuple[str, ...]
    shards: tuple[Shard, ...]
    classes: tuple[str, ...] | None = None
    sources: tuple[str, ...] = ()
    remote: RemoteConfig = _DEFAULT
    license: str | None = None
    mixture: tuple[tuple[int, float | None], ...] = ()
    conflict: str = ""
    dropped: tuple[SkippedSample, ...] = ()

    @property
    def spec(self) -> str:
        """Its name in messages."""
        return " + ".join(self.places)

    @property
    def source(self) -> str | None:
        """`sources` in one line."""
        return " + ".join(self.sources) or None

    @cached_property
    def urls(self) -> tuple[str, ...]:
        return tuple(shard.url for shard in self.shards)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(shard.samples for shard in self.shards)

    @property
    def samples(self) -> int:
        return sum(self.counts)

    @property
    def labeled(self) -> bool:
        """Whether the first sample has a label."""
        first = next((n for n, count in enumerate(self.counts) if count), 0)
        return any("cls" in sample.members for sample in self.open(first).samples[:1])

    @property
    def first_index(self) -> np.ndarray:
        """int64 (shards + 1,): the global index of each shard's first sample; the last entry is the total."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        """Hash of what tells shard sets apart: names, counts and checksums (or `headers`) of shards, and classes."""
        names = [  # of a remote shard whose content is unknown, the address
            file_name(shard.url)
            if shard.checksum or shard.header or "://" not in shard.url
            else f"{shard.url.partition('?')[0]} {shard.size}"
            for shard in self.shards
        ]
        checksums, headers = [shard.checksum for shard in self.shards], [shard.header for shard in self.shards]
        content = json.dumps([names, self.counts, checksums, headers, self.mixture, self.classes])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def in_common(self, other: ShardSet) -> int:
        """How many shards of this set the other one has too, by their address, checksum or headers."""
        known = {name for shard in other.shards for name in (shard.url, shard.checksum, shard.header)} - {""}
        return sum(not known.isdisjoint((shard.url, shard.checksum, shard.header)) for shard in self.shards)

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
        listed = self.shards[shard]
        file = ShardFile(open_url(listed.url, self.remote, listed.size, listed.checksum), listed.url)
        if len(file.samples) > listed.samples or file.size < listed.samples * BLOCKSIZE:  # a sample has a header
            found = f"it holds {len(file.samples)} samples, and info.json lists {listed.samples}"
            raise UserError(f"{listed.url}: {found}; make the shards again")
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
        hint = "; raise the limit (ulimit -n), or set fewer data.lanes" if error.errno == errno.EMFILE else ""
        raise RunError(f"{url}: cannot be read: {error.strerror}{hint}") from None


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
    from ssl_vit.data.places import is_shards, split_name

    urls, content = list_shards(folder_of(spec), remote)
    info = content or Info(samples=0, shards=[])
    entries = {entry.file: entry for entry in info.shards}
    listed = [entries.get(file_name(url)) for url in urls]
    if (unknown := listed.count(None)) and any("://" in url for url in urls):
        print(f"{spec}: {unknown} shard(s) are in no info.json and are downloaded to be counted", file=sys.stderr)
    place, _ = split_name(spec)
    images = "://" not in place and not is_shards(place)
    return ShardSet(
        places=(spec,),
        shards=tuple(_shard(url, entry, remote) for url, entry in zip(urls, listed, strict=True)),
        classes=tuple(info.classes) if info.classes else None,
        sources=(info.source,) if info.source else (),
        remote=remote,
        license=info.license,
        dropped=tuple(SkippedSample(shard=spec, key=e.file, reason=e.reason) for e in info.dropped) if images else (),
    )


def dropped_from(sets: Sequence[ShardSet], data: DataConfig) -> list[SkippedSample]:
    """The images of these sets that could not be packed, each once. Raises UserError where `data` lets none be
    skipped."""
    found = list(dict.fromkeys(sample for one in sets for sample in one.dropped))
    if found and data.on_bad_sample == "fail":
        raise found[0].error()
    return found


def _shard(url: str, entry: ShardEntry | None, remote: RemoteConfig) -> Shard:
    if entry and (entry.sha256 or "://" in url):
        return Shard(url, entry.samples, entry.sha256, entry.bytes)
    count, header = _read_headers(url, remote)
    return Shard(url, count, header=header) if entry is None else Shard(url, entry.samples, "", entry.bytes, header)


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
    return ShardSet(
        places=tuple(place for opened in sets for place in opened.places),
        shards=tuple(shard for opened in sets for shard in opened.shards),
        classes=sets[0].classes if len({opened.classes for opened in sets}) == 1 else None,
        sources=tuple(source for opened in sets for source in opened.sources or (opened.spec,)),
        remote=remote,
        license=" + ".join(sorted({opened.license for opened in sets if opened.license})) or None,
        mixture=tuple((len(opened.urls), weight) for opened, weight in parts),
        conflict=conflict,
        dropped=tuple(sample for opened in sets for sample in opened.dropped),
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
