"""Encoded images: what their headers say, limits of their sizes, and checking that one can be decoded."""

from __future__ import annotations

import io
import re
import warnings

from PIL import Image, UnidentifiedImageError

from ssl_vit.data import MAX_PIXELS
from ssl_vit.data.shards.info import STORED_FORMATS
from ssl_vit.interfaces import BadSample

# Pillow's warnings about images that it then rejects, or reads anyway; errors are raised.
warnings.filterwarnings("ignore", module=r"PIL\.")
_SCANS = 500  # of a progressive JPEG; encoders write about ten
_SCAN = re.compile(b"\xff\xda")  # faster than bytes.count


def check_pixels(height: int, width: int, most: int = MAX_PIXELS) -> None:
    """Raises BadSample for an image with more than `most` pixels, ValueError for one without any."""
    if not height or not width:
        raise ValueError(f"its header says {height}x{width} pixels")
    if height * width > most:
        raise BadSample(
            f"{height}x{width} pixels are more than the limit of {most}: scale it down (`shards make --resize`), or "
            "raise data.max_pixels for shards that hold it"
        )


def check_scans(data: bytes) -> None:
    """Raises BadSample for a JPEG with so many scans that decoding takes minutes: each goes through all pixels."""
    # In bytes behind the image, which are no scans, the mark comes up once in 65,536.
    if data.startswith(b"\xff\xd8") and len(_SCAN.findall(data)) > _SCANS + len(data) // 8192:
        raise BadSample(f"more than {_SCANS} scans in one JPEG")


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
        check_scans(data)
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
