"""Color classes and the three targets, exact on the uint8 image that the model sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import adaptive_avg_pool2d

from ssl_vit.interfaces import UserError
from ssl_vit.objectives.masked_patch import (
    class_colors,
    mean_color_classes,
)
from ssl_vit.objectives.patches import downsized_classes

Make = Callable[..., Any]


def slow_classes(image_CHW: np.ndarray, patch: int, bits: int) -> list[int]:
    """Patch by patch and channel by channel in float64, as the paper's words go."""
    channels, height, width = image_CHW.shape
    classes = []
    for top in range(0, height, patch):
        for left in range(0, width, patch):
            number = 0
            for channel in range(channels):
                total = 0.0
                for y in range(top, top + patch):
                    for x in range(left, left + patch):
                        total += float(image_CHW[channel, y, x])
                number = number * 2**bits + math.floor(total / patch**2 / (256 / 2**bits))
            classes.append(number)
    return classes


@pytest.mark.parametrize(
    ("channels", "height", "width", "patch", "bits"),
    [(1, 28, 28, 7, 3), (3, 6, 15, 3, 2), (3, 10, 5, 5, 8), (4, 4, 8, 2, 4)],
)
def test_classes_agree_with_a_slow_loop(channels: int, height: int, width: int, patch: int, bits: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, channels, height, width), dtype=np.uint8)
    found = mean_color_classes(torch.from_numpy(pixels), patch, bits)
    assert found.tolist() == [slow_classes(image, patch, bits) for image in pixels]


@pytest.mark.parametrize(("channels", "bits"), [(1, 7), (1, 8), (3, 3), (4, 2)])
def test_class_colors_are_the_centers_of_the_bins(channels: int, bits: int) -> None:
    classes = torch.arange(2 ** (bits * channels))
    colors = class_colors(classes, channels, bits)
    assert colors.dtype == torch.uint8
    assert colors.shape == (len(classes), channels)
    assert torch.equal(mean_color_classes(colors[:, :, None, None], 1, bits)[:, 0], classes)
    assert (colors[0] == 256 // 2 ** (bits + 1)).all()


@pytest.mark.parametrize("patch", [5, 7, 8, 14])
def test_downsized_cells_of_any_patch_are_those_of_adaptive_pooling(patch: int) -> None:
    pixels = torch.randint(
        0, 256, (2, 3, 2 * patch, patch), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    found = downsized_classes(pixels, patch, 2)
    assert found.shape == (2, 2, 16)
    for number in range(2):
        part = pixels[:, :, number * patch : (number + 1) * patch].double()
        bins = (adaptive_avg_pool2d(part, 4) / 64 + 1e-9).floor().long().flatten(2)
        assert torch.equal(found[:, number], bins[:, 0] * 16 + bins[:, 1] * 4 + bins[:, 2])


def test_downsized_objectives_of_patches_that_four_does_not_divide(make_objective: Make) -> None:
    objective = make_objective(encoder={"image_size": 14, "patch_size": 7}, target="downsized", bits=2)
    pixels = torch.randint(0, 256, (2, 3, 14, 14), dtype=torch.uint8)
    assert torch.equal(objective.targets(pixels), downsized_classes(pixels, 7, 2))
    assert objective.head.out_features == 16 * 2 ** (2 * 3)
    with pytest.raises(UserError, match="downsized needs patches of at least 4"):
        make_objective(encoder={"image_size": 6, "patch_size": 3}, target="downsized")


def test_targets_of_rectangles_and_channels_are_the_pixels_under_each_patch(make_objective: Make) -> None:
    encoder = {"image_size": (8, 20), "channels": 7}
    pixels = np.random.default_rng(3).integers(0, 256, (2, 7, 8, 20), dtype=np.uint8)
    found = make_objective(encoder=encoder, bits=2).targets(torch.from_numpy(pixels))
    assert found[..., 0].tolist() == [slow_classes(image, 4, 2) for image in pixels]
    whole = make_objective(encoder=encoder, target="pixels").targets(torch.from_numpy(pixels))
    assert whole.shape == (2, 10, 7 * 16)
    for number in (1, 9):
        top, left = number // 5 * 4, number % 5 * 4
        expected = pixels[1, :, top : top + 4, left : left + 4].ravel() / 255
        np.testing.assert_allclose(whole[1, number].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("channels", "bits", "message"),
    [(3, 6, "at most 5 bits, or objective.target=pixels"), (17, 1, "use objective.target=pixels")],
)
def test_more_classes_than_a_head_can_carry_are_refused_for_colors_alone(
    make_objective: Make, channels: int, bits: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_objective(encoder={"channels": channels}, bits=bits)
    assert make_objective(encoder={"channels": channels}, bits=bits, target="pixels").head.out_features == channels * 16


def test_the_mean_of_a_patch_of_more_pixels_than_float32_counts_is_exact() -> None:
    image = torch.full((1, 1, 512, 512), 224, dtype=torch.uint8)
    assert mean_color_classes(image, 512).tolist() == [[7]]
    image[..., 0, 0] = 223
    assert mean_color_classes(image, 512).tolist() == [[6]]
