"""What can be packed into shards: folders of images, tables that `datasets` reads, and sources of your own.

A file `NAME.py` here with `open_images(place, split) -> Source` is a new source, called `NAME:PLACE`; so is any
module, as `my_package.module:PLACE`. Where it has splits, its `list_splits(place) -> list[str]` names them. A source
lists its images and reads one only when asked, so packing needs memory for file names and labels, not for images.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ssl_vit import plugins
from ssl_vit.data.packing.sources import folder
from ssl_vit.data.packing.sources.base import Source, find_split
from ssl_vit.files import expanded
from ssl_vit.interfaces import UserError

FOLDER, HUB = "imagefolder:", "hf:"  # prefixes
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?")
_NAME = re.compile(r"digits|[A-Za-z_][\w.]*\w:(?!//).*")


def is_name(spec: str) -> bool:
    """Whether this names a source where no such path exists: `digits`, NAME:PLACE, `imagefolder:PATH`, `hf:NAME`."""
    return bool(_NAME.fullmatch(spec))


def open_source(
    spec: str, *, split: str | None = None, label_column: str | None = None, image_column: str | None = None
) -> Source:
    """Open a source of images.

    spec: a folder of images (one sub-folder per class, or flat and unlabeled), a parquet or arrow file, a folder that
        `datasets` saved, `digits` (scikit-learn's; a folder of that name is `./digits`), NAME:PLACE for a source of
        your own, or the name of a dataset on the Hugging Face hub. `imagefolder:PATH` and `hf:NAME` say which it is;
        `hf:NAME:CONFIG` is one configuration of a dataset.
    split: one of the source's splits.
    label_column, image_column: columns of a table.

    Raises UserError where the source is missing, empty or ambiguous, or an image has no valid label.
    """
    source = _find(spec, label_column, image_column)[1](split)
    if source.labels is not None:
        if len(source.labels) != source.count:
            raise UserError(f"{spec}: has {len(source.labels)} labels for {source.count} images; return one per image")
        labels, classes = np.asarray(source.labels), len(source.classes or ())
        if labels.dtype.kind not in "iu":
            raise UserError(f"{spec}: its labels are {labels.dtype}; return class indices as integers")
        if len(wrong := np.flatnonzero(~((labels >= 0) & (labels < classes)))):
            image = f"{spec}: image {source.items[wrong[0]]} has the label {labels[wrong[0]]}"
            raise UserError(f"{image}, which is none of its {classes} classes; label or remove it")
        source = replace(source, labels=labels.astype(np.int64))
    return source


def list_splits(spec: str) -> list[str]:
    """The names of a source's splits; [] where it has none. spec and errors: as in `open_source`."""
    return list(_find(spec)[0]())


def _find(spec: str, *columns: str | None) -> tuple[Callable[[], list[str]], Callable[[str | None], Source]]:
    """(list_splits, open a split) of what `spec` names. columns: of the labels and of the images in a table."""
    is_folder, path = spec.startswith(FOLDER), expanded(spec.removeprefix(FOLDER))
    if is_folder and not path.is_dir():
        raise UserError(f"{spec}: no such folder")
    if spec == "digits" or (is_name(spec) and not path.exists() and not spec.startswith(HUB)):
        name, _, place = spec.partition(":")
        module = plugins.load("sources", name)
        found = partial(_splits_of, module, place), partial(_opened, module, spec, place)
    elif path.is_dir() and not folder.is_dataset(path, tables=not is_folder):
        found = partial(folder.list_splits, path), partial(folder.open_folder, path)
    else:
        if not path.exists():
            _check_hub_name(spec)
        from ssl_vit.data.packing.sources import tables  # `datasets` takes a second to import

        table = spec.removeprefix(HUB), path if path.exists() else None
        return partial(tables.list_splits, *table), lambda split: tables.open_table(*table, split, *columns)
    if any(columns):
        raise UserError(f"{spec}: label_column and image_column are for tables (parquet, arrow, hub); omit them")
    return found


def _splits_of(module: Any, place: str) -> list[str]:
    return list(module.list_splits(place)) if hasattr(module, "list_splits") else []


def _opened(module: Any, spec: str, place: str, split: str | None) -> Source:
    if split is not None and not hasattr(module, "list_splits"):
        find_split(spec, split, [])
    source: Source = module.open_images(place, split)
    return source


def _check_hub_name(spec: str) -> None:
    """Raises UserError where a path that does not exist cannot be a name on the hub either."""
    name = spec.removeprefix(HUB)
    if not _HUB_NAME.fullmatch(name) or (name == spec and "/" in spec and expanded(spec).parent.is_dir()):
        raise UserError(f"{spec}: no such file or folder")
    print(f"{name}: looking for this dataset on the Hugging Face hub", file=sys.stderr)
