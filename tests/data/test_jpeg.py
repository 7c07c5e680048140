"""Decoding less than the whole JPEG: exactly the same pixels where that is claimed, close ones where it is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image, ImageOps
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from ssl_vit.data import AugmentConfig
from ssl_vit.data.images import train_transform
from ssl_vit.data.jpeg import Jpeg
from ssl_vit.interfaces import BadSample
from tests.tars import encoded

MODES = {1: ImageReadMode.GRAY, 3: ImageReadMode.RGB}


def photograph(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth colors, edges and noise."""
    generator = np.random.default_rng(seed)
    coarse = torch.from_numpy(generator.uniform(0, 255, (1, 3, 7, 9)))
    pixels = F.interpolate(coarse, (height, width), mode="bicubic")[0].numpy().transpose(1, 2, 0)
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (
        255 - pixels[height // 3 : height // 2, width // 4 : width // 2]
    )
    return Image.fromarray((pixels + generator.normal(0, 9, pixels.shape)).clip(0, 255).astype(np.uint8))


def jpeg(image: Image.Image, **options: Any) -> bytes:
    return encoded(image, "JPEG", **({"quality": 90} | options))


def torchvisions(data: bytes, channels: int = 3) -> torch.Tensor:
    return decode_jpeg(
        torch.frombuffer(bytearray(data), dtype=torch.uint8), MODES[channels], apply_exif_orientation=True
    )


KINDS: dict[str, dict[str, Any]] = {
    "4:2:0": {"subsampling": 2},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0},
    "optimized": {"optimize": True},
    "restarts": {"restart_marker_rows": 1},
    "progressive": {"progressive": True},
    "quality 30": {"quality": 30},
    "comment": {"comment": b"\xff\xc0 looks like a frame"},
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_region_is_exactly_that_part_of_the_whole(kind: str, channels: int) -> None:
    data = jpeg(photograph(203, 149), **KINDS[kind])
    whole = torchvisions(data, channels)
    assert torch.equal(Jpeg(data, channels).whole(), whole)
    generator = np.random.default_rng(1)
    for _ in range(40):
        top, left = int(generator.integers(0, 200)), int(generator.integers(0, 140))
        height, width = int(generator.integers(1, 204 - top)), int(generator.integers(1, 150 - left))
        found = Jpeg(data, channels).region(top, left, height, width, None)
        assert torch.equal(found, whole[:, top : top + height, left : left + width]), (top, left, height, width)


def test_rows_below_the_region_are_not_decoded() -> None:
    """Damage there goes unnoticed; damage above does not."""
    data = bytearray(jpeg(photograph(512, 256)))
    whole = torchvisions(bytes(data))
    data[len(data) * 3 // 4 : len(data) - 100] = bytes(len(data) - 100 - len(data) * 3 // 4)
    assert torch.equal(Jpeg(bytes(data), 3).region(0, 0, 256, 256, None), whole[:, :256])
    assert not torch.equal(Jpeg(bytes(data), 3).region(0, 0, 510, 256, None), whole[:, :510])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_regions_count_in_the_upright_picture(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg(photograph(208, 152), exif=exif)  # even: a mirrored odd side would move the grid by half a pixel
    whole = torchvisions(data)
    picture = Jpeg(data, 3)
    assert (picture.height, picture.width) == tuple(whole.shape[1:])
    assert torch.equal(picture.region(20, 30, 70, 60, None), whole[:, 20:90, 30:90])
    reduced = picture.region(20, 30, 100, 80, (50, 40))
    expected = F.avg_pool2d(whole[None, :, 20:120, 30:110].float(), 2)[0]
    assert reduced.shape == expected.shape
    assert (reduced - expected).abs().mean() < 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_reduced_region_has_all_of_its_box(orientation: int) -> None:
    """Also where no side of the stored picture is a multiple of the factor."""
    top, left, height, width = 9, 3, 212, 509
    pixels = np.zeros((227, 517), dtype=np.uint8)
    box = pixels[top : top + height, left : left + width]
    box[:3] = box[-3:] = box[:, :3] = box[:, -3:] = 255
    exif = Image.Exif()
    image = Image.fromarray(pixels)
    exif[0x0112] = {6: 8, 8: 6}.get(orientation, orientation)  # the inverse
    image.getexif().update(exif)
    stored = ImageOps.exif_transpose(image)
    exif[0x0112] = orientation
    picture = Jpeg(jpeg(stored, quality=95, exif=exif), 1)
    assert (picture.height, picture.width) == pixels.shape
    found = picture.region(top, left, height, width, (height // 8, width // 8))[0]
    for edge in (found[0], found[-1], found[:, 0], found[:, -1]):
        assert edge.float().mean() > 20, "a third of the frame, in blocks of 8 pixels"


@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_a_large_box_is_decoded_reduced_but_never_too_small(factor: int) -> None:
    data = jpeg(photograph(640, 480))
    box = (40, 32, 512, 384)
    least = (512 // factor, 384 // factor)
    found = Jpeg(data, 3).region(*box, least)
    assert tuple(found.shape[1:]) == least
    exact = torchvisions(data)[:, 40:552, 32:416].float()
    assert (found - F.avg_pool2d(exact[None], factor)[0]).abs().mean() < 2.5
    if factor > 1:
        assert Jpeg(data, 3).region(*box, (least[0] + 1, least[1])).shape[1] == 2 * least[0]


@pytest.mark.parametrize("size", [(900, 1200), (1200, 800)])
def test_the_reduced_crop_shows_what_the_exact_one_shows(size: tuple[int, int]) -> None:
    data = jpeg(photograph(*size))
    reduced = train_transform(96, AugmentConfig())
    exact = train_transform(96, AugmentConfig(reduced_decode=False))
    torchvision = v2.RandomResizedCrop(96, (0.05, 1.0), antialias=True)
    whole, closest = torchvisions(data), []
    for seed in range(12):
        views = []
        pairs: list[Any] = [(reduced, Jpeg(data, 3)), (exact, Jpeg(data, 3)), (torchvision, whole)]
        for transform, picture in pairs:
            torch.manual_seed(seed)
            views.append(transform(picture))
        assert torch.equal(views[1], views[2])
        error = (views[0].float() - views[2].float()).square().mean().sqrt()
        assert error < 8  # of 255, 30 dB: the box may have moved by less than a pixel of the reduced picture
        closest.append(error.item())
    assert max(closest) > 0, "no crop was reduced: the test shows nothing"


@pytest.mark.parametrize("kept", [0.2, 0.6, 0.95])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_file_cut_short_is_an_error_whatever_the_region(kept: float, progressive: bool) -> None:
    data = jpeg(photograph(203, 149), progressive=progressive)
    for least in (None, (4, 4)):
        with pytest.raises(BadSample, match="unreadable image: "):
            Jpeg(data[: int(len(data) * kept)], 3).region(0, 0, 10, 10, least)


@pytest.mark.parametrize("trailer", [b"\0" * 32, b"\0" * 5000, b"camera notes" * 300])
def test_bytes_behind_the_end_do_no_harm(trailer: bytes) -> None:
    data = jpeg(photograph(203, 149))
    whole = torchvisions(data)
    assert torch.equal(Jpeg(data + trailer, 3).whole(), whole)
    assert torch.equal(Jpeg(data + trailer, 3).region(3, 4, 50, 60, None), whole[:, 3:53, 4:64])


def test_stray_bytes_between_markers_are_forgiven_as_torchvision_does() -> None:
    data = jpeg(photograph(64, 64))
    stray = data[:-2] + b"\x12\x34" + data[-2:]
    assert torch.equal(Jpeg(stray, 3).whole(), torchvisions(stray))


def test_stray_bytes_in_a_picture_that_lies_on_its_side() -> None:
    """torchvision does not look for EXIF behind another APP1 segment."""
    exif, xmp = Image.Exif(), b"http://ns.adobe.com/xap/1.0/\0<x/>"
    exif[0x0112] = 6
    data = jpeg(photograph(64, 80), exif=exif)
    data = data[:2] + b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp + data[2:]
    picture = Jpeg(data.replace(b"\xff\xda", b"\x12\x34\xff\xda"), 3)
    assert (picture.height, picture.width) == (80, 64)
    assert torch.equal(picture.whole(), Jpeg(data, 3).whole())


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"\xff\xd8" + b"\0" * 50, b"\xff\xd8\xff\xe0\0\0" * 9]
)
def test_what_has_no_frame_is_no_jpeg(data: bytes) -> None:
    with pytest.raises(ValueError, match="frame"):
        Jpeg(data, 3)


def test_an_orientation_that_does_not_exist_is_none() -> None:
    exif = Image.Exif()
    exif[0x0112] = 9
    jpeg = Jpeg(encoded(Image.new("RGB", (20, 10), (200, 30, 30)), "JPEG", exif=exif), 3)
    assert (jpeg.height, jpeg.width) == (10, 20)
    assert jpeg.whole().shape == jpeg.region(0, 0, 10, 20, None).shape == (3, 10, 20)
