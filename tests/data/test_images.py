from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from timm.data import rand_augment_transform
from torchvision import transforms
from torchvision.transforms import v2

from ssl_vit.data import AugmentConfig, DataConfig
from ssl_vit.data import images as ours
from ssl_vit.data.images import Pixels
from ssl_vit.interfaces import BadSample, UserError
from tests.tars import encoded

SIZES = [(64, 64), (80, 64), (64, 95), (37, 200), (20, 24), (224, 224)]


def train_transform(size: Any, augment: AugmentConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    transform = ours.train_transform(size, augment)
    return lambda pixels: transform(Pixels(pixels))


def evaluation_transform(size: Any, data: DataConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    transform = ours.evaluation_transform(size, data)
    return lambda pixels: transform(Pixels(pixels))


def image(height: int, width: int, channels: int = 3, seed: int = 0) -> torch.Tensor:
    """Smooth colors with some noise, uint8 (C, H, W)."""
    generator = np.random.default_rng(seed)
    coarse = torch.from_numpy(generator.uniform(0, 255, (1, channels, 5, 6)))
    smooth = F.interpolate(coarse, (height, width), mode="bilinear") + torch.from_numpy(
        generator.normal(0, 12, (1, channels, height, width))
    )
    return smooth[0].clamp(0, 255).round().to(torch.uint8)


@pytest.mark.parametrize(("share", "shorter"), [(256 / 224, 37), (1.0, 32), (1.5, 48)])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("size", SIZES)
def test_evaluation_resizes_the_shorter_side_and_crops_the_center(
    size: tuple[int, int], channels: int, share: float, shorter: int
) -> None:
    pixels = image(*size, channels)
    found = evaluation_transform(32, DataConfig(train="x", evaluation_resize=share))(pixels)
    assert found.shape == (channels, 32, 32)
    assert found.dtype == torch.uint8
    torchvisions = v2.Compose([v2.Resize(shorter, antialias=True), v2.CenterCrop(32)])
    assert torch.equal(found, torchvisions(pixels))


def test_images_of_the_right_size_pass_untouched() -> None:
    pixels = image(28, 28, 1)
    assert torch.equal(evaluation_transform(28, DataConfig(train="x", evaluation_resize=1.0))(pixels), pixels)
    assert torch.equal(train_transform(28, AugmentConfig(crop="center"))(pixels), pixels)


@pytest.mark.parametrize("settings", [{}, {"scale": (0.3, 0.4)}, {"scale": (1.0, 1.0), "ratio": (1.0, 1.0)}])
@pytest.mark.parametrize("size", SIZES)
def test_the_inception_crop_is_torchvisions_under_the_same_seed(
    size: tuple[int, int], settings: dict[str, Any]
) -> None:
    augment, pixels = AugmentConfig(crop="inception", **settings), image(*size)
    transform = train_transform(32, augment)
    whole = transforms.RandomResizedCrop(32, augment.scale, augment.ratio, antialias=True)
    for seed in range(5):
        torch.manual_seed(seed)
        found = transform(pixels)
        torch.manual_seed(seed)
        top, left, height, width = transforms.RandomResizedCrop.get_params(pixels, [*augment.scale], [*augment.ratio])
        cut = pixels[:, top : top + height, left : left + width]
        assert torch.equal(found, v2.functional.resize(cut, [32, 32], antialias=True))
        torch.manual_seed(seed)
        assert (whole(pixels).int() - found.int()).abs().max() <= 1  # the older class resizes in floating point
        assert found.shape == (3, 32, 32)
        assert found.dtype == torch.uint8


@pytest.mark.parametrize(("padding", "views"), [(1, 9), (2, 25), (0, 1)])
def test_shift_moves_the_image_over_zeros_and_nothing_else(padding: int, views: int) -> None:
    pixels = image(8, 8, 1) // 2 + 1  # never zero itself
    framed = F.pad(pixels, [padding] * 4)
    possible = {
        framed[:, y : y + 8, x : x + 8].numpy().tobytes()
        for y in range(2 * padding + 1)
        for x in range(2 * padding + 1)
    }
    assert len(possible) == views
    transform = train_transform(8, AugmentConfig(crop="shift", padding=padding))
    torch.manual_seed(0)
    seen = {transform(pixels).numpy().tobytes() for _ in range(400)}
    assert seen == possible


@pytest.mark.parametrize("target", [(24, 40), (40, 24), (32, 8)])
@pytest.mark.parametrize("size", [*SIZES, (48, 80), (30, 10)])
def test_a_rectangle_is_cut_from_the_least_resize_that_covers_it(
    size: tuple[int, int], target: tuple[int, int]
) -> None:
    pixels = image(*size)
    scale = max(target[0] / size[0], target[1] / size[1])
    covering = [max(math.floor(side * scale + 1e-9), least) for side, least in zip(size, target, strict=True)]
    resized = v2.functional.resize(pixels, covering, v2.InterpolationMode.BILINEAR, antialias=True)
    assert min(c - t for c, t in zip(covering, target, strict=True)) == 0
    expected = v2.functional.center_crop(resized, [*target])
    exact = DataConfig(train="x", evaluation_resize=1.0)
    assert torch.equal(evaluation_transform(target, exact)(pixels), expected)
    assert torch.equal(train_transform(target, AugmentConfig(crop="center"))(pixels), expected)
    assert evaluation_transform(target, DataConfig(train="x"))(pixels).shape == (3, *target)


@pytest.mark.parametrize("crop", ["inception", "shift"])
def test_random_crops_make_rectangles_too(crop: Any) -> None:
    transform = train_transform((24, 40), AugmentConfig(crop=crop, padding=2))
    for size in SIZES:
        assert transform(image(*size)).shape == (3, 24, 40)


def test_a_strip_too_thin_to_cover_is_a_bad_sample() -> None:
    with pytest.raises(BadSample, match="20000x1 pixels"):
        evaluation_transform(384, DataConfig(train=""))(torch.zeros(3, 20_000, 1, dtype=torch.uint8))


def test_a_jpeg_whose_header_says_no_rows_is_a_bad_sample() -> None:
    data = encoded(Image.new("RGB", (16, 16)), "JPEG")
    frame = data.index(b"\xff\xc0")
    flat = data[: frame + 5] + b"\0\0" + data[frame + 7 :]
    with pytest.raises(BadSample):
        ours.open_picture({"jpg": flat}, 3)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_damaged_exif_loses_no_image(kind: str) -> None:
    def pixels(**options: Any) -> torch.Tensor:
        content = encoded(Image.fromarray(np.asarray(image(6, 8).permute(1, 2, 0))), kind, **options)
        return ours.open_picture({"jpg": content}, 3).whole()

    assert torch.equal(pixels(exif=b"Exif\0\0JUNKJUNKJUNK"), pixels())
    # A sound orientation, and a time that is a fraction: Pillow reads it, but cannot write it again.
    tags = struct.pack("<HHIHHHHII", 0x0112, 3, 1, 6, 0, 0x0132, 5, 1, 38) + struct.pack("<III", 0, 1, 2)
    damaged = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + tags
    assert torch.equal(pixels(exif=damaged), pixels().mT.flip(-1))


def test_rand_augment_is_timms_on_the_crop_and_leaves_the_generators_alone() -> None:
    pixels, text = image(90, 70), "rand-m9-mstd0.5-inc1"
    settings = {"translate_const": 28, "img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC}
    theirs = rand_augment_transform(text, settings)
    ours_, crop = (train_transform(64, AugmentConfig(rand_augment=name)) for name in (text, None))
    changed = 0
    for seed in range(12):
        torch.manual_seed(seed)
        cropped, drawn = crop(pixels), int(torch.randint(2**32, ()))
        random.seed(drawn)
        np.random.seed(drawn)
        expected = v2.functional.pil_to_tensor(theirs(v2.functional.to_pil_image(cropped)))
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(seed)
        found = ours_(pixels)
        assert torch.equal(found, expected)
        changed += not torch.equal(found, cropped)
        assert (random.random(), np.random.random()) == pytest.approx((0.2379646, 0.5507979))
    assert changed > 6


@pytest.mark.parametrize("channels", [1, 3])
def test_rand_augment_keeps_the_shape(channels: int) -> None:
    transform = train_transform(32, AugmentConfig(rand_augment="rand-m10-n2"))
    for _ in range(20):
        found = transform(image(40, 40, channels))
        assert found.shape == (channels, 32, 32) and found.dtype == torch.uint8


def test_rand_augment_refuses_what_it_cannot_do() -> None:
    for text in ("augmix-m3", "rand-mx9", "rand-q7"):
        with pytest.raises(UserError, match=rf"rand_augment={text}.*rand-m9-mstd0\.5-inc1"):
            train_transform(32, AugmentConfig(rand_augment=text))
    with pytest.raises(UserError, match="RGBA"):
        train_transform(32, AugmentConfig(rand_augment="rand-m9"))(image(40, 40, 4))
