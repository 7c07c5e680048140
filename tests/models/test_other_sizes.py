"""The same encoder untrained, with other weights, and for images of another size or aspect ratio."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssl_vit.analysis.figures import attention
from ssl_vit.interfaces import UserError
from ssl_vit.models import Resampling
from ssl_vit.models.factory import at_size, fresh, initialize, load, state
from ssl_vit.models.position import resample
from ssl_vit.models.vit import ViTEncoder

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


@pytest.mark.parametrize(("size", "method"), [((8, 28), "timm"), ((40, 12), "google")])
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
    expected = resample(old["pos_embed"], (4, 4), model.grid, old["pos_embed"].shape[1] - 16, method)
    assert torch.equal(new["pos_embed"], expected)
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


def test_weights_for_a_size_that_the_patch_does_not_divide_are_evaluated_at_it(
    shaken: Make, tmp_path: Path, saved: Make
) -> None:
    """As SigLIP's 384 pixels with patches of 14, whose convolution drops the last pixels."""
    arguments = {"img_size": (18, 18), "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    encoder = shaken(ViTEncoder("vit_tiny_patch16_224", arguments, 0.5, 0.5))
    again = fresh(load(saved(tmp_path, encoder)), 0)
    assert (again.image_size, again.grid, again.outline().grid) == ((18, 18), (4, 4), (4, 4))
    with pytest.raises(UserError, match="image_size=22 is not a multiple"):
        fresh(again, 0, 22)
    images = np.zeros((2, 18, 18, 3), dtype=np.uint8)
    weights = np.ones((2, *again.grid))
    assert attention(images, weights).axes


def test_fixed_positions_stay_fixed_at_another_size(
    make_encoder: Make, shaken: Make, saved: Make, tmp_path: Path
) -> None:
    source = make_encoder(positions="sincos2d")
    model = at_size(source, (8, 24))
    assert not model.network.pos_embed.requires_grad
    expected = resample(state(source)["pos_embed"], (4, 4), (2, 6))
    torch.testing.assert_close(model.network.pos_embed, expected)
    again = load(saved(tmp_path, model))
    assert not again.network.pos_embed.requires_grad
    assert torch.equal(again.network.pos_embed, model.network.pos_embed)


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


@pytest.mark.parametrize(
    "difference",
    [
        *({"width": 32}, {"depth": 3}, {"patch_size": 8}, {"channels": 1}, {"heads": 4}),
        *({"positions": kind} for kind in ("sincos2d", "learned_2d", "relative", "none")),
    ],
)
def test_initialize_copies_weights_and_refuses_other_architectures(
    make_encoder: Make, shaken: Make, difference: dict[str, Any]
) -> None:
    source, model = shaken(make_encoder(1)), make_encoder(2, image_size=(8, 20))
    initialize(model, source, "source", "google")
    assert torch.equal(state(model)["pos_embed"], resample(state(source)["pos_embed"], (4, 4), (2, 5), 1, "google"))
    assert all(torch.equal(tensor, state(source)[key]) for key, tensor in state(model).items() if key != "pos_embed")
    with pytest.raises(UserError, match="the other run does not fit"):
        initialize(make_encoder(), make_encoder(**difference), "the other run")
    with pytest.raises(UserError, match=r"encoder\.channels is 1 there, 3 here"):  # not the mean, which follows from it
        initialize(make_encoder(), make_encoder(channels=1, mean=0.5, std=0.5), "the other run")
