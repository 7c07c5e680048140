"""Tables of images, read by `datasets`: parquet and arrow files, saved dataset folders, Hugging Face hub names."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from pyarrow import ArrowNotImplementedError, compute  # type: ignore[import-untyped]

from ssl_vit.data.packing.sources.base import BrokenImageError, Source, find_split, read_file
from ssl_vit.interfaces import UserError


def open_table(
    spec: str, path: Path | None, split: str | None, label_column: str | None, image_column: str | None
) -> Source:
    part, tables = _load_splits(spec, path, split)
    table = tables[part or ""]
    for column in (image_column, label_column):
        if column is not None and column not in table.features:
            raise UserError(f"{spec} has no column {column!r}; its columns: {', '.join(table.features)}")
    if len(table) == 0:
        raise UserError(f"{spec}: the table has no rows")
    column = image_column or _image_column(spec, table)
    try:
        images = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    except (TypeError, ValueError, ArrowNotImplementedError) as error:
        raise UserError(f"{spec}: column {column!r} does not hold images: {_first_line(error)}") from None
    wanted = label_column or _label_column(spec, table)
    classes, labels = _classes_and_labels(spec, table, list(tables.values()), wanted) if wanted else (None, None)

    listing, size = _listing(images)
    origin = spec if path is None else path.resolve().name
    name = f"{origin} (datasets{f', split {part}' if part else ''})"
    read = _RowReader(images, column)
    return Source(name, table.info.license or None, classes, labels, range(len(table)), read, listing, size)


@dataclass(frozen=True)
class _RowReader:
    images: datasets.Dataset  # travels to packing processes as the path of its memory-mapped file
    column: str

    def __call__(self, row: int) -> tuple[str, bytes]:
        key = f"row {row}"
        cell = self.images[row][self.column] or {}
        data, file = cell.get("bytes"), cell.get("path")
        if data is None:
            if not file:
                raise BrokenImageError(key, "no image in this row")
            data = read_file(Path(file), key, Path(file).parent)
        return key, data


def _listing(images: datasets.Dataset) -> tuple[str, int]:
    """A hash of every row's size in bytes and file name, and the bytes in all. Only Arrow's offsets are read."""
    listing, total = hashlib.sha256(), 0
    for cells in images.data.column(0).chunks:
        sizes = compute.fill_null(compute.binary_length(cells.field("bytes")), 0).to_numpy().astype(np.int64)
        files = [file or "" for file in cells.field("path").to_pylist()]
        for row in np.flatnonzero(sizes == 0):
            if files[row] and Path(files[row]).is_file():  # the image is beside the table, not in it
                sizes[row] = Path(files[row]).stat().st_size
        listing.update(sizes.tobytes() + "\0".join(map(os.path.basename, files)).encode())
        total += int(sizes.sum())
    return listing.hexdigest(), total


def _load_splits(spec: str, path: Path | None, split: str | None) -> tuple[str | None, dict[str, datasets.Dataset]]:
    """The chosen split's name and all splits of the dataset; a lone unnamed table has the name None and key ""."""
    try:
        if path is None:
            loaded = datasets.load_dataset(spec)
        elif path.is_file():
            builder = {".parquet": "parquet", ".arrow": "arrow"}.get(path.suffix.lower())
            if builder is None:
                raise UserError(f"{spec}: a file to pack is .parquet or .arrow; for images name their folder")
            loaded = datasets.load_dataset(builder, data_files=str(path))["train"]
        elif (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path))
    except ConnectionError:
        raise UserError(
            f"{spec}: no such file or folder here, and the Hugging Face hub cannot be reached to look for a dataset "
            "of that name (offline?)"
        ) from None
    except datasets.exceptions.DatasetNotFoundError:
        raise UserError(f"{spec}: no such file or folder here, and no such dataset on the Hugging Face hub") from None
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{spec}: cannot be read as a dataset: {_first_line(error)}") from None
    if isinstance(loaded, datasets.Dataset):
        if split is not None and str(loaded.split) != split:
            raise UserError(f"{spec} is one table without splits; leave out split={split}")
        return None, {"": loaded}
    name = next(iter(loaded)) if split is None and len(loaded) == 1 else find_split(spec, split, list(loaded))
    return name, dict(loaded)


def _image_column(spec: str, table: datasets.Dataset) -> str:
    def holds_bytes(feature: Any) -> bool:  # parquet written without `datasets`: raw bytes, or {"bytes", "path"}
        return "bytes" in feature if isinstance(feature, dict) else getattr(feature, "dtype", "").endswith("binary")

    features = table.features.items()
    found = [name for name, feature in features if isinstance(feature, datasets.Image)]
    found = found or [name for name, feature in features if holds_bytes(feature)]
    named = [name for name in found if name in ("image", "img")]
    if len(found) != 1 and len(named) != 1:
        raise UserError(
            f"{spec}: {'several columns hold' if found else 'no column holds'} images; "
            f"name one as image_column, from: {', '.join(found or table.features)}"
        )
    return found[0] if len(found) == 1 else named[0]


def _label_column(spec: str, table: datasets.Dataset) -> str | None:
    """The one ClassLabel column; else an int or string column that is called a label; else none."""
    found = [name for name, feature in table.features.items() if isinstance(feature, datasets.ClassLabel)]
    # Other integer columns (ids, sizes) are no labels: the name must say so.
    found = found or [name for name in table.features if name.lower() in ("label", "labels", "class", "target", "cls")]
    if len(found) > 1 and "label" not in found:
        raise UserError(f"{spec} has several label columns; name one as label_column, from: {', '.join(found)}")
    return "label" if "label" in found else next(iter(found), None)


def _classes_and_labels(
    spec: str, table: datasets.Dataset, tables: list[datasets.Dataset], column: str
) -> tuple[list[str] | None, np.ndarray | None]:
    feature = table.features[column]
    values = table.select_columns([column])[:][column]
    if isinstance(feature, datasets.ClassLabel):
        classes = list(feature.names)
        labels = np.array([-1 if value is None else value for value in values], dtype=np.int64)
        if labels.max() >= len(classes):
            raise UserError(f"{spec}: column {column!r} holds the label {labels.max()}, but has {len(classes)} classes")
    elif isinstance(feature, datasets.Value) and re.match(r"u?int|bool|(large_)?string", feature.dtype):
        # Over all splits, so that train and test agree on the indices.
        known = sorted({value for part in tables if column in part.features for value in part.unique(column)} - {None})
        classes = [str(value) for value in known]
        index = {value: number for number, value in enumerate(known)}
        labels = np.array([index.get(value, -1) for value in values], dtype=np.int64)
    else:
        raise UserError(f"{spec}: column {column!r} cannot be a label: it holds {feature}, not integers or names")
    missing = np.flatnonzero(labels < 0)  # hub datasets write -1 where the test labels are kept secret
    if len(missing) == len(labels):
        return None, None
    if len(missing):
        raise UserError(f"{spec}: {len(missing)} of {len(labels)} rows have no {column!r} (first: row {missing[0]})")
    return classes, labels


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
