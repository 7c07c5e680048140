"""Folders of images as a source."""

from __future__ import annotations

import hashlib
import os
import stat
import unicodedata
import warnings
from collections import Counter
from pathlib import Path
from typing import NoReturn

import numpy as np

from ssl_vit.data import TEST
from ssl_vit.data.packing.sources.base import METADATA, TABLES, FileReader, Source, find_split, is_image
from ssl_vit.interfaces import UserError, printable

_SPLITS = {"train", *TEST}
_SPLIT_NAMES = {*_SPLITS, "training", "testing"}


def list_splits(root: Path) -> list[str]:
    """The folder's train, val and test where it holds nothing else, sorted; [] for class folders and flat folders."""
    inside = {*_sub_folders(root)}
    return sorted(inside) if "train" in inside and inside <= _SPLITS else []


def open_folder(root: Path, split: str | None) -> Source:
    """One sub-folder per class, or flat and unlabeled. split: picks a folder where train, test, val are above these."""
    whole, name, class_roots, inside = root, printable(root.resolve().name), [root], {*_sub_folders(root)}
    if split is None and "train" in inside and len(inside & _SPLITS) > 1 and (others := sorted(inside - _SPLITS)):
        raise UserError(
            f"{root} holds splits and other folders ({', '.join(others[:3])}): move the others away, "
            "or pack one split with `ssl-vit shards make --split NAME`"
        )
    like_splits = len(inside) > 1 and {folder.casefold() for folder in inside} <= _SPLIT_NAMES
    if like_splits and split not in inside and not list_splits(root):
        names = ", ".join(sorted(inside))
        raise UserError(f"{root} holds splits ({names}): call them train and test or val, or name one of them")
    if split is not None or list_splits(root):
        splits = sorted(folder for folder in inside if folder in _SPLITS or folder == split)
        part = find_split(str(root), split, splits)
        class_roots = [root / other for other in _same_classes(root, part, splits)]
        root, name = root / part, f"{name}/{part}"

    entries = [entry for folder in {root, *class_roots} for entry in _entries(folder)]
    if broken := next((entry.path for entry in entries if _is_broken(entry)), None):
        raise UserError(f"{broken}: broken link (is its disk mounted?); restore or remove it")
    folders, classes, ignored = _sub_folders(root), None, Counter[str]()
    if folders:
        classes = sorted({folder for class_root in class_roots for folder in _sub_folders(class_root)})
        if wrong := next((folder for folder in classes if folder.encode(errors="replace").decode() != folder), None):
            raise UserError(f"{root}: the name of folder {wrong!r} is not UTF-8; rename it")
        if len({unicodedata.normalize("NFC", folder) for folder in classes}) < len(classes):
            raise UserError(
                f"{root}: two class folders have one name in different Unicode forms (NFC, NFD): rename one"
            )
        files = [entry.name for entry in _entries(root) if entry.is_file()]
        ignored.update(map(_suffix, files))
        if stray := next(filter(is_image, files), None):
            raise UserError(
                f"{root} holds both images ({stray}) and sub-folders ({folders[0]}/): "
                "put every image in a sub-folder named after its class, or none"
            )
    items, counts, listing, times, total = list[str](), list[int](), hashlib.sha256(), hashlib.sha256(), 0
    deeper = dict[str, list[str]]()  # class folders whose images all lie in sub-folders, and these
    for folder in folders or [""]:
        images, other_files = _images_in(root / folder)
        ignored += other_files
        if not images:
            what = "this class folder holds no images" if folder else "holds no images, parquet or arrow files"
            found = f" (only {_kinds(other_files)})" if other_files else ""
            raise UserError(f"{root / folder}: {what}{found}; add some or remove the folder")
        for file, size, modified in sorted(images):
            items.append(f"{folder}/{file}" if folder else file)
            total += size
            times.update(f"{modified}\n".encode())
            listing.update(os.fsencode(f"{items[-1]}\0{size}\n"))
        counts.append(len(images))
        if folder and all("/" in file for file, _, _ in images):
            deeper[folder] = sorted({file.partition("/")[0] for file, _, _ in images})
    described = [
        entry for folder in {whole, root, *class_roots} for entry in _entries(folder) if entry.name in METADATA
    ]
    if unread := sorted(file.path for file in described if file.is_file() and not _is_table(file, tables=False)):
        warnings.warn(f"{unread[0]} was not read: it has no column file_name (in UTF-8)", stacklevel=3)
    if ignored:
        warnings.warn(f"{root}: ignored {ignored.total()} files of other types ({_kinds(ignored)})", stacklevel=3)
    if len(folders) == 1 and deeper:
        meant = f"to make its sub-folders classes ({', '.join(deeper[folders[0]][:3])}), name {root / folders[0]}"
        warnings.warn(f"{root} has one class, {folders[0]}; {meant}", stacklevel=3)
    elif below := [f"{folder}/{name}" for folder, names in deeper.items() if len(names) > 1 for name in names]:
        shown = ", ".join(folders[:3])
        meant = f"folders below them, such as {below[0]} and {below[1]}, are not classes"
        warnings.warn(f"{root}: the classes are its own sub-folders ({shown}); {meant}", stacklevel=3)
    labels = None
    if classes is not None:
        index = {folder: number for number, folder in enumerate(classes)}
        labels = np.repeat(np.array([index[folder] for folder in folders], dtype=np.int64), counts)
    reader = FileReader(root)
    about = f"{name} (folder)", None, classes, labels, items, reader, listing.hexdigest()
    return Source(*about, bytes=total, modified=times.hexdigest())


