"""`Encoder`: a timm network that turns uint8 images into output tokens, as every stage and evaluator uses it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Self, get_args

import timm
import torch
from torch import nn

from ssl_vit.interfaces import Size, UserError
from ssl_vit.models import Pooling

Numbers = float | Sequence[float]
# Arguments of `timm.create_model` that say where weights lie and go: a `config.json` from elsewhere has no say in that.
_NOT_SIZES = {
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "device",
    "dtype",
}


class Encoder(nn.Module, ABC):
    """A timm network by name; images_BCHW are uint8, 0..255.

    Shapes: N patches (of a CNN: cells of the last feature map), width D, P prefix tokens (class token, registers).

    network: timm's module.
    name, arguments: what `timm.create_model` built it from.
    mean, std: one number per channel, of pixels scaled to [0, 1].
    width: D. image_size: (height, width) in pixels.
    """

    network: Any
    width: int
    image_size: tuple[int, int]
    prefix_tokens = 0
    has_class_token = False
    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, name: str, arguments: dict[str, Any], mean: Numbers, std: Numbers) -> None:
        """Raises UserError for a mean or std of another number of channels."""
        super().__init__()
        self.name, self.arguments = name, arguments
        self.channels = int(arguments.get("in_chans", 3))
        self.mean, self.std = self._per_channel("mean", mean), self._per_channel("std", std)
        if min(self.std) <= 0:
            raise UserError(f"encoder.std={min(self.std)} must be greater than 0")
        scale = torch.tensor([1 / (255 * s) for s in self.std])
        shift = torch.tensor([m / s for m, s in zip(self.mean, self.std, strict=True)])
        self.register_buffer("scale", scale.reshape(-1, 1, 1), persistent=False)
        self.register_buffer("shift", shift.reshape(-1, 1, 1), persistent=False)

    def _per_channel(self, key: str, value: Numbers) -> tuple[float, ...]:
        numbers = (value,) * self.channels if isinstance(value, float | int) else tuple(value)
        if len(numbers) != self.channels:
            raise UserError(
                f"encoder.{key} has {len(numbers)} numbers for {self.channels} channels: give one per channel"
            )
        return numbers

    @property
    @abstractmethod
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    def num_features(self, pooling: Pooling) -> int:
        """Dimension of `pool`'s output per image."""
        return self.width * {"both": 2, "patches": self.patches}.get(pooling, 1)

    @property
    def own_settings(self) -> dict[str, Any]:
        """What `config.json` keeps beside timm's own entries, by the constructor's argument names."""
        return {}

    @abstractmethod
    def untrained(self, image_size: Size | None = None) -> Self:
        """A new encoder of this architecture (at another image size if given), from torch's default generator.

        Raises UserError for a size that the patches do not divide.
        """

    def outline(self, image_size: Size | None = None) -> Self:
        """The architecture without weights (on the meta device), at another image size if given. Raises UserError for
        a size that the weights cannot be used at."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return self.untrained(image_size)

    def with_arguments(self, **arguments: Any) -> Self:
        """A copy of the same weights that timm builds with other arguments, such as `drop_path_rate`. Raises UserError
        where the network does not take them."""
        like = copy.copy(self)
        like.arguments = self.arguments | arguments
        with torch.random.fork_rng(devices=[]):
            model = like.untrained()
        model.network.load_state_dict(self.network.state_dict())
        return model.to(next(self.parameters()).device).train(self.training)

    @abstractmethod
    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """uint8 images -> output tokens (B, P + N, D), patches in row-major order."""

    @abstractmethod
    def represent(self, images_BCHW: torch.Tensor, pooling: Pooling, block: int | None = None) -> torch.Tensor:
        """uint8 images -> one vector per image.

        pooling: how `pool` makes it of the tokens.
        block: read the tokens after this block (from 1), under the model's last norm; None: the output tokens.
        Raises UserError for a block that the network does not have.
        """

    def normalized(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """uint8 images -> float32 of the same shape, (pixel / 255 - mean) / std, on the images' device."""
        return (images_BCHW * self.scale).sub_(self.shift)

    def finish(self, vectors: torch.Tensor) -> torch.Tensor:
        """The norm that some models apply after pooling: (..., D) -> (..., D)."""
        finished: torch.Tensor = self.network.fc_norm(vectors) if hasattr(self.network, "fc_norm") else vectors
        return finished

    def check_pooling(self, pooling: Pooling) -> None:
        """Raises UserError for an unknown pooling, and for one that reads the class token of a model without one."""
        if pooling not in get_args(Pooling):
            raise UserError(f"pooling={pooling}: choose one of {', '.join(get_args(Pooling))}")
        if pooling in ("token", "both") and not self.has_class_token:
            raise UserError(f"pooling={pooling} needs a class token, which {self.name} does not have: use mean")

    def pool(self, outputs: torch.Tensor, pooling: Pooling) -> torch.Tensor:
        """Output tokens (B, P + N, D) -> one vector per image.

        pooling: `token`: the class token (B, D). `mean`: of the patches (B, D). `both`: concatenated (B, 2D).
            `patches`: all patches concatenated (B, N * D), which keeps the layout as pixels do.
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


def create(name: str, arguments: dict[str, Any]) -> Any:
    """timm's model without a classifier. Raises UserError for a name that timm does not know, naming the closest, and
    for arguments that do not fit."""
    if not timm.is_model(name):
        raise UserError(f"encoder.name='{name}' is not a timm model{close_names(name)}")
    if refused := sorted(_NOT_SIZES & arguments.keys()):
        raise UserError(f"encoder.name='{name}': model_args cannot hold {', '.join(refused)}; remove it")
    try:
        network = timm.create_model(name, pretrained=False, num_classes=0, **arguments)
    except (TypeError, AssertionError, ValueError, RuntimeError, ArithmeticError) as error:
        raise UserError(f"encoder.name='{name}' cannot have these settings: {arguments} ({error})") from None
    if not hasattr(network, "pretrained_cfg"):
        raise UserError(f"encoder.name='{name}': no pretrained_cfg; build it with timm.models.build_model_with_cfg")
    return network


def shares_parameters(module: nn.Module) -> bool:
    """Whether a parameter has two names, which safetensors files cannot store."""
    return len([*module.named_parameters(remove_duplicate=False)]) > len([*module.parameters()])


def close_names(name: str) -> str:
    """The end of a message that names timm's models of similar names."""
    near = get_close_matches(name, timm.list_models(), n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""
