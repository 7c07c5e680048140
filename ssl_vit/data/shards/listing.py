"""What a shard specification names: the shards' paths or URLs, and what the `info.json` beside them says."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import braceexpand

from ssl_vit.data import RemoteConfig
from ssl_vit.data.shards.info import ABOUT, INFO, MAX_INFO_BYTES, RECORD, Info, local_info, parse_info
from ssl_vit.files import expanded
from ssl_vit.interfaces import UserError

TAR = re.compile(r"[^.].*\.(tar(\.(gz|bz2|xz|zst))?|tgz)")  # not a.tar.md5; compressed ones have a message
_MOST = 1_000_000  # paths of brace ranges
_RANGE = re.compile(r"(?<!\\)\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")
_MAKE_THEM = (
    "name images (data=PLACE, or --data: a folder, a parquet file, hf:NAME), or make shards with `ssl-vit shards make "
    "SOURCE OUT`"
)


def file_name(url: str) -> str:
    """The name of a shard in its folder: without what signs a URL."""
    return os.path.basename(url.partition("?")[0] if "://" in url else url)


def list_shards(spec: str, remote: RemoteConfig) -> tuple[list[str], Info | None]:
    """The shards of a folder, tar, glob or brace range in their order, and the `info.json` beside them (None: there is
    none, or they lie in several folders).

    Local paths come back absolute. Raises UserError when there is nothing or `info.json` is not one, RunError when a
    server does not answer.
    """
    spec = spec.removeprefix("file://")
    store = _Remote(spec, remote) if "://" in spec else _Store(spec)
    try:
        # A path that exists is taken literally, with its braces.
        patterns = [store.path] if store.exists(store.path) else _expanded(store.path)
    except ValueError as error:
        raise UserError(f"{spec}: {error}") from None
    if len(patterns) == 1 and store.is_folder(patterns[0]):
        return _folder(store, spec)
    names = [name for pattern in patterns for name in store.matching(pattern)]
    if not names:
        raise UserError(f"{spec}: no such shard or folder; {store.hint}")
    if inside := [name for name in names if store.local and Path(name).is_dir()]:
        raise UserError(f"{spec}: {inside[0]} is a folder; name the shards in it, or give a list of folders")
    folders = {os.path.dirname(name if store.local else name.partition("?")[0]) for name in names}
    return [store.url(name) for name in names], store.info(folders.pop()) if len(folders) == 1 else None


def _expanded(path: str) -> list[str]:
    """The paths of brace ranges. Raises ValueError for braces that do not pair and for too many paths."""
    ranges = _RANGE.findall(path)  # braceexpand makes a list of each
    most = max((abs(int(last) - int(first)) // max(int(step or 1), 1) for first, last, step in ranges), default=0)
    paths = [*islice(braceexpand.braceexpand(path), _MOST + 1)] if most <= _MOST else []
    if not 0 < len(paths) <= _MOST:
        raise ValueError(f"names more than {_MOST:,} shards")
    return paths


def _folder(store: _Store, spec: str) -> tuple[list[str], Info | None]:
    folder = store.path.rstrip("/")
    info = store.info(folder)
    if info and len(info.splits) > 1:
        raise UserError(
            f"{spec} holds several splits ({', '.join(info.splits)}): name the shards of one, with * or {{..}}"
        )
    present = {file_name(name) for name in store.names(folder, needed=info is None)}
    if info is None and RECORD in present:
        raise UserError(f"{spec}: packing was not finished; run its `ssl-vit shards make` command again")
    files = [entry.file for entry in info.shards] if info else sorted(filter(TAR.fullmatch, present))
    if not files:
        nested = [part for part in ("train", "test") if store.info(f"{folder}/{part}")]
        hint = f"did you mean '{spec.rstrip('/')}/{nested[0]}'?" if nested else store.refused or store.hint
        raise UserError(f"{spec}: no shards (*.tar) there; {hint}")
    if info and store.local and (extra := sorted(filter(TAR.fullmatch, present - {*files}))):
        count = f"{len(extra)} shards there are not listed in its {INFO} or {ABOUT} ({_first(extra)})"
        raise UserError(f"{spec}: {count}: move them away, or make the set again")
    if present and (missing := [file for file in files if file not in present]):
        count = f"{len(missing)} of its {len(files)} shards are missing ({_first(missing)})"
        raise UserError(f"{spec}: {count}: copy them, or make the set again")
    return [store.url(f"{folder}/{file}") for file in files], info


def _first(names: list[str]) -> str:
    return ", ".join([*names[:3], *(["..."] if names[3:] else [])])


class _Store:
    """Where a specification's shards lie: on the local disk."""

    hint, local, refused = _MAKE_THEM, True, ""

    def __init__(self, spec: str) -> None:
        self.spec, self.path = spec, str(expanded(spec).absolute())

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def is_folder(self, path: str) -> bool:
        return self.exists(path) and Path(path).is_dir()

    def names(self, folder: str, *, needed: bool) -> list[str]:
        """Empty where a folder cannot be listed; raises UserError for one that may not be listed if that is needed."""
        return [path.name for path in Path(folder).iterdir() if not (path.is_dir() and TAR.fullmatch(path.name))]

    def matching(self, pattern: str) -> list[str]:
        if self.exists(pattern):
            return [pattern]
        if not glob.has_magic(pattern):
            expected = f" (expected by '{self.spec}')" if pattern != self.path else ""
            raise UserError(f"{pattern}: no such shard or folder{expected}; {_MAKE_THEM}")
        names = sorted(glob.glob(pattern))
        return [name for name in names if TAR.fullmatch(os.path.basename(name))] or names  # without its info.json

    def info(self, folder: str) -> Info | None:
        return local_info(Path(folder))

    def url(self, path: str) -> str:
        return path


