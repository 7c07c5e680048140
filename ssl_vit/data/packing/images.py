"""What a shard stores of an image."""

from __future__ import annotations

import io
from typing import cast

from PIL import Image

from ssl_vit.data import MAX_PIXELS
from ssl_vit.data.headers import check_pixels, decode, open_header
from ssl_vit.data.shards.info import STORED_FORMATS
from ssl_vit.interfaces import BadSample

# A closed list: Pillow knows more formats, and hands some of them (EPS) to other programs.
READ_FORMATS = (*STORED_FORMATS, "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # MPO: a JPEG followed by more pictures
_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


def to_stored(data: bytes, resize: int | None = None, quality: int = 95) -> tuple[str, bytes]:
    """Check that the image can be decoded, and return what a shard stores of it: jpg, png or webp (by content: a PNG
    called .jpg is a PNG), and the bytes.

    JPEG, PNG and WebP bytes are stored unchanged, other formats (the first frame of an animation) as PNG.

    resize: the shorter side in pixels. An image of another size is scaled (bicubic, up or down) and encoded in its own
        format; EXIF is kept (it holds the orientation), a color profile is not.
    quality: 1..100, of JPEG and WebP that are encoded again.

    Raises BadSample.
    """
    image = open_header(data, READ_FORMATS, MAX_PIXELS if resize is None else 2 * MAX_PIXELS)
    size, extension = image.size, _EXTENSIONS.get(image.format or "", "png")
    if resize is not None:
        size = (round(size[0] * resize / min(size)), round(size[1] * resize / min(size)))
    if size == image.size and image.format in _EXTENSIONS:
        decode(image, at_least=(1, 1))
        return extension, data
    decode(image, at_least=(2 * size[0], 2 * size[1]))
    exif = {"exif": image.info["exif"]} if "exif" in image.info else {}
    encoded = io.BytesIO()
    try:
        check_pixels(size[1], size[0])
        if image.mode == "F":
            raise ValueError("its pixels are floats (mode F), whose range is not known; scale them to 8 or 16 bits")
        if image.mode.startswith("I"):  # 16 bits in either byte order (Pillow resizes only one of them), or 32 bits
            image = image.convert("I")
            low, high = cast(tuple[float, float], image.getextrema())
            if low < 0 or high > 65535:
                raise ValueError("values outside 16 bits")
            image = image.convert("I;16")
        if size != image.size:
            if image.mode == "P":  # neither a palette nor two levels can be interpolated
                image = image.convert("RGBA" if "transparency" in image.info else "RGB")
            elif image.mode == "1":
                image = image.convert("L")
            # Each channel alone: Pillow would make what is transparent black, and readers ignore the alpha channel.
            bands = [band.resize(size, Image.Resampling.BICUBIC) for band in image.split()]
            image = Image.merge(image.mode, bands)
        if extension == "png" and image.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
            image = image.convert("RGB")
        image.save(encoded, _FORMATS[extension], quality=quality, **exif)
    except (OSError, ValueError, BadSample) as error:
        raise BadSample(f"cannot be stored as {_FORMATS[extension]}: {error}") from None
    return extension, encoded.getvalue()
