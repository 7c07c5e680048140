"""Kinds of positions against loops written from their definition; positions at another resolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scipy.ndimage import zoom

from ssl_vit.interfaces import UserError
from ssl_vit.models import Resampling
from ssl_vit.models.factory import at_size, state
from ssl_vit.models.position import Grid, from_table, resample, to_table

Make = Callable[..., Any]

GRIDS = [
    ((14, 14), (24, 24)),
    ((3, 5), (6, 4)),
    ((1, 1), (3, 3)),
]


def positions(grid: Grid, prefix: int, width: int = 6) -> torch.Tensor:
    return torch.randn(1, prefix + grid[0] * grid[1], width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_googles_way_is_scipys_zoom_of_order_one(old: Grid, new: Grid, prefix: int) -> None:
    before = positions(old, prefix)
    after = resample(before, old, new, prefix, method="google")
    assert after.shape == (1, prefix + new[0] * new[1], 6)
    assert after.dtype == torch.float32
    grid = before[0, prefix:].numpy().reshape(*old, 6)
    scaled = zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1)
    np.testing.assert_allclose(after[0, prefix:].numpy().reshape(*new, 6), scaled, atol=1e-6)


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize(("old", "new"), [*GRIDS, ((24, 24), (14, 14))])
def test_timms_way_is_bicubic_and_antialiased(old: Grid, new: Grid, prefix: int) -> None:
    before = positions(old, prefix).bfloat16()
    after = resample(before, old, new, prefix, method="timm")
    grid = before[:, prefix:].float().reshape(1, *old, 6).permute(0, 3, 1, 2)
    scaled = F.interpolate(grid, size=new, mode="bicubic", antialias=True).permute(0, 2, 3, 1).reshape(1, -1, 6)
    assert torch.equal(after, torch.cat([before[:, :prefix], scaled.bfloat16()], dim=1))


@pytest.mark.parametrize("method", ["timm", "google"])
def test_the_same_grid_changes_nothing(method: Resampling) -> None:
    before = positions((3, 5), 1)
    assert torch.equal(resample(before, (3, 5), (3, 5), 1, method), before)


@pytest.mark.parametrize(
    ("length", "grid", "prefix"), [(16, (4, 4), 1), (17, (4, 4), 0), (17, (2, 4), 1), (18, (4, 4), 1)]
)
@pytest.mark.parametrize("new", [(6, 6), (4, 4)])
def test_a_length_that_is_not_the_grid_is_refused(length: int, grid: Grid, prefix: int, new: Grid) -> None:
    with pytest.raises(ValueError, match=f"{length} positions"):
        resample(torch.zeros(1, length, 3), grid, new, prefix)


# --- kinds ---


@pytest.mark.parametrize("settings", [{}, {"class_token": False}, {"name": "vit_small_patch14_reg4_dinov2"}], ids=str)
def test_learned_2d_positions_are_a_columns_and_a_rows_side_by_side(
    make_encoder: Make, shaken: Make, settings: dict[str, Any]
) -> None:
    encoder = shaken(make_encoder(positions="learned_2d", image_size=(8, 12), **settings))
    (rows, columns), prefix, half = encoder.grid, encoder.position_prefix, encoder.width // 2
    positions, table = encoder.network.pos_embed[0].detach(), encoder.network.pos_embed_2d.detach()
    x, y = table[2 * prefix : 2 * prefix + columns], table[2 * prefix + columns :]
    for token in range(prefix):
        assert torch.equal(positions[token], table[2 * token : 2 * token + 2].flatten())
    for row in range(rows):
        for column in range(columns):
            found = positions[prefix + row * columns + column]
            assert torch.equal(found, torch.cat([x[column], y[row]])) and len(found) == 2 * half
    assert torch.equal(to_table(from_table(table, encoder.grid), encoder.grid), table)
    other = at_size(encoder, (16, 20))
    expected = resample(state(encoder)["pos_embed"], encoder.grid, other.grid, prefix)
    torch.testing.assert_close(state(other)["pos_embed"], expected, atol=1e-6, rtol=0)


def relative_logits(encoder: Any, block: Any) -> torch.Tensor:
    """The bias of every pair of tokens, (H, T, T), in loops: row of the query minus row of the key, then columns."""
    (rows, columns), prefix, table = encoder.grid, encoder.prefix_tokens, block.rel_pos.relative_position_bias_table
    bias = torch.zeros(encoder.heads, prefix + encoder.patches, prefix + encoder.patches)
    for query in range(encoder.patches):
        for key in range(encoder.patches):
            down, right = query // columns - key // columns, query % columns - key % columns
            offset = (down + rows - 1) * (2 * columns - 1) + right + columns - 1
            bias[:, prefix + query, prefix + key] = table[offset]
    if prefix:
        bias[:, 0, 1:], bias[:, 1:, 0], bias[:, 0, 0] = table[-3][:, None], table[-2][:, None], table[-1]
    return bias


@pytest.mark.parametrize("class_token", [True, False])
@torch.no_grad()
def test_relative_positions_are_added_to_the_logits_of_the_tokens_that_are_there(
    make_encoder: Make, shaken: Make, pixels: Make, class_token: bool
) -> None:
    encoder = shaken(make_encoder(positions="relative", position_std=1.0, image_size=(8, 12), class_token=class_token))
    images, prefix = pixels(encoder), encoder.prefix_tokens
    visible_BK = torch.tensor([[4, 0, 3], [2, 5, 1]])
    among_BT = torch.cat([torch.zeros(2, prefix, dtype=torch.int64), visible_BK + prefix], dim=1)
    tokens = encoder.enter(encoder.embed(images))
    shown = torch.stack([tokens[image, among] for image, among in enumerate(among_BT)])
    for block in encoder.network.blocks:
        bias, outputs = relative_logits(encoder, block), []
        for number, (sequence, among) in enumerate(zip([*tokens, *shown], [None, None, *among_BT], strict=True)):
            own = bias if among is None else bias[:, among][:, :, among]
            query, key, value = block.attn.qkv(block.norm1(sequence)).unflatten(-1, (3, encoder.heads, -1)).unbind(1)
            logits = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5 + own
            read = torch.einsum("hqk,khd->qhd", logits.softmax(-1), value).flatten(1)
            sequence = sequence + block.attn.proj(read)
            outputs.append(sequence + block.mlp(block.norm2(sequence)))
            assert number or own.std() > 0.1
        tokens, shown = torch.stack(outputs[:2]), torch.stack(outputs[2:])
    torch.testing.assert_close(encoder(images), encoder.network.norm(tokens), atol=1e-5, rtol=1e-5)
    found = encoder.encode_visible(encoder.embed(images), visible_BK)
    torch.testing.assert_close(found, encoder.network.norm(shown), atol=1e-5, rtol=1e-5)
    kept = encoder.encode(encoder.embed(images), keep_BK=visible_BK)
    torch.testing.assert_close(kept[0], encoder(images)[0, prefix + visible_BK[0]], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("method", ["timm", "google"])
@torch.no_grad()
def test_relative_positions_at_another_size_keep_their_offsets(make_encoder: Make, method: Resampling) -> None:
    """A number that falls with the distance falls with it at the new size too; those of the class token stay."""
    encoder = make_encoder(positions="relative", image_size=(12, 20))
    for block in encoder.network.blocks:
        y, x = torch.meshgrid(torch.arange(-2.0, 3), torch.arange(-4.0, 5), indexing="ij")
        block.rel_pos.relative_position_bias_table[:-3] = -(x.abs() + y.abs()).flatten()[:, None]
    other = at_size(encoder, (20, 12), method)
    for old, new in zip(encoder.network.blocks, other.network.blocks, strict=True):
        tables = [block.rel_pos.relative_position_bias_table for block in (old, new)]
        assert torch.equal(tables[0][-3:], tables[1][-3:])
        grid = tables[1][:-3, 0].reshape(9, 5)
        assert grid[4, 2] > -0.5
        assert (grid[:, 2].diff()[:4] > 0).all() and (grid[:, 2].diff()[4:] < 0).all()
        assert (grid[4].diff()[:2] > 0).all() and (grid[4].diff()[2:] < 0).all()


@torch.no_grad()
def test_without_positions_a_permutation_of_patches_permutes_the_outputs(
    make_encoder: Make, shaken: Make, pixels: Make
) -> None:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    for kind, blind in (("none", True), ("learned_2d", False), ("relative", False)):
        encoder = shaken(make_encoder(positions=kind, position_std=1.0))
        patches = encoder.embed(pixels(encoder))
        outputs, permuted = encoder.encode(patches)[:, 1:], encoder.encode(patches[:, order])[:, 1:]
        assert torch.allclose(outputs[:, order], permuted, atol=1e-5) == blind


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"positions": "relative", "name": "vit_small_patch14_reg4_dinov2"}, "positions=relative.*registers"),
        ({"positions": "learned_2d", "width": 9, "heads": 3}, "positions=learned_2d needs an even width"),
    ],
)
def test_models_that_cannot_have_a_kind_are_refused(make_encoder: Make, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_encoder(**settings)
