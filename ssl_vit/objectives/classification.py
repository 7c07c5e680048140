"""Image classification: supervised pretraining (paper, table 3) and fine-tuning (paper, table 4)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import nn

from ssl_vit.data.transforms import device_images
from ssl_vit.interfaces import Batch, StepOutput, UserError
from ssl_vit.interfaces import Config as BaseConfig
from ssl_vit.models.backbone import Backbone


class Config(BaseConfig):
    """head: `mlp` (one tanh hidden layer: pretraining) or `linear` (zero-initialised: fine-tuning); paper, section 3.1.

    pooling: what the head reads: the class `token` (the paper's), the `mean` of the patches, or all `patches` side by
        side, which keeps the layout (for small images of one centred thing, such as digits).
    classes: how many; None takes the number of classes that the shards' info.json names.
    """

    name: Literal["classification"] = "classification"
    head: Literal["mlp", "linear"] = "mlp"
    pooling: Literal["token", "mean", "patches"] = "token"
    classes: int | None = Field(None, ge=2)
    label_smoothing: float = Field(0.0, ge=0, lt=1)


class Objective(nn.Module):
    """The backbone and a classification head; cross-entropy."""

    needs_labels = True

    def __init__(self, backbone: Backbone, config: Config, classes: int | None = None) -> None:
        super().__init__()
        number = config.classes or classes
        if number is None:
            raise UserError("objective.classes: the shards' info.json names no classes, so say how many there are")
        self.backbone, self.config = backbone, config
        width = backbone.width * (backbone.patches if config.pooling == "patches" else 1)
        self.head: nn.Module
        if config.head == "linear":
            linear = nn.Linear(width, number)
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
            self.head = linear
        else:
            hidden = backbone.width
            self.head = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, number))

    def noise_per_sample(self) -> int:
        return 0

    def logits(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """uint8 images -> float32 class logits (B, classes)."""
        return self.head(self.backbone.pool(self.backbone(images_BCHW), self.config.pooling)).float()

    def forward(self, batch: Batch) -> StepOutput:
        logits = self.logits(device_images(batch))
        labels = batch.labels.clamp(min=0)  # padding carries -1 and weighs nothing
        per_image = F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.config.label_smoothing)
        hits = (logits.detach().argmax(-1) == labels).float()
        return StepOutput(batch.mean(per_image), {"accuracy": batch.mean(hits)})
