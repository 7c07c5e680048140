"""What every encoder is to the stages and evaluators: a timm network that turns uint8 images into output tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Literal, Self

import timm
import torch
from torch import nn

from ssl_vit.interfaces import Size, UserError
from ssl_vit.models import PerChannel

Pooling = Literal["token", "mean", "both", "patches"]
Numbers = float | Sequence[float]


class Encoder(nn.Module, ABC):
    """A timm network by name; images_BCHW are uint8, 0..255.

    N is the number of patches (of a CNN: cells of the last feature map), D the width, P the prefix tokens (class,
    registers). network: timm's module. name, arguments: what `timm.create_model` built it from. mean, std: see
    `EncoderConfig`.
    """

    prefix_tokens = 0
    has_class_token = False
    _scale: float | torch.Tensor
    _shift: float | torch.Tensor

    def __init__(self, name: str, arguments: dict[str, Any], mean: Numbers, std: Numbers) -> None:
        """Raises UserError for a mean or std of another number of channels."""
        super().__init__()
        self.name, self.arguments = name, arguments
        channels = arguments.get("in_chans", 3)
        means, stds = ([value] * channels if isinstance(value, float | int) else [*value] for value in (mean, std))
        for key, values in (("mean", means), ("std", stds)):
            if len(values) != channels:
                raise UserError(f"encoder.{key} has {len(values)} numbers for {channels} channels: give one each")
        if min(stds) <= 0:
            raise UserError(f"encoder.std={min(stds)} must be greater than 0")
        # One number where the channels agree, one a channel where they do not.
        self.mean: PerChannel = means[0] if len({*means}) == 1 else tuple(means)
        self.std: PerChannel = stds[0] if len({*stds}) == 1 else tuple(stds)
        scale, shift = [1 / (255 * s) for s in stds], [m / s for m, s in zip(means, stds, strict=True)]
        if isinstance(self.mean, tuple) or isinstance(self.std, tuple):
            self.register_buffer("_scale", torch.tensor(scale).reshape(-1, 1, 1), persistent=False)
            self.register_buffer("_shift", torch.tensor(shift).reshape(-1, 1, 1), persistent=False)
        else:
            self._scale, self._shift = scale[0], shift[0]

    @property
    @abstractmethod
    def network(self) -> nn.Module: ...

    @property
    @abstractmethod
    def width(self) -> int: ...

    @property
    @abstractmethod
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels."""

    @property
    @abstractmethod
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def channels(self) -> int:
        return int(self.arguments.get("in_chans", 3))

    @property
    def own_settings(self) -> dict[str, Any]:
        """What `config.json` keeps beside timm's own entries, by the constructor's argument names."""
        return {}

    @abstractmethod
    def untrained(self, image_size: Size | None = None) -> Self:
        """A new one of the same architecture, at another image size where asked, drawn from torch's default generator.

        Raises UserError for a size that the patches do not divide.
        """

    @abstractmethod
    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """uint8 images -> output tokens (B, P + N, D), patches in row-major order."""

    def represent(self, images_BCHW: torch.Tensor, pooling: Pooling, block: int | None = None) -> torch.Tensor:
        """uint8 images -> one vector an image, as `pool` makes it of the output tokens; or of the tokens after a block
        (from 1), under the model's last norm. Raises UserError for a block that the network does not have."""
        if block is not None:
            raise UserError(f"block={block}: {self.name} is no transformer and has no blocks")
        return self.pool(self(images_BCHW), pooling)

    def normalized(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """uint8 images -> float32 of the same shape, (pixel / 255 - mean) / std, on the images' device."""
        return (images_BCHW * self._scale).sub_(self._shift)

    def finish(self, vectors: torch.Tensor) -> torch.Tensor:
        """The norm that some models apply after pooling: (..., D) -> (..., D)."""
        return vectors

    def check_pooling(self, pooling: Pooling) -> None:
        """Raises UserError where a class token is asked of a model without one."""
        if pooling in ("token", "both") and not self.has_class_token:
            raise UserError(f"pooling={pooling} needs a class token, which {self.name} does not have: use mean")

    def pool(self, outputs: torch.Tensor, pooling: Pooling) -> torch.Tensor:
        """Output tokens (B, P + N, D) -> one vector an image: the class token (B, D), the mean of the patches (B, D),
        both side by side (B, 2D), or all patches side by side (B, N * D), which keeps the layout as pixels do.

        Raises UserError as `check_pooling` does.
        """
        self.check_pooling(pooling)
        patches = outputs[:, self.prefix_tokens :]
        if pooling == "token":
            return self.finish(outputs[:, 0])
        if pooling == "mean":
            return self.finish(patches.mean(1))
        if pooling == "patches":
            return self.finish(patches).flatten(1)
        return torch.cat([self.finish(outputs[:, 0]), self.finish(patches.mean(1))], dim=1)


def create(name: str, arguments: dict[str, Any]) -> nn.Module:
    """timm's model without a classifier. Raises UserError for a name that timm does not know, naming the closest.

    Arguments that do not fit raise whatever timm raises.
    """
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise UserError(f"encoder.name='{name}' is no timm model{hint}")
    model = timm.create_model(name, pretrained=False, num_classes=0, **arguments)
    assert isinstance(model, nn.Module)
    return model
