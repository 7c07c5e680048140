"""Position embeddings at another resolution (paper, section 3.2): 2D interpolation over the patch grid."""

from __future__ import annotations

import numpy as np
import torch
from scipy.ndimage import zoom
from timm.layers import resample_abs_pos_embed

from ssl_vit.models import Resampling

Grid = tuple[int, int]


def resample(
    positions_1LD: torch.Tensor, old_grid: Grid, new_grid: Grid, prefix_tokens: int = 1, method: Resampling = "timm"
) -> torch.Tensor:
    """Position embeddings (1, prefix + old rows * columns, D) -> (1, prefix + new rows * columns, D).

    prefix_tokens: how many leading entries belong to prefix tokens; they are kept as they are.
    method: `timm`: bicubic, antialiased, in float32. `google`: scipy's zoom of order 1 (bilinear with aligned corners),
        as in the paper authors' code. They differ by points of accuracy: do not mix them in a comparison.
    Raises ValueError when the length does not fit the old grid.
    """
    if positions_1LD.shape[1] != prefix_tokens + old_grid[0] * old_grid[1]:
        raise ValueError(
            f"{positions_1LD.shape[1]} positions do not make {prefix_tokens} + {old_grid[0]}x{old_grid[1]}"
        )
    if old_grid == new_grid:
        return positions_1LD
    if method == "timm":
        return resample_abs_pos_embed(positions_1LD, list(new_grid), list(old_grid), num_prefix_tokens=prefix_tokens)
    prefix, grid = positions_1LD[:, :prefix_tokens], positions_1LD[0, prefix_tokens:]
    pixels = grid.reshape(*old_grid, -1).detach().cpu().double().numpy()
    factors = (new_grid[0] / old_grid[0], new_grid[1] / old_grid[1], 1)
    zoomed = torch.from_numpy(np.ascontiguousarray(zoom(pixels, factors, order=1)))
    return torch.cat([prefix, zoomed.to(positions_1LD).reshape(1, -1, grid.shape[-1])], dim=1)
