"""What can be packed into shards: folders of images, tables that `datasets` reads, and sources of your own.

A file `NAME.py` here with `open_images(place, split) -> Source` is a source of its own, called `NAME:PLACE`. A source
lists its images and reads one only when asked, so packing needs memory for file names and labels, not for images.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ssl_vit import plugins
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.data.packing.sources.folder import is_dataset, open_folder
from ssl_vit.interfaces import UserError

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_PLUGIN = re.compile(r"(?P<name>[a-z]\w+):(?!//)(?P<place>.*)")


def open_source(
    spec: str, *, split: str | None = None, label_column: str | None = None, image_column: str | None = None
) -> Source:
    """Open a source of images.

    spec: a folder of images (one sub-folder per class, or flat and unlabeled), a parquet or arrow file, a folder that
        `datasets` saved, `digits` (scikit-learn's; a folder of that name is `./digits`), NAME:PLACE for a source of
        your own, or the name of a data set on the Hugging Face hub.
    split: one of the source's splits.
    label_column, image_column: columns of a table.

    Raises UserError where the source is missing, empty or ambiguous.
    """
    path = Path(spec).expanduser()
    plugin = _PLUGIN.fullmatch("digits:" if spec == "digits" else "" if path.exists() else spec)
    images = not plugin and path.is_dir() and not is_dataset(path)
    if (plugin or images) and (label_column or image_column):
        raise UserError(f"{spec}: label_column and image_column are for tables (parquet, arrow, hub); omit them")
    if plugin:
        found: Source = plugins.load("sources", plugin["name"]).open_images(plugin["place"], split)
        return found
    if images:
        return open_folder(path, split)
    if not path.exists():
        if not _HUB_NAME.fullmatch(spec) or ("/" in spec and path.parent.is_dir()):
            raise UserError(f"{spec}: no such file or folder")
        print(f"{spec}: no such folder; looking for this data set on the Hugging Face hub", file=sys.stderr)
    from ssl_vit.data.packing.sources.tables import open_table  # `datasets` takes a second to import

    return open_table(spec, path if path.exists() else None, split, label_column, image_column)
