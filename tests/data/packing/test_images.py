"""What may be read as an image, what is stored of it, and that no broken one gets through."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ssl_vit.data.headers import channels as channels_of
from ssl_vit.data.headers import decode, open_header
from ssl_vit.data.packing import images
from ssl_vit.data.packing.images import to_stored
from ssl_vit.interfaces import BadSample
from tests import tars

from .pictures import noise

RAMP = np.stack([*np.meshgrid(np.arange(60) * 4, np.arange(40) * 6), np.full((40, 60), 99)], -1).astype(np.uint8)
PICTURE = Image.fromarray(RAMP)
OTHER = Image.fromarray(255 - RAMP)


def encoded(kind: str, image: Image.Image = PICTURE, **options: Any) -> bytes:
    return tars.encoded(image, kind, **options)


WITH_THUMBNAIL = b"Exif\0\0" + encoded("JPEG", PICTURE.resize((8, 8)))


def opened(data: bytes) -> Image.Image:
    image = open_header(data)
    decode(image)
    return image


ANIMATED: dict[str, Any] = {"save_all": True, "append_images": [OTHER]}
GRAY16 = Image.fromarray(RAMP[..., 0].astype(np.uint16) * 257)
AS_THEY_ARE = {
    "jpeg": (encoded("JPEG"), "jpg", 3),
    "progressive jpeg": (encoded("JPEG", progressive=True), "jpg", 3),
    "gray jpeg": (encoded("JPEG", PICTURE.convert("L")), "jpg", 1),
    "cmyk jpeg": (encoded("JPEG", PICTURE.convert("CMYK")), "jpg", 3),
    "two pictures in a jpeg": (encoded("MPO", **ANIMATED), "jpg", 3),
    "thumbnail in a jpeg": (encoded("JPEG", exif=WITH_THUMBNAIL), "jpg", 3),
    "video behind a jpeg": (encoded("JPEG") + b"ftypmp42" * 99, "jpg", 3),
    "png": (encoded("PNG"), "png", 3),
    "16-bit png": (encoded("PNG", GRAY16), "png", 1),
    "palette png": (encoded("PNG", PICTURE.convert("P"), transparency=3), "png", 3),
    "bilevel png": (encoded("PNG", PICTURE.convert("1")), "png", 1),
    "gray-alpha png": (encoded("PNG", PICTURE.convert("LA")), "png", 1),
    "moving png": (encoded("PNG", **ANIMATED), "png", 3),
    "webp": (encoded("WEBP", quality=90), "webp", 3),
    "moving webp": (encoded("WEBP", **ANIMATED), "webp", 3),
}
OTHER_KINDS = {
    "bmp": encoded("BMP"),
    "gif": encoded("GIF", PICTURE.convert("P")),
    "moving gif": encoded("GIF", **ANIMATED),
    "tiff": encoded("TIFF"),
    "cmyk tiff": encoded("TIFF", PICTURE.convert("CMYK")),
    "jpeg 2000": encoded("JPEG2000"),
    "avif": encoded("AVIF"),
    "ppm": encoded("PPM"),
}


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_jpeg_png_and_webp_are_kept_byte_for_byte(name: str) -> None:
    data, extension, channels = AS_THEY_ARE[name]
    assert to_stored(data) == (extension, data)
    assert channels_of(opened(data)) == channels


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_other_kinds_become_png_with_the_same_pixels(name: str) -> None:
    extension, stored = to_stored(OTHER_KINDS[name])
    assert extension == "png"
    expected = np.asarray(Image.open(io.BytesIO(OTHER_KINDS[name])).convert("RGB"))
    np.testing.assert_array_equal(np.asarray(opened(stored).convert("RGB")), expected)


def test_16_bit_files_of_other_kinds_keep_their_values() -> None:
    pgm = b"P5 60 40 65535\n" + np.asarray(GRAY16).astype(">u2").tobytes()
    for data in (pgm, encoded("TIFF", GRAY16)):
        np.testing.assert_array_equal(np.asarray(opened(to_stored(data)[1])), np.asarray(GRAY16))
    big_endian = encoded("TIFF", Image.fromarray(np.asarray(GRAY16).astype(">u2")))
    assert big_endian.startswith(b"MM")
    for resize in (None, 20):
        assert to_stored(big_endian, resize) == to_stored(encoded("TIFF", GRAY16), resize)
    for values, reason in (
        (np.full((4, 4), 70_000, dtype=np.int32), "16 bits"),
        (np.ones((4, 4), np.float32), "floats"),
    ):
        with pytest.raises(BadSample, match=f"cannot be stored as PNG: .*{reason}"):
            to_stored(encoded("TIFF", Image.fromarray(values)))


@pytest.mark.parametrize("name", [*AS_THEY_ARE, *OTHER_KINDS])
def test_resized_images_keep_their_kind_and_look_the_same(name: str) -> None:
    data = AS_THEY_ARE[name][0] if name in AS_THEY_ARE else OTHER_KINDS[name]
    extension, stored = to_stored(data, resize=20)
    image = opened(stored)
    assert image.size == (30, 20)
    assert extension == (AS_THEY_ARE[name][1] if name in AS_THEY_ARE else "png")
    whole = Image.open(io.BytesIO(data))
    if name in ("16-bit png", "bilevel png"):
        expected = np.asarray(
            whole.convert("L" if name == "bilevel png" else None).resize((30, 20), Image.Resampling.BICUBIC)
        )
        assert image.mode == ("L" if name == "bilevel png" else "I;16")
        np.testing.assert_array_equal(np.asarray(image), expected)
    else:
        smaller = whole.convert("RGB").resize((30, 20), Image.Resampling.BICUBIC)
        difference = np.asarray(image.convert("RGB"), dtype=float) - np.asarray(smaller, dtype=float)
        assert np.abs(difference).mean() < (2 if extension in ("jpg", "webp") else 0.5)


def test_resizing_enlarges_too_and_keeps_bytes_of_the_right_size() -> None:
    assert to_stored(encoded("JPEG"), resize=40)[1] == encoded("JPEG")
    assert opened(to_stored(encoded("PNG"), resize=80)[1]).size == (120, 80)
    line = Image.new("L", (60_000, 1))
    with pytest.raises(BadSample, match=r"pixels are more than the limit"):
        to_stored(encoded("PNG", line), resize=224)


def test_exif_travels_with_a_resized_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert opened(to_stored(encoded("JPEG", exif=exif), resize=20)[1]).getexif()[0x0112] == 6
    upright = opened(to_stored(encoded("TIFF", exif=exif))[1])  # Pillow rotates a TIFF as it decodes it
    assert (upright.size, 0x0112 in upright.getexif()) == ((40, 60), False)
    assert opened(to_stored(encoded("AVIF", exif=exif))[1]).getexif()[0x0112] == 6


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"this is text", "not an image"),
        (b"\xff\xd8\xff\xe0 and then text", "not an image|cannot be decoded"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),  # Pillow would start Ghostscript
        (encoded("JPEG", noise(0, (64, 64)))[:2000], "the end of the JPEG is missing"),
        (encoded("JPEG", noise(0, (64, 64)))[:2000] + bytes(2000), "the end of the JPEG is missing"),
        (encoded("JPEG", noise(0, (64, 64)), exif=WITH_THUMBNAIL)[:-2], "the end of the JPEG is missing"),
        (encoded("JPEG", noise(0, (64, 64)), progressive=True)[:-2], "the end of the JPEG is missing"),
        (encoded("PNG", noise(0, (64, 64)))[:2000], "cannot be decoded"),
        (encoded("WEBP", noise(0, (64, 64)))[:2000], "cannot be decoded|not an image"),
        (encoded("GIF", noise(0, (64, 64)).convert("P"))[:2000], "cannot be decoded"),
        (encoded("BMP")[:2000], "cannot be decoded"),
    ],
)
@pytest.mark.parametrize("resize", [None, 20])
def test_broken_images_are_refused_with_a_reason(data: bytes, reason: str, resize: int | None) -> None:
    with pytest.raises(BadSample, match=reason):
        to_stored(data, resize)


def test_a_size_fit_to_exhaust_memory_is_a_broken_image() -> None:
    header = bytearray(encoded("PNG", PICTURE.convert("L")))
    header[16:24] = (40_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with pytest.raises(BadSample, match="pixels"):
        to_stored(bytes(header))
    header[16:24] = (9_500).to_bytes(4, "big") * 2  # between Pillow's warning and its error
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with pytest.warns(Image.DecompressionBombWarning), pytest.raises(BadSample, match="9500x9500 pixels"):
        open_header(bytes(header))


def test_an_image_above_the_limit_is_shrunk_when_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", PICTURE.width * PICTURE.height * 2 // 3)
    for kind in ("JPEG", "PNG", "WEBP"):
        extension, stored = to_stored(encoded(kind), resize=8)
        assert min(Image.open(io.BytesIO(stored)).size) == 8 and extension in ("jpg", "png", "webp")
    monkeypatch.setattr(images, "MAX_PIXELS", PICTURE.width * PICTURE.height // 3)
    with pytest.raises(BadSample, match="pixels are more than the limit"):
        to_stored(encoded("PNG"), resize=8)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_pixels_keep_their_color_when_resized(mode: str) -> None:
    white = Image.new("RGBA", (40, 40), (255, 255, 255, 0)).convert(mode)
    _, stored = to_stored(tars.encoded(white, "PNG"), resize=20)
    assert np.asarray(opened(stored))[..., 0].min() == 255
