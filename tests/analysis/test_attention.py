"""Attention by block against a whole unfused network; distance and rollout by hand and by float64 loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch

from ssl_vit.analysis import attention

Build = Callable[..., Any]

MODELS: dict[str, dict[str, Any]] = {
    "class token": {},
    "rectangle": {"image_size": (8, 16)},
    "register, no class token": {"name": "vit_wee_patch16_reg1_gap_256"},
    "class token and registers": {"name": "vit_small_patch14_reg4_dinov2"},
    "parallel blocks, query and key norms": {"name": "vit_base_patch16_xp_224"},
    "relative positions": {"positions": "relative", "position_std": 1.0},
    "relative positions, parallel blocks": {"positions": "relative", "name": "vit_base_patch16_xp_224"},
    "differential attention": {"name": "vit_dwee_patch16_reg1_gap_256"},
}
PLAIN = ("class token", "rectangle", "register, no class token", "class token and registers")


def sharpened(encoder: Any) -> Any:
    """With larger weights: a fresh model attends so evenly that a wrong map would look alike."""
    with torch.no_grad():
        for name, weights in encoder.network.named_parameters():
            if "qkv.weight" in name or "in_proj.weight" in name or name == "pos_embed":
                weights.mul_(3)
    return encoder.eval()


def images_for(encoder: Any, count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (count, 3, *encoder.image_size), dtype=torch.uint8, generator=generator)


def unfused(encoder: Any, images: torch.Tensor) -> list[np.ndarray]:
    """timm's own probabilities in float64, (B, H, T, T) a layer: what its unfused path hands to the dropout."""
    vit = copy.deepcopy(encoder.network).double()
    maps: list[list[torch.Tensor]] = []
    for block in vit.blocks:
        maps.append([])
        for module in block.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
            if hasattr(module, "attn_drop"):
                module.attn_drop.register_forward_hook(lambda _, inputs, __, own=maps[-1]: own.append(inputs[0]))
    with torch.inference_mode():
        vit.forward_features((images.double() / 255 - 0.5) / 0.5)
    return [torch.cat(layer, dim=1).numpy() for layer in maps]


@pytest.mark.parametrize("kind", MODELS)
def test_maps_are_those_of_timms_unfused_path(make_encoder: Build, kind: str) -> None:
    name = MODELS[kind].get("name", "vit_tiny_patch16_224")
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    encoder = sharpened(make_encoder(**MODELS[kind]))
    images = images_for(encoder)
    with torch.inference_mode():
        before = encoder(images)
    found = list(attention.attention_maps(encoder, images))
    for maps, expected in zip(found, unfused(encoder, images), strict=True):
        assert expected.std() > 0.01  # not even
        np.testing.assert_allclose(maps.numpy(), expected, atol=2e-5)
    with torch.inference_mode():
        assert torch.equal(encoder(images), before)  # the model is as it was


def distance_by_hand(maps: list[np.ndarray], encoder: Any) -> np.ndarray:
    (rows, columns), (height, width), prefix = encoder.grid, encoder.image_size, encoder.prefix_tokens
    y, x = np.divmod(np.arange(rows * columns), columns)
    far = np.hypot((y[:, None] - y) * height / rows, (x[:, None] - x) * width / columns)
    paid = np.stack(maps)[..., prefix:, prefix:]  # layers, images, heads, queries, keys
    mean: np.ndarray = ((paid * far).sum(-1) / paid.sum(-1)).mean((1, 3))
    return mean


def rollout_by_hand(maps: list[np.ndarray], encoder: Any) -> np.ndarray:
    prefix, identity = encoder.prefix_tokens, np.eye(maps[0].shape[-1])
    found = []
    for image in range(len(maps[0])):
        rolled = identity
        for layer in maps:
            mixed = layer[image].mean(0) + identity
            rolled = mixed / mixed.sum(1, keepdims=True) @ rolled
        row = rolled[0] if encoder.has_class_token else rolled[prefix:].mean(0)
        found.append(row[prefix:].reshape(encoder.grid))
    return np.array(found)


@pytest.mark.parametrize("kind", PLAIN)
def test_distance_and_rollout_are_those_of_numpy_in_float64(make_encoder: Build, kind: str) -> None:
    encoder = sharpened(make_encoder(**MODELS[kind]))
    images = images_for(encoder)
    maps = unfused(encoder, images)
    distance = attention.attention_distance(encoder, images)
    assert np.ptp(distance) > 0.1
    np.testing.assert_allclose(distance, distance_by_hand(maps, encoder), rtol=1e-5)
    rolled = attention.rollout(encoder, images)
    assert np.ptp(rolled) > 0.01
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}  # float32 against float64; single shares are as small as 1e-4
    np.testing.assert_allclose(rolled, rollout_by_hand(maps, encoder), **close)


def test_memory_groups_change_nothing(make_encoder: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = sharpened(make_encoder())
    images = images_for(encoder, 5)
    whole = attention.attention_distance(encoder, images), attention.rollout(encoder, images)
    monkeypatch.setattr(attention, "_MAP_NUMBERS", 2 * 17 * 17 * 2)  # two images of 2 heads and 17 tokens
    parts = attention.attention_distance(encoder, images), attention.rollout(encoder, images)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
