"""Raw members -> tensors: a closed list of decoders (images, class ids); anything else in a shard is ignored."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torchvision.io import ImageReadMode, decode_image

from ssl_vit.data.shards import IMAGE_EXTENSIONS
from ssl_vit.interfaces import UserError

_MODES = {1: ImageReadMode.GRAY, 3: ImageReadMode.RGB, 4: ImageReadMode.RGB_ALPHA}


class BadSample(Exception):
    """A sample that cannot be used; the message says why. The stream counts it, reports it and goes on."""


def check_channels(channels: int) -> None:
    """Raise UserError unless image files can be decoded to this many channels."""
    if channels not in _MODES:
        raise UserError(f"backbone.channels={channels}: image shards decode to 1 (grey), 3 (RGB) or 4 (RGBA) channels")


def decode_pixels(sample: Mapping[str, bytes | str], channels: int) -> torch.Tensor:
    """The sample's image as uint8 (C, H, W). Raises BadSample when it is missing or unreadable."""
    for extension in IMAGE_EXTENSIONS:
        data = sample.get(extension)
        if isinstance(data, bytes):
            try:
                buffer = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
                return decode_image(buffer, mode=_MODES[channels], apply_exif_orientation=True)
            except (RuntimeError, ValueError) as error:
                raise BadSample(f"unreadable .{extension} image: {str(error).splitlines()[0]}") from None
    raise BadSample(f"no image member ({', '.join(IMAGE_EXTENSIONS)})")


def decode_label(sample: Mapping[str, bytes | str], classes: int | None) -> int:
    """The sample's class index, -1 where it has no `.cls`. Raises BadSample for text or a class out of range."""
    data = sample.get("cls")
    if data is None:
        return -1
    try:
        label = int(data)
    except ValueError:
        raise BadSample(f"label {data[:20]!r} is not a class index") from None
    if label < 0 or (classes is not None and label >= classes):
        raise BadSample(f"label {label} is outside the classes 0..{classes - 1 if classes else '?'}")
    return label
