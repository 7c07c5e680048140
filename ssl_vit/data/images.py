"""Raw members -> images and labels, and what happens to an image between the decoder and the model.

A closed list of decoders (images, class indices); any other member is ignored. Transforms are torchvision's, on uint8
tensors. Flip, color augmentation (`augment.py`) and normalization run on the device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from ssl_vit.data import MAX_PIXELS, AugmentConfig, DataConfig
from ssl_vit.data.headers import check_pixels, check_scans, open_header
from ssl_vit.data.jpeg import Jpeg, orientation, unreadable, upright
from ssl_vit.data.shards.info import IMAGE_EXTENSIONS
from ssl_vit.interfaces import BadSample, Size, UserError, pair

PIL_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class Pixels:
    """A decoded picture, with the methods of `Jpeg`."""

    def __init__(self, pixels: torch.Tensor) -> None:
        self.pixels = pixels
        self.height, self.width = pixels.shape[1:]

    def whole(self) -> torch.Tensor:
        return self.pixels

    def region(self, top: int, left: int, height: int, width: int, least: tuple[int, int] | None) -> torch.Tensor:
        return self.pixels[:, top : top + height, left : left + width]


Picture = Jpeg | Pixels
"""An upright image of known height and width whose pixels may not be decoded yet."""


def check_channels(channels: int) -> None:
    """Raise UserError unless image files can be decoded to this many channels."""
    if channels not in PIL_MODES:
        raise UserError(f"encoder.channels={channels}: image shards decode to 1 (gray), 3 (RGB) or 4 (RGBA) channels")


def open_picture(sample: Mapping[str, bytes], channels: int, max_pixels: int = MAX_PIXELS) -> Picture:
    """The sample's image, upright by its EXIF. It and its methods raise BadSample when it is missing, unreadable or
    larger than `max_pixels`, which is read from its header before anything is decoded."""
    for extension in IMAGE_EXTENSIONS:
        if extension in sample:
            try:
                return _open(sample[extension], channels, max_pixels)
            except BadSample:
                raise
            except Exception as error:  # Pillow's parsers raise many types
                raise unreadable(error) from None
    raise BadSample(f"no image member ({', '.join(IMAGE_EXTENSIONS)})")


def eight_bits(image: Image.Image) -> Image.Image:
    """The image with 16-bit gray scaled to 8 bits; Pillow's own conversion would clip."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))


def _open(data: bytes, channels: int, max_pixels: int) -> Picture:
    if data.startswith(b"\xff\xd8") and channels in (1, 3):
        with suppress(ValueError):  # stray bytes between its markers: Pillow decides
            check_scans(data)
            jpeg = Jpeg(data, channels)
            check_pixels(jpeg.height, jpeg.width, max_pixels)
            return jpeg
    image = open_header(data, max_pixels=max_pixels)
    pixels = np.array(eight_bits(image).convert(PIL_MODES[channels]))
    stored = torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1)
    return Pixels(upright(stored, orientation(image)))


Transform = Callable[[Picture], torch.Tensor]


class InceptionCrop:
    """A box of random area and aspect ratio (torchvision's `RandomResizedCrop` draws it), resized to (height, width).

    Exactly torchvision's pixels; with `reduce`, a box at least twice as large as the result on both sides may be
    decoded at 1/2, 1/4 or 1/8 of its size first.
    """

    def __init__(
        self, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], reduce: bool
    ) -> None:
        self.size, self.least = size, size if reduce else None
        self.draw = v2.RandomResizedCrop(size, scale=scale, ratio=ratio).make_params

    def __call__(self, picture: Picture) -> torch.Tensor:
        box = self.draw([torch.empty(1, picture.height, picture.width, device="meta")])
        region = picture.region(box["top"], box["left"], box["height"], box["width"], self.least)
        # One channels-last image: the layout of the fast uint8 kernel, a third faster than through torchvision.
        single = region[None].contiguous(memory_format=torch.channels_last)
        return F.interpolate(single, self.size, mode="bilinear", antialias=True)[0]


