"""Attentive probe (CAPI, arXiv 2502.08769): a learnable query per head attends to the frozen patch tokens; its output
is classified by a linear layer. The tokens are standardized by the mean and variance of those of the labeled images.

It reads encoders trained on masked images more fairly than mean pooling does: their patch tokens keep what the mean
loses (efficient probing, arXiv 2506.10178).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import nn

from ssl_vit.evaluators.base import Classifier, LabeledConfig, Scored, SweepConfig
from ssl_vit.evaluators.base import Evaluator as BaseEvaluator
from ssl_vit.evaluators.features import FeatureConfig, Features, ImageSet
from ssl_vit.interfaces import Diverged, UserError, pair
from ssl_vit.models.encoder import Encoder
from ssl_vit.records import Cost
from ssl_vit.results import Prediction

HEAD_SIZE = 64
_LEAST_STD = 1e-6


class Config(FeatureConfig, LabeledConfig, SweepConfig):
    """pooling: `patches`; the probe reads all of them.

    steps: number of optimizer steps, with cosine decay to 0.
    batch_size: images per step, at most the number of labeled images.
    lr: learning rate if it is not swept.
    weight_decay: weight decay if it is not swept.
    memory_gib: the most that the tokens of the training and test images may take, as float32.
    """

    pooling: Literal["patches"] = "patches"
    sweep: dict[str, tuple[Any, ...]] = Field({"lr": (1e-3, 3e-3, 1e-2, 3e-2), "weight_decay": (1e-3, 1e-1)})
    steps: int = Field(300, ge=1)
    batch_size: int = Field(256, ge=1)
    lr: float = Field(1e-2, gt=0)
    weight_decay: float = Field(1e-3, ge=0)
    memory_gib: float = Field(8.0, gt=0)


class AttentiveHead(nn.Module):
    """Cross-attention of one query per head of size 64 over patch tokens, then a linear classifier.

    There are `width` / 64 heads, rounded, at least one.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        heads = max(1, round(width / HEAD_SIZE))
        self.query_HE = nn.Parameter(torch.empty(heads, HEAD_SIZE))
        self.key_value = nn.Linear(width, 2 * heads * HEAD_SIZE, bias=False)
        self.classifier = nn.Linear(heads * HEAD_SIZE, classes)
        nn.init.trunc_normal_(self.query_HE, std=0.02)
        nn.init.trunc_normal_(self.key_value.weight, std=0.02)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, tokens_BND: torch.Tensor) -> torch.Tensor:
        """Patch tokens -> logits (B, classes)."""
        key_value = self.key_value(tokens_BND).unflatten(-1, (2, -1, HEAD_SIZE))
        key_BHNE, value_BHNE = key_value.permute(2, 0, 3, 1, 4)
        query_BH1E = self.query_HE[None, :, None].expand(len(tokens_BND), -1, -1, -1)
        read_BH1E = F.scaled_dot_product_attention(query_BH1E, key_BHNE, value_BHNE)
        logits: torch.Tensor = self.classifier(read_BH1E.flatten(1))
        return logits


class Evaluator(BaseEvaluator):
    """One head for every label budget and seed, on tokens that are extracted once."""

    title = "Attentive probe on frozen patch tokens"
    references = ("untrained",)

    def fit(self, train: ImageSet, seed: int) -> Classifier:
        labeled = len(train.context.train_labels) if train.extract is None else len(train.extract)
        self.check(train.context.trained, labeled + train.context.test.samples)
        c, device = self.config, train.context.accelerator.device
        features = train.features(c)
        start = time.perf_counter()
        classes, targets = np.unique(features.labels, return_inverse=True)
        width = train.context.trained.num_features("patches") // train.context.trained.patches

        def tokens(features: Features) -> torch.Tensor:
            """float32 (n, N, D) of the patches, side by side in the features."""
            return torch.from_numpy(features.vectors).unflatten(1, (-1, width))

        tokens_BND, targets_B = tokens(features), torch.from_numpy(targets)
        std_D, mean_D = torch.std_mean(tokens_BND, dim=(0, 1), correction=0)
        scale_D, mean_D = std_D.clamp(min=_LEAST_STD).to(device), mean_D.to(device)

        def standardized(tokens_BND: torch.Tensor) -> torch.Tensor:
            return (tokens_BND.to(device) - mean_D) / scale_D

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            head = AttentiveHead(tokens_BND.shape[-1], len(classes)).to(device)
        steps, batch_size = c.steps, min(c.batch_size, len(targets_B))
        optimizer = torch.optim.AdamW(head.parameters(), lr=c.lr, weight_decay=c.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for rows in _batches(len(targets_B), batch_size, steps, seed):
            logits = head(standardized(tokens_BND[rows]))
            optimizer.zero_grad()
            F.cross_entropy(logits, targets_B[rows].to(device)).backward()
            optimizer.step()
            schedule.step()
        keys_values = tokens_BND.shape[1] * head.key_value.weight.numel()
        attention = 2 * tokens_BND.shape[1] * head.query_HE.numel()
        # A step costs three forward passes, but two for keys and values: the tokens need no gradient.
        products = 2 * keys_values + 3 * (attention + head.classifier.weight.numel())
        flops = 2.0 * products * steps * batch_size
        cost = Cost(images_seen=steps * batch_size, flops=flops, seconds=round(time.perf_counter() - start, 2))

        @torch.no_grad()
        def classify(images: ImageSet) -> list[Scored]:
            test = images.features(c)
            parts = tokens(test).split(c.batch_size)
            probabilities = torch.cat([head(standardized(part)).softmax(-1).cpu() for part in parts]).numpy()
            if not np.isfinite(probabilities).all():
                error = Diverged(f"the attentive probe diverged with lr={c.lr}")
                error.cost = cost
                raise error
            predicted = classes[probabilities.argmax(1)]
            prediction = Prediction(test.images, test.labels, predicted, probabilities.max(1))
            return [Scored(prediction, cost=cost, labels=len(features.labels))]

        return classify

    def check(self, encoder: Encoder, images: int) -> None:
        """Raises UserError for too many tokens and for an encoder without any."""
        encoder.check_pooling("patches")
        size = pair(self.config.image_size or encoder.image_size)
        pixels = math.prod(size) / math.prod(encoder.image_size)
        needed = 4 * images * encoder.num_features("patches") * pixels / 2**30
        if needed > self.config.memory_gib:
            raise UserError(
                f"attentive_probe: the tokens of {images:,} images take {math.ceil(needed * 10) / 10:g} GiB, more than "
                f"memory_gib={self.config.memory_gib:g}: raise it, or lower labels_per_class or image_size"
            )


def _batches(images: int, batch_size: int, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Rows of each step: epochs of shuffled images without the incomplete last batch."""
    generator = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        for rows in torch.randperm(images, generator=generator).split(batch_size):
            if len(rows) == batch_size and done < steps:
                done += 1
                yield rows
