"""Any timm network as an encoder: CNNs and other transformers, as a baseline or with downloaded weights."""

from __future__ import annotations

import copy
import json
from typing import Any, Self

import torch

from ssl_vit.interfaces import Size, UserError, first_line, pair
from ssl_vit.models import Pooling
from ssl_vit.models.encoder import Encoder, Numbers, create, shares_parameters

_SIZES = ("img_size", "in_chans", "num_classes")


class TimmEncoder(Encoder):
    """A network by timm's `forward_features` and `forward_head(pre_logits=True)`.

    `mean` is timm's own pooling with all that follows it before the classifier; where timm keeps a class token, the
    mean of the patches as in a ViT. The cells of a last feature map are patches. Networks with other outputs (several
    resolutions, tokens of unknown place) have none.

    Batch norm sees one micro-batch of one process at a time.

    kind: timm's class.
    """

    def __init__(self, name: str, arguments: dict[str, Any], mean: Numbers, std: Numbers, image_size: Size) -> None:
        """timm's `name` built with `arguments`; image_size: pixels.

        Raises UserError for sizes that the network cannot have and a mean or std of other channels.
        """
        super().__init__(name, arguments, mean, std)
        self.network = create(name, arguments)
        if shares_parameters(self.network):
            raise UserError(
                f"{name} shares weights between layers, which safetensors files cannot store; use another network"
            )
        self.image_size, self.kind = pair(image_size), type(self.network).__name__
        self._measure()

    def _measure(self) -> None:
        """Read output shapes from a network on the meta device. Raises UserError for an image size that fails."""
        shape = (1, self.channels, *self.image_size)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("meta"):
            network = create(self.name, self.arguments).eval()
            try:
                features = network.forward_features(torch.empty(shape))
                pooled = network.forward_head(features, pre_logits=True)
            except (AssertionError, RuntimeError, ValueError, NotImplementedError, TypeError) as error:
                raise UserError(
                    f"{self.name} cannot read images of {self.image_size} pixels: {first_line(error)}"
                ) from None
        self.width = int(pooled.shape[-1])
        self._is_map = isinstance(features, torch.Tensor) and features.ndim == 4
        self._channels_last = getattr(network, "output_fmt", "NCHW") == "NHWC"
        prefix = getattr(network, "num_prefix_tokens", None)
        self._grid, self._token_width = (0, 0), self.width
        if self._is_map:
            _, *shape = features.shape
            *grid, self._token_width = shape if self._channels_last else (*shape[1:], shape[0])
            self._grid = (grid[0], grid[1])
        elif isinstance(features, torch.Tensor) and features.ndim == 3 and prefix is not None:
            self.prefix_tokens = int(prefix)
            self.has_class_token = getattr(network, "cls_token", None) is not None
            patches, patch_embed = features.shape[1] - self.prefix_tokens, getattr(network, "patch_embed", None)
            rows, columns = getattr(patch_embed, "grid_size", None) or (1, patches)
            self._grid = (rows, columns) if rows * columns == patches else (1, patches)

    @property
    def grid(self) -> tuple[int, int]:
        return self._grid

    @property
    def architecture(self) -> str:
        """timm's name and the arguments that change what the weights compute."""
        kept = {key: value for key, value in self.arguments.items() if key not in _SIZES and "drop" not in key}
        return f"{self.name} {json.dumps(kept, sort_keys=True)}"

    def num_features(self, pooling: Pooling) -> int:
        return self.patches * self._token_width if pooling == "patches" else super().num_features(pooling)

    def check_pooling(self, pooling: Pooling) -> None:
        super().check_pooling(pooling)
        if pooling == "patches" and not self.patches:
            raise UserError(
                f"pooling=patches: {self.name} ({self.kind}) has no patch tokens: use mean, or another evaluator"
            )

    def untrained(self, image_size: Size | None = None) -> Self:
        size = self.image_size if image_size is None else pair(image_size)
        arguments = self.arguments if size == self.image_size else self.arguments | self._sized(size)
        return type(self)(self.name, arguments, self.mean, self.std, size)

    def _sized(self, size: tuple[int, int]) -> dict[str, Any]:
        """The argument of a network that is built for one image size."""
        fixed = "img_size" in self.arguments or self.network.pretrained_cfg.get("fixed_input_size")
        return {"img_size": size} if fixed else {}

    def at_size(self, image_size: Size) -> Self:
        """A copy for another image size, with positions resampled by timm.

        Raises UserError for a network whose weights belong to one size.
        """
        model = copy.deepcopy(self)
        size = pair(image_size)
        if argument := self._sized(size):
            if not hasattr(model.network, "set_input_size"):
                raise UserError(f"{self.name} ({self.kind}) reads only images of {self.image_size} pixels")
            model.network.set_input_size(img_size=size)
        model.arguments, model.image_size = self.arguments | argument, size
        model._measure()
        return model

    def outline(self, image_size: Size | None = None) -> Self:
        outlined = super().outline()
        with torch.device("meta"):
            return outlined if image_size is None else outlined.at_size(image_size)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """uint8 images -> output tokens (B, P + N, D); without patch tokens, the pooled features (B, 1, D)."""
        features = self.network.forward_features(self.normalized(images_BCHW))
        return self._tokens(features) if self.patches else self.network.forward_head(features, pre_logits=True)[:, None]

    def _tokens(self, features: torch.Tensor) -> torch.Tensor:
        if not self._is_map:
            return features
        return features.flatten(1, 2) if self._channels_last else features.flatten(2).mT

    def represent(self, images_BCHW: torch.Tensor, pooling: Pooling, block: int | None = None) -> torch.Tensor:
        if block is not None:
            raise UserError(f"block={block}: the blocks of {self.name} ({self.kind}) cannot be read; remove block")
        self.check_pooling(pooling)
        features = self.network.forward_features(self.normalized(images_BCHW))
        if pooling == "mean" and not self.has_class_token:
            pooled: torch.Tensor = self.network.forward_head(features, pre_logits=True)
            return pooled
        return self.pool(self._tokens(features), pooling)
