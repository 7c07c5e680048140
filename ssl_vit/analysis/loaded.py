"""A trained encoder with the preparation of its images: from a path, or from a timm network in memory."""

from __future__ import annotations

import io
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from ssl_vit.data import DataConfig
from ssl_vit.data.images import Pixels, evaluation_transform, open_picture
from ssl_vit.data.jpeg import orientation, upright
from ssl_vit.data.packing.images import to_stored
from ssl_vit.interfaces import BadSample, UserError
from ssl_vit.models import factory
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.exchange import memory
from ssl_vit.recipe import Recipe, run_recipe
from ssl_vit.training.distributed import Engine, make_accelerator

AnyImage = str | PathLike[str] | bytes | Image.Image
_KEPT_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "F"}


@dataclass(frozen=True)
class Loaded:
    """encoder: in evaluation mode.

    data: how images are prepared. settings: the recipe of the run (None: there is none).
    folder: the weights folder (None: the weights are in memory only).
    """

    encoder: Encoder
    data: DataConfig
    settings: Recipe | None = None
    folder: Path | None = None

    def accelerator(self) -> Engine:
        """The engine for an evaluation: precision and timeout of its training, or the defaults."""
        if self.settings is None:
            return make_accelerator()
        training = self.settings.training
        return make_accelerator(training.precision, training.timeout, or_fp32=True)


@dataclass(frozen=True)
class Preprocess:
    """A function from an image to what timm's network expects, float32 (C, H, W): the pixels that an evaluation sees.

    Raises UserError for a file that cannot be read or is not an image.
    """

    model: Loaded

    def __call__(self, image: AnyImage) -> torch.Tensor:
        encoder, data, turned = self.model.encoder, self.model.data, 1
        if isinstance(image, Image.Image):
            image.load()  # Pillow turns a TIFF upright there
            buffer, turned = io.BytesIO(), orientation(image)
            mode = "I" if image.mode.startswith("I") else image.mode if image.mode in _KEPT_MODES else "RGB"
            # A TIFF keeps all values; those that fit no PNG are refused below, as in a file.
            image.convert(mode).save(buffer, "TIFF" if mode in ("I", "F") else "PNG")
            name, content = "image", buffer.getvalue()
        elif isinstance(image, bytes):
            name, content = "image", image
        else:
            name = str(image)
            try:
                content = Path(image).read_bytes()
            except OSError as error:
                raise UserError(f"{name}: cannot be read: {error.strerror}") from None
        try:
            picture = open_picture(dict([to_stored(content)]), encoder.channels, data.max_pixels)
            pixels = evaluation_transform(encoder.image_size, data)(Pixels(upright(picture.whole(), turned)))
        except BadSample as error:
            raise UserError(f"{name}: not a readable image: {error}") from None
        return encoder.normalized(pixels.to(encoder.scale.device)[None])[0]


def load(model: Path | nn.Module) -> Loaded:
    """The encoder of a run, checkpoint or weights folder, or a copy of a network that `ssl_vit.load` or
    `timm.create_model` returned.

    Images are prepared as the recipe of the run evaluates; for another network of timm, with the image size,
    `crop_pct`, mean and std of its `pretrained_cfg`; for a weights folder, by the defaults of `data`.

    Raises UserError where there are no readable weights, and for a network that is not timm's.
    """
    if isinstance(model, Path):
        folder, settings = factory.find_weights(model), run_recipe(model)
        return Loaded(factory.load(folder), settings.data if settings else DataConfig(train=""), settings, folder)
    if type(model).__name__ == "OptimizedModule":
        raise UserError("a compiled network cannot be copied: give the network that torch.compile was called with")
    if isinstance(preprocess := getattr(model, "preprocess", None), Preprocess):
        encoder = memory.with_weights(factory.fresh(preprocess.model.encoder, 0), model)
        return Loaded(encoder, preprocess.model.data, preprocess.model.settings)
    encoder, resize = memory.from_network(model)
    return Loaded(encoder, DataConfig(train="", evaluation_resize=resize))


def recipe_of(model: nn.Module) -> Recipe | None:
    """The recipe of the run that a network was loaded from, if any."""
    preprocess = getattr(model, "preprocess", None)
    return preprocess.model.settings if isinstance(preprocess, Preprocess) else None
