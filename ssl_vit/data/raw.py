"""The pieces of every source: encoded samples by index, and what may be read as an image."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from ssl_vit.interfaces import UserError

STORED_FORMATS = ("JPEG", "PNG", "WEBP")
# A closed list: Pillow knows more kinds, and hands some of them (EPS) to outside programs.
_READ_FORMATS = (*STORED_FORMATS, "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # MPO: a JPEG with more pictures behind it
VALIDATION = {"val", "valid", "validation"}


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


def to_stored(data: bytes, key: str) -> tuple[bytes, str]:
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


def read_file(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BrokenImageError(key, error.strerror or str(error)) from None


def find_split(spec: str, split: str | None, parts: list[str]) -> str:
    if split in parts:
        return split
    alike = [part for part in parts if split in VALIDATION and part in VALIDATION]
    if len(alike) == 1:
        return alike[0]
    wrong = "is divided into splits" if split is None else f"has no split {split!r}"
    raise UserError(f"{spec} {wrong}; choose split from: {', '.join(parts) or 'nothing (leave it out)'}")
