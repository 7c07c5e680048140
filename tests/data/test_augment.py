"""Flip and color augmentation on the device, against torchvision image by image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from ssl_vit.data import AugmentConfig
from ssl_vit.data.augment import color_augment, device_images
from ssl_vit.interfaces import UserError

NONE = [1.0, 1.0, 1.0, 0.0, 0.0, 256.0]


@pytest.mark.parametrize("flip", [[False] * 5, [True] * 5, [True, False, False, True, False]])
def test_exactly_the_images_asked_for_are_mirrored(make_batch: Any, flip: list[bool]) -> None:
    batch = make_batch(5, flip=torch.tensor(flip))
    before = batch.images.clone()
    found = device_images(batch)
    assert found.dtype == torch.uint8
    for mirrored, original, seen in zip(flip, before.numpy(), found.numpy(), strict=True):
        np.testing.assert_array_equal(seen, np.flip(original, axis=2) if mirrored else original)
    assert torch.equal(batch.images, before)


@pytest.mark.parametrize("channels", [1, 3])
def test_jitter_is_torchvisions_brightness_contrast_and_saturation(make_batch: Any, channels: int) -> None:
    factors = torch.tensor([[1.0, 1.0, 1.0], [0.5, 1.0, 1.0], [1.4, 1.0, 1.0], [1.0, 0.3, 1.0], [1.0, 1.6, 1.0]])
    more = [[1.0, 1.0, 0.0], [1.0, 1.0, 1.9], [0.8, 1.3, 0.6], [1.8, 0.4, 0.7]]  # the last: white before the contrast
    factors = torch.cat([factors, torch.tensor(more)])
    batch = make_batch(9, channels=channels, jitter=factors, flip=torch.arange(9) % 2 == 0)
    found = device_images(batch)
    assert found.dtype == torch.uint8
    for image, mirrored, (brightness, contrast, saturation), seen in zip(
        batch.images, batch.flip, factors.tolist(), found, strict=True
    ):
        expected = (image.flip(-1) if mirrored else image).double() / 255
        expected = v2.functional.adjust_brightness(expected, brightness)
        expected = v2.functional.adjust_contrast(expected, contrast)
        if channels == 3:
            expected = v2.functional.adjust_saturation(expected, saturation)
        assert (seen - expected * 255).abs().max() <= 0.51
    assert torch.equal(found[0], batch.images[0].flip(-1)), "factors of one change nothing"


def test_hue_blur_and_solarization_are_torchvisions(make_batch: Any) -> None:
    """Each alone, then all after one another; gray pixels and a hue of half the circle among them."""
    changes = [NONE, [1, 1, 1, 0.5, 0, 256], [1, 1, 1, -0.2, 0, 256], [1, 1, 1, 0, 0.1, 256], [1, 1, 1, 0, 2.0, 256]]
    changes += [[1, 1, 1, 0, 0, 128], [1, 1, 0, 0.3, 0, 256], [0.7, 1.4, 1.2, 0.1, 1.3, 128]]
    batch = make_batch(8, jitter=torch.tensor(changes), flip=torch.zeros(8, dtype=torch.bool))
    batch.images[:, :, :2] = batch.images[:, :1, :2]  # rows without color
    batch.images[:, :, 2:6] = 100 + batch.images[:, :, 2:6] % 2  # rows almost without
    found = device_images(batch)
    for image, (brightness, contrast, saturation, hue, sigma, threshold), seen in zip(
        batch.images, batch.jitter.tolist(), found, strict=True
    ):
        expected = v2.functional.adjust_brightness(image.double() / 255, brightness)
        expected = v2.functional.adjust_contrast(expected, contrast)
        expected = v2.functional.adjust_saturation(expected, saturation)
        expected = v2.functional.adjust_hue(expected, hue)
        if sigma:
            expected = v2.functional.gaussian_blur(expected, [7, 7], [sigma, sigma])
        if threshold < 256:
            close = (expected * 255 - threshold).abs() < 1e-3  # where the last bit decides
            expected = v2.functional.solarize(expected, threshold / 255)
            seen = torch.where(close, (expected * 255).round(), seen)
        assert (seen - expected * 255).abs().max() <= 0.52
    assert torch.equal(found[0], batch.images[0])
    assert torch.equal(found[5], torch.where(batch.images[5] >= 128, 255 - batch.images[5], batch.images[5]))


def test_alpha_is_not_augmented(make_batch: Any) -> None:
    changes = torch.tensor([[0.7, 1.4, 0.0, 0.1, 1.3, 128.0]] * 2)
    batch = make_batch(2, channels=4, jitter=changes, flip=torch.zeros(2, dtype=torch.bool))
    rgb = make_batch(2, channels=3, jitter=changes, flip=torch.zeros(2, dtype=torch.bool))
    rgb.images[:] = batch.images[:, :3]
    found = device_images(batch)
    assert torch.equal(found[:, 3], batch.images[:, 3])
    assert torch.equal(found[:, :3], device_images(rgb))


def test_gray_images_are_blurred_and_solarized(make_batch: Any) -> None:
    jitter = torch.tensor([[1.0, 1.0, 0.0, 0.4, 0.0, 256.0], [1.0, 1.0, 1.0, 0.0, 1.0, 256.0], [1, 1, 1, 0, 0, 128]])
    batch = make_batch(3, channels=1, jitter=jitter, flip=torch.zeros(3, dtype=torch.bool))
    found = device_images(batch)
    assert torch.equal(found[0], batch.images[0]), "they have no color to change"
    blurred = v2.functional.gaussian_blur(batch.images[1].double(), [7, 7], [1.0, 1.0])
    assert (found[1] - blurred).abs().max() <= 0.51
    assert torch.equal(found[2], torch.where(batch.images[2] >= 128, 255 - batch.images[2], batch.images[2]))


def test_a_blur_wider_than_the_images_is_refused(make_batch: Any) -> None:
    batch = make_batch(1, size=3, jitter=torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0, 256.0]]))
    with pytest.raises(UserError, match=r"data\.augment\.blur"):
        device_images(batch)


def test_parameters_have_the_shares_and_ranges_of_the_settings() -> None:
    augment = AugmentConfig(
        brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, jitter_prob=0.8, grayscale=0.2, blur=0.5, solarize=0.3
    )
    color = color_augment(augment)
    assert color
    torch.manual_seed(0)
    drawn = torch.stack([color.draw() for _ in range(4000)])
    assert drawn.shape == (4000, color.columns)
    brightness, contrast, saturation, hue, sigma, threshold = drawn.T
    unchanged = (brightness == 1) & (contrast == 1) & (hue == 0)
    for share, expected in (
        (unchanged, 0.2), (saturation == 0, 0.2), (sigma > 0, 0.5), (threshold == 128, 0.3), (threshold == 256, 0.7),
    ):  # fmt: skip
        assert share.float().mean() == pytest.approx(expected, abs=0.025)
    for factors in (brightness, contrast, saturation[saturation > 0]):
        assert 0.2 <= factors.min() < 0.25 and 1.75 < factors.max() <= 1.8
    assert -0.2 <= hue.min() < -0.19 and 0.19 < hue.max() <= 0.2
    assert 0.1 <= sigma[sigma > 0].min() < 0.12 and 1.98 < sigma.max() <= 2


def test_settings_that_change_no_color_draw_nothing() -> None:
    assert color_augment(AugmentConfig()) is None
    for name in ("brightness", "contrast", "saturation", "hue", "grayscale", "blur", "solarize"):
        assert color_augment(AugmentConfig(**{name: 0.1})) is not None


def test_jitter_alone_draws_what_it_always_drew() -> None:
    color = color_augment(AugmentConfig(brightness=0.4, saturation=0.2))
    assert color
    torch.manual_seed(3)
    found = color.draw()
    torch.manual_seed(3)
    assert torch.equal(found, 1 + (2 * torch.rand(3) - 1) * torch.tensor([0.4, 0.0, 0.2]))


def test_what_is_drawn_does_not_depend_on_each_other() -> None:
    augment = AugmentConfig(brightness=0.8, saturation=0.8, jitter_prob=0.6, grayscale=0.2, blur=0.5, solarize=0.3)
    color = color_augment(augment)
    assert color
    torch.manual_seed(0)
    brightness, _, saturation, _, sigma, threshold = torch.stack([color.draw() for _ in range(4000)]).T
    still, gray, blurred = brightness == 1, saturation == 0, sigma > 0
    assert (saturation[still & ~gray] == 1).all(), "without jitter it stays, too"
    for share, expected in (
        (gray[still], 0.2), (blurred[gray], 0.5), (blurred[still], 0.5), (threshold[blurred] == 128, 0.3),
        (threshold[gray] == 128, 0.3), (threshold[still] == 128, 0.3),
    ):  # fmt: skip
        assert share.float().mean() == pytest.approx(expected, abs=0.07)
    every = color_augment(AugmentConfig(brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, blur=1.0))
    assert every
    drawn = torch.stack([every.draw() for _ in range(4000)])[:, :5]
    torch.testing.assert_close(torch.corrcoef(drawn.T), torch.eye(5), atol=0.07, rtol=0)


def test_jitter_may_be_omitted_without_other_changes() -> None:
    color = color_augment(AugmentConfig(brightness=0.8, jitter_prob=0.5))
    assert color
    torch.manual_seed(0)
    drawn = torch.stack([color.draw() for _ in range(400)])
    assert (drawn == torch.tensor(NONE)).all(1).float().mean() == pytest.approx(0.5, abs=0.1)
