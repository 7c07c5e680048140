"""What a data argument names: shards, or images that are packed first; and which part of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

from ssl_vit.data import TEST
from ssl_vit.data.packing.sources import FOLDER, is_name, list_splits
from ssl_vit.data.packing.sources.base import TABLES, is_image
from ssl_vit.data.shards.info import ABOUT, INFO, MAX_INFO_BYTES, RECORD, TARS
from ssl_vit.data.shards.listing import TAR
from ssl_vit.files import expanded
from ssl_vit.interfaces import UserError

_PART = re.compile(r"(?P<place>.+)#(?P<part>[\w.-]+)", re.DOTALL)
_LISTS = (INFO, ABOUT, RECORD)


def split_name(spec: str) -> tuple[str, str]:
    """`PLACE#PART` as (PLACE, PART); PART is "" where the whole place is meant."""
    match = None if os.path.exists(expanded(spec)) else _PART.fullmatch(spec)
    return (match["place"], match["part"]) if match else (spec, "")


def absolute(spec: str) -> str:
    """The same for all names of the same images, as far as names and folders tell."""
    place, part = split_name(spec)
    if "://" in spec:
        return f"{place.rstrip('/')}/{part}" if part else place.rstrip("/")
    folder = expanded(place.removeprefix(FOLDER)).resolve()
    found = next((folder / name for name in names_of(part) if part and (folder / name).is_dir()), None)
    return str(found or (f"{folder}#{part}" if part else folder))


def check_outside(folder: Path | str, places: Iterable[str]) -> None:
    """Raises UserError for a folder inside a folder of images, where what is written would look like images."""
    for place in places:
        images = expanded(split_name(place)[0].removeprefix(FOLDER)).resolve()
        inside = images.is_dir() and expanded(folder).resolve().is_relative_to(images)
        if inside and "://" not in place and not is_shards(str(images)):
            raise UserError(f"{folder} lies inside {place}, where it would look like images; choose a folder outside")


def names_of(part: str) -> tuple[str, ...]:
    """The folders or splits that can be this part, in order of preference."""
    return TEST if part == "test" else (part,)


def is_shards(place: str) -> bool:
    """Whether a name is that of shards, or of nothing that exists: then the error is about shards."""
    path = expanded(place)
    if not os.path.exists(path):
        return not is_name(place)
    if path.is_dir():
        return _is_set(path) or bool(_parts(path))
    return path.suffix.lower() not in (*TABLES, ".csv")


def _is_set(folder: Path) -> bool:
    """Whether shards lie in the folder itself, finished or not. Tars without a list do not count where the folder
    holds more images than tars: they may be the archive of a dataset."""
    if any(_lists_shards(folder / name) for name in _LISTS):
        return True
    tars = len([file for file in folder.glob("[!.]*") if TAR.fullmatch(file.name)])
    beside = (file.name for file in folder.glob("[!.]*"))
    inside = (file for sub in folder.glob("[!.]*/") for _, _, files in os.walk(sub) for file in files)
    images = len([*islice(filter(is_image, chain(beside, inside)), tars + 1)])  # enough to compare
    return tars > 0 and images <= tars


def _parts(folder: Path) -> list[str]:
    """The sub-folders with shards, finished or not. Tars alone count only in train, test and val: the archive of a
    dataset of images may still lie in its class folders."""
    if not os.path.exists(folder):  # `glob` raises for a name that is too long
        return []
    listed = {file.parent.name for name in _LISTS for file in folder.glob(f"[!.]*/{name}") if _lists_shards(file)}
    return sorted(listed | {name for name in ("train", *TEST) if _is_set(folder / name)})


def _lists_shards(file: Path) -> bool:
    """Whether a file was written by packing; other datasets may contain files of the same names."""
    if file.name == RECORD or any(file.parent.glob(TARS)):
        return file.exists()
    try:
        with file.open("rb") as opened:
            content = json.loads(opened.read(MAX_INFO_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and any(isinstance(content.get(key), list | dict) for key in ("shards", "splits"))


def parts_of(place: str) -> list[str]:
    """The parts that `place` has, as data arguments: its splits, unless it has one for training alone, else itself."""
    if is_shards(place):
        names = _parts(folder := expanded(place))
        if names and _is_set(folder):  # shards in sub-folders beside its own
            return [place, *(f"{place}#{name}" for name in names)]
    else:
        names = list_splits(place)
        names = names if len(names) > 1 or set(names) & set(TEST) else []
    return [f"{place}#{name}" for name in names] or [place]


def part_of_shards(folder: Path, part: str) -> Path:
    """The folder of one part of packed shards. Raises UserError where there is none."""
    parts = _parts(folder)
    for name in names_of(part):
        if name in parts:
            return folder / name
    if os.path.exists(folder):
        raise UserError(
            f"{folder} holds no shards {part}/; name the shards to train and to test on one by one, "
            f"or {FOLDER}{folder} for its images"
        )
    whole, is_part, _ = str(folder).rpartition("#")
    if is_part and os.path.exists(whole):
        raise UserError(f"{folder} is one part; give {whole}, which has both, or the parts to train and test on")
    here = "" if folder.is_absolute() else f" in {Path.cwd()}"  # names in a saved recipe are looked up there, too
    raise UserError(
        f"{folder}: no such file or folder{here}; name images (a folder, a parquet file, hf:NAME) or shards "
        "with data=PLACE"
    )
