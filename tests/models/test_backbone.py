from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from ssl_vit.interfaces import UserError
from ssl_vit.models import BackboneConfig
from ssl_vit.models.backbone import build, fresh, initialise, load, require_vit, state

Make = Callable[..., Any]

FREE = {"image_size": 28, "channels": 1, "patch_size": 7, "width": 16, "depth": 2, "heads": 2}

# --- sizes ---


def counted(image: int, channels: int, patch: int, width: int, layers: int, mlp: int) -> int:
    """Weights and biases of equations 1 to 4, counted by hand."""
    embedding = patch * patch * channels * width + width
    attention = 3 * (width * width + width) + width * width + width
    perceptron = width * mlp + mlp + mlp * width + width
    positions = ((image // patch) ** 2 + 1) * width
    return embedding + width + positions + layers * (attention + perceptron + 4 * width) + 2 * width


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("config", "sizes", "millions"),
    [
        ({"name": "vit_tiny_patch16_224"}, (224, 3, 16, 192, 12, 768), 5.5),
        ({"name": "vit_small_patch16_224"}, (224, 3, 16, 384, 12, 1536), 21.7),
        ({"name": "vit_base_patch32_224"}, (224, 3, 32, 768, 12, 3072), 87.5),
        ({"name": "vit_base_patch16_224"}, (224, 3, 16, 768, 12, 3072), 85.8),
        ({"name": "vit_large_patch32_224"}, (224, 3, 32, 1024, 24, 4096), 305.5),
        ({"name": "vit_large_patch16_224"}, (224, 3, 16, 1024, 24, 4096), 303.3),
        ({"name": "vit_huge_patch14_224"}, (224, 3, 14, 1280, 32, 5120), 630.8),
        ({"name": "vit_base_patch16_224", **FREE}, (28, 1, 7, 16, 2, 64), 0.0),
        ({**FREE, "mlp_ratio": 2.0, "channels": 4}, (28, 4, 7, 16, 2, 32), 0.0),
    ],
)
def test_parameter_counts(config: dict[str, Any], sizes: tuple[int, ...], millions: float) -> None:
    with torch.device("meta"):
        backbone = build(BackboneConfig(**config))
        if len(config) == 1:
            assert parameters(backbone) == parameters(timm.create_model(config["name"], num_classes=0))
    assert parameters(backbone) == counted(*sizes)
    assert round(parameters(backbone) / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("name", "classes", "millions"),
    [("vit_base_patch16_224", 0, 86), ("vit_large_patch32_224", 1000, 307), ("vit_huge_patch14_224", 1000, 632)],
)
def test_the_papers_table_1(name: str, classes: int, millions: int) -> None:
    """Its rounded counts, with the patch size and head for which each of them holds to the million."""
    with torch.device("meta"):
        backbone = build(BackboneConfig(name=name))
    assert round((parameters(backbone) + classes * (backbone.width + 1) * (classes > 0)) / 1e6) == millions


def test_vit_b_with_an_imagenet_head_is_the_published_one_to_the_last_parameter() -> None:
    with torch.device("meta"):
        backbone = build(BackboneConfig())
    assert parameters(backbone) + 768 * 1000 + 1000 == 86_567_656  # as published with the weights in timm


def test_the_small_grey_vit_has_7850_parameters() -> None:
    backbone = require_vit(build(BackboneConfig(**FREE)), "this test")
    whole = parameters(backbone) + parameters(nn.Linear(backbone.width, 10))
    assert whole == 7850
    assert whole - backbone.vit.cls_token.numel() - backbone.vit.pos_embed.numel() == 7562  # in its layers


def test_properties(make_backbone: Make) -> None:
    backbone = make_backbone(image_size=(28, 42), channels=1, patch_size=7)
    found = (backbone.width, backbone.patch_size, backbone.image_size, backbone.grid, backbone.patches)
    assert found == (16, 7, (28, 42), (4, 6), 24)
    assert (backbone.channels, backbone.heads, backbone.prefix_tokens) == (1, 2, 1)


@pytest.mark.parametrize(
    ("name", "size", "patch_size", "grid", "pixels"),
    [
        ("vit_base_r50_s16_224", 224, None, (14, 14), 16),  # the paper's 1x1 patches
        ("vit_base_r50_s16_224", (64, 96), 2, (2, 3), 32),
        ("vit_small_r26_s32_224", (96, 32), None, (3, 1), 32),
        ("vit_large_r50_s32_224", 64, 1, (2, 2), 32),
        ("vit_tiny_r_s16_p8_224", 64, None, (2, 2), 32),
        ("vit_tiny_r_s16_p8_224", 64, 4, (4, 4), 16),
        ("vit_base_resnet50d_224", 64, None, (2, 2), 32),
    ],
)
def test_a_hybrids_patch_is_cells_to_the_encoder_and_pixels_to_colours(
    name: str, size: Any, patch_size: int | None, grid: tuple[int, int], pixels: int
) -> None:
    with torch.device("meta"):
        backbone = build(BackboneConfig(name=name, image_size=size, patch_size=patch_size))
    assert (backbone.grid, require_vit(backbone, "this test").patch_size) == (grid, pixels)


# --- normalisation ---

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.mark.parametrize("normalisation", [IMAGENET, {"mean": 0.4, "std": (0.1, 0.2, 0.3)}])
def test_each_channel_may_have_its_own_normalisation(
    make_backbone: Make, tmp_path: Path, normalisation: dict[str, Any], shaken: Make, pixels: Make, saved: Make
) -> None:
    backbone = shaken(make_backbone(norm_eps=0.01, **normalisation))
    images = pixels(backbone)
    mean, std = (torch.tensor(normalisation[key]).reshape(-1, 1, 1) for key in ("mean", "std"))
    again = load(saved(tmp_path, backbone))
    with torch.no_grad():
        expected = backbone.vit.patch_embed((images / 255 - mean) / std)
        torch.testing.assert_close(backbone.embed(images), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(again(images), backbone(images))
        again.vit.norm.eps = 1e-6
        assert not torch.equal(again(images), backbone(images))
    assert (again.mean, again.std, again.norm_eps) == (backbone.mean, backbone.std, 0.01)
    assert fresh(again, 0).std == again.std
    assert state(again).keys() == again.vit.state_dict().keys()


def test_one_number_a_channel_is_one_number_where_they_agree(make_backbone: Make) -> None:
    assert make_backbone(mean=(0.4, 0.4, 0.4)).mean == 0.4
    with pytest.raises(UserError, match=r"backbone\.mean has 2 numbers for 3 channels"):
        make_backbone(mean=(0.4, 0.5))
    with pytest.raises(ValueError, match="std"):
        BackboneConfig(std=(0.2, 0.0, 0.2))


@pytest.mark.parametrize("difference", [IMAGENET, {"mean": 0.4}, {"norm_eps": 1e-12}])
def test_weights_of_another_normalisation_are_not_taken_over(make_backbone: Make, difference: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"backbone\.{min(difference)} is"):
        initialise(make_backbone(), make_backbone(**difference), "the other run")


def test_weights_of_another_activation_function_are_not_taken_over() -> None:
    """No tensor tells of it."""
    sizes = {"width": 48, "depth": 1, "heads": 2, "image_size": 32}
    one, other = (
        build(BackboneConfig(name=f"vit_base_patch16_clip_{name}224", **sizes)) for name in ("quickgelu_", "")
    )
    with pytest.raises(UserError, match="its blocks compute QuickGELU, those here GELU"):
        initialise(other, one, "the other run")


# --- errors ---


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "vit_bse_patch16_224"}, "did you mean .*vit_base_patch16_224"),
        ({"name": "vit_bse_patch16_224", "patch_size": 16}, "did you mean .*vit_base_patch16_224"),
        ({"name": "qqqq"}, "no timm model"),
        ({"name": "resnet18", "patch_size": 4}, r"backbone\.patch_size: resnet18 is a ResNet"),
        ({"name": "swin_tiny_patch4_window7_224", "patch_size": 4}, "use a VisionTransformer or a ResNet"),
        ({"name": "eva02_tiny_patch14_224"}, "use a VisionTransformer or a ResNet"),
        ({"name": "eva02_tiny_patch14_224", "patch_size": 14}, "use a VisionTransformer or a ResNet"),
        ({"image_size": 225}, r"backbone\.image_size=225 .* use 224 or 240"),
        ({"image_size": 10, "patch_size": 16}, r"backbone\.image_size=10 .* use 16 or 32"),
        ({"image_size": (224, 250)}, r"backbone\.image_size=250 .* use 240 or 256"),
        (
            {"name": "vit_base_r50_s16_224", "image_size": 48, "patch_size": 2},
            r"image_size=48 .* patch size 32: use 32",
        ),
        ({"name": "vitamin_xlarge_256"}, "has no position embeddings"),
        ({"name": "deit_tiny_distilled_patch16_224"}, "VisionTransformerDistilled"),
        ({"width": 16, "heads": 3}, r"backbone\.width=16"),
        ({"width": 20}, r"backbone\.width=20"),
        ({"heads": 7}, r"backbone\.heads=7"),
    ],
)
def test_what_cannot_be_built_is_the_users_mistake(config: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=message):
        build(BackboneConfig(**config))


@pytest.mark.parametrize("size", ["wide", 0, 8.5, True, [8], [8, 0], [8, 12, 3], ["8", 12]])
def test_a_size_is_a_side_or_height_and_width(size: Any) -> None:
    with pytest.raises(ValueError, match=r"a square's side such as 224, or \[height, width\]"):
        BackboneConfig(image_size=size)
    assert BackboneConfig(image_size=[8, 12]).image_size == (8, 12)


@pytest.mark.parametrize("mean", ["grey", [], ["a"], [0.5, None], True])
def test_normalisation_is_one_number_or_one_a_channel(mean: Any) -> None:
    with pytest.raises(ValueError, match="one number, or one for each channel"):
        BackboneConfig(mean=mean)
    assert BackboneConfig(mean=[0.1, 0.2]).mean == (0.1, 0.2)
