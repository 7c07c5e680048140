"""Masked patch prediction (paper, appendix B.1.2): corrupt half of the patch embeddings, predict their mean colors."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field, model_validator
from torch import nn

from ssl_vit.data.images import device_images
from ssl_vit.interfaces import Batch, StepOutput, UserError
from ssl_vit.interfaces import Config as BaseConfig
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.factory import require_vit
from ssl_vit.models.last_block import flat_rows, take

_FREQUENCY_RATE = 0.01  # the class frequencies are a moving average over about 100 batches
_DOWNSIZED = 4  # target 2 of the paper: the patch downsized to 4x4
_MOST_CLASSES = 2**16  # a head of more would outweigh the encoder


class Config(BaseConfig):
    """Defaults are the paper's.

    mask_ratio: share of patches corrupted in every image (exactly round(ratio * N)); BERT's is 0.15.
    mask_prob, random_prob: probability that a corrupted patch becomes the learnable [mask] embedding, or another
        patch's embedding; the others stay as they are. The loss counts all corrupted patches.
    random_from: where the other patch comes from: `batch` (the images of the same lane in the same step, so that the
        result does not depend on the number of processes) or the same `image`.
    target: `mean_color` (one class per patch), `downsized` (the patch at 4x4, 16 classes per patch), `pixels` (L2).
    bits: of each quantized color channel; there are 2**(bits * channels) classes, at most 65,536.
    """

    name: Literal["masked_patch"] = "masked_patch"
    mask_ratio: float = Field(0.5, gt=0, le=1)
    mask_prob: float = Field(0.8, ge=0, le=1)
    random_prob: float = Field(0.1, ge=0, le=1)
    random_from: Literal["batch", "image"] = "batch"
    target: Literal["mean_color", "downsized", "pixels"] = "mean_color"
    bits: int = Field(3, ge=1, le=8)

    @model_validator(mode="after")
    def _shares_fit(self) -> Config:
        if self.mask_prob + self.random_prob > 1 + 1e-9:
            raise ValueError("mask_prob + random_prob must not exceed 1")
        return self


def patch_pixels(images_BCHW: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Images -> (B, N, C, P, P), patches in row-major order as the patch embedding numbers them."""
    b, c, h, w = images_BCHW.shape
    p = patch_size
    grid = images_BCHW.reshape(b, c, h // p, p, w // p, p)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(b, (h // p) * (w // p), c, p, p)


def mean_color_classes(images_BCHW: torch.Tensor, patch_size: int, bits: int = 3) -> torch.Tensor:
    """uint8 images -> each patch's mean color as a class, int64 (B, N).

    Each channel's mean over the patch's pixels (0..255) falls into one of 2**bits equal bins; the class reads the bins
    as digits, first channel highest: 64 * R + 8 * G + B for 3 bits of RGB. Exact: sums of whole numbers, below what the
    float type holds.
    """
    pixels = images_BCHW.to(torch.float32 if patch_size <= 256 else torch.float64)
    sums_BNC = F.avg_pool2d(pixels, patch_size, divisor_override=1).flatten(2).transpose(1, 2).long()
    bins_BNC = sums_BNC * 2**bits // (256 * patch_size**2)
    weights_C = 2 ** (bits * torch.arange(bins_BNC.shape[-1] - 1, -1, -1, device=bins_BNC.device))
    return (bins_BNC * weights_C).sum(-1)


def class_colors(classes: torch.Tensor, channels: int, bits: int = 3) -> torch.Tensor:
    """The color in the middle of each class's bins: int64 (...,) -> uint8 (..., C). The inverse for pictures."""
    digits = [(classes >> (bits * (channels - 1 - c))) & (2**bits - 1) for c in range(channels)]
    return ((torch.stack(digits, dim=-1) * 2 + 1) * (256 >> (bits + 1)) if bits < 8 else torch.stack(digits, -1)).byte()


def corrupt(
    tokens_BND: torch.Tensor,
    mask_token_D: torch.Tensor,
    count: int,
    generator: torch.Generator | None = None,
    *,
    noise_BM: torch.Tensor | None = None,
    mask_prob: float = 0.8,
    random_prob: float = 0.1,
    random_from: Literal["batch", "image"] = "batch",
    pool: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Corrupt exactly `count` = K patch embeddings of every image.

    generator: draws the noise where `noise_BM` is None.
    noise_BM: uniform in [0, 1), M = `noise_needed`.
    mask_prob, random_prob: see `Config`. A random patch is never the patch itself.
    random_from: `batch` draws from groups of `pool` consecutive images (0: the whole batch).

    Returns the tokens (B, N, D) and the corrupted patches, int64 (B, K), distinct in each row. Shapes are static.
    Raises ValueError for a count outside 1..N, and for noise or a pool that does not fit the batch.
    """
    b, n, _ = tokens_BND.shape
    if not 1 <= count <= n:
        raise ValueError(f"cannot corrupt {count} of {n} patches")
    needed = noise_needed(n, count)
    if noise_BM is None:
        noise_BM = torch.rand(b, needed, generator=generator, device=tokens_BND.device)
    if noise_BM.shape != (b, needed):
        raise ValueError(f"noise is {tuple(noise_BM.shape)}, not {(b, needed)}")
    indices_BK = noise_BM[:, :n].argsort(dim=1, stable=True)[:, :count]
    kind_BK1 = noise_BM[:, n : n + count, None]
    images = 1 if random_from == "image" else (pool or b)
    if b % images:
        raise ValueError(f"{b} images are not groups of {images}")
    # Stepping 1..M-1 places around the ring of the M patches of a group never lands on the patch itself.
    ring = images * n
    steps_BK = (noise_BM[:, n + count : n + 2 * count] * (ring - 1)).long().clamp(max=max(ring - 2, 0)) + 1
    row_B1 = torch.arange(b, device=tokens_BND.device)[:, None]
    start_B1 = row_B1 // images * ring
    donors_BK = start_B1 + (row_B1 % images * n + indices_BK + steps_BK) % ring
    flat = tokens_BND.flatten(0, 1)
    donated_BKD = flat.index_select(0, donors_BK.flatten()).unflatten(0, (b, -1))
    own_BKD = take(tokens_BND, indices_BK)
    kept_BKD = torch.where(kind_BK1 < mask_prob + random_prob, donated_BKD, own_BKD)
    replaced_BKD = torch.where(kind_BK1 < mask_prob, mask_token_D.to(tokens_BND.dtype), kept_BKD)
    corrupted = flat.index_copy(0, flat_rows(indices_BK, n), replaced_BKD.flatten(0, 1))
    return corrupted.unflatten(0, (b, n)), indices_BK


def noise_needed(patches: int, count: int) -> int:
    """How many uniform numbers the corruption of an image takes."""
    return patches + 2 * count


class Objective(nn.Module):
    """The encoder, the mask token and a linear head on the corrupted patches' outputs."""

    reconstructs = True

    def __init__(self, encoder: Encoder, config: Config, classes: int | None = None) -> None:
        super().__init__()
        encoder = require_vit(encoder, "objective.name=masked_patch")
        self.encoder, self.config = encoder, config
        self.count = max(1, round(config.mask_ratio * encoder.patches))
        if config.target == "downsized" and encoder.patch_size % _DOWNSIZED:
            raise UserError(f"objective.target=downsized needs a patch size that {_DOWNSIZED} divides")
        self.colors = 0 if config.target == "pixels" else 2 ** (config.bits * encoder.channels)
        if self.colors > _MOST_CLASSES:
            fitting = int(math.log2(_MOST_CLASSES)) // encoder.channels
            raise UserError(
                f"objective.bits={config.bits} with {encoder.channels} channels makes {self.colors:,} classes: "
                f"use {f'at most {fitting} bits, or ' if fitting else ''}objective.target=pixels"
            )
        slots = _DOWNSIZED**2 if config.target == "downsized" else 1
        pixels = encoder.channels * encoder.patch_size**2
        self.mask_token = nn.Parameter(torch.empty(encoder.width))
        self.head = nn.Linear(encoder.width, pixels if config.target == "pixels" else slots * self.colors)
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", torch.zeros(self.colors))
        nn.init.normal_(self.mask_token, std=0.02)  # timm's scale for embeddings
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def noise_per_sample(self) -> int:
        return noise_needed(self.encoder.patches, self.count)

    def corrupt(
        self, patches_BND: torch.Tensor, mask_D: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`corrupt` as configured, by the batch's noise; patches: embeddings, or pixels for a picture."""
        c = self.config
        return corrupt(
            patches_BND,
            mask_D,
            self.count,
            noise_BM=batch.noise,
            mask_prob=c.mask_prob,
            random_prob=c.random_prob,
            random_from=c.random_from,
            pool=batch.lane_size,
        )

    def targets(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """uint8 images -> the targets of every patch: int64 (B, N, slots), or float32 (B, N, P*P*C) in [0, 1]."""
        patch = self.encoder.patch_size
        if self.config.target == "pixels":
            return patch_pixels(images_BCHW, patch).flatten(2).float() / 255
        if self.config.target == "mean_color":
            return mean_color_classes(images_BCHW, patch, self.config.bits)[..., None]
        small = mean_color_classes(images_BCHW, patch // _DOWNSIZED, self.config.bits)
        side_h, side_w = images_BCHW.shape[2] * _DOWNSIZED // patch, images_BCHW.shape[3] * _DOWNSIZED // patch
        grid = small.reshape(-1, 1, side_h, side_w)
        return patch_pixels(grid, _DOWNSIZED).flatten(2)

    def predict(self, batch: Batch, images_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Corrupt, encode, predict: (head outputs float32 (B, K, ...), corrupted patches (B, K), tokens (B, N, D))."""
        tokens, indices = self.corrupt(self.encoder.embed(images_BCHW), self.mask_token, batch)
        return self.head(self.encoder.encode(tokens, keep_BK=indices)).float(), indices, tokens

    def forward(self, batch: Batch) -> StepOutput:
        """Loss and metrics over the corrupted patches alone; `summarize` adds those of the constant baseline."""
        images = device_images(batch)
        outputs_BKO, indices_BK, _ = self.predict(batch, images)
        targets = self.targets(images)
        targets_BKS = targets.gather(1, indices_BK[..., None].expand(-1, -1, targets.shape[-1]))
        if self.config.target == "pixels":
            loss = batch.mean((outputs_BKO - targets_BKS).square().mean(dim=(1, 2)))
            weights_B1 = batch.valid.float()[:, None] / batch.valid.sum().clamp(min=1)
            square = batch.mean(targets_BKS.square().mean(dim=(1, 2)))
            return StepOutput(loss, {"target_mean": (targets_BKS.mean(1) * weights_B1).sum(0), "target_square": square})
        logits = outputs_BKO.reshape(*targets_BKS.shape, self.colors)
        per_patch = F.cross_entropy(logits.flatten(0, 2), targets_BKS.flatten(), reduction="none")
        loss = batch.mean(per_patch.reshape(len(targets_BKS), -1).mean(1))
        hits = (logits.detach().argmax(-1) == targets_BKS).float().mean(dim=(1, 2))
        flat = targets_BKS.flatten()
        weights = batch.valid.float()[:, None, None].expand_as(targets_BKS).flatten()
        counts = torch.zeros(self.colors, device=flat.device).scatter_add_(0, flat, weights)
        return StepOutput(loss, {"accuracy": batch.mean(hits), "class_shares": counts / weights.sum().clamp(min=1)})

    @torch.no_grad()
    def summarize(self, means: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Metrics of S steps -> what is logged: also `constant_*`, loss and accuracy of the best constant prediction.

        For classes it predicts their frequencies so far: those of one batch, which shows few of the classes, would
        flatter it.
        """
        logged = dict(means)
        if self.config.target == "pixels":
            square, mean_SP = logged.pop("target_square"), logged.pop("target_mean")
            return {**logged, "constant_loss": square - mean_SP.square().mean(-1)}
        losses, hits = [], []
        shares_SC = logged.pop("class_shares")
        seen = self.frequencies.cpu()
        for shares in shares_SC:
            seen = torch.lerp(seen, shares.float(), _FREQUENCY_RATE)  # in the buffer's precision at every step
            baseline = seen.double() / seen.sum().clamp(min=1e-30)
            losses.append(-torch.special.xlogy(shares, baseline).sum())
            hits.append(shares[baseline.argmax()])
        self.frequencies.copy_(seen)
        return {**logged, "constant_loss": torch.stack(losses), "constant_accuracy": torch.stack(hits)}
