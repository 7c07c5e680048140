"""Small images, for tests of packing and verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ssl_vit.data.packing.sources.base import Source
from tests import tars


def noise(seed: int = 0, size: tuple[int, int] = (14, 10)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(kind: str, seed: int = 0, size: tuple[int, int] = (14, 10), mode: str = "RGB", **options: Any) -> bytes:
    return tars.encoded(noise(seed, size).convert(mode), kind, **options)


def write(path: Path, data: bytes) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return data


def all_images(source: Source) -> list[bytes]:
    return [source.read(item) for item in source.items]
