"""What every source of images consists of."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_vit.data import VALIDATION
from ssl_vit.data.shards.info import MAX_MEMBER_BYTES
from ssl_vit.interfaces import BadSample, RunError, UserError

if TYPE_CHECKING:
    import numpy as np

TABLES = (".parquet", ".arrow")  # suffixes
METADATA = ("metadata.csv", "metadata.jsonl")  # describe the images beside them, as `datasets` reads them
_IMAGES: tuple[str, ...] = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".jp2")
_IMAGES += (".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")


@dataclass(frozen=True)
class Source:
    """Images that are listed but not yet read, always in the same order.

    name, license: for info.json.
    classes: class names, None in an unlabeled source.
    labels: int64 (count,), each in 0..len(classes)-1; None in an unlabeled source.
    items: what `read` takes, one per image: its path as a string, or its row as an int. The image is named after it: by
        the path, or as `row N`.
    read: item -> the image's encoded bytes. It is pickled for every shard and raises BadSample where an image
        cannot be read.
    listing: a hash of the images' names and sizes, which tells sources apart without reading them.
    groups: int64 (count,), ascending: images of one group, such as those of one person, stay in one part or fold.
    bytes: size of all images together, where it is known without reading them.
    modified: a hash of the times when the files were changed, where the images are files.
    """

    name: str
    license: str | None
    classes: list[str] | None
    labels: np.ndarray | None
    items: Sequence[Any]
    read: Callable[[Any], bytes]
    listing: str
    groups: np.ndarray | None = None
    bytes: int = 0
    modified: str = ""

    @property
    def count(self) -> int:
        return len(self.items)

    @property
    def held_out_from(self) -> str:
        """What a holdout takes a fraction of, as text."""
        if self.groups is not None:
            return "the groups"
        return "the images" if self.labels is None else "each class"


@dataclass(frozen=True)
class FileReader:
    """`Source.read` of a folder of images: its items are paths relative to `root`, with slashes."""

    root: Path

    def __call__(self, name: str) -> bytes:
        return read_file(self.root / name, self.root)


def read_file(path: Path, root: Path) -> bytes:
    """The file's bytes.

    Raises BadSample for a file that is gone or may not be read, RunError where the disk or network fails or
    `root` itself is gone: then the image is not at fault.
    """
    try:
        if path.stat().st_size > MAX_MEMBER_BYTES:
            raise BadSample(f"larger than {MAX_MEMBER_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR) and root.is_dir():
            raise BadSample(error.strerror or str(error)) from None
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from None


def is_image(name: str) -> bool:
    """Whether a file is an image, by its name."""
    return name.lower().endswith(_IMAGES)


def find_split(source: str, split: str | None, splits: list[str]) -> str:
    """The one of `splits` that was asked for; val, valid and validation are the same. Raises UserError."""
    if split in splits:
        return split
    same = [name for name in splits if split in VALIDATION and name in VALIDATION]
    if len(same) == 1:
        return same[0]
    if not splits:
        how = f"in a suite replace source with train: {source}#train and test: {source}#test"
        raise UserError(f"{source} has no splits; omit split={split}, or {how}")
    wrong = "has several splits" if split is None else f"has no split {split!r}"
    raise UserError(f"{source} {wrong}; choose split from: {', '.join(splits)}")
