"""The predictions of a masked objective in pictures: input, corrupted input, prediction and target, side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from ssl_vit.analysis import figures
from ssl_vit.data.augment import device_images
from ssl_vit.interfaces import Batch
from ssl_vit.objectives.patches import patch_pixels, whole_images

HEADINGS = ("input", "corrupted", "predicted", "target")


@torch.no_grad()
def reconstructions(objective: Any, batch: Batch, images: int = 6) -> np.ndarray:
    """uint8 (rows, 4, H, W, C): for the batch's first images the four pictures of `HEADINGS`.

    objective: one with `reconstruct` (see `models.objective`); it is in evaluation mode afterwards.
    """
    few = replace(batch.rows(slice(images)), lane_size=0, views=1)
    objective.eval()
    pixels = device_images(few)
    columns = (patch_pixels(pixels, objective.encoder.patch_size), *objective.reconstruct(few, pixels))
    pictures = torch.stack([whole_images(column, pixels.shape[2]) for column in columns], dim=1)
    return pictures.permute(0, 1, 3, 4, 2).cpu().numpy()


def sheet(pictures: np.ndarray) -> Figure:
    """The pictures (rows, 4, H, W, C) under their headings."""
    return figures.sheet(dict(zip(HEADINGS, np.moveaxis(pictures, 1, 0), strict=True)), 2)
