"""Folders of images as a source."""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from ssl_vit.data.packing.sources.base import VALIDATION, FileReader, Source, find_split
from ssl_vit.interfaces import UserError

_SUFFIXES = {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".jp2"}
_SPLITS = {"train", "test", *VALIDATION}


class _Names:
    """Strings end to end in one buffer: a million file names as a list of `str` would take three times the memory."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("q", [0])

    def append(self, name: str) -> None:
        self._text += os.fsencode(name)
        self._ends.append(len(self._text))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(bytes(self._text[self._ends[index] : self._ends[index + 1]]))


def _refuse(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename}: cannot be listed: {error.strerror}; make it readable or leave it out") from None


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """What is in the folder. Hidden names are left alone: they are macOS resource forks ("._cat.jpg") and notebook
    checkpoints, never samples."""
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        _refuse(error)


def _sub_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in _entries(folder) if entry.is_dir())


def _is_image(name: str) -> bool:
    return "." + name.rpartition(".")[2].lower() in _SUFFIXES


def _images_in(folder: Path, prefix: str = "") -> tuple[list[tuple[str, int]], int]:
    """(path below the folder, bytes) of every image file there, and how many other files were seen."""
    images: list[tuple[str, int]] = []
    others = 0
    for entry in _entries(folder):
        if entry.is_dir():
            if entry.is_symlink():  # it could lead in circles
                others += 1
                continue
            inner, more = _images_in(folder / entry.name, f"{prefix}{entry.name}/")
            images += inner
            others += more
            continue
        try:
            status = entry.stat()
            plain, size = stat.S_ISREG(status.st_mode), status.st_size
        except OSError:  # a link to nowhere: packing finds the same and lists it as left out
            plain, size = True, 0
        if plain and _is_image(entry.name):
            images.append((prefix + entry.name, size))
        else:
            others += 1
    return images, others


def open_folder(root: Path, split: str | None) -> Source:
    """One sub-folder a class, or flat and unlabeled; `split` picks where folders named train, test, val are above."""
    name = root.resolve().name
    parts = _sub_folders(root)
    class_roots = [root]
    if split is None and "train" in parts and {*parts} & _SPLITS != {"train"} and not set(parts) <= _SPLITS:
        beside = sorted(set(parts) - _SPLITS)[:3]
        raise UserError(
            f"{root} holds splits and other folders ({', '.join(beside)}): name one by --split, or move those away"
        )
    if split is not None or ("train" in parts and set(parts) <= _SPLITS):
        parts = [part for part in parts if part in _SPLITS or part == split]
        part = find_split(str(root), split, parts)
        # The classes of every split, so that one missing from this split does not shift the others' indices; but not of
        # a split that is laid out otherwise and shares none.
        folders = {other: {*_sub_folders(root / other)} for other in parts}
        alike, left = {part}, {*parts} - {part}
        while found := {other for other in left if any(folders[other] & folders[one] for one in alike)}:
            alike, left = alike | found, left - found
        class_roots = [root / other for other in alike]
        root, name = root / part, f"{name}/{part}"

    class_folders = _sub_folders(root)
    classes, ignored = None, 0
    if class_folders:
        classes = sorted({folder for class_root in class_roots for folder in _sub_folders(class_root)})
        if broken := next((folder for folder in classes if not _is_text(folder)), None):
            raise UserError(f"{root}: the folder {broken!r} has a name that is no UTF-8: rename it")
        beside = [entry.name for entry in _entries(root) if entry.is_file()]
        ignored = len(beside)
        if stray := next(filter(_is_image, beside), None):
            raise UserError(
                f"{root} holds both images ({stray}) and sub-folders ({class_folders[0]}/): "
                "put every image in a sub-folder named after its class, or none"
            )
    files, total, listing = _Names(), 0, hashlib.sha256()
    counts = []
    for folder in class_folders or [""]:
        images, others = _images_in(root / folder)
        ignored += others
        if not images:
            what = "this class folder holds no images" if folder else "holds no images, parquet or arrow files"
            raise UserError(f"{root / folder}: {what}; add some or remove the folder")
        for file, size in sorted(images):
            file = f"{folder}/{file}" if folder else file
            files.append(file)
            listing.update(os.fsencode(f"{file}\0{size}\n"))
            total += size
        counts.append(len(images))
        below = sorted({file.split("/")[0] for file, _ in images if "/" in file}) if len(class_folders) == 1 else []
        if len(below) > 1 and all("/" in file for file, _ in images):
            inside = f"the only class, with all its images in sub-folders ({', '.join(below[:3])})"
            warnings.warn(f"{root / folder}: {inside}: if those are the classes, name this folder", stacklevel=3)
    if ignored:
        warnings.warn(f"{root}: ignored {ignored} files that are not images", stacklevel=3)
    labels = None
    if classes is not None:
        index_of = {folder: index for index, folder in enumerate(classes)}
        labels = np.repeat(np.array([index_of[folder] for folder in class_folders], dtype=np.int64), counts)
    return Source(f"{name} (folder)", None, classes, labels, files, FileReader(root), listing.hexdigest(), total)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_dataset(folder: Path) -> bool:
    """Whether `datasets` must read this directory: saved tables, or images described by a metadata file."""
    for entry in _entries(folder):
        if entry.name in ("dataset_dict.json", "state.json") or _is_table(entry):
            return True
        if entry.is_dir() and any(map(_is_table, _entries(folder / entry.name))):
            return True
    return False


def _is_table(entry: os.DirEntry[str]) -> bool:
    if entry.name in ("metadata.csv", "metadata.jsonl") and entry.is_file():
        # Only the imagefolder layout is meant: other people's metadata.csv does not name the images this way.
        with Path(entry.path).open(errors="replace") as file:
            return "file_name" in file.readline()
    return entry.name.endswith((".parquet", ".arrow"))
