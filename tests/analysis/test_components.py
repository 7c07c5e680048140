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


def test_planted_filters_are_found_in_order(make_encoder: Build) -> None:
    """Filters that mix two patterns, one with four times the weight of the other, about a common mean."""
    encoder = make_encoder(width=64, heads=2)
    generator = np.random.default_rng(0)
    patterns, _ = np.linalg.qr(generator.normal(size=(48, 2)))
    mixture = generator.normal(size=(64, 2))
    mixture = np.linalg.qr(mixture - mixture.mean(0))[0] * (4, 1)
    weights = mixture @ patterns.T + generator.normal(size=48)
    with torch.no_grad():
        encoder.network.patch_embed.proj.weight.copy_(torch.from_numpy(weights).reshape(64, 3, 4, 4))
    found = components.filter_components(encoder, 2)
    assert found.values.shape == (2, 3, 4, 4) and found.values.dtype == np.float64
    np.testing.assert_allclose(found.explained, [16 / 17, 1 / 17], atol=1e-5)
    for component, pattern in zip(found.values, patterns.T, strict=True):
        signed = pattern * np.sign(pattern[np.abs(pattern).argmax()])
        np.testing.assert_allclose(component.ravel(), signed, atol=1e-4)


def test_components_are_no_more_than_the_filters_have(make_encoder: Build) -> None:
    assert components.filter_components(make_encoder(width=16)).values.shape == (16, 3, 4, 4)
    gray = make_encoder(width=64, channels=1, patch_size=2, image_size=8)
    assert components.filter_components(gray).values.shape == (4, 1, 2, 2)


def test_a_hybrids_filters_are_its_stems(make_encoder: Build) -> None:
    encoder = make_encoder(name="vit_tiny_r_s16_p8_224", image_size=32, patch_size=None)
    found = components.filter_components(encoder)
    assert found.values.shape == (28, 3, 7, 7)
    flat = encoder.network.patch_embed.backbone.conv.weight.detach().double().flatten(1).numpy()
    _, sizes, axes = np.linalg.svd(flat - flat.mean(0))
    np.testing.assert_allclose(np.abs((found.values.reshape(28, -1) * axes[:28]).sum(1)), 1, atol=1e-6)
    np.testing.assert_allclose(found.explained, sizes[:28] ** 2 / (sizes**2).sum(), rtol=1e-6)


@pytest.mark.parametrize(
    "sizes", [{}, {"image_size": (8, 16)}, {"name": "vit_wee_patch16_reg1_gap_256"}, {"positions": "sincos2d"}]
)
def test_similarity_is_that_of_a_loop(make_encoder: Build, sizes: dict[str, Any]) -> None:
    encoder = make_encoder(**sizes)
    rows, columns = encoder.grid
    positions = encoder.network.pos_embed[0, -rows * columns :].detach().double().numpy()
    found = components.position_similarity(encoder)
    assert found.shape == (rows, columns, rows, columns)
    for row in range(rows):
        for column in range(columns):
            own = positions[row * columns + column]
            for other in range(rows * columns):
                cosine = own @ positions[other] / (np.linalg.norm(own) * np.linalg.norm(positions[other]))
                assert found[row, column, other // columns, other % columns] == pytest.approx(cosine, abs=1e-12)
    np.testing.assert_allclose(np.einsum("ijij->ij", found), 1)


def test_neighborhoods_are_averaged_apart() -> None:
    """2 rows, 3 columns: similarity is 1 for neighbors, 2 in the rest of the row, 3 elsewhere."""
    similarity = np.zeros((2, 3, 2, 3))
    for y in range(2):
        for x in range(3):
            for v in range(2):
                for u in range(3):
                    far = abs(y - v) + abs(x - u)
                    similarity[y, x, v, u] = 1 if far == 1 else 2 if y == v else 3
    found = components.neighborhoods(similarity)
    assert found == {"neighbors": 1.0, "same_row": 2.0, "elsewhere": 3.0}  # no column has a rest


def test_features_of_two_kinds_have_two_colors(make_encoder: Build) -> None:
    """Half of the patches black, half white: two kinds of tokens once positions play no part."""
    encoder = make_encoder(image_size=(16, 24)).eval()
    with torch.no_grad():
        encoder.network.pos_embed.zero_()
    images = torch.zeros(20, 3, 16, 24, dtype=torch.uint8)
    images[:, :, :8] = 255
    found = components.feature_map(encoder, images)
    assert found.values.shape == (20, 4, 6, 3) and found.values.min() >= 0 and found.values.max() <= 1
    top, bottom = found.values[:, :2], found.values[:, 2:]
    assert abs(top[..., 0].mean() - bottom[..., 0].mean()) > 0.9
    assert np.ptp(top[..., 0]) < 0.1 and np.ptp(bottom[..., 0]) < 0.1
    assert found.explained[0] > 0.99


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
