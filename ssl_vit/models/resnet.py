"""ResNet baselines of a comparison: timm's ResNets and BiT ResNets behind the encoder's interface."""

from __future__ import annotations

from typing import Any, Self

import torch
from timm.models import is_model_in_modules

from ssl_vit.interfaces import Size, UserError, pair
from ssl_vit.models.encoder import Encoder, Numbers, create


def is_cnn(name: str) -> bool:
    """Whether timm's `name` is a ResNet (v1, with its variants) or a pre-activation ResNet (v2, BiT)."""
    return bool(is_model_in_modules(name, {"resnet", "resnetv2"}))


class ResNetEncoder(Encoder):
    """A ResNet: the cells of its last feature map are its N output tokens; there is no class token.

    Its batch norms (BiT has none) see only their own process's part of each batch.
    """

    def __init__(self, name: str, arguments: dict[str, Any], mean: Numbers, std: Numbers, image_size: Size) -> None:
        """Raises UserError for sizes that the network cannot have and a mean or std of other channels."""
        super().__init__(name, arguments, mean, std)
        try:
            self.network = create(name, arguments)
        except TypeError as error:
            raise UserError(f"encoder.name='{name}' cannot have these settings: {arguments} ({error})") from None
        self.width, self.image_size = int(self.network.num_features), pair(image_size)

    @property
    def grid(self) -> tuple[int, int]:
        stride = int(self.network.feature_info[-1]["reduction"])
        return -(-self.image_size[0] // stride), -(-self.image_size[1] // stride)

    def untrained(self, image_size: Size | None = None) -> Self:
        return type(self)(self.name, self.arguments, self.mean, self.std, image_size or self.image_size)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        features_BDHW: torch.Tensor = self.network.forward_features(self.normalized(images_BCHW))
        return features_BDHW.flatten(2).mT
