"""Tables of images, read by `datasets`: parquet and arrow files, saved datasets, names on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
from pyarrow import ArrowNotImplementedError, compute  # type: ignore[import-untyped]

from ssl_vit.data.packing.sources.base import METADATA, TABLES, Source, find_split, is_image, read_file
from ssl_vit.interfaces import BadSample, UserError, first_line, printable

_LABELS = ("label", "labels", "class", "target", "cls")  # usual names of their column
# What `datasets` raises for damaged tables: IndexError for no rows, OverflowError for numbers of more than 64 bits,
# RuntimeError for a dataset with a script.
_FAILURES = (ValueError, OSError, RuntimeError, LookupError, OverflowError, TypeError)


def list_splits(spec: str, path: Path | None) -> list[str]:
    """The splits of a dataset; [] for a single table. path: None for a name on the hub."""
    return [name for name in _load(spec, path) if name]


def open_table(
    spec: str, path: Path | None, split: str | None, label_column: str | None, image_column: str | None
) -> Source:
    """See `open_source`. path: None for a name on the hub."""
    tables = _load(spec, path)
    if split is not None and str(getattr(tables.get(""), "split", split)) != split:
        raise UserError(f"{spec} is one table without splits; omit split={split}")
    alone = len(tables) == 1 and (split is None or "" in tables)
    part = next(iter(tables)) if alone else find_split(spec, split, list(tables))
    table = tables[part]
    for column in (image_column, label_column):
        if column is not None and column not in table.features:
            raise UserError(f"{spec} has no column {column!r}; its columns: {', '.join(table.features)}")
    if len(table) == 0:
        raise UserError(f"{spec}: the table has no rows")
    column = image_column or _image_column(spec, table)
    try:
        images = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    except (TypeError, ValueError, ArrowNotImplementedError) as error:
        raise UserError(f"{spec}: column {column!r} does not hold images: {first_line(error)}") from None
    files = [path, *path.rglob("*")] if path else []
    metadata = _metadata(path) if path else []
    if metadata:
        _check_listed_once(spec, images)
    label_column = label_column or _label_column(spec, table, described=bool(metadata))
    if metadata and (others := sum(is_image(file.name) for file in files) - sum(map(len, tables.values()))) > 0:
        warnings.warn(f"{spec}: its metadata file does not list {others} of its images: not packed", stacklevel=3)
    if not label_column and metadata:
        warnings.warn(f"{spec}: its metadata file has no label column: packed without labels", stacklevel=3)
    classes, labels = _labels(spec, table, list(tables.values()), label_column) if label_column else (None, None)
    if metadata and label_column and classes and "int" in table.features[label_column].dtype:
        classes = _as_written(spec, classes, metadata, label_column)
    name = f"{spec if path is None else printable(path.resolve().name)} (datasets){part and f', split {part}'}"
    root = (path if path.is_dir() else path.parent) if path else Path()
    return Source(
        name,
        table.info.license or None,
        classes,
        labels,
        range(len(table)),
        partial(_read, images, column, root),
        _listing(images, root),
        bytes=images.data.nbytes,
        modified=hashlib.sha256(str([_modified(file) for file in sorted(files)]).encode()).hexdigest(),
    )


def _modified(file: Path) -> int:
    return (file.stat() if file.exists() else file.lstat()).st_mtime_ns  # of what a link names, where it is not broken


def _read(images: datasets.Dataset, column: str, root: Path, row: int) -> bytes:
    """images: pickled as the path of its memory-mapped file. root: of relative paths in the table."""
    cell = images[row][column] or {}
    if (data := cell.get("bytes")) is not None:
        return bytes(data)
    if not (file := cell.get("path")):
        raise BadSample("no image in this row")
    return read_file(root / file, root if not Path(file).is_absolute() else Path(file).parent)


def _listing(images: datasets.Dataset, root: Path) -> str:
    """A hash of every row's size in bytes and file name. Only Arrow's offsets are read."""
    listing = hashlib.sha256()
    for cells in images.data.column(0).chunks:
        sizes = compute.fill_null(compute.binary_length(cells.field("bytes")), 0).to_numpy().astype(np.int64)
        files = [file or "" for file in cells.field("path").to_pylist()]
        for row in np.flatnonzero(sizes == 0):
            if files[row] and (root / files[row]).is_file():  # the image is beside the table, not in it
                sizes[row] = (root / files[row]).stat().st_size
        listing.update(sizes.tobytes() + "\0".join(map(os.path.basename, files)).encode())
    return listing.hexdigest()


def _load(spec: str, path: Path | None) -> dict[str, datasets.Dataset]:
    """The splits of the dataset by name; a single table is the split ""."""
    try:
        if path is None:
            loaded = datasets.load_dataset(*spec.split(":"))
        elif (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            loaded = datasets.load_from_disk(str(path))
        elif path.is_dir():
            loaded = datasets.load_dataset(str(path.resolve()))  # `datasets` has names of its own, such as text
        elif path.suffix.lower() in TABLES:
            loaded = datasets.load_dataset(path.suffix.lower()[1:], data_files=str(path))["train"]
        else:
            how = "name the folder of the images; labels can be in its metadata.csv (columns file_name and label)"
            raise UserError(f"{spec}: only .parquet and .arrow files can be packed; {how}")
    except ConnectionError:
        raise UserError(f"{spec}: no such file or folder, and the Hugging Face hub cannot be reached") from None
    except datasets.exceptions.DatasetNotFoundError as error:
        what = f"{spec}: no such file or folder, and no such dataset on the Hugging Face hub"
        raise UserError(f"{what}: {first_line(error)}") from None
    except (*_FAILURES, datasets.exceptions.DatasetsError) as error:
        if path is None and "available configs" in str(error):
            listed = str(error).partition("available configs: ")[2].partition("]")[0]
            raise UserError(f"{spec} has several configurations; name one, as hf:NAME:CONFIG: {listed}]") from None
        reasons = [str(error), *([first_line(error.__cause__)] if error.__cause__ else [])]
        raise UserError(f"{spec}: cannot be read as a dataset: {' '.join(' '.join(reasons).split())[:500]}") from None
    return {"": loaded} if isinstance(loaded, datasets.Dataset) else dict(loaded)


def _image_column(spec: str, table: datasets.Dataset) -> str:
    def holds_bytes(feature: Any) -> bool:  # parquet written without `datasets`: raw bytes, or {"bytes", "path"}
        return "bytes" in feature if isinstance(feature, dict) else getattr(feature, "dtype", "").endswith("binary")

    columns = [name for name, feature in table.features.items() if isinstance(feature, datasets.Image)]
    columns = columns or [name for name, feature in table.features.items() if holds_bytes(feature)]
    usual = [name for name in columns if name in ("image", "img")]
    if len(columns) == 1 or len(usual) == 1:
        return columns[0] if len(columns) == 1 else usual[0]
    what = "several columns hold" if columns else "no column holds"
    give = "set image_column (`shards make --image-column`) to one of"
    raise UserError(f"{spec}: {what} images; {give}: {', '.join(columns or table.features)}")


def _label_column(spec: str, table: datasets.Dataset, *, described: bool) -> str | None:
    """The only ClassLabel column; else an int or string column with the name of a label; else none.

    described: whether the user's metadata file has the columns, so that one with the name of a label is meant as such.
    """
    columns = [name for name, feature in table.features.items() if isinstance(feature, datasets.ClassLabel)]
    columns = columns or [
        name for name, feature in table.features.items() if name.lower() in _LABELS and _is_name_or_number(feature)
    ]
    if not columns and (unread := [name for name in table.features if name.lower() in _LABELS]):
        what = f"column {unread[0]!r} holds neither integers nor strings"
        if described:
            found = table.features[unread[0]]
            kind = f"it was read as {getattr(found, 'dtype', found)}; integers beside empty cells become floats"
            raise UserError(f"{spec}: {what} ({kind}): give every image a label, or rename the column")
        warnings.warn(f"{spec}: {what}: packed without labels", stacklevel=4)
    if len(columns) > 1 and "label" not in columns:
        give = "set label_column (`shards make --label-column`) to one of"
        raise UserError(f"{spec} has several label columns; {give}: {', '.join(columns)}")
    return "label" if "label" in columns else next(iter(columns), None)


def _is_name_or_number(feature: Any) -> bool:
    return isinstance(feature, datasets.Value) and bool(re.match(r"u?int|bool|(large_)?string", feature.dtype))


def _labels(
    spec: str, table: datasets.Dataset, tables: list[datasets.Dataset], column: str
) -> tuple[list[str] | None, np.ndarray | None]:
    """(class names, labels); (None, None) where all labels are hidden, as those of test sets on the hub."""
    feature = table.features[column]
    values = table.select_columns([column])[:][column]
    if isinstance(feature, datasets.ClassLabel):
        classes = list(feature.names)
        labels = np.array([-1 if value is None else value for value in values], dtype=np.int64)
        if labels.max() >= len(classes):
            raise UserError(f"{spec}: column {column!r} holds the label {labels.max()}, but has {len(classes)} classes")
    elif _is_name_or_number(feature):
        # Over all splits, so that train and test agree on the indices. A split of -1 alone has hidden labels.
        found = [set(part.unique(column)) - {None} for part in tables if column in part.features]
        numbers = sorted(set[Any]().union(*(names for names in found if names != {-1})))
        classes = [str(value) for value in numbers]
        index = {value: number for number, value in enumerate(numbers)}
        labels = np.array([index.get(value, -1) for value in values], dtype=np.int64)
    else:
        raise UserError(f"{spec}: column {column!r} cannot be a label: it holds {feature}, not integers or strings")
    missing = np.flatnonzero(labels < 0)
    if len(missing) == len(labels):
        return None, None
    if len(missing):
        what = f"{len(missing)} of {len(labels)} rows have no {column!r} (first: row {missing[0]})"
        how = "label them (NA, None and null in a CSV file mean empty)"
        raise UserError(f"{spec}: {what}; {how}, or move unlabeled images into a folder of their own")
    return classes, labels


def _metadata(path: Path) -> list[Path]:
    """The metadata files of a folder of images and of its splits."""
    return [file for name in METADATA for file in (*path.glob(name), *path.glob(f"*/{name}")) if file.is_file()]


def _check_listed_once(spec: str, images: datasets.Dataset) -> None:
    """Raises UserError where two rows name the same file."""
    files = pd.Series(compute.struct_field(images.data.column(0), "path").to_pylist(), dtype=object).dropna()
    if len(twice := files[files.duplicated()]):
        file = os.path.basename(twice.iloc[0])
        what = f"its metadata file lists {twice.nunique()} of the images more than once (first: {printable(file)})"
        raise UserError(f"{spec}: {what}; list each image once, or a copy could be in both train and test")


def _as_written(spec: str, classes: list[str], metadata: list[Path], column: str) -> list[str]:
    """Class names as metadata.csv has them: `datasets` reads the names 007 and 7 as one number."""
    written = dict[str, str]()
    for file in (file for file in metadata if file.suffix == ".csv"):
        frame = pd.read_csv(file, dtype=str, keep_default_na=False)
        for text in frame[column].str.strip().unique() if column in frame else ():
            name = str(int(text)) if text.isdecimal() else text
            if written.setdefault(name, text) != text:
                both = f"the classes {written[name]!r} and {text!r} in metadata.csv are one number"
                raise UserError(f"{spec}: {both}: write each class in one way, or with letters")
    return [written.get(name, name) for name in classes]
