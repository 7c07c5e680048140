"""Data sets given by a source are packed into shards once, before anything is judged on them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from ssl_vit.comparison.config import DataSet
from ssl_vit.data.packing import pack
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.shards.info import INFO
from ssl_vit.files import read_json, write_json
from ssl_vit.interfaces import UserError

_REQUEST = "request.json"  # beside train/ and test/: what they were packed from
_PART = re.compile(r", \d+ images( per class)?\b|part of holdout")  # of info.json's source: `--subset`, `--holdout`


def prepare(sets: Mapping[str, DataSet], folder: Path, say: Callable[[str], None] = print) -> dict[str, DataSet]:
    """The same sets with `train` and `test` shards; those given by `source` are packed into `folder/NAME/train` and
    `/test` where they are not there yet (other processes wait). Raises UserError for a source that cannot be had."""
    return {name: _packed(name, chosen, folder, say) for name, chosen in sets.items()}


def packed(sets: Mapping[str, DataSet], folder: Path) -> dict[str, DataSet]:
    """The same sets where all are packed already; nothing is written. Raises UserError naming one that is not."""
    found = {}
    for name, chosen in sets.items():
        if chosen.source is None:
            found[name] = chosen
            continue
        parts = _parts(name, folder)
        if not all((out / INFO).exists() for out in parts.values()):
            raise UserError(
                f"data set {name} is not packed yet, and a dry run packs nothing: "
                f"`ssl-vit shards make {chosen.source} {parts['train']} --split {chosen.splits[0]}`, and test likewise"
            )
        _check_packed(name, chosen, folder)
        found[name] = _with_shards(chosen, parts)
    return found


def _request(chosen: DataSet) -> dict[str, Any]:
    return chosen.model_dump(mode="json", include={"source", "splits", "image_column", "label_column"})


def _check_packed(name: str, chosen: DataSet, folder: Path) -> None:
    """Raises UserError where the set's folder holds another source, or a part of one, by what is written there."""
    mend = "name another folder for the packed sets, or remove that one"
    note = folder / name / _REQUEST
    if note.is_file() and (packed := read_json(note)) != (asked := _request(chosen)):
        differ = [key for key in asked if packed.get(key) != asked[key]]
        shown = "; ".join(f"{key} {packed.get(key)}, now {asked[key]}" for key in differ)
        raise UserError(f"data set {name}: {folder / name} was packed from something else ({shown}): {mend}")
    for out in _parts(name, folder).values():
        info = read_json(out / INFO) if (out / INFO).is_file() else {}
        if _PART.search(str(info.get("source"))):
            raise UserError(f"data set {name}: {out} holds a part of it only ({info['source']}): {mend}")


def _parts(name: str, folder: Path) -> dict[str, Path]:
    return {part: folder / name / part for part in ("train", "test")}


def _with_shards(chosen: DataSet, parts: Mapping[str, Path]) -> DataSet:
    return chosen.model_copy(update={"source": None, **{part: str(out) for part, out in parts.items()}})


def _packed(name: str, chosen: DataSet, folder: Path, say: Callable[[str], None]) -> DataSet:
    if chosen.source is None:
        return chosen
    parts = _parts(name, folder)
    (folder / name).mkdir(parents=True, exist_ok=True)
    with FileLock(folder / name / ".lock"):
        _check_packed(name, chosen, folder)
        for split, out in zip(chosen.splits, parts.values(), strict=True):
            if (out / INFO).exists():
                continue
            say(f"packing {chosen.source} ({split}) into {out}")
            try:
                with warnings.catch_warnings():
                    warnings.showwarning = lambda message, *_: say(f"note: {message}")
                    source = open_source(
                        chosen.source, split=split, image_column=chosen.image_column, label_column=chosen.label_column
                    )
                    pack(source, out, overwrite=True, progress=False)
            except UserError as error:
                raise UserError(f"data set {name}: {error}") from None
        write_json(folder / name / _REQUEST, _request(chosen))
    return _with_shards(chosen, parts)
