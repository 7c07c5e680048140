"""The base class of objectives: encoder, head and loss in one module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from ssl_vit.interfaces import Batch, StepOutput
from ssl_vit.models.encoder import Encoder


class Objective(nn.Module, ABC):
    """What a run trains. Built by its module's `Objective(encoder, config, classes)`.

    classes: how many classes the shards name (None: they do not).
    encoder: the network that is saved for later use.
    needs_labels: whether samples without a label are of no use.
    least_views: how many views of each image (`data.views`) it needs.
    whole_batch: whether the loss is not a mean over images, so that micro-batches would change it.

    Its config may have `classes`, how many there are where the shards do not name them, and `pooling`, which timm's
    model of the encoder gets (`ssl_vit.models.Pooling`).

    It may have `reconstruct(batch, images) -> (given, predicted, truth)`: patches, uint8 (B, N, C, P, P), that
    `ssl-vit inspect` and `training.picture_every` draw beside the images, uint8 (B, C, H, W), which are flipped and
    jittered already.
    """

    needs_labels: ClassVar[bool] = False
    least_views: ClassVar[int] = 1
    whole_batch: ClassVar[bool] = False
    encoder: Encoder

    def noise_per_sample(self) -> int:
        """How many uniform numbers `Batch.noise` must hold for each sample."""
        return 0

    @abstractmethod
    def forward(self, batch: Batch) -> StepOutput:
        """Loss and metrics of a batch."""

    def summarize(self, means: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The scalars to log, (S,), from each metric's means over the global batches of S consecutive steps, float64
        (S,) or (S, M) on the CPU. Every process calls it once for every step."""
        return means
