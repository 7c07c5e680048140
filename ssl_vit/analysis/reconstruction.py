"""What the masked stage sees and says: input, corrupted input, predicted colours, true colours, side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from ssl_vit.data.transforms import device_images
from ssl_vit.interfaces import Batch
from ssl_vit.objectives import masked_patch

_HEADINGS = ("input", "corrupted", "predicted", "true colours")
_CELL = 96  # pixels, the least side of one picture
_MASKED = 128


@torch.inference_mode()
def reconstructions(objective: masked_patch.Objective, batch: Batch, images: int = 6) -> np.ndarray:
    """uint8 (rows, 4, H, W, C): for the batch's first images the four pictures of `_HEADINGS`.

    Corrupted patches are drawn grey; predictions and truth show them, over the input's own mean colours elsewhere.
    """
    count = min(images, len(batch.images))
    names = ("images", "labels", "noise", "flip", "indices", "valid")
    few = replace(batch, **{n: getattr(batch, n)[:count] for n in names}, keys=batch.keys[:count], lane_size=0)
    objective.eval()
    pixels, patch, config = device_images(few), objective.backbone.patch_size, objective.config
    outputs, chosen, _ = objective.predict(few, pixels)
    channels = pixels.shape[1]
    patches = masked_patch.patch_pixels(pixels, patch)
    if config.target == "pixels":
        predicted = (outputs.reshape(*chosen.shape, channels, patch, patch).clamp(0, 1) * 255).byte()
        truth = patches.clone()
    else:
        slots = outputs.shape[-1] // objective.colours
        side = round(slots**0.5)
        classes = outputs.reshape(*chosen.shape, slots, objective.colours).argmax(-1)
        predicted = _blocks(masked_patch.class_colours(classes, channels, config.bits), side, patch)
        truth = _blocks(masked_patch.class_colours(objective.targets(pixels), channels, config.bits), side, patch)
    index = chosen[..., None, None, None].expand(-1, -1, channels, patch, patch)
    guess = truth.scatter(1, index, predicted)
    hidden = patches.scatter(1, index, torch.full_like(predicted, _MASKED))
    columns = [_unpatch(part, pixels.shape[2]) for part in (patches, hidden, guess, truth)]
    return torch.stack(columns, dim=1).permute(0, 1, 3, 4, 2).cpu().numpy()


def _blocks(colours_BKSC: torch.Tensor, side: int, patch: int) -> torch.Tensor:
    """Colours of side x side cells -> flat-coloured patches (B, K, C, P, P)."""
    b, k, _, c = colours_BKSC.shape
    cells = colours_BKSC.reshape(b, k, side, side, c).permute(0, 1, 4, 2, 3)
    return cells.repeat_interleave(patch // side, -1).repeat_interleave(patch // side, -2)


def _unpatch(patches_BNCPP: torch.Tensor, height: int) -> torch.Tensor:
    b, n, c, p, _ = patches_BNCPP.shape
    rows = height // p
    return patches_BNCPP.reshape(b, rows, n // rows, c, p, p).permute(0, 3, 1, 4, 2, 5).reshape(b, c, height, -1)


def save_sheet(pictures: np.ndarray, path: Path) -> np.ndarray:
    """Write the pictures as one PNG with a headed column each; returns the sheet, uint8 (H, W, 3)."""
    rows, columns, h, w, c = pictures.shape
    scale = max(1, -(-_CELL // h))
    gap, top = 8, 18
    sheet = Image.new("RGB", (columns * (w * scale + gap) + gap, top + rows * (h * scale + gap)), "white")
    draw = ImageDraw.Draw(sheet)
    for column, heading in enumerate(_HEADINGS):
        x = gap + column * (w * scale + gap)
        draw.text((x, 3), heading, fill="black")
        for row in range(rows):
            pixels = pictures[row, column, :, :, :3] if c >= 3 else np.repeat(pictures[row, column, :, :, :1], 3, -1)
            cell = Image.fromarray(pixels).resize((w * scale, h * scale), Image.Resampling.NEAREST)
            sheet.paste(cell, (x, top + row * (h * scale + gap)))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    return np.asarray(sheet)
