from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_vit.data.images import check_channels, open_picture
from ssl_vit.data.shards.reading import decode_label
from ssl_vit.interfaces import BadSample, UserError
from tests import tars

PIL_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
OPTIONS: dict[str, dict[str, Any]] = {"jpg": {"quality": 92}, "png": {}, "webp": {"lossless": True}}
FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}


def decode_pixels(sample: dict[str, Any], channels: int) -> torch.Tensor:
    opened = open_picture(sample, channels)
    pixels = opened.whole()
    assert pixels.shape == (channels, opened.height, opened.width)
    return pixels


def picture(mode: str) -> Image.Image:
    """A smooth picture, 40 rows and 52 columns, with a see-through corner where the mode has alpha."""
    rows, columns = np.mgrid[0:40, 0:52]
    layers = [rows * 6, columns * 4, (rows + columns) * 2, np.where(rows + columns < 30, 0, 255 - rows)]
    rgba = Image.fromarray(np.stack(layers, -1).astype(np.uint8))
    if mode == "I;16":
        return Image.fromarray((rows * 1500 + columns * 7).astype(np.uint16))
    if mode == "P16":  # 16 colors: four bits a pixel
        return rgba.convert("RGB").quantize(16)
    return rgba.convert("RGB").convert(mode) if mode in ("P", "CMYK") else rgba.convert(mode)


def encoded(image: Image.Image, extension: str, **options: Any) -> bytes:
    return tars.encoded(image, FORMATS[extension], **(OPTIONS.get(extension, {}) | options))


def noise(extension: str) -> bytes:
    """A picture that does not compress, so that most of the file is pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 52, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), extension)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(
    ("extension", "mode", "levels"),
    [
        ("jpg", "RGB", 3),
        ("jpg", "L", 3),
        ("jpg", "CMYK", 3),
        ("png", "RGB", 0),
        ("png", "RGBA", 0),
        ("png", "L", 0),
        ("png", "LA", 0),
        ("png", "P", 0),
        ("png", "P16", 0),
        ("png", "1", 0),
        ("webp", "RGB", 0),
        ("webp", "RGBA", 0),
        ("webp", "L", 0),
    ],
)
def test_pixels_agree_with_pil(extension: str, mode: str, levels: int, channels: int) -> None:
    data = encoded(picture(mode), extension)
    found = decode_pixels({extension: data}, channels)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert(PIL_MODES[channels])).reshape(40, 52, channels)
    assert found.dtype == torch.uint8
    assert found.shape == (channels, 40, 52)
    # Color to gray rounds its weighted sum in one library and truncates it in the other: one level.
    rounding = 1 if channels == 1 and mode not in ("L", "LA", "1") else 0
    difference = np.abs(found.numpy().transpose(1, 2, 0).astype(int) - expected.astype(int))
    assert difference.max() <= max(levels, rounding)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_sixteen_bits_become_eight(channels: int) -> None:
    deep = picture("I;16")
    found = decode_pixels({"png": encoded(deep, "png")}, channels)
    assert found.dtype == torch.uint8
    assert found.shape == (channels, 40, 52)
    expected = np.asarray(deep) / 257
    assert np.abs(found[0].numpy() - expected).max() <= 1


BROKEN = r"unreadable image: |cannot be decoded: |not an image|empty file"


@pytest.mark.parametrize("extension", ["jpg", "png", "webp"])
@pytest.mark.parametrize("left", [0.0, 0.001, 0.02, 0.3, 0.5, 0.9])
def test_a_file_cut_short_is_a_bad_sample(extension: str, left: float) -> None:
    data = noise(extension)
    assert decode_pixels({extension: data}, 3).shape == (3, 40, 52)
    with pytest.raises(BadSample, match=BROKEN):
        decode_pixels({extension: data[: int(len(data) * left)]}, 3)


@pytest.mark.parametrize("extension", ["jpg", "jpeg", "png", "webp"])
@pytest.mark.parametrize(
    "data", [b"", b"hello, this is text\n" * 20, b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"\0" * 100]
)
def test_what_is_no_image_is_a_bad_sample(extension: str, data: bytes) -> None:
    with pytest.raises(BadSample, match=BROKEN):
        decode_pixels({extension: data}, 3)


@pytest.mark.parametrize("sample", [{}, {"__key__": "1", "cls": b"1"}, {"gif": b"GIF89a"}, {"txt": b"x", "pkl": b"y"}])
def test_a_sample_without_an_image_is_a_bad_sample(sample: dict[str, bytes | str]) -> None:
    with pytest.raises(BadSample, match=r"no image member .*jpg.*png.*webp"):
        decode_pixels(sample, 3)


@pytest.mark.parametrize(("channels", "known"), [(1, True), (3, True), (4, True), (2, False), (5, False)])
def test_channels_that_no_image_file_has_are_refused(channels: int, known: bool) -> None:
    if known:
        check_channels(channels)
    else:
        with pytest.raises(UserError, match=rf"encoder\.channels={channels}"):
            check_channels(channels)


@pytest.mark.parametrize(
    ("sample", "classes", "label"),
    [
        ({"cls": b"0"}, 10, 0),
        ({"cls": b"9"}, 10, 9),
        ({"cls": b"7\n"}, 10, 7),
        ({"cls": b"123456"}, None, 123456),
        ({}, 10, -1),
        ({"json": b"{}"}, None, -1),
    ],
)
def test_labels(sample: dict[str, bytes], classes: int | None, label: int) -> None:
    assert decode_label(sample, classes) == label


@pytest.mark.parametrize(
    ("text", "classes", "message"),
    [
        (b"cat", 10, "not a class index"),
        (b"", 10, "not a class index"),
        (b"3.0", 10, "not a class index"),
        (b"1 2", 10, "not a class index"),
        (b"\xff\xfe", 10, "not a class index"),
        (b"x" * 10_000, None, "not a class index"),
        (b"10", 10, r"10 is outside the classes 0\.\.9"),
        (b"-1", 10, r"-1 is outside"),
        (b"-3", None, r"-3 is outside"),
        (b"99999999999", 1000, "not a class index"),
    ],
)
def test_labels_that_are_no_class_are_bad_samples(text: bytes, classes: int | None, message: str) -> None:
    with pytest.raises(BadSample, match=message) as raised:
        decode_label({"cls": text}, classes)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(("extension", "kind"), [("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP")])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_image_with_too_many_pixels_is_refused_by_its_header(extension: str, kind: str, channels: int) -> None:
    data = tars.encoded(Image.new("RGB", (40, 30)), kind)
    assert open_picture({extension: data}, channels, 1200).whole().shape == (channels, 30, 40)
    with pytest.raises(BadSample, match=r"30x40 pixels are more than the limit of 1199"):
        open_picture({extension: data}, channels, 1199)
