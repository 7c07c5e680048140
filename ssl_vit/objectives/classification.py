"""Image classification: supervised pretraining (paper, table 3) and fine-tuning (paper, table 4)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import nn
from torchvision.transforms import v2

from ssl_vit.data.augment import device_images
from ssl_vit.interfaces import Batch, ObjectiveConfig, StepOutput, UserError
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.objective import Objective as BaseObjective


class Config(ObjectiveConfig):
    """head: `mlp` (one tanh hidden layer: pretraining), `linear` (zero-initialized: fine-tuning; paper, section 3.1) or
        `probe` (MAE's linear probe: batch norm without parameters, then a linear layer, on a frozen encoder).
    pooling: what the head reads: the class `token` (the paper's), the `mean` of the patches, or all `patches` side by
        side, which keeps the layout (for small images of one centered object, such as digits).
    classes: number of classes; None: as many as the shards' info.json names.
    label_smoothing: label smoothing of the targets, 0..1.
    mixup: alpha of the Beta distribution of the mixing ratio of mixup (0: off). Drawn from torch's generator of each
        process, like dropout.
    cutmix: the same for CutMix. With both, each batch gets one of them at random, as in timm.
    """

    name: Literal["classification"] = "classification"
    head: Literal["mlp", "linear", "probe"] = "mlp"
    pooling: Literal["token", "mean", "patches"] = "token"
    classes: int | None = Field(None, ge=2)
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    mixup: float = Field(0.0, ge=0)
    cutmix: float = Field(0.0, ge=0)


class Objective(BaseObjective):
    """The encoder and a classification head; cross-entropy."""

    needs_labels = True

    def __init__(self, encoder: Encoder, config: Config, classes: int | None = None) -> None:
        super().__init__()
        number = config.classes or classes
        if number is None:
            raise UserError("objective.classes: the shards' info.json names no classes; give their number")
        if classes and number < classes:
            raise UserError(f"objective.classes={number}: the images have {classes} classes; remove it")
        if number < 2:
            raise UserError("objective.name=classification needs at least two classes; name labeled images of several")
        encoder.check_pooling(config.pooling)
        self.encoder, self.config = encoder, config
        width = encoder.num_features(config.pooling)
        self.frozen = config.head == "probe"
        self.head: nn.Module
        if config.head == "mlp":
            hidden = encoder.width
            self.head = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, number))
        else:
            linear = nn.Linear(width, number)
            nn.init.zeros_(linear.bias)
            if self.frozen:
                nn.init.trunc_normal_(linear.weight, std=0.01)
                self.head = nn.Sequential(nn.BatchNorm1d(width, affine=False, eps=1e-6), linear)
                encoder.requires_grad_(False)
            else:
                nn.init.zeros_(linear.weight)
                self.head = linear
        with torch.device("cpu"):  # their constructors read numbers, which meta tensors do not have
            mixes = [v2.MixUp(alpha=config.mixup, num_classes=number)] if config.mixup else []
            mixes += [v2.CutMix(alpha=config.cutmix, num_classes=number)] if config.cutmix else []
        self.mix = v2.RandomChoice(mixes) if mixes else None

    def train(self, mode: bool = True) -> Objective:
        super().train(mode)
        if self.frozen:
            self.encoder.eval()  # no dropout, no running statistics
        return self

    def logits(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Images, 0..255 -> float32 class logits (B, classes)."""
        return self.head(self.encoder.represent(images_BCHW, self.config.pooling)).float()

    @torch.compiler.disable  # its shapes depend on what it draws: a compiler would make a graph per draw
    def _mixed(self, images_BCHW: torch.Tensor, labels_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.mix is not None
        if self.config.cutmix and images_BCHW.device.type == "xla":
            raise UserError("objective.cutmix: XLA would compile a program per box; use mixup")
        images, targets = self.mix(images_BCHW.float(), labels_B)
        return images, targets

    def forward(self, batch: Batch) -> StepOutput:
        images = device_images(batch)
        labels = batch.labels.clamp(min=0)  # padding has -1 and no weight
        targets = labels
        if self.mix is not None and self.training:
            images, targets = self._mixed(images, labels)
        logits = self.logits(images)
        per_image = F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.config.label_smoothing)
        hits = (logits.detach().argmax(-1) == labels).float()
        return StepOutput(batch.mean(per_image), {"accuracy": batch.mean(hits)})
