"""Encoded images: limits of their sizes, checking that one can be decoded, and what a shard stores of it."""

from __future__ import annotations

import io
import warnings
from typing import cast

from PIL import Image, UnidentifiedImageError

from ssl_vit.data import MAX_PIXELS
from ssl_vit.data.shards.info import STORED_FORMATS
from ssl_vit.interfaces import BadSample

# Pillow's warnings about images that it then rejects, or reads anyway; errors are raised.
warnings.filterwarnings("ignore", module=r"PIL\.")

# A closed list: Pillow knows more formats, and hands some of them (EPS) to other programs.
READ_FORMATS = (*STORED_FORMATS, "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # MPO: a JPEG followed by more pictures
_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


def check_pixels(height: int, width: int, most: int = MAX_PIXELS) -> None:
    """Raises BadSample for an image with more than `most` pixels, ValueError for one without any."""
    if not height or not width:
        raise ValueError(f"its header says {height}x{width} pixels")
    if height * width > most:
        raise BadSample(
            f"{height}x{width} pixels are more than the limit of {most}: scale it down (`shards make --resize`), or "
            "raise data.max_pixels for shards that hold it"
        )


def check_webp(data: bytes, most: int = MAX_PIXELS) -> None:
    """Raises BadSample for a WebP file whose header claims more than `most` pixels.

    Pillow allocates its whole canvas, twice, to open one; it opens other formats by their headers alone.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return
    kind, number = data[12:16], int.from_bytes
    if kind == b"VP8X":
        width, height = number(data[24:27], "little") + 1, number(data[27:30], "little") + 1
    elif kind == b"VP8L":
        bits = number(data[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        width, height = (number(data[n : n + 2], "little") & 0x3FFF for n in (26, 28))
    check_pixels(height, width, most)


def open_header(data: bytes, formats: tuple[str, ...] = STORED_FORMATS, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image with its size, mode and format, pixels not yet decoded.

    Raises BadSample where there is no such header, where the image has too many pixels, and for a JPEG
    without an end mark: one that was cut and then filled up with zeros decodes without an error, to gray.
    """
    try:
        check_webp(data, max_pixels)
        image = Image.open(stream := io.BytesIO(data), formats=formats)
        check_pixels(image.height, image.width, max_pixels)
    except UnidentifiedImageError:
        raise BadSample("not an image" if data else "empty file") from None
    except BadSample:
        raise
    except Exception as error:  # as in decode; includes Pillow's DecompressionBombError
        raise BadSample(f"cannot be decoded: {error}") from None
    # Pillow has read up to the pixels, so that the end mark of a thumbnail in the header does not count.
    if image.format in ("JPEG", "MPO") and data.find(b"\xff\xd9", stream.tell()) < 0:
        raise BadSample("cannot be decoded: the end of the JPEG is missing")
    return image


def decode(image: Image.Image, at_least: tuple[int, int] | None = None) -> None:
    """Decode all of an opened image in place, or raise BadSample. Its mode is kept.

    at_least: a (width, height) that is enough. A JPEG is then decoded at 1/2, 1/4 or 1/8 where that is not smaller;
        all of the file is still read and checked, in less time. (1, 1) only checks.
    """
    try:
        if at_least is not None:
            image.draft(None, at_least)
        image.load()
    except Exception as error:  # Pillow's parsers raise many types: struct.error, zlib.error, SyntaxError
        raise BadSample(f"cannot be decoded: {error}") from None


def channels(image: Image.Image) -> int:
    """1 for gray images (alpha not counted), 3 for all others."""
    return 1 if image.mode in ("1", "L", "LA", "I", "F") or image.mode.startswith("I;16") else 3


def to_stored(data: bytes, resize: int | None = None, quality: int = 95) -> tuple[str, bytes]:
    """Check that the image can be decoded, and return what a shard stores of it: jpg, png or webp (by content: a PNG
    called .jpg is a PNG), and the bytes.

    JPEG, PNG and WebP bytes are stored unchanged, other formats (the first frame of an animation) as PNG.

    resize: the shorter side in pixels. An image of another size is scaled (bicubic, up or down) and encoded in its own
        format; EXIF is kept (it holds the orientation), a color profile is not.
    quality: 1..100, of JPEG and WebP that are encoded again.

    Raises BadSample.
    """
    image = open_header(data, READ_FORMATS, MAX_PIXELS if resize is None else 2 * MAX_PIXELS)
    size, extension = image.size, _EXTENSIONS.get(image.format or "", "png")
    if resize is not None:
        size = (round(size[0] * resize / min(size)), round(size[1] * resize / min(size)))
    if size == image.size and image.format in _EXTENSIONS:
        decode(image, at_least=(1, 1))
        return extension, data
    decode(image, at_least=(2 * size[0], 2 * size[1]))
    exif = {"exif": image.info["exif"]} if "exif" in image.info else {}
    encoded = io.BytesIO()
    try:
        check_pixels(size[1], size[0])
        if image.mode == "F":
            raise ValueError("its pixels are floats (mode F), whose range is not known; scale them to 8 or 16 bits")
        if image.mode.startswith("I"):  # 16 bits in either byte order (Pillow resizes only one of them), or 32 bits
            image = image.convert("I")
            low, high = cast(tuple[float, float], image.getextrema())
            if low < 0 or high > 65535:
                raise ValueError("values outside 16 bits")
            image = image.convert("I;16")
        if size != image.size:
            if image.mode == "P":  # neither a palette nor two levels can be interpolated
                image = image.convert("RGBA" if "transparency" in image.info else "RGB")
            elif image.mode == "1":
                image = image.convert("L")
            # Each channel alone: Pillow would make what is transparent black, and readers ignore the alpha channel.
            bands = [band.resize(size, Image.Resampling.BICUBIC) for band in image.split()]
            image = Image.merge(image.mode, bands)
        if extension == "png" and image.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
            image = image.convert("RGB")
        image.save(encoded, _FORMATS[extension], quality=quality, **exif)
    except (OSError, ValueError, BadSample) as error:
        raise BadSample(f"cannot be stored as {_FORMATS[extension]}: {error}") from None
    return extension, encoded.getvalue()
