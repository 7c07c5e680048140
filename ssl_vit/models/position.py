"""Kinds of position embeddings (paper, appendix D.4) on timm's modules, and positions at another resolution (paper,
section 3.2): 2D interpolation over the patch grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from timm.layers import RelPosBias, resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ssl_vit.models import Resampling

Grid = tuple[int, int]


class VisionTransformer2D(VisionTransformer):
    """timm's network with learned 2D positions: a vector of D / 2 numbers for every column (X) and every row (Y) of
    patches; a patch has those of its column and its row side by side, a prefix token D numbers of its own.

    pos_embed_2d: (2 * prefix + columns + rows, D / 2), the two halves of each prefix token first.
    """

    @property
    def pos_embed(self) -> torch.Tensor:
        """What timm's network adds to the tokens: (1, prefix + rows * columns, D)."""
        return from_table(self.pos_embed_2d, self.patch_embed.grid_size)


def from_table(table: torch.Tensor, grid: Grid) -> torch.Tensor:
    """`pos_embed_2d` -> timm's `pos_embed` (1, prefix + rows * columns, D)."""
    rows, columns = grid
    prefix, x, y = table.split([len(table) - columns - rows, columns, rows])
    patches = torch.cat([x.expand(rows, -1, -1), y[:, None].expand(-1, columns, -1)], dim=-1)
    return torch.cat([prefix.reshape(-1, patches.shape[-1]), patches.flatten(0, 1)])[None]


def to_table(positions_1LD: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The inverse of `from_table`."""
    prefix, patches = positions_1LD[0].split([positions_1LD.shape[1] - grid[0] * grid[1], grid[0] * grid[1]])
    x, y = patches.unflatten(0, grid).chunk(2, dim=-1)
    return torch.cat([prefix.reshape(-1, positions_1LD.shape[2] // 2), x[0], y[:, 0]])


def timm_format(network: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The network's tensors by name, learned 2D positions as timm's `pos_embed`."""
    formatted = dict(tensors)
    if (table := formatted.pop("pos_embed_2d", None)) is not None:
        formatted["pos_embed"] = from_table(table, network.patch_embed.grid_size)  # type: ignore[union-attr, arg-type]
    return formatted


def own_format(network: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `timm_format`; tensors that are not in timm's format stay as they are."""
    formatted = dict(tensors)
    if isinstance(network, VisionTransformer2D) and "pos_embed" in formatted:
        formatted["pos_embed_2d"] = to_table(formatted.pop("pos_embed"), network.patch_embed.grid_size)
    return formatted


def relate(block: nn.Module, grid: Grid, heads: int, prefix_tokens: int, std: float) -> None:
    """Give timm's block relative positions, as its `rel_pos` (timm's RelPosBias): per head a learned number for every
    offset between two patches, in rows and columns, and three for pairs with the class token.

    They are added to the attention logits. The block still takes tokens alone; where those are some of the sequence
    only, `among_BT` (int64) says which.
    """
    block.rel_pos = bias = RelPosBias(grid, heads, prefix_tokens, device=next(block.parameters()).device)
    nn.init.trunc_normal_(bias.relative_position_bias_table, std=std)
    block.register_forward_pre_hook(_add_relative, with_kwargs=True)  # a subclass would be unknown to FSDP's wrapping


def _add_relative(block: Any, arguments: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    bias = block.rel_pos.get_bias()  # (1, heads, T, T)
    if (among_BT := given.get("among_BT")) is not None:
        bias = bias[0][:, among_BT[:, :, None], among_BT[:, None]].transpose(0, 1)
    return arguments, {"attn_mask": bias}


def resample(
    positions_1LD: torch.Tensor, old_grid: Grid, new_grid: Grid, prefix_tokens: int = 1, method: Resampling = "timm"
) -> torch.Tensor:
    """Position embeddings (1, prefix + old rows * columns, D) -> (1, prefix + new rows * columns, D).

    prefix_tokens: how many leading entries belong to prefix tokens; they are kept as they are.
    method: `timm`: bicubic, antialiased, in float32. `google`: bilinear with aligned corners, in float64 (the paper
        authors' code: scipy's zoom of order 1). They differ by points of accuracy: do not mix them in a comparison.
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
    prefix, grid = positions_1LD[:, :prefix_tokens], positions_1LD[:, prefix_tokens:]
    pixels = grid.detach().cpu().double().unflatten(1, old_grid).permute(0, 3, 1, 2)
    resized = F.interpolate(pixels, new_grid, mode="bilinear", align_corners=True)
    return torch.cat([prefix, resized.flatten(2).mT.to(grid)], dim=1)


def resample_relative(
    table: torch.Tensor, old_grid: Grid, new_grid: Grid, prefix_tokens: int, method: Resampling
) -> torch.Tensor:
    """The table of a RelPosBias for another grid: `resample` over its (2 * rows - 1) x (2 * columns - 1) offsets.

    The three entries of the class token, which come last, are kept.
    """
    (old, new), own = [(2 * rows - 1, 2 * columns - 1) for rows, columns in (old_grid, new_grid)], 3 * prefix_tokens
    return resample(table.roll(own, 0)[None], old, new, own, method)[0].roll(-own, 0)
