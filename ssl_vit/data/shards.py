"""Naming and reading shard sets: which tars there are, how many samples each holds, and their raw members.

Tar bytes are moved by WebDataset's own iterator and URLs are opened by fsspec; nothing is unpickled and nothing reaches
a shell (`pipe:` URLs are refused).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, cast

import braceexpand
import fsspec
import numpy as np
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_iterator

from ssl_vit.interfaces import UserError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")


@dataclass(frozen=True)
class ShardSet:
    """Shards in a fixed order with their sample counts; the global index of a sample counts through them in order.

    classes: class names in label order, or None where the shards carry no `info.json` that names them.
    """

    spec: str
    urls: tuple[str, ...]
    counts: tuple[int, ...]
    classes: tuple[str, ...] | None = None
    source: str | None = None
    checksums: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        return sum(self.counts)

    @property
    def first_index(self) -> np.ndarray:
        """int64 (shards + 1,): the global index of each shard's first sample; the last entry is the total."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        """Tells shard sets apart: the shards' names, counts and (where `info.json` has them) checksums, hashed."""
        names = [os.path.basename(url) for url in self.urls]
        content = json.dumps([names, self.counts, self.checksums])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def members_of(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Global sample indices -> sorted positions inside each shard (a plan's `keep`)."""
        wanted, first = np.unique(np.asarray(indices, dtype=np.int64)), self.first_index
        return [wanted[(wanted >= a) & (wanted < b)] - a for a, b in pairwise(first)]


def open_url(url: str) -> BinaryIO:
    """Open a local path or any URL that fsspec knows, for reading bytes. Raises UserError for `pipe:` and missing."""
    if url.startswith("pipe:"):
        raise UserError(f"{url}: pipe: URLs would run a shell command and are refused")
    try:
        return cast(BinaryIO, fsspec.open(url, "rb").open())
    except FileNotFoundError:
        raise UserError(f"{url}: no such shard") from None


def open_shards(spec: str) -> ShardSet:
    """Find the shards that `spec` names (a folder, a tar, a glob, a brace range; local or URL) and count them.

    Counts and class names come from the `info.json` beside the shards; without it, local tars are counted by reading
    their headers. Raises UserError when nothing is found.
    """
    if spec.startswith("pipe:"):
        raise UserError(f"{spec}: pipe: URLs would run a shell command and are refused")
    spec = os.path.expanduser(spec)
    try:
        filesystem, path = fsspec.core.url_to_fs(spec)
    except (ImportError, ValueError) as error:
        raise UserError(f"{spec}: cannot open such a URL: {error}") from None
    scheme = spec[: spec.index("://") + 3] if "://" in spec else ""
    if filesystem.isdir(path):
        folder = path
        tars = sorted(name for name in filesystem.ls(path, detail=False) if name.endswith(".tar"))
    else:
        folder = os.path.dirname(path)
        tars = []
        for pattern in braceexpand.braceexpand(path):
            found = sorted(filesystem.glob(pattern)) if any(c in pattern for c in "*?[") else [pattern]
            tars += [str(name) for name in found]
        missing = [name for name in tars if not filesystem.exists(name)]
        if missing:
            asked = f" (asked for by '{spec}')" if missing != [path] else ""
            raise UserError(
                f"{scheme}{missing[0]}: no such shard or folder{asked}; "
                "make shards with `ssl-vit shards make SOURCE OUT`"
            )
    info_path = f"{folder}/info.json"
    info = json.loads(filesystem.cat_file(info_path)) if filesystem.exists(info_path) else None
    if info is not None and filesystem.isdir(path):
        tars = [f"{folder}/{shard['file']}" for shard in info["shards"]]
    if not tars:
        hint = "make them with `ssl-vit shards make SOURCE OUT`"
        nested = [part for part in ("train", "test") if filesystem.exists(f"{path}/{part}/info.json")]
        if nested:
            hint = f"did you mean '{spec.rstrip('/')}/{nested[0]}'?"
        raise UserError(f"{spec}: no shards (*.tar) there; {hint}")
    urls = tuple(filesystem.unstrip_protocol(name) if scheme else name for name in tars)
    known = {shard["file"]: int(shard["samples"]) for shard in info["shards"]} if info else {}
    counts = tuple(
        known[os.path.basename(url)] if os.path.basename(url) in known else _count_samples(url) for url in urls
    )
    classes = tuple(info["classes"]) if info and info.get("classes") else None
    hashes = {shard["file"]: shard.get("sha256", "") for shard in info["shards"]} if info else {}
    checksums = tuple(hashes.get(os.path.basename(url), "") for url in urls)
    return ShardSet(spec, urls, counts, classes, info.get("source") if info else None, checksums)


def _count_samples(url: str) -> int:
    """Count a tar's samples from its headers alone; a tar cut short counts as far as its headers go."""
    keys: dict[str, None] = {}
    with open_url(url) as stream:
        try:
            for member in tarfile.open(fileobj=stream, mode="r:"):
                key, _ = base_plus_ext(member.name)
                if member.isreg() and key is not None:
                    keys[key] = None
        except tarfile.ReadError as error:
            if not keys:
                raise UserError(f"{url}: not a readable tar ({error})") from None
    return len(keys)


def read_members(url: str) -> Iterator[tuple[int, dict[str, bytes | str] | Exception]]:
    """Read a shard front to back: (position, sample) for each sample, as raw bytes by extension plus `__key__`.

    Damage (a duplicate member, a tar cut short) is yielded in place as an exception; after a cut nothing follows.
    """
    damage: list[Exception] = []

    def note(error: Exception) -> bool:
        damage.append(error)
        return True

    with open_url(url) as stream:
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
