"""`listed:labels.csv`: images of a CSV file with the columns `file` (relative to the CSV file) and `label`."""

import hashlib
from pathlib import Path

import pandas as pd

from ssl_vit.data.packing.sources.base import FileReader, Source
from ssl_vit.interfaces import UserError


def open_images(place: str, split: str | None) -> Source:
    table = pd.read_csv(place, dtype=str)
    if not {"file", "label"} <= set(table.columns):
        raise UserError(f"{place}: needs the columns file and label")
    labels, classes = pd.factorize(table["label"], sort=True)
    folder = Path(place).resolve().parent
    stats = [path.stat() for file in table["file"] if (path := folder / file).exists()]
    return Source(
        name=Path(place).name,
        license=None,
        classes=list(classes),
        labels=labels,
        items=list(table["file"]),
        read=FileReader(folder),
        listing=hashlib.sha256(Path(place).read_bytes()).hexdigest(),
        modified=hashlib.sha256(f"{folder} {[(s.st_size, s.st_mtime_ns) for s in stats]}".encode()).hexdigest(),
    )
