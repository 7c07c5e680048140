"""Tables of images, read by `datasets`: parquet and arrow files, saved dataset folders, Hugging Face hub names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ssl_vit.data.raw import BrokenImageError, RawSample, Source, find_split, read_file, to_stored
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
    except (TypeError, ValueError, NotImplementedError) as error:  # the last is pyarrow's
        raise UserError(f"{spec}: column {column!r} does not hold images: {_first_line(error)}") from None
    wanted = label_column or _label_column(spec, table)
    classes, labels = _classes_and_labels(spec, table, list(tables.values()), wanted) if wanted else (None, None)

    def sample(index: int) -> RawSample:
        key = f"row {index}"
        cell = images[index][column] or {}
        data, file = cell.get("bytes"), cell.get("path")
        if data is None:
            if not file:
                raise BrokenImageError(key, "no image in this row")
            data = read_file(Path(file), key)
        image, extension = to_stored(data, key)
        return RawSample(key, image, extension, None if labels is None else int(labels[index]))

    origin = spec if path is None else path.resolve().name
    name = f"{origin} (datasets{f', split {part}' if part else ''})"
    return Source(name, table.info.license or None, len(table), classes, labels, sample)


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
