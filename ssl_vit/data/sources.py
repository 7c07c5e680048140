"""What can be packed into shards: folders of images, anything `datasets` reads, scikit-learn's digits.

A source knows its samples by index and reads an image only when it is asked for, so packing needs memory for file
names and labels, not for images. JPEG, PNG and WebP bytes travel as they are; other kinds become PNG.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

from ssl_vit.data.raw import VALIDATION, RawSample, Source, find_split, read_file, to_stored
from ssl_vit.interfaces import UserError

_SUFFIXES = {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".jp2"}
_SPLITS = {"train", "test", *VALIDATION}
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


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
    from ssl_vit.data.tables import open_table  # here, not above: `datasets` takes a second to import

    return open_table(spec, path if path.exists() else None, split, label_column, image_column)


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
            if Path(name).suffix.lower() in _SUFFIXES and not name.startswith("."):
                images.append(Path(directory) / name)
            elif not name.startswith("."):
                others += 1
    return sorted(images), others


def _folder(root: Path, split: str | None) -> Source:
    name = root.resolve().name
    parts = [folder.name for folder in _visible_folders(root)]
    class_roots = [root]
    if split is not None or ("train" in parts and set(parts) <= _SPLITS):
        parts = [part for part in parts if part in _SPLITS or part == split]
        # The classes of every split, so that one missing from this split does not shift the others' indices.
        class_roots = [root / part for part in parts]
        part = find_split(str(root), split, parts)
        root, name = root / part, f"{name}/{part}"

    class_folders = _visible_folders(root)
    flat = [entry for entry in root.iterdir() if entry.is_file() and entry.suffix.lower() in _SUFFIXES]
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
        image, extension = to_stored(read_file(files[index], key), key)
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
