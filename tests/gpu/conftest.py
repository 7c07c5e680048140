"""Images for the tests that need a CUDA device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.tars import packed


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 512 images of 224 px: colored squares on noise, so that there is something to learn."""
    folder, dice = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(512):
        pixels = dice.integers(0, 40, (224, 224, 3), dtype=np.uint8)
        y, x = dice.integers(0, 160, 2)
        pixels[y : y + 64, x : x + 64] = dice.integers(60, 256, 3)
        target = folder / "source" / str(number % 2) / f"{number}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(target, quality=90)
    return packed(folder / "source", folder / "shards", shards=4)
