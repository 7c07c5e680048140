"""`digits`: scikit-learn's 1,797 handwritten digits, 8x8 pixels.

They come from 14 filled-in forms. A form asks for the same digits in the same order, of which a few are missing in some
forms, so the labels tell where each begins (a test checks this). Parts of the dataset are made of whole forms: no
writer's form is on both sides. Train is the first 11 forms (1,415 digits), test the last 3 (382 digits).

The forms were filled in by 13 people, who are not recorded: two forms may be of one person.
"""

from __future__ import annotations

import hashlib
import io
from functools import partial

import numpy as np
from PIL import Image

from ssl_vit.data.packing.sources.base import Source
from ssl_vit.interfaces import UserError

FORMS = (0, 130, 256, 386, 516, 646, 776, 906, 1029, 1157, 1287, 1415, 1545, 1667)
"""The first digit of each form."""
_COUNT, _TEST = 1797, FORMS[11]


def _read(pixels: np.ndarray, row: int) -> bytes:
    """pixels: uint8 (1797, 8, 8)."""
    encoded = io.BytesIO()
    Image.fromarray(pixels[row]).save(encoded, "PNG")
    return encoded.getvalue()


def list_splits(place: str) -> list[str]:
    return ["train", "test"]


def open_images(place: str, split: str | None) -> Source:
    if place:
        raise UserError(f"digits:{place}: the digits come with scikit-learn; write digits")
    from sklearn.datasets import load_digits

    ranges = {"train": range(_TEST), "test": range(_TEST, _COUNT), "all": range(_COUNT)}
    if (split or "all") not in ranges:
        raise UserError(f"digits has no split {split!r}; choose train (first 1,415), test (last 382) or all")
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
    forms = np.searchsorted(FORMS, rows, side="right") - 1
    name = f"digits (scikit-learn){f', split {split}' if split else ''}"
    return Source(name, license, names, labels, rows, partial(_read, pixels), listing, forms)