def is_dataset(folder: Path, *, tables: bool) -> bool:
    """Whether `datasets` must read this folder: images described by a metadata file, or with `tables` saved tables."""
    for entry in _entries(folder):
        if (tables and entry.name in ("dataset_dict.json", "state.json")) or _is_table(entry, tables):
            return True
        if entry.is_dir() and any(_is_table(inside, tables) for inside in _entries(folder / entry.name)):
            return True
    return False


def _is_table(entry: os.DirEntry[str], tables: bool) -> bool:
    if entry.name in METADATA and entry.is_file():
        # Only the imagefolder layout: another metadata.csv does not name images in this way.
        with Path(entry.path).open(errors="replace") as file:
            return "file_name" in file.readline()
    return tables and entry.name.endswith(TABLES)


def _same_classes(root: Path, part: str, splits: list[str]) -> set[str]:
    """The splits whose classes count together with those of `part`, so that a class that one split lacks does not
    shift the indices of the others: all that share a class with it, directly or through others."""
    folders = {split: {*_sub_folders(root / split)} for split in splits}
    same = {part}
    while more := {split for split in splits if split not in same and any(folders[split] & folders[s] for s in same)}:
        same |= more
    return same


def _refuse(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename}: cannot be listed: {error.strerror}; make it readable or move it away") from None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in the folder, without hidden names: those are macOS resource forks ("._cat.jpg") and checkpoints of
    notebooks, never samples."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        _refuse(error)


def _sub_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in _entries(folder) if entry.is_dir())


def _images_in(folder: Path) -> tuple[list[tuple[str, int, int]], Counter[str]]:
    """(path below the folder, bytes, time of the last change in ns) of every image file, and the kinds of the other
    files."""
    images, others = list[tuple[str, int, int]](), Counter[str]()
    for base, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = Path(base).relative_to(folder).as_posix()
        others.update("links to folders" for name in folders if Path(base, name).is_symlink())  # not followed
        for name in files:
            if name.startswith("."):
                continue
            try:
                status = os.stat(f"{base}/{name}")  # noqa: PTH116  # a `Path` for each of a million files takes longer
                regular, size, modified = stat.S_ISREG(status.st_mode), status.st_size, status.st_mtime_ns
            except OSError:  # a broken link: packing lists it as unreadable
                regular, size, modified = True, 0, 0
            if regular and is_image(name):
                images.append((name if below == "." else f"{below}/{name}", size, modified))
            else:
                others[_suffix(name)] += 1
    return images, others


def _suffix(name: str) -> str:
    return Path(name).suffix.lower() or "without suffix"


def _kinds(suffixes: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in suffixes.most_common(5))


def _is_broken(entry: os.DirEntry[str]) -> bool:
    """Whether this may have been a link to a class folder."""
    return entry.is_symlink() and not Path(entry.path).exists() and not is_image(entry.name)
