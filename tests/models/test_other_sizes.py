"""The same encoder untrained, with other weights, and for images of another size or aspect ratio."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom
from timm.layers import resample_abs_pos_embed

from ssl_vit.interfaces import UserError
from ssl_vit.models import Resampling
from ssl_vit.models.factory import at_size, fresh, initialize, load, state

Make = Callable[..., Any]

# With and without a position for the class token, registers, no class token at all, a norm after pooling.
NAMES = [
    "vit_tiny_patch16_224",
    "deit3_small_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch16_siglip_gap_224",
    "vit_medium_patch16_reg4_gap_256",
    "test_vit2",
]
SIZES = [(24, 24), (8, 8), (8, 28), (40, 12)]  # up, down, wide, tall


def resampled(positions_1LD: torch.Tensor, size: tuple[int, int], method: Resampling) -> torch.Tensor:
    """A 4x4 grid of positions brought to a size of 4-pixel patches by the published code of either side."""
    rows, columns, prefix = size[0] // 4, size[1] // 4, positions_1LD.shape[1] - 16
    if method == "timm":
        return resample_abs_pos_embed(positions_1LD, [rows, columns], [4, 4], num_prefix_tokens=prefix)
    grid = positions_1LD[0, prefix:].numpy().reshape(4, 4, -1)
    zoomed = zoom(grid, (rows / 4, columns / 4, 1), order=1).reshape(1, rows * columns, -1)
    return torch.from_numpy(np.concatenate([positions_1LD[:, :prefix].numpy(), zoomed], axis=1))


@pytest.mark.parametrize("method", ["timm", "google"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_another_size_keeps_the_weights_and_resamples_the_positions(
    make_encoder: Make, shaken: Make, pixels: Make, name: str, size: tuple[int, int], method: Resampling
) -> None:
    source = shaken(make_encoder(name=name, position_std=0.5))
    before = torch.get_rng_state()
    model = at_size(source, size, method)
    assert torch.equal(before, torch.get_rng_state())
    old, new = state(source), state(model)
    assert old.keys() == new.keys()
    assert all(torch.equal(new[key], old[key]) for key in old if key != "pos_embed")
    torch.testing.assert_close(new["pos_embed"], resampled(old["pos_embed"], size, method), atol=1e-6, rtol=1e-6)
    prefix = old["pos_embed"].shape[1] - 16
    assert torch.equal(new["pos_embed"][:, :prefix], old["pos_embed"][:, :prefix])
    assert (model.image_size, model.patch_size, model.training) == (size, 4, False)
    with torch.no_grad():
        assert model(pixels(model)).isfinite().all()


def test_the_two_methods_differ_and_a_size_already_had_is_a_copy(make_encoder: Make, shaken: Make) -> None:
    source = shaken(make_encoder(position_std=0.5))
    ways = [at_size(source, 24, method).network.pos_embed for method in ("timm", "google")]
    assert (ways[0] - ways[1]).abs().max() > 0.1
    same = at_size(source, 16)
    assert all(torch.equal(a, b) for a, b in zip(state(same).values(), state(source).values(), strict=True))
    with torch.no_grad():
        same.network.pos_embed.zero_()
    assert source.network.pos_embed.abs().max() > 0


def test_fixed_positions_stay_fixed_at_another_size(
    make_encoder: Make, shaken: Make, saved: Make, tmp_path: Path
) -> None:
    source = make_encoder(positions="sincos2d")
    model = at_size(source, (8, 24))
    assert not model.network.pos_embed.requires_grad
    expected = resampled(state(source)["pos_embed"], (8, 24), "timm")
    torch.testing.assert_close(model.network.pos_embed, expected)
    again = load(saved(tmp_path, model))
    assert not again.network.pos_embed.requires_grad
    assert torch.equal(again.network.pos_embed, model.network.pos_embed)


def test_hybrids_change_size_too(make_encoder: Make, shaken: Make, pixels: Make) -> None:
    source = shaken(make_encoder(name="vit_tiny_r_s16_p8_224", image_size=64))  # 4 cells of 4 pixels to a patch
    assert (source.grid, source.patch_size) == ((4, 4), 16)
    model = at_size(source, (32, 80))
    assert (model.grid, model.patch_size) == ((2, 5), 16)
    with torch.no_grad():
        assert model(pixels(model)).shape == (2, 11, 16)


@pytest.mark.parametrize("size", [18, (16, 18), (18, 16)])
def test_a_size_that_the_patches_do_not_divide_is_the_users_mistake(make_encoder: Make, size: Any) -> None:
    for change in (at_size, lambda model, size: fresh(model, 0, size)):
        with pytest.raises(UserError, match="image_size=18 is not a multiple of the patch size 4: use 16 or 20"):
            change(make_encoder(), size)


# --- untrained others ---


def test_fresh_weights_depend_on_the_seed_alone(make_encoder: Make, shaken: Make) -> None:
    like, other = make_encoder(1), shaken(make_encoder(2))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = state(fresh(like, 11))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    second, other = state(fresh(other, 11)), state(fresh(like, 12))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["patch_embed.proj.weight"], other["patch_embed.proj.weight"])
    assert not torch.equal(first["pos_embed"], other["pos_embed"])
    assert not torch.equal(first["pos_embed"], state(like)["pos_embed"])


@pytest.mark.parametrize("size", [24, (12, 48)])
def test_fresh_at_another_size(make_encoder: Make, pixels: Make, size: Any) -> None:
    larger = fresh(make_encoder(mean=0.1, position_std=0.7), 0, image_size=size)
    assert (larger.patches, larger.mean, larger.position_std) == (36, (0.1,) * 3, 0.7)
    assert larger.image_size == (size if isinstance(size, tuple) else (size, size))
    assert larger(pixels(larger)).shape == (2, 37, 16)


# --- weights of another run ---


@pytest.mark.parametrize("method", ["timm", "google"])
@pytest.mark.parametrize("size", [(16, 16), *SIZES])
def test_initialize_copies_weights_and_resamples_positions(
    make_encoder: Make, shaken: Make, pixels: Make, size: tuple[int, int], method: Resampling
) -> None:
    source, model = shaken(make_encoder(1)), make_encoder(2, image_size=size)
    initialize(model, source, "source", method)
    old, new = state(source), state(model)
    assert all(torch.equal(new[key], old[key]) for key in old if key != "pos_embed")
    torch.testing.assert_close(new["pos_embed"], resampled(old["pos_embed"], size, method), atol=1e-6, rtol=1e-6)
    if size == (16, 16):
        images = pixels(source)
        with torch.no_grad():
            assert torch.equal(model.eval()(images), source(images))


@pytest.mark.parametrize(
    "difference",
    [{"width": 32}, {"depth": 3}, {"patch_size": 8}, {"channels": 1}, {"positions": "sincos2d"}, {"heads": 4}],
)
def test_initialize_refuses_other_architectures(make_encoder: Make, difference: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the other run does not fit"):
        initialize(make_encoder(), make_encoder(**difference), "the other run")
