"""The comparison's CNN baselines: timm's ResNets and BiT ResNets behind the encoder's interface."""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from timm.models import is_model_in_modules
from torch import nn

from ssl_vit.interfaces import Size, UserError, pair
from ssl_vit.models.encoder import Encoder, Numbers, create


def is_cnn(name: str) -> bool:
    """Whether timm's `name` is a ResNet (v1, with its variants) or a pre-activation ResNet (v2, BiT)."""
    return bool(is_model_in_modules(name, {"resnet", "resnetv2"}))


class ResNetEncoder(Encoder):
    """A ResNet: its last feature map's cells are its N output tokens; there is no class token.

    Its batch norms (BiT has none) see a process's own part of each batch.
    """

    def __init__(self, name: str, arguments: dict[str, Any], mean: Numbers, std: Numbers, image_size: Size) -> None:
        """Raises UserError for sizes that the network cannot have and a mean or std of other channels."""
        super().__init__(name, arguments, mean, std)
        try:
            self.cnn = create(name, arguments)
        except TypeError as error:
            raise UserError(f"encoder.name='{name}' cannot have these settings: {arguments} ({error})") from None
        self._image_size = pair(image_size)

    @property
    def network(self) -> nn.Module:
        return self.cnn

    @property
    def width(self) -> int:
        return int(cast(Any, self.cnn).num_features)

    @property
    def image_size(self) -> tuple[int, int]:
        return self._image_size

    @property
    def grid(self) -> tuple[int, int]:
        stride = int(cast(Any, self.cnn).feature_info[-1]["reduction"])
        return -(-self._image_size[0] // stride), -(-self._image_size[1] // stride)

    def untrained(self, image_size: Size | None = None) -> Self:
        return type(self)(self.name, self.arguments, self.mean, self.std, image_size or self._image_size)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        features_BDHW = cast(Any, self.cnn).forward_features(self.normalized(images_BCHW))
        return cast(torch.Tensor, features_BDHW.flatten(2).mT)
