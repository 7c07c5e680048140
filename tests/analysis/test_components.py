"""Filters, position similarity and the feature map against loops and numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ssl_vit.analysis import components
from ssl_vit.interfaces import UserError

Build = Callable[..., Any]


@pytest.mark.parametrize(
    "sizes", [{"image_size": (8, 16)}, {"name": "vit_wee_patch16_reg1_gap_256"}, {"positions": "sincos2d"}]
)
def test_similarity_is_that_of_a_loop(make_encoder: Build, sizes: dict[str, Any]) -> None:
    encoder = make_encoder(**sizes)
    rows, columns = encoder.grid
    positions = encoder.network.pos_embed[0, -rows * columns :].detach().double().numpy()
    found = components.position_similarity(encoder)
    assert found.shape == (rows, columns, rows, columns)
    unit = positions / np.linalg.norm(positions, axis=1, keepdims=True)
    np.testing.assert_allclose(found.reshape(rows * columns, -1), unit @ unit.T, atol=1e-12)
    np.testing.assert_allclose(np.einsum("ijij->ij", found), 1)


@pytest.mark.parametrize(("width", "count"), [(64, 28), (16, 16)])
def test_filters_are_the_components_of_the_patch_projection(make_encoder: Build, width: int, count: int) -> None:
    encoder = make_encoder(width=width)
    weight = encoder.network.patch_embed.proj.weight.detach().double().numpy()
    filters = weight.reshape(width, -1)
    found = components.filter_components(encoder)
    assert found.values.shape == (count, *weight.shape[1:])
    _, scales, axes = np.linalg.svd(filters - filters.mean(0), full_matrices=False)
    for component, axis, scale in zip(found.values.reshape(count, -1), axes, scales, strict=False):
        if scale > 1e-9:  # as many components as filters: the last one explains nothing
            np.testing.assert_allclose(component, axis * np.sign(axis[np.abs(axis).argmax()]), atol=1e-9)
    np.testing.assert_allclose(found.explained, (scales**2 / (scales**2).sum())[:count], atol=1e-12)


def test_feature_maps_are_the_tokens_components(make_encoder: Build) -> None:
    encoder = make_encoder().eval()
    images = torch.randint(0, 256, (20, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = components.feature_map(encoder, images)
    with torch.inference_mode():
        tokens = encoder(images)[:, 1:].double().numpy().reshape(-1, 16)
    _, _, axes = np.linalg.svd(tokens - tokens.mean(0), full_matrices=False)
    for component in range(3):
        axis = axes[component] * np.sign(axes[component][np.abs(axes[component]).argmax()])
        scores = (tokens - tokens.mean(0)) @ axis
        low, high = np.percentile(scores, (1, 99))
        expected = ((scores - low) / (high - low)).clip(0, 1)
        np.testing.assert_allclose(found.values[..., component].ravel(), expected, atol=1e-5)


def test_few_patches_have_colors_and_one_alone_is_refused(make_encoder: Build) -> None:
    encoder = make_encoder(image_size=4).eval()
    images = torch.arange(2 * 48, dtype=torch.uint8).reshape(2, 3, 4, 4)
    found = components.feature_map(encoder, images)
    assert found.values.shape == (2, 1, 1, 3) and np.isfinite(found.values).all()
    with pytest.raises(UserError, match="one patch"):
        components.feature_map(encoder, images[:1])
