"""JPEG decoding that does only the needed work.

Three things make a training crop cheaper than a full decode: rows below the crop are never decoded, a crop much larger
than the result is decoded at 1/2, 1/4 or 1/8 of its size in the frequency domain, and libjpeg-turbo (`simplejpeg`)
fills a channels-last array that the resize kernel reads as it is.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from ssl_vit.interfaces import BadSample, first_line

_COLORS = {1: "GRAY", 3: "RGB"}
_MODES = {1: ImageReadMode.GRAY, 3: ImageReadMode.RGB}
_ORIENTATION = 0x0112  # EXIF tag; the values below put a picture upright
_UPRIGHT: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    2: lambda pixels: pixels.flip(-1),
    3: lambda pixels: pixels.flip(-2, -1),
    4: lambda pixels: pixels.flip(-2),
    5: lambda pixels: pixels.mT,
    6: lambda pixels: pixels.mT.flip(-1),
    7: lambda pixels: pixels.mT.flip(-2, -1),
    8: lambda pixels: pixels.mT.flip(-2),
}
_BASELINE = (0xC0, 0xC1)  # start-of-frame markers of sequential Huffman coding: rows come top to bottom, once
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_BARE = {0x00, 0x01, *range(0xD0, 0xDA)}  # no length follows
_ROWS = 16  # rows of a coding unit with 4:2:0 color; other subsamplings have 8 or 16
_CONTEXT = 4  # rows below the last one that its color interpolation may look at
_TAIL = 64  # bytes at the end among which the end mark must be, for a file to count as whole


class Jpeg:
    """One JPEG file: upright size from its header, pixels on demand. The constructor raises ValueError where there is
    no such header, `whole` and `region` raise BadSample for a file that is cut short or cannot be decoded."""

    def __init__(self, data: bytes, channels: int) -> None:
        self.data, self.channels = data, channels
        self.frame, kind, exif = _scan(data)
        rows, columns = (int.from_bytes(data[self.frame + n : self.frame + n + 2], "big") for n in (3, 5))
        self.stored = (rows, columns)
        self.orientation = 1
        if exif:
            with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
                self.orientation = orientation(image)
        self.height, self.width = self.stored if self.orientation < 5 else self.stored[::-1]
        whole = data.rfind(b"\xff\xd9", len(data) - _TAIL) >= 0
        self.can_stop_early = kind in _BASELINE and whole and self.orientation == 1 and rows > 0

    def whole(self) -> torch.Tensor:
        """All pixels, uint8 (C, height, width), the same as torchvision's `decode_jpeg`."""
        try:
            return upright(_tensor(simplejpeg.decode_jpeg(self.data, _COLORS[self.channels])), self.orientation)
        except ValueError:  # CMYK, stray bytes between markers: torchvision decides
            buffer = torch.from_numpy(np.frombuffer(self.data, dtype=np.uint8).copy())
        try:
            return upright(decode_jpeg(buffer, mode=_MODES[self.channels]), self.orientation)
        except RuntimeError as error:
            raise unreadable(error) from None

    def region(self, top: int, left: int, height: int, width: int, least: tuple[int, int] | None) -> torch.Tensor:
        """The pixels of a box in the upright picture, uint8 (C, h, w): of its own size, exactly those of `whole`, or
        with `least` = (h, w) at 1/2, 1/4 or 1/8 of its size where that is at least as large."""
        factor = _reduction((height, width), least) if least else 1
        bottom = -(-(top + height + _CONTEXT) // (_ROWS * factor)) * _ROWS * factor
        data, rows = self.data, self.stored[0]
        if self.can_stop_early and bottom < rows:
            # The frame header says how many rows to decode: with fewer, the decoder stops there.
            data = data[: self.frame + 3] + bottom.to_bytes(2, "big") + data[self.frame + 5 :]
            rows = bottom
        if data is self.data and factor == 1:
            return self.whole()[:, top : top + height, left : left + width]
        try:
            pixels = simplejpeg.decode_jpeg(
                data,
                _COLORS[self.channels],
                min_height=-(-rows // factor),
                min_width=-(-self.stored[1] // factor),
                min_factor=factor,
                strict=data is self.data,  # a decoder that stops early complains of the bytes it leaves
            )
        except ValueError:
            return self.whole()[:, top : top + height, left : left + width]
        top, left, height, width = self._stored_box(top, left, height, width)
        end = (top + height + factor - 1) // factor, (left + width + factor - 1) // factor
        return upright(_tensor(pixels)[:, top // factor : end[0], left // factor : end[1]], self.orientation)

    def _stored_box(self, top: int, left: int, height: int, width: int) -> tuple[int, int, int, int]:
        """A box of the upright picture in the stored one."""
        if self.orientation in (2, 3, 6, 7):
            left = self.width - left - width
        if self.orientation in (3, 4, 7, 8):
            top = self.height - top - height
        return (top, left, height, width) if self.orientation < 5 else (left, top, width, height)


def orientation(image: Image.Image) -> int:
    """The EXIF orientation of an opened image, 1 to 8; 1 (upright) where none can be read."""
    with suppress(Exception):  # Pillow's parsers raise many types
        value = int(image.getexif()[_ORIENTATION])
        return value if value in _UPRIGHT else 1
    return 1


def upright(pixels: torch.Tensor, exif: int) -> torch.Tensor:
    """Rotate or mirror pixels (C, height, width) as an EXIF orientation says."""
    return _UPRIGHT[exif](pixels) if exif in _UPRIGHT else pixels


def unreadable(error: Exception) -> BadSample:
    """The error to raise for an image that a decoder rejects, with the first line of the decoder's message."""
    return BadSample(f"unreadable image: {first_line(error)}")


def _tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _reduction(box: tuple[int, int], least: tuple[int, int]) -> int:
    """The largest of 8, 4, 2, 1 by which the box can shrink and still cover `least`."""
    return next(
        f for f in (8, 4, 2, 1) if f == 1 or all(side // f >= want for side, want in zip(box, least, strict=True))
    )


def _scan(data: bytes) -> tuple[int, int, bool]:
    """Walk the markers to the frame header: (offset behind its marker, which kind it is, whether EXIF came before)."""
    offset, exif = 2, False
    while offset + 9 <= len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker in _FRAMES:
            return offset + 2, marker, exif
        if marker in _BARE:  # out of place here; libjpeg skips some, and would find another frame than this walk
            break
        exif = exif or (marker == 0xE1 and data[offset + 4 : offset + 8] == b"Exif")
        # A marker may be preceded by any number of filling 0xFF bytes.
        offset += 1 if marker == 0xFF else 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    raise ValueError("no frame header in the JPEG")
