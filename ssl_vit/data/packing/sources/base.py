"""What every source of images is made of."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ssl_vit.interfaces import RunError, UserError

if TYPE_CHECKING:
    import numpy as np

VALIDATION = {"val", "valid", "validation"}


class BrokenImageError(Exception):
    """An image that cannot be read; `key` names it in its source, `reason` says why in a few words."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key, self.reason = key, reason


class Items(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Source:
    """Images that are listed but not yet read, always in the same order.

    classes and labels (int64 (count,), each in 0..len(classes)-1) are both None in an unlabeled source.
    items: one small thing an image that `read` takes: a file's name, a row's number.
    read: item -> (the image's name in the source, such as a relative path or "row 17"; its encoded bytes). It is
    pickled once for each packing process and raises BrokenImageError where an image cannot be read.
    listing: a hash of what the images are called and how large they are, which tells sources apart without reading
    them; size: their bytes in all, 0 where that is little.
    """

    name: str
    license: str | None
    classes: list[str] | None
    labels: np.ndarray | None
    items: Items
    read: Callable[[Any], tuple[str, bytes]]
    listing: str
    size: int = 0

    @property
    def count(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class FileReader:
    """`Source.read` of a folder of images: its items are paths relative to `root`, with slashes."""

    root: Path

    def __call__(self, name: str) -> tuple[str, bytes]:
        return name, read_file(self.root / name, name, self.root)


def read_file(path: Path, key: str, root: Path) -> bytes:
    """The file's bytes. Raises BrokenImageError for a file that is no more there or may not be read, RunError where
    the disk or the network fails or `root` itself is gone: then the image is not to blame."""
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR) and root.is_dir():
            raise BrokenImageError(key, error.strerror or str(error)) from None
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from None


def find_split(spec: str, split: str | None, parts: list[str]) -> str:
    if split in parts:
        return split
    alike = [part for part in parts if split in VALIDATION and part in VALIDATION]
    if len(alike) == 1:
        return alike[0]
    wrong = "is divided into splits" if split is None else f"has no split {split!r}"
    raise UserError(f"{spec} {wrong}; choose split from: {', '.join(parts) or 'nothing (leave it out)'}")
