from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssl_vit.interfaces import UserError
from ssl_vit.models import EncoderConfig
from ssl_vit.models.factory import build, fresh, initialize, load, require_vit, state

Make = Callable[..., Any]

# --- sizes ---


@pytest.mark.parametrize(
    ("name", "size", "patch_size", "grid", "pixels"),
    [
        ("vit_base_r50_s16_224", 224, None, (14, 14), 16),  # the paper's 1x1 patches
        ("vit_base_r50_s16_224", (64, 96), 2, (2, 3), 32),
        ("vit_small_r26_s32_224", (96, 32), None, (3, 1), 32),
        ("vit_tiny_r_s16_p8_224", 64, 4, (4, 4), 16),
    ],
)
def test_a_hybrids_patch_is_cells_to_the_encoder_and_pixels_to_colors(
    name: str, size: Any, patch_size: int | None, grid: tuple[int, int], pixels: int
) -> None:
    with torch.device("meta"):
        encoder = build(EncoderConfig(name=name, image_size=size, patch_size=patch_size))
    assert (encoder.grid, require_vit(encoder, "this test").patch_size) == (grid, pixels)


# --- normalization ---

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.mark.parametrize("normalization", [IMAGENET, {"mean": 0.4, "std": (0.1, 0.2, 0.3)}])
def test_each_channel_may_have_its_own_normalization(
    make_encoder: Make, tmp_path: Path, normalization: dict[str, Any], shaken: Make, pixels: Make, saved: Make
) -> None:
    encoder = shaken(make_encoder(norm_eps=0.01, **normalization))
    images = pixels(encoder)
    mean, std = (torch.tensor(normalization[key]).reshape(-1, 1, 1) for key in ("mean", "std"))
    again = load(saved(tmp_path, encoder))
    with torch.no_grad():
        expected = encoder.network.patch_embed((images / 255 - mean) / std)
        torch.testing.assert_close(encoder.embed(images), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(again(images), encoder(images))
        again.network.norm.eps = 1e-6
        assert not torch.equal(again(images), encoder(images))
    assert (again.mean, again.std) == (encoder.mean, encoder.std) and again.norm_eps == 0.01
    assert fresh(again, 0).std == again.std
    assert state(again).keys() == again.network.state_dict().keys()


@pytest.mark.parametrize("difference", [IMAGENET, {"mean": 0.4}, {"norm_eps": 1e-12}])
def test_weights_of_another_normalization_are_not_taken_over(make_encoder: Make, difference: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"encoder\.{min(difference)} is"):
        initialize(make_encoder(), make_encoder(**difference), "the other run")


def test_the_epsilon_of_rms_norms_is_set_too() -> None:
    sizes = {"width": 48, "depth": 1, "heads": 2, "image_size": 28}
    encoder = build(EncoderConfig(name="aimv2_large_patch14_224", norm_eps=0.1, **sizes))
    assert encoder.norm_eps == encoder.network.norm.eps == encoder.network.blocks[0].norm1.eps == 0.1


def test_weights_of_another_activation_function_are_not_taken_over() -> None:
    """No tensor tells of it."""
    sizes = {"width": 48, "depth": 1, "heads": 2, "image_size": 32}
    one, other = (build(EncoderConfig(name=f"vit_base_patch16_clip_{name}224", **sizes)) for name in ("quickgelu_", ""))
    with pytest.raises(UserError, match="its blocks compute QuickGELU, those here GELU"):
        initialize(other, one, "the other run")


# --- errors ---


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "vit_bse_patch16_224"}, "did you mean .*vit_base_patch16_224"),
        ({"name": "qqqq"}, "not a timm model"),
        ({"name": "vit_tiny_patch16_224.augreg_in21k"}, "a tag names weights"),
        ({"name": "resnet18", "patch_size": 4}, r"encoder\.patch_size: resnet18 is not a VisionTransformer"),
        ({"name": "eva02_tiny_patch14_224", "patch_size": 14}, "is not a VisionTransformer; remove the key"),
        ({"image_size": 225}, r"encoder\.image_size=225 .* use 224 or 240"),
        ({"image_size": (224, 250)}, r"encoder\.image_size=250 .* use 240 or 256"),
        (
            {"name": "vit_base_r50_s16_224", "image_size": 48, "patch_size": 2},
            r"image_size=48 .* patch size 32: use 32",
        ),
        ({"name": "vitamin_xlarge_256"}, "has no position embeddings"),
        ({"mean": (0.4, 0.5)}, r"encoder\.mean has 2 numbers for 3 channels"),
        ({"std": (0.2, 0.0, 0.2)}, r"encoder\.std=0\.0 must be greater than 0"),
        ({"width": 16, "heads": 3}, "width=16 must be a multiple of encoder.heads=3"),
    ],
)
def test_what_cannot_be_built_is_the_users_mistake(config: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=message):
        build(EncoderConfig(**config))


@pytest.mark.parametrize("size", ["wide", 0, True, [8, 0], [8, 12, 3]])
def test_a_size_is_a_side_or_height_and_width(size: Any) -> None:
    with pytest.raises(ValueError, match=r"a square's side such as 224, or \[height, width\]"):
        EncoderConfig(image_size=size)
    assert EncoderConfig(image_size=[8, 12]).image_size == (8, 12)
