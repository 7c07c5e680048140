"""What can be packed into shards: folders of images, anything `datasets` reads, scikit-learn's digits.

A source knows its samples by index and reads an image only when it is asked for, so packing needs memory for file
names and labels, not for images. JPEG, PNG and WebP bytes travel as they are; other kinds become PNG.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from ssl_vit.interfaces import UserError

if TYPE_CHECKING:
    from datasets import Dataset

STORED_FORMATS = ("JPEG", "PNG", "WEBP")
# A closed list: Pillow knows more kinds, and hands some of them (EPS) to outside programs.
_READ_FORMATS = (*STORED_FORMATS, "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
_READ_SUFFIXES = {
    ".jpg",
    ".jpeg",
    ".jfif",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".pbm",
    ".jp2",
}
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # MPO: a JPEG with more pictures behind it
_VALIDATION = {"val", "valid", "validation"}
_SPLITS = {"train", "test", *_VALIDATION}
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class BrokenImageError(Exception):
    """An image that cannot be read; `key` names it in its source, `reason` says why in a few words."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key, self.reason = key, reason


@dataclass(frozen=True)
class RawSample:
    """One encoded image. key: its name in the source (a relative path, "row 17"); extension: jpg, png or webp, by
    content; label: class index, None in an unlabelled source; meta: small JSON-able facts, from folders {"file": ...}.
    """

    key: str
    image: bytes
    extension: str
    label: int | None
    meta: dict[str, Any] | None = None


@dataclass
class Source:
    """Samples by index, always in the same order.

    classes and labels (int64 (count,), each in 0..len(classes)-1) are both None in an unlabelled source.
    sample(i) may be called from several threads and raises BrokenImageError where the bytes are no image; it reads
    the header only, `decode` tells whether the rest is whole.
    """

    name: str
    licence: str | None
    count: int
    classes: list[str] | None
    labels: np.ndarray | None
    sample: Callable[[int], RawSample]

    def samples(self) -> Iterator[RawSample]:
        return (self.sample(index) for index in range(self.count))


def open_source(
    spec: str, *, split: str | None = None, label_column: str | None = None, image_column: str | None = None
) -> Source:
    """Open what `spec` names: a folder of images (one sub-folder a class, or flat and unlabelled), a local parquet or
    arrow file or dataset directory, "digits" (scikit-learn's; a folder of that name is "./digits"), or the name of a
    dataset on the Hugging Face hub. `split` picks one of the source's parts; the columns matter to datasets only.

    Raises UserError where the source is missing, empty or ambiguous.
    """
    path = Path(spec).expanduser()
    is_images = spec != "digits" and path.is_dir() and not _is_dataset(path)
    if (spec == "digits" or is_images) and (label_column or image_column):
        raise UserError(f"{spec}: label_column and image_column are for tables (parquet, arrow, hub); leave them out")
    if spec == "digits":
        return _digits(split)
    if is_images:
        return _folder(path, split)
    if not path.exists() and (not _HUB_NAME.fullmatch(spec) or ("/" in spec and path.parent.is_dir())):
        raise UserError(f"{spec}: no such file or folder")
    return _table(spec, path if path.exists() else None, split, label_column, image_column)


def open_header(data: bytes, key: str, formats: tuple[str, ...] = STORED_FORMATS) -> Image.Image:
    """The image's size, mode and format, its pixels not yet decoded; BrokenImageError where there is no such header."""
    try:
        return Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        raise BrokenImageError(key, "not an image" if data else "empty file") from None
    except Exception as error:  # as in decode; a size fit to exhaust memory (DecompressionBombError) ends here, too
        raise BrokenImageError(key, f"cannot be decoded: {error}") from None


