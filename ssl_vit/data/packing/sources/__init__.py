"""What can be packed into shards: folders of images, tables that `datasets` reads, and sources of your own.

A file `NAME.py` here with `open_images(place, split) -> Source` is a new source, called `NAME:PLACE`; so is any
module, as `my_package.module:PLACE`. Where it has splits, its `list_splits(place) -> list[str]` names them. A source
lists its images and reads one only when asked, so packing needs memory for file names and labels, not for images.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ssl_vit import plugins
from ssl_vit.data.packing.sources import folder
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.files import expanded
from ssl_vit.interfaces import UserError

FOLDER, HUB = "imagefolder:", "hf:"  # prefixes
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_PLUGIN = re.compile(r"(?P<name>[a-z][\w.]*\w):(?!//)(?P<place>.*)")


def open_source(
    spec: str, *, split: str | None = None, label_column: str | None = None, image_column: str | None = None
) -> Source:
    """Open a source of images.

    spec: a folder of images (one sub-folder per class, or flat and unlabeled), a parquet or arrow file, a folder that
        `datasets` saved, `digits` (scikit-learn's; a folder of that name is `./digits`), NAME:PLACE for a source of
        your own, or the name of a dataset on the Hugging Face hub. `imagefolder:PATH` and `hf:NAME` say which it is.
    split: one of the source's splits.
    label_column, image_column: columns of a table.

    Raises UserError where the source is missing, empty or ambiguous.
    """
    plugin, path, images = _kind(spec)
    if (plugin or images) and (label_column or image_column):
        raise UserError(f"{spec}: label_column and image_column are for tables (parquet, arrow, hub); omit them")
    if plugin:
        source: Source = plugins.load("sources", plugin["name"]).open_images(plugin["place"], split)
        return source
    if images:
        return folder.open_folder(path, split)
    if not path.exists():
        _check_hub_name(spec)
    from ssl_vit.data.packing.sources.tables import open_table  # `datasets` takes a second to import

    hub_name = spec.removeprefix(HUB)
    return open_table(hub_name, path if path.exists() else None, split, label_column, image_column)


def list_splits(spec: str) -> list[str]:
    """The names of a source's splits; [] where it has none. spec: as `open_source` takes it; raises UserError as it."""
    plugin, path, images = _kind(spec)
    if plugin:
        module = plugins.load("sources", plugin["name"])
        return list(module.list_splits(plugin["place"])) if hasattr(module, "list_splits") else []
    if images:
        return folder.list_splits(path)
    if not path.exists():
        _check_hub_name(spec)
    from ssl_vit.data.packing.sources import tables

    return tables.list_splits(spec.removeprefix(HUB), path if path.exists() else None)


def _kind(spec: str) -> tuple[re.Match[str] | None, Path, bool]:
    """(match of NAME:PLACE; the path; whether it is a folder of images). Neither: a table or a name on the hub."""
    spec = spec.removeprefix(FOLDER)
    path = expanded(spec)
    is_path = path.exists() or spec.startswith(HUB)
    plugin = _PLUGIN.fullmatch("digits:" if spec == "digits" else "" if is_path else spec)
    return plugin, path, not plugin and path.is_dir() and not folder.is_dataset(path)


def _check_hub_name(spec: str) -> None:
    """Raises UserError where a path that does not exist cannot be a name on the hub either."""
    name = spec.removeprefix(HUB)
    if not _HUB_NAME.fullmatch(name) or (name == spec and "/" in spec and expanded(spec).parent.is_dir()):
        raise UserError(f"{spec}: no such file or folder")
    print(f"{name}: looking for this dataset on the Hugging Face hub", file=sys.stderr)
