"""What can be packed into shards: folders of images, anything `datasets` reads, and what a file in here opens.

A file `NAME.py` here with `open_images(place, split) -> Source` is a source of its own, called `NAME:PLACE`. A source
lists its images and reads one only when it is asked for, so packing needs memory for file names and labels (some 40
bytes an image), not for images.
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
_OWN = re.compile(r"(?P<name>[a-z]\w+):(?!//)(?P<place>.*)")


def open_source(
    spec: str, *, split: str | None = None, label_column: str | None = None, image_column: str | None = None
) -> Source:
    """Open what `spec` names: a folder of images (one sub-folder a class, or flat and unlabeled), a local parquet or
    arrow file or dataset directory, "digits" (scikit-learn's; a folder of that name is "./digits"), NAME:PLACE for the
    source of a file in this room, or the name of a dataset on the Hugging Face hub. `split` picks one of the source's
    parts; the columns matter to datasets only.

    Raises UserError where the source is missing, empty or ambiguous.
    """
    path = Path(spec).expanduser()
    own = _OWN.fullmatch("digits:" if spec == "digits" else "" if path.exists() else spec)
    is_images = not own and path.is_dir() and not is_dataset(path)
    if (own or is_images) and (label_column or image_column):
        raise UserError(f"{spec}: label_column and image_column are for tables (parquet, arrow, hub); leave them out")
    if own:
        found: Source = plugins.load("sources", own["name"]).open_images(own["place"], split)
        return found
    if is_images:
        return open_folder(path, split)
    if not path.exists() and (not _HUB_NAME.fullmatch(spec) or ("/" in spec and path.parent.is_dir())):
        raise UserError(f"{spec}: no such file or folder")
    if not path.exists():
        print(
            f"{spec}: no such folder here, so the Hugging Face hub is asked for a data set of that name",
            file=sys.stderr,
        )
    from ssl_vit.data.packing.sources.tables import open_table  # here, not above: `datasets` takes a second to import

    return open_table(spec, path if path.exists() else None, split, label_column, image_column)