def decode(data: bytes, key: str, formats: tuple[str, ...] = STORED_FORMATS) -> Image.Image:
    """The whole decoded image, or BrokenImageError. Pillow's mode and size are kept."""
    image = open_header(data, key, formats)
    try:
        image.load()
    except Exception as error:  # Pillow's parsers raise whatever they stumble on: struct.error, zlib.error, SyntaxError
        raise BrokenImageError(key, f"cannot be decoded: {error}") from None
    return image


def channels(image: Image.Image) -> int:
    """1 for grey images (alpha aside), 3 for all others."""
    return 1 if image.mode in ("1", "L", "LA", "I", "F") or image.mode.startswith("I;16") else 3


def _stored(data: bytes, key: str) -> tuple[bytes, str]:
    """The bytes to store and their extension. Content decides, not the file name: a PNG called .jpg is a PNG."""
    extension = _EXTENSIONS.get(open_header(data, key, _READ_FORMATS).format or "")
    if extension:
        return data, extension
    image = decode(data, key, _READ_FORMATS)
    encoded = io.BytesIO()
    try:
        (image.convert("RGB") if image.mode in ("CMYK", "YCbCr", "LAB", "HSV") else image).save(encoded, "PNG")
    except (OSError, ValueError) as error:
        raise BrokenImageError(key, f"cannot be stored as PNG: {error}") from None
    return encoded.getvalue(), "png"


