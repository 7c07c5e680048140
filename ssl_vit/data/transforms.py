"""What happens to an image between the decoder and the model: torchvision's transforms on uint8 tensors.

Flip and normalisation are left to the device (`device_images`), colour targets need the pixels as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torchvision.transforms import InterpolationMode, v2

from ssl_vit.data import AugmentConfig, DataConfig
from ssl_vit.interfaces import Batch

Transform = Callable[[torch.Tensor], torch.Tensor]


def train_transform(image_size: int, augment: AugmentConfig) -> Transform:
    """uint8 (C, H, W) of any size -> uint8 (C, image_size, image_size), random by torch's default CPU generator.

    The inception crop resizes bilinearly with antialiasing, as the paper authors' code does.
    """
    if augment.crop == "inception":
        return v2.RandomResizedCrop(image_size, scale=augment.scale, ratio=augment.ratio, antialias=True)
    if augment.crop == "shift":
        return v2.Compose([*_resize(image_size), v2.RandomCrop(image_size, padding=augment.padding or None)])
    centre = [*_resize(image_size), v2.CenterCrop(image_size)]
    if augment.crop == "affine":
        shift = augment.padding / image_size
        affine = v2.RandomAffine(
            degrees=augment.degrees,
            translate=(shift, shift),
            scale=(1 - augment.zoom, 1 + augment.zoom),
            shear=augment.shear,
            interpolation=InterpolationMode.BILINEAR,
        )
        return v2.Compose([*centre, affine])
    return v2.Compose(centre)


def evaluation_transform(image_size: int, data: DataConfig) -> Transform:
    """uint8 (C, H, W) -> uint8 (C, image_size, image_size): resize the shorter side, crop the centre; no randomness."""
    shorter = round(data.evaluation_resize * image_size)
    return v2.Compose([*_resize(shorter), v2.CenterCrop(image_size)])


def _resize(shorter: int) -> list[v2.Transform]:
    return [v2.Resize(shorter, interpolation=InterpolationMode.BILINEAR, antialias=True)]


def device_images(batch: Batch) -> torch.Tensor:
    """The batch's images as the model sees them before normalisation: uint8 (B, C, H, W), mirrored where asked."""
    mirrored = batch.images.flip(-1)
    return torch.where(batch.flip[:, None, None, None], mirrored, batch.images)
