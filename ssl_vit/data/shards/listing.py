"""What a shard specification names: the shards' paths or URLs, and what the `info.json` beside them says."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import braceexpand
from fsspec.implementations.local import LocalFileSystem

from ssl_vit.data import RemoteConfig
from ssl_vit.data.shards.info import ABOUT, INFO, RECORD, Info, local_info, parse_info
from ssl_vit.data.shards.remote import ask, find_filesystem
from ssl_vit.interfaces import UserError

_TAR = re.compile(r"\.(tar(\.\w+)?|tgz)$")
_MEND = "make shards with `ssl-vit shards make SOURCE OUT`"
_NAME_THEM = "where a server lists no files, name the shards, such as URL/{000000..000009}.tar"


def file_name(url: str) -> str:
    """The name of a shard in its folder: without what signs a URL."""
    return os.path.basename(url.partition("?")[0] if "://" in url else url)


def list_shards(spec: str, remote: RemoteConfig) -> tuple[list[str], Info | None]:
    """The shards of a folder, tar, glob or brace range in their order, and the content of the `info.json` beside them
    (None: there is none, or they lie in several folders).

    Local paths come back absolute. Raises UserError when there is nothing or `info.json` is not one, RunError when a
    server does not answer.
    """
    store = _Store(spec, remote)
    # A path that is there is meant as it stands, with whatever braces it has.
    patterns = [store.path] if store.local and Path(store.path).exists() else expand(store.path)
    if len(patterns) == 1 and store.is_folder(store.path):
        folder = store.path.rstrip("/")
        info = store.info(folder)
        names = [f"{folder}/{shard.file}" for shard in info.shards] if info else store.tars(folder)
        if not names:
            nested = [part for part in ("train", "test") if store.info(f"{folder}/{part}")]
            hint = f"did you mean '{spec.rstrip('/')}/{nested[0]}'?" if nested else store.hint
            raise UserError(f"{spec}: no shards (*.tar) there; {hint}")
        if info and len(splits := info.splits) > 1:
            raise UserError(
                f"{spec} holds several splits ({', '.join(splits)}): name the shards of one, with * or {{..}}"
            )
        if store.local:
            _refuse_missing(folder, [name.removeprefix(f"{folder}/") for name in names])
    else:
        names = [name for pattern in patterns for name in store.matching(pattern)]
        if not names:
            raise UserError(f"{spec}: no such shard or folder; {store.hint}")
        folders = {os.path.dirname(name.partition("?")[0] if store.http else name) for name in names}
        info = store.info(folders.pop()) if len(folders) == 1 else None
    return [store.url(name) for name in names], info


def _refuse_missing(folder: str, files: list[str]) -> None:
    """One listing tells at once what would stop a run hours later; files in sub-folders are left to it."""
    present = {path.name for path in Path(folder).iterdir()}
    if missing := [file for file in files if "/" not in file and file not in present]:
        first = ", ".join([*missing[:3], *(["..."] if missing[3:] else [])])
        count = f"{len(missing)} of its {len(files)} shards are not there ({first})"
        raise UserError(f"{folder}: {count}: copy them, or make the set again")


def expand(spec: str) -> list[str]:
    """A brace range written out. Raises UserError for braces that do not pair."""
    try:
        return list(braceexpand.braceexpand(spec))
    except ValueError as error:
        raise UserError(f"{spec}: {error}") from None


class _Store:
    """Where a specification's shards lie: a local disk or a server."""

    def __init__(self, spec: str, remote: RemoteConfig) -> None:
        self.spec, self.remote = spec, remote
        self.filesystem, self.path = find_filesystem(spec)
        self.filesystem.invalidate_cache()  # of listings
        self.local = isinstance(self.filesystem, LocalFileSystem)
        self.http = "http" in self.filesystem.protocol
        self.hint = f"{_MEND}; {_NAME_THEM}" if self.http else _MEND

    def url(self, path: str) -> str:
        return path if self.local else str(self.filesystem.unstrip_protocol(path))

    def is_folder(self, path: str) -> bool:
        if self.local:
            return bool(self.filesystem.isdir(path))
        return not self._is_glob(path) and not _TAR.search(file_name(self.spec))

    def info(self, folder: str) -> Info | None:
        """What the folder's info.json or about.json says. Stores that may not be listed refuse what is not there."""
        if self.local:
            found = local_info(Path(folder))
            return found[0] if found else None
        for name in (INFO, ABOUT):
            path = f"{folder}/{name}"
            try:
                content = ask(self.filesystem, self.url(path), self.remote, "cat_file", path)
            except (FileNotFoundError, PermissionError):
                continue
            if info := parse_info(content, self.url(path)):
                return info
        return None

    def tars(self, folder: str) -> list[str]:
        found = self._names("ls", folder, detail=False)
        if any(file_name(name) == RECORD for name in found):
            raise UserError(
                f"{self.url(folder)}: packing was not finished; run its `ssl-vit shards make` command again"
            )
        return [name for name in found if _TAR.search(name)]

    def matching(self, pattern: str) -> list[str]:
        there = self.local and Path(pattern).exists()
        if self._is_glob(pattern) and not there:
            return self._names("glob", pattern)
        if self.local and not there:
            asked = f" (asked for by '{self.spec}')" if pattern != self.path else ""
            raise UserError(f"{pattern}: no such shard or folder{asked}; {_MEND}")
        return [pattern]

    def _names(self, method: str, path: str, **options: Any) -> list[str]:
        try:
            return sorted(map(str, ask(self.filesystem, self.url(path), self.remote, method, path, **options)))
        except FileNotFoundError:
            return []
        except PermissionError as error:
            mend = _NAME_THEM if self.http else "check the credentials"
            raise UserError(f"{self.url(path)}: access is refused ({error}): {mend}") from None

    def _is_glob(self, pattern: str) -> bool:
        """A `?` begins the query of an http URL."""
        return any(sign in (pattern.partition("?")[0] if self.http else pattern) for sign in "*?[")
