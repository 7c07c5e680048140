"""What headers of images claim, read before a decoder allocates memory for it. Without torch or numpy."""

from __future__ import annotations

import warnings

from ssl_vit.data import MAX_PIXELS
from ssl_vit.interfaces import BadSample

# Pillow's warnings about images that it then rejects, or reads anyway; errors are raised.
warnings.filterwarnings("ignore", module=r"PIL\.")


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
