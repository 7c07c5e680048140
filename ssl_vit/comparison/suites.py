"""Packs datasets that are given by a source, once, before anything is evaluated on them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from filelock import FileLock

from ssl_vit.comparison.sets import DataSet
from ssl_vit.data.packing import pack
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.shards.info import INFO, RECORD
from ssl_vit.files import read_json, write_json
from ssl_vit.interfaces import UserError, errors_about
from ssl_vit.progress import Say

_REQUEST = "request.json"  # beside train/ and test/: what they were packed from
_PART = re.compile(r", \d+ images( per class)?\b|part of holdout|fold_\d+ of ")  # in info.json's source: a part of it


def prepare(sets: Mapping[str, DataSet], folder: Path, say: Say = print, *, write: bool = True) -> dict[str, DataSet]:
    """The same sets with `train` and `test` shards. Sources are packed into `folder/NAME` unless they are there; other
    processes wait. write: False packs nothing.

    Raises UserError for a source that cannot be read, a folder that was packed from another one, and (without `write`)
    for a set that is not packed yet.
    """
    packed = dict(sets)
    for name, chosen in sets.items():
        if chosen.source is None:
            continue
        places = {part: str(folder / name / part) for part in ("train", "test")}
        if write:
            (folder / name).mkdir(parents=True, exist_ok=True)
        with FileLock(folder / name / ".lock") if write else nullcontext():
            _check_packed(name, chosen, folder)
            if write:
                _pack(name, chosen, folder, say)
        if not all((Path(place) / INFO).is_file() for place in places.values()):
            raise UserError(f"dataset {name} is not packed yet, and a dry run packs nothing; first run it with --list")
        packed[name] = chosen.model_copy(update={"source": None, **places})
    return packed


def _check_packed(name: str, chosen: DataSet, folder: Path) -> None:
    place, fix = folder / name, "set another folder in the suite (in a comparison, data.folder)"
    held = read_json(place / _REQUEST) if (place / _REQUEST).is_file() else None
    if held and held != _request(chosen):
        raise UserError(f"dataset {name}: {place} was packed from {held['source']} {held['splits']}; {fix}")
    for info in (place / part / INFO for part in ("train", "test")):
        if info.is_file() and (held is None or _PART.search(str(read_json(info).get("source")))):
            other = f"other shards than all of {chosen.source}" if held else "shards that no suite packed"
            raise UserError(f"dataset {name}: {info.parent} holds {other}; {fix}")


def _request(chosen: DataSet) -> dict[str, object]:
    return chosen.model_dump(mode="json", include={"source", "splits", "image_column", "label_column"})


def _pack(name: str, chosen: DataSet, folder: Path, say: Say) -> None:
    columns = {"image_column": chosen.image_column, "label_column": chosen.label_column}
    write_json(folder / name / _REQUEST, _request(chosen))  # first: both parts must be of one source after a kill too
    for split, part in zip(chosen.splits, ("train", "test"), strict=True):
        out = folder / name / part
        if not (out / INFO).exists():
            say(f"packing {chosen.source} ({split}) into {out}")
            with errors_about(f"dataset {name}"), warnings.catch_warnings():
                warnings.showwarning = lambda message, *_: say(f"note: {message}")
                source = open_source(str(chosen.source), split=split, **columns)
                info = pack(source, out, overwrite=(out / RECORD).exists(), progress=False)[out]
            if info.dropped:
                say(f"note: {len(info.dropped)} images cannot be read and are skipped; {out / INFO} lists them")
