"""Masked patch prediction in pictures: input, corrupted input, predicted and true mean colors, side by side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from matplotlib.figure import Figure

from ssl_vit.analysis import figures
from ssl_vit.data.images import device_images
from ssl_vit.interfaces import Batch
from ssl_vit.objectives import masked_patch

HEADINGS = ("input", "corrupted", "predicted", "target")
_MASK_GRAY = 128


@torch.no_grad()
def reconstructions(objective: masked_patch.Objective, batch: Batch, images: int = 6) -> np.ndarray:
    """uint8 (rows, 4, H, W, C): for the batch's first images the four pictures of `HEADINGS`.

    corrupted: what the model is given, as pixels: [mask] gray, a random patch's pixels, or the patch unchanged.
    predicted: the predictions for all corrupted patches, and the true values of the others. target: all true values.
    """
    count = min(images, len(batch.images))
    tensors = {name: value[:count] for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    few = replace(batch, **tensors, keys=batch.keys[:count], lane_size=0)
    objective.eval()
    pixels, patch, config = device_images(few), objective.encoder.patch_size, objective.config
    outputs, chosen, _ = objective.predict(few, pixels)
    channels = pixels.shape[1]
    patches = masked_patch.patch_pixels(pixels, patch)
    # The corruption is drawn from the batch's noise alone, so that pixels instead of embeddings are corrupted alike.
    corrupted, _ = objective.corrupt(patches.flatten(2), torch.full_like(patches[0, 0].flatten(), _MASK_GRAY), few)
    if config.target == "pixels":
        predicted = (outputs.reshape(*chosen.shape, channels, patch, patch).clamp(0, 1) * 255).byte()
        truth = patches
    else:
        slots = outputs.shape[-1] // objective.colors
        side = round(slots**0.5)
        classes = outputs.reshape(*chosen.shape, slots, objective.colors).argmax(-1)
        predicted = _blocks(masked_patch.class_colors(classes, channels, config.bits), side, patch)
        truth = _blocks(masked_patch.class_colors(objective.targets(pixels), channels, config.bits), side, patch)
    guess = truth.scatter(1, chosen[..., None, None, None].expand_as(predicted), predicted)
    columns = [_unpatch(part, pixels.shape[2]) for part in (patches, corrupted.reshape_as(patches), guess, truth)]
    return torch.stack(columns, dim=1).permute(0, 1, 3, 4, 2).cpu().numpy()


def sheet(pictures: np.ndarray) -> Figure:
    """The pictures (rows, 4, H, W, C) under their headings."""
    return figures.sheet(dict(zip(HEADINGS, np.moveaxis(pictures, 1, 0), strict=True)), 2)


def _blocks(colors_BKSC: torch.Tensor, side: int, patch: int) -> torch.Tensor:
    """Colors of side x side cells -> flat-colored patches (B, K, C, P, P)."""
    b, k, _, c = colors_BKSC.shape
    cells = colors_BKSC.reshape(b, k, side, side, c).permute(0, 1, 4, 2, 3)
    return cells.repeat_interleave(patch // side, -1).repeat_interleave(patch // side, -2)


def _unpatch(patches_BNCPP: torch.Tensor, height: int) -> torch.Tensor:
    b, n, c, p, _ = patches_BNCPP.shape
    rows = height // p
    return patches_BNCPP.reshape(b, rows, n // rows, c, p, p).permute(0, 3, 1, 4, 2, 5).reshape(b, c, height, -1)