def _read(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BrokenImageError(key, error.strerror or str(error)) from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _digits(split: str | None) -> Source:
    from sklearn.datasets import load_digits

    ranges = {"train": range(1437), "test": range(1437, 1797), "all": range(1797)}
    if (split or "all") not in ranges:
        raise UserError(f"digits has no split {split!r}; choose train (first 1,437), test (last 360) or all")
    digits = load_digits()
    rows = ranges[split or "all"]
    pixels = np.round(digits.images * 255 / 16).astype(np.uint8)
    labels = digits.target[rows.start : rows.stop].astype(np.int64)

    def sample(index: int) -> RawSample:
        encoded = io.BytesIO()
        Image.fromarray(pixels[rows[index]]).save(encoded, "PNG")
        return RawSample(f"digit {rows[index]}", encoded.getvalue(), "png", int(labels[index]))

    licence = (
        "CC BY 4.0: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning "
        "Repository (scikit-learn ships its test set)"
    )
    return Source("digits (scikit-learn)", licence, len(rows), [str(digit) for digit in range(10)], labels, sample)


def _visible_folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images_in(folder: Path) -> tuple[list[Path], int]:
    """Every image file below the folder, sorted, and how many other files were seen. Hidden names are left alone:
    they are macOS resource forks ("._cat.jpg") and notebook checkpoints, never samples."""
    images, others = [], 0
    for directory, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if Path(name).suffix.lower() in _READ_SUFFIXES and not name.startswith("."):
                images.append(Path(directory) / name)
            elif not name.startswith("."):
                others += 1
    return sorted(images), others


def _find_split(spec: str, split: str | None, parts: list[str]) -> str:
    if split in parts:
        return split
    alike = [part for part in parts if split in _VALIDATION and part in _VALIDATION]
    if len(alike) == 1:
        return alike[0]
    wrong = "is divided into splits" if split is None else f"has no split {split!r}"
    raise UserError(f"{spec} {wrong}; choose split from: {', '.join(parts) or 'nothing (leave it out)'}")


def _folder(root: Path, split: str | None) -> Source:
    name = root.resolve().name
    parts = [folder.name for folder in _visible_folders(root)]
    class_roots = [root]
    if split is not None or ("train" in parts and set(parts) <= _SPLITS):
        parts = [part for part in parts if part in _SPLITS or part == split]
        # The classes of every split, so that one missing from this split does not shift the others' indices.
        class_roots = [root / part for part in parts]
        part = _find_split(str(root), split, parts)
        root, name = root / part, f"{name}/{part}"

    class_folders = _visible_folders(root)
    flat = [entry for entry in root.iterdir() if entry.is_file() and entry.suffix.lower() in _READ_SUFFIXES]
    if class_folders and flat:
        raise UserError(
            f"{root} holds both images ({flat[0].name}) and sub-folders ({class_folders[0].name}/): "
            "put every image in a sub-folder named after its class, or none"
        )
    files: list[Path] = []
    class_of_file: list[int] = []
    classes, ignored = None, 0
    if class_folders:
        classes = sorted({folder.name for class_root in class_roots for folder in _visible_folders(class_root)})
        index_of = {class_name: index for index, class_name in enumerate(classes)}
        ignored = sum(entry.is_file() and not entry.name.startswith(".") for entry in root.iterdir())
    for folder in class_folders or [root]:
        images, others = _images_in(folder)
        if not images:
            what = "this class folder holds no images" if class_folders else "holds no images, parquet or arrow files"
            raise UserError(f"{folder}: {what}; add some or remove the folder")
        files += images
        ignored += others
        if classes is not None:
            class_of_file += [index_of[folder.name]] * len(images)
    if ignored:
        warnings.warn(f"{root}: ignored {ignored} files that are not images", stacklevel=3)
    labels = np.array(class_of_file, dtype=np.int64) if class_folders else None

    def sample(index: int) -> RawSample:
        key = files[index].relative_to(root).as_posix()
        image, extension = _stored(_read(files[index], key), key)
        return RawSample(key, image, extension, None if labels is None else int(labels[index]), {"file": key})

    return Source(f"{name} (folder)", None, len(files), classes, labels, sample)


def _is_dataset(folder: Path) -> bool:
    """Whether `datasets` must read this directory: saved tables, or images described by a metadata file."""
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        return True
    if any(next(folder.glob(pattern), None) for pattern in ("*.parquet", "*.arrow", "*/*.parquet", "*/*.arrow")):
        return True
    notes = [
        path for name in ("metadata.csv", "metadata.jsonl") for path in (*folder.glob(name), *folder.glob(f"*/{name}"))
    ]
    # Only the imagefolder layout is meant: other people's metadata.csv does not name the images this way.
    return any("file_name" in path.read_text(errors="replace").partition("\n")[0] for path in notes)


def _load_splits(spec: str, path: Path | None, split: str | None) -> tuple[str | None, dict[str, Dataset]]:
    """The chosen split's name and all splits of the dataset; a lone unnamed table has the name None and key ""."""
    import datasets

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
    name = next(iter(loaded)) if split is None and len(loaded) == 1 else _find_split(spec, split, list(loaded))
    return name, dict(loaded)


def _table(
    spec: str, path: Path | None, split: str | None, label_column: str | None, image_column: str | None
) -> Source:
    import datasets

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
            data = _read(Path(file), key)
        image, extension = _stored(data, key)
        return RawSample(key, image, extension, None if labels is None else int(labels[index]))

    origin = spec if path is None else path.resolve().name
    name = f"{origin} (datasets{f', split {part}' if part else ''})"
    return Source(name, table.info.license or None, len(table), classes, labels, sample)


def _image_column(spec: str, table: Dataset) -> str:
    import datasets

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


def _label_column(spec: str, table: Dataset) -> str | None:
    """The one ClassLabel column; else an int or string column that is called a label; else none."""
    import datasets

    found = [name for name, feature in table.features.items() if isinstance(feature, datasets.ClassLabel)]
    # Other integer columns (ids, sizes) are no labels: the name must say so.
    found = found or [name for name in table.features if name.lower() in ("label", "labels", "class", "target", "cls")]
    if len(found) > 1 and "label" not in found:
        raise UserError(f"{spec} has several label columns; name one as label_column, from: {', '.join(found)}")
    return "label" if "label" in found else next(iter(found), None)


def _classes_and_labels(
    spec: str, table: Dataset, tables: list[Dataset], column: str
) -> tuple[list[str] | None, np.ndarray | None]:
    import datasets

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
