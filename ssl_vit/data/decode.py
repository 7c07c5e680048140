"""Raw members -> images and labels: a closed list of decoders (images, class ids); anything else is ignored."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from ssl_vit.data.jpeg import Jpeg
from ssl_vit.data.packing.images import STORED_FORMATS
from ssl_vit.data.shards import IMAGE_EXTENSIONS
from ssl_vit.interfaces import UserError

_MOST_CLASSES = 10_000_000
_PIL_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class BadSample(Exception):
    """A sample that cannot be used; the message says why. The stream counts it, reports it and goes on."""


class Picture(Protocol):
    """An image whose size is known and whose pixels may not be decoded yet. Pixels are uint8 (C, H, W), upright."""

    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...

    def whole(self) -> torch.Tensor:
        """All pixels."""
        ...

    def region(self, top: int, left: int, height: int, width: int, least: tuple[int, int] | None) -> torch.Tensor:
        """The pixels of a box; with `least`, possibly at 1/2, 1/4 or 1/8 of its size but no smaller than `least`."""
        ...


@dataclass
class Pixels:
    """A decoded picture."""

    pixels: torch.Tensor

    @property
    def height(self) -> int:
        return self.pixels.shape[1]

    @property
    def width(self) -> int:
        return self.pixels.shape[2]

    def whole(self) -> torch.Tensor:
        return self.pixels

    def region(self, top: int, left: int, height: int, width: int, least: tuple[int, int] | None) -> torch.Tensor:
        return self.pixels[:, top : top + height, left : left + width]


def check_channels(channels: int) -> None:
    """Raise UserError unless image files can be decoded to this many channels."""
    if channels not in _PIL_MODES:
        raise UserError(f"encoder.channels={channels}: image shards decode to 1 (gray), 3 (RGB) or 4 (RGBA) channels")


class _Checked:
    """A picture of a sample: whatever its decoder stumbles on is a BadSample."""

    def __init__(self, extension: str, data: bytes, channels: int) -> None:
        self.extension = extension
        try:
            self.picture = _open(data, channels)
        except Exception as error:
            raise self._bad(error) from None
        self.height, self.width = self.picture.height, self.picture.width

    def whole(self) -> torch.Tensor:
        try:
            return self.picture.whole()
        except Exception as error:
            raise self._bad(error) from None

    def region(self, top: int, left: int, height: int, width: int, least: tuple[int, int] | None) -> torch.Tensor:
        try:
            return self.picture.region(top, left, height, width, least)
        except Exception as error:
            raise self._bad(error) from None

    def _bad(self, error: Exception) -> BadSample:
        # Pillow's parsers raise whatever they stumble on: struct.error, zlib.error, SyntaxError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, UnidentifiedImageError):  # its words hold an address in memory
            reason = "not an image"
        return BadSample(f"unreadable .{self.extension} image: {reason}")


def open_picture(sample: Mapping[str, bytes | str], channels: int) -> Picture:
    """The sample's image, upright by its EXIF. It and its methods raise BadSample when it is missing or unreadable."""
    for extension in IMAGE_EXTENSIONS:
        data = sample.get(extension)
        if isinstance(data, bytes):
            return _Checked(extension, data, channels)
    raise BadSample(f"no image member ({', '.join(IMAGE_EXTENSIONS)})")


def _open(data: bytes, channels: int) -> Picture:
    if data.startswith(b"\xff\xd8") and channels in (1, 3):
        with suppress(ValueError):  # stray bytes between its markers: Pillow judges
            return Jpeg(data, channels)
    with Image.open(io.BytesIO(data), formats=STORED_FORMATS) as opened:
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I"):  # 16-bit gray: Pillow's own conversion would clip instead of scaling
            image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
        pixels = np.array(image.convert(_PIL_MODES[channels]))
    return Pixels(torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1))


def class_index(content: bytes | str) -> int | None:
    """The whole number that a `.cls` member holds; None for anything else, and for more than a set has classes."""
    text = (content.decode("ascii", "replace") if isinstance(content, bytes) else content).strip()
    # Python itself refuses thousands of digits.
    is_number = text.removeprefix("-").isdecimal() and len(text) < 19
    return int(text) if is_number and int(text) <= _MOST_CLASSES else None


def decode_label(sample: Mapping[str, bytes | str], classes: int | None) -> int:
    """The sample's class index, -1 where it has no `.cls`. Raises BadSample for text or a class out of range."""
    data = sample.get("cls")
    if data is None:
        return -1
    label = class_index(data)
    if label is None:
        text = data.decode("ascii", "replace") if isinstance(data, bytes) else data
        raise BadSample(f"label {text.strip()[:20]!r} is not a class index")
    if label < 0 or (classes is not None and label >= classes):
        raise BadSample(f"label {label} is outside the classes 0..{classes - 1 if classes else '?'}")
    return label
