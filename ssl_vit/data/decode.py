"""Raw members -> tensors: a closed list of decoders (images, class ids); anything else in a shard is ignored."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.io import ImageReadMode, decode_jpeg

from ssl_vit.data.shards import IMAGE_EXTENSIONS
from ssl_vit.interfaces import UserError

_JPEG_MODES = {1: ImageReadMode.GRAY, 3: ImageReadMode.RGB}
_PIL_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_FORMATS = ("JPEG", "PNG", "WEBP")  # a closed list: Pillow hands some other kinds to outside programs


class BadSample(Exception):
    """A sample that cannot be used; the message says why. The stream counts it, reports it and goes on."""


def check_channels(channels: int) -> None:
    """Raise UserError unless image files can be decoded to this many channels."""
    if channels not in _PIL_MODES:
        raise UserError(f"backbone.channels={channels}: image shards decode to 1 (grey), 3 (RGB) or 4 (RGBA) channels")


def decode_pixels(sample: Mapping[str, bytes | str], channels: int) -> torch.Tensor:
    """The sample's image as uint8 (C, H, W), upright by its EXIF. Raises BadSample when it is missing or unreadable."""
    for extension in IMAGE_EXTENSIONS:
        data = sample.get(extension)
        if isinstance(data, bytes):
            try:
                return _decode(data, channels)
            # Pillow's parsers raise whatever they stumble on: struct.error, zlib.error, SyntaxError
            except Exception as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise BadSample(f"unreadable .{extension} image: {reason}") from None
    raise BadSample(f"no image member ({', '.join(IMAGE_EXTENSIONS)})")


def _decode(data: bytes, channels: int) -> torch.Tensor:
    if data.startswith(b"\xff\xd8") and channels in _JPEG_MODES:  # torchvision's JPEG decoder is the faster one
        buffer = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        return decode_jpeg(buffer, mode=_JPEG_MODES[channels], apply_exif_orientation=True)
    with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion would clip instead of scaling
            image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
        pixels = np.array(image.convert(_PIL_MODES[channels]))
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1).contiguous()


def decode_label(sample: Mapping[str, bytes | str], classes: int | None) -> int:
    """The sample's class index, -1 where it has no `.cls`. Raises BadSample for text or a class out of range."""
    data = sample.get("cls")
    if data is None:
        return -1
    text = (data.decode("ascii", "replace") if isinstance(data, bytes) else data).strip()
    if not text.removeprefix("-").isdecimal():
        raise BadSample(f"label {text[:20]!r} is not a class index")
    label = int(text)
    if label < 0 or (classes is not None and label >= classes):
        raise BadSample(f"label {label} is outside the classes 0..{classes - 1 if classes else '?'}")
    return label
