from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom
from timm.layers import resample_abs_pos_embed

from ssl_vit.models import Resampling
from ssl_vit.models.position import Grid, resample

GRIDS = [
    ((14, 14), (24, 24)),
    ((3, 5), (6, 4)),
    ((1, 1), (3, 3)),
]


def positions(grid: Grid, prefix: int, width: int = 6) -> torch.Tensor:
    return torch.randn(1, prefix + grid[0] * grid[1], width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_timms_way_is_timms_own(old: Grid, new: Grid, prefix: int) -> None:
    before = positions(old, prefix)
    expected = resample_abs_pos_embed(before, new_size=list(new), old_size=list(old), num_prefix_tokens=prefix)
    assert torch.equal(resample(before, old, new, prefix), expected)


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


@pytest.mark.parametrize("method", ["timm", "google"])
def test_the_same_grid_changes_nothing(method: Resampling) -> None:
    before = positions((3, 5), 1)
    assert torch.equal(resample(before, (3, 5), (3, 5), 1, method), before)


@pytest.mark.parametrize("method", ["timm", "google"])
def test_rows_and_columns_are_not_mixed_up(method: Resampling) -> None:
    """A gradient down the rows stays a gradient down the rows."""
    rows = torch.arange(6.0).repeat_interleave(3)[None, :, None]
    after = resample(rows, (6, 3), (3, 6), 0, method).reshape(3, 6)
    torch.testing.assert_close(after, after[:, :1].expand(-1, 6))
    assert (after[:, 0].diff() > 0.5).all()


@pytest.mark.parametrize(
    ("length", "grid", "prefix"), [(16, (4, 4), 1), (17, (4, 4), 0), (17, (2, 4), 1), (18, (4, 4), 1)]
)
@pytest.mark.parametrize("new", [(6, 6), (4, 4)])
def test_a_length_that_is_not_the_grid_is_refused(length: int, grid: Grid, prefix: int, new: Grid) -> None:
    with pytest.raises(ValueError, match=f"{length} positions"):
        resample(torch.zeros(1, length, 3), grid, new, prefix)