class _Remote(_Store):
    """Behind a URL."""

    local = False

    def __init__(self, spec: str, remote: RemoteConfig) -> None:
        from ssl_vit.data.shards import remote as client  # takes as long to import as all else here

        self.spec, self.remote, self.client = spec, remote, client
        self.filesystem, self.path = client.find_filesystem(spec, remote.timeout)
        self.filesystem.invalidate_cache()  # of listings
        self.http = "http" in self.filesystem.protocol
        self.hint = f"{_MAKE_THEM}; without info.json, {client.NAME_THEM}" if self.http else _MAKE_THEM
        if remote.cache_dir:
            from ssl_vit.data.shards.cache import cache_folder

            cache_folder(remote)  # a folder that cannot be written is known before anything else

    def exists(self, path: str) -> bool:
        return False  # asked when it is opened

    def is_folder(self, path: str) -> bool:
        return not self._is_glob(path) and not TAR.fullmatch(file_name(self.spec))

    def names(self, folder: str, *, needed: bool) -> list[str]:
        try:
            return [] if self.http else self._ask(self.filesystem.ls, folder, detail=False)
        except UserError:  # many may read objects and not list them
            if needed:
                raise
            return []

    def matching(self, pattern: str) -> list[str]:
        if not self._is_glob(pattern):
            return [pattern]
        if self.http:  # it has no standard way to list a folder
            raise UserError(f"{self.url(pattern)}: files behind http URLs cannot be listed; {self.client.NAME_THEM}")
        return self._ask(self.filesystem.glob, pattern)

    def info(self, folder: str) -> Info | None:
        """Stores that cannot be listed deny access to objects that do not exist."""
        for name in (INFO, ABOUT):
            path = f"{folder}/{name}"
            try:
                content = self.client.fetch(self.url(path), self.remote, MAX_INFO_BYTES)
            except self.client.NotThere:
                continue
            except self.client.Refused as error:
                self.refused = f"{error}; or {self.client.NAME_THEM}"
                continue
            if info := parse_info(content, self.url(path)):
                return info
        return None

    def url(self, path: str) -> str:
        return str(self.filesystem.unstrip_protocol(path))

    def _ask(self, method: Callable[..., list[str]], path: str, **options: Any) -> list[str]:
        try:
            return sorted(self.client.retried(self.url(path), self.remote, method, path, **options))
        except self.client.NotThere:
            return []

    def _is_glob(self, pattern: str) -> bool:
        """A `?` begins the query of an http URL."""
        return any(sign in (pattern.partition("?")[0] if self.http else pattern) for sign in "*?[")