class RandAugment:
    """timm's RandAugment after a crop, with the settings of timm's training script (as in MAE): bicubic, filled with
    ImageNet's mean color."""

    def __init__(self, config: str, crop: Transform, size: tuple[int, int]) -> None:
        from timm.data import IMAGENET_DEFAULT_MEAN, rand_augment_transform  # takes a second to import

        color = tuple(round(255 * mean) for mean in IMAGENET_DEFAULT_MEAN)
        settings = {
            "translate_const": int(0.45 * min(size)),
            "img_mean": color,
            "interpolation": Image.Resampling.BICUBIC,
        }
        try:
            self.augment = rand_augment_transform(config, settings)
        except (AssertionError, ValueError, KeyError) as error:
            wrong = f"data.augment.rand_augment={config}: timm cannot read it ({error!r})"
            raise UserError(f"{wrong}; write it as rand-m9-mstd0.5-inc1") from None
        self.crop, self.least = crop, getattr(crop, "least", None)

    def __call__(self, picture: Picture) -> torch.Tensor:
        image = self.crop(picture)
        channels = len(image)
        if channels == 4:
            raise UserError("data.augment.rand_augment: not for RGBA images; set it to null, or encoder.channels=3")
        states, seed = (random.getstate(), np.random.get_state()), int(torch.randint(2**32, ()))
        try:  # timm draws from the generators of Python and NumPy
            random.seed(seed)
            np.random.seed(seed)
            changed = self.augment(v2.functional.to_pil_image(image.expand(3, -1, -1)))
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        return v2.functional.pil_to_tensor(changed)[:channels]


def train_transform(image_size: Size, augment: AugmentConfig) -> Transform:
    """A picture of any size -> uint8 (C, *image_size), random by torch's default CPU generator.

    image_size: pixels, a square's side or (height, width). The inception crop resizes bilinearly with antialiasing.
    """
    crop = _crop(pair(image_size), augment)
    return RandAugment(augment.rand_augment, crop, pair(image_size)) if augment.rand_augment else crop


def _crop(size: tuple[int, int], augment: AugmentConfig) -> Transform:
    if augment.crop == "inception":
        return InceptionCrop(size, augment.scale, augment.ratio, augment.reduced_decode)
    cover = partial(_cover, size=size)
    if augment.crop == "shift":
        if augment.padding > min(size):
            limits = f"images of {size[0]}x{size[1]} cannot shift so far"
            raise UserError(f"data.augment.padding={augment.padding}: {limits}")
        return _compose(cover, v2.RandomCrop(size, padding=augment.padding or None))
    return _compose(cover, v2.CenterCrop(size))


def evaluation_transform(image_size: Size, data: DataConfig) -> Transform:
    """A picture -> uint8 (C, *image_size): resize until it is covered, crop the center; no randomness.

    A square's shorter side becomes round(evaluation_resize * image_size), as usual.
    """
    size = pair(image_size)
    larger = (round(data.evaluation_resize * size[0]), round(data.evaluation_resize * size[1]))
    return _compose(partial(_cover, size=larger), v2.CenterCrop(size))


def _compose(*steps: Callable[[torch.Tensor], torch.Tensor]) -> Transform:
    chain = v2.Compose(steps)
    return lambda picture: chain(picture.whole())


def _cover(image_CHW: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize, keeping the aspect ratio, to the least size that covers (height, width): torchvision's `Resize` of the
    shorter side where that is a square (its truncation of the longer side included)."""
    height, width = image_CHW.shape[-2:]
    if height * size[1] <= width * size[0]:
        target = [size[0], int(width * size[0] / height)]
    else:
        target = [int(height * size[1] / width), size[1]]
    if target[0] * target[1] > MAX_PIXELS:
        raise BadSample(
            f"its {height}x{width} pixels would be {target[0]}x{target[1]} once they cover {size[0]}x{size[1]}"
        )
    return v2.functional.resize(image_CHW, target, InterpolationMode.BILINEAR, antialias=True)
