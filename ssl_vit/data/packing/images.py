"""The pieces of every source: what a source of images is, what may be read as an image, and how one is stored.

Packing processes import this and little else, so that they start fast: no numpy here, no torch.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import cast

from PIL import Image, UnidentifiedImageError

from ssl_vit.data.packing.sources.base import BrokenImageError
from ssl_vit.data.shards.info import MAX_PIXELS, STORED_FORMATS

# A closed list: Pillow knows more kinds, and hands some of them (EPS) to outside programs.
READ_FORMATS = (*STORED_FORMATS, "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # MPO: a JPEG with more pictures behind it
_KINDS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


def open_header(data: bytes, key: str, formats: tuple[str, ...] = STORED_FORMATS) -> Image.Image:
    """The image's size, mode and format, its pixels not yet decoded; BrokenImageError where there is no such header, or
    no end mark in a JPEG: one that was cut and then filled up (with zeros, as some downloads are) decodes without an
    error, to gray.
    """
    try:
        image = Image.open(stream := io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        raise BrokenImageError(key, "not an image" if data else "empty file") from None
    except Exception as error:  # as in load; a size fit to exhaust memory (DecompressionBombError) ends here, too
        raise BrokenImageError(key, f"cannot be decoded: {error}") from None
    # Pillow has read up to the pixels, so the end of a thumbnail in the header does not count.
    if image.format in ("JPEG", "MPO") and data.find(b"\xff\xd9", stream.tell()) < 0:
        raise BrokenImageError(key, "cannot be decoded: the end of the JPEG is missing")
    return image


def load(image: Image.Image, key: str, at_least: tuple[int, int] | None = None) -> None:
    """Decode all of an opened image in place, or raise BrokenImageError. Its mode is kept.

    at_least: a (width, height) that will do. JPEG pixels then come reduced by 2, 4 or 8 where that is not smaller;
    all of the file is read and checked nevertheless, in less time. (1, 1) is for checking alone.
    """
    try:
        if at_least is not None:
            image.draft(None, at_least)
        image.load()
    except Exception as error:  # Pillow's parsers raise whatever they stumble on: struct.error, zlib.error, SyntaxError
        raise BrokenImageError(key, f"cannot be decoded: {error}") from None


def channels(image: Image.Image) -> int:
    """1 for gray images (alpha aside), 3 for all others."""
    return 1 if image.mode in ("1", "L", "LA", "I", "F") or image.mode.startswith("I;16") else 3


@dataclass(frozen=True)
class Stored:
    """An image as a shard holds it. extension: jpg, png or webp, by content; a PNG called .jpg is a PNG."""

    data: bytes
    extension: str
    width: int
    height: int
    channels: int


def to_stored(data: bytes, key: str, resize: int | None = None, quality: int = 95) -> Stored:
    """Decode the image to see that it is whole, and give what to store: JPEG, PNG and WebP bytes as they are, other
    kinds (the first frame of a moving one) as PNG.

    resize: the shorter side in pixels. An image of another size is scaled (bicubic, up or down) and encoded again, as
    the kind it is, with `quality` (1..100); a JPEG four times too large or more is first decoded to a half, a
    quarter or an eighth, not below twice the size. EXIF is kept (it holds the orientation), a color profile is not.
    Raises BrokenImageError.
    """
    image = open_header(data, key, READ_FORMATS)
    size, extension = image.size, _EXTENSIONS.get(image.format or "", "png")
    if resize is not None:
        size = (round(size[0] * resize / min(size)), round(size[1] * resize / min(size)))
    if size == image.size and image.format in _EXTENSIONS:
        load(image, key, at_least=(1, 1))
        return Stored(data, extension, *size, channels(image))
    load(image, key, at_least=(2 * size[0], 2 * size[1]))
    exif = {"exif": image.info["exif"]} if "exif" in image.info and image.format in _EXTENSIONS else {}
    encoded = io.BytesIO()
    try:
        if size[0] * size[1] > MAX_PIXELS:
            raise ValueError(f"{size[0]}x{size[1]} pixels would be too many")
        if image.mode == "I":  # 16-bit PGM, as Pillow reads it, or 32-bit TIFF
            image = _sixteen_bits(image)
        if size != image.size:
            image = _interpolable(image).resize(size, Image.Resampling.BICUBIC)
        if extension == "png" and image.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
            image = image.convert("RGB")
        image.save(encoded, _KINDS[extension], quality=quality, **exif)
    except (OSError, ValueError) as error:
        raise BrokenImageError(key, f"cannot be stored as {_KINDS[extension]}: {error}") from None
    return Stored(encoded.getvalue(), extension, *size, channels(image))


def _interpolable(image: Image.Image) -> Image.Image:
    """Neither a palette nor two levels can be interpolated."""
    if image.mode == "P":
        return image.convert("RGBA" if "transparency" in image.info else "RGB")
    return image.convert("L") if image.mode == "1" else image


def _sixteen_bits(image: Image.Image) -> Image.Image:
    low, high = cast(tuple[float, float], image.getextrema())
    if low < 0 or high > 65535:
        raise ValueError("its values are beyond 16 bits")
    return image.convert("I;16")
