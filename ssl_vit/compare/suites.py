"""Data sets given by a source are packed into shards once, before anything is judged on them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock

from ssl_vit.compare.config import DataSet
from ssl_vit.data import pack, sources
from ssl_vit.data.journal import INFO
from ssl_vit.interfaces import UserError


def prepare(sets: Mapping[str, DataSet], folder: Path, say: Callable[[str], None] = print) -> dict[str, DataSet]:
    """The same sets with `train` and `test` shards; those given by `source` are packed into `folder/NAME/train` and
    `/test` where they are not there yet (other processes wait). Raises UserError for a source that cannot be had."""
    return {name: _packed(name, chosen, folder, say) for name, chosen in sets.items()}


def packed(sets: Mapping[str, DataSet], folder: Path) -> dict[str, DataSet]:
    """The same sets where all are packed already; nothing is written. Raises UserError naming one that is not."""
    found = {}
    for name, chosen in sets.items():
        parts = _parts(name, folder)
        if chosen.source and not all((out / INFO).exists() for out in parts.values()):
            raise UserError(
                f"data set {name} is not packed yet, and a dry run packs nothing: "
                f"`ssl-vit shards make {chosen.source} {parts['train']} --split {chosen.splits[0]}`, and test likewise"
            )
        found[name] = _with_shards(chosen, parts) if chosen.source else chosen
    return found


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
        for split, out in zip(chosen.splits, parts.values(), strict=True):
            if (out / INFO).exists():
                continue
            say(f"packing {chosen.source} ({split}) into {out}")
            try:
                with warnings.catch_warnings():
                    warnings.showwarning = lambda message, *_: say(f"note: {message}")
                    source = sources.open_source(
                        chosen.source, split=split, image_column=chosen.image_column, label_column=chosen.label_column
                    )
                    pack.make(source, out, overwrite=True, progress=False)
            except UserError as error:
                raise UserError(f"data set {name}: {error}") from None
    return _with_shards(chosen, parts)
