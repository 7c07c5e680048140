"""`digits`: scikit-learn's 1,797 handwritten digits, 8x8 pixels; the first 1,437 are train, the last 360 test."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ssl_vit.data.packing.sources.base import Source
from ssl_vit.interfaces import UserError


@dataclass(frozen=True)
class _DigitReader:
    pixels: np.ndarray  # uint8 (1797, 8, 8)

    def __call__(self, row: int) -> tuple[str, bytes]:
        encoded = io.BytesIO()
        Image.fromarray(self.pixels[row]).save(encoded, "PNG")
        return f"digit {row}", encoded.getvalue()


def open_images(place: str, split: str | None) -> Source:
    if place:
        raise UserError(f"digits:{place}: the digits come with scikit-learn; write digits")
    from sklearn.datasets import load_digits

    ranges = {"train": range(1437), "test": range(1437, 1797), "all": range(1797)}
    if (split or "all") not in ranges:
        raise UserError(f"digits has no split {split!r}; choose train (first 1,437), test (last 360) or all")
    digits = load_digits()
    rows = ranges[split or "all"]
    pixels = np.round(digits.images * 255 / 16).astype(np.uint8)
    labels = digits.target[rows.start : rows.stop].astype(np.int64)
    license = (
        "CC BY 4.0: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning "
        "Repository (scikit-learn ships its test set)"
    )
    listing = hashlib.sha256(pixels[rows.start : rows.stop].tobytes()).hexdigest()
    names = [str(digit) for digit in range(10)]
    return Source("digits (scikit-learn)", license, names, labels, rows, _DigitReader(pixels), listing)
