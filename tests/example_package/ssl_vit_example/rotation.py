"""Rotation prediction (Gidaris et al., ICLR 2018): predict by which multiple of 90 degrees an image was rotated."""

from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ssl_vit.data.augment import device_images
from ssl_vit.interfaces import Batch, ObjectiveConfig, StepOutput
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.objective import Objective as BaseObjective


class Config(ObjectiveConfig):
    pooling: ClassVar[str] = "mean"  # of timm's model; `name` is there, and keys of the objective go here


class Objective(BaseObjective):
    def __init__(self, encoder: Encoder, config: Config, classes: int | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.width, 4)

    def noise_per_sample(self) -> int:
        return 1  # random numbers per image; the same on any number of processes

    def forward(self, batch: Batch) -> StepOutput:
        images_BCHW = device_images(batch)  # square, uint8
        turns_B = (4 * batch.noise[:, 0]).long()
        rotated_4BCHW = torch.stack([images_BCHW.rot90(k, (-2, -1)) for k in range(4)])
        rotated_BCHW = rotated_4BCHW[turns_B, torch.arange(len(turns_B), device=turns_B.device)]
        logits_BK = self.head(self.encoder.represent(rotated_BCHW, "mean")).float()
        correct_B = (logits_BK.detach().argmax(-1) == turns_B).float()
        loss_B = cross_entropy(logits_BK, turns_B, reduction="none")
        return StepOutput(batch.mean(loss_B), {"accuracy": batch.mean(correct_B)})
