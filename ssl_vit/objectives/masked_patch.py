"""Masked patch prediction (paper, appendix B.1.2): corrupt half of the patch embeddings, predict their mean colors."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field, model_validator
from torch import nn

from ssl_vit.data.augment import device_images
from ssl_vit.interfaces import Batch, ObjectiveConfig, StepOutput, UserError
from ssl_vit.models import Pooling
from ssl_vit.models.blocks import flat_rows, take
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.factory import require_patches
from ssl_vit.models.objective import Objective as BaseObjective
from ssl_vit.models.vit import ViTEncoder
from ssl_vit.objectives.patches import (
    DOWNSIZED,
    MASK_GRAY,
    class_shares,
    constant_l1,
    constant_l2,
    downsized_classes,
    level_shares,
    moments,
    patch_pixels,
    replaced,
)

_FREQUENCY_RATE = 0.01  # the class frequencies are a moving average over about 100 batches
_MOST_CLASSES = 2**16  # a head of more would outweigh the encoder


class Config(ObjectiveConfig):
    """Defaults are the paper's. SimMIM (Xie et al. 2022): mask_ratio 0.6, mask_size 32, mask_prob 1, random_prob 0,
    target pixels, loss l1.

    mask_ratio: fraction of the patches corrupted in every image (round(ratio * N), at least one; N squares with
        `mask_size`); BERT's is 0.15.
    mask_prob: probability that a corrupted patch becomes the learnable [mask] embedding. The loss counts all corrupted
        patches.
    random_prob: probability that it becomes the embedding of another patch; the rest stay as they are.
    random_from: where the other patch comes from: `batch` (the images of the same lane in the same step, so that the
        result does not depend on the number of processes) or the same `image`.
    mask_size: pixels, the side of the squares of patches that are corrupted together; None: each patch alone. SimMIM's
        is 32.
    target: `mean_color` (one class per patch), `downsized` (the patch at 4x4, 16 classes per patch), `pixels` (all
        values of the patch, scaled to [0, 1]).
    loss: loss for the target `pixels`: `l2` (the mean squared error) or `l1` (the mean absolute error, SimMIM's).
    bits: bits of each quantized color channel; there are 2**(bits * channels) classes, at most 65,536.
    """

    pooling: ClassVar[Pooling] = "mean"  # of timm's model: the class token is not trained

    name: Literal["masked_patch"] = "masked_patch"
    mask_ratio: float = Field(0.5, gt=0, le=1)
    mask_prob: float = Field(0.8, ge=0, le=1)
    random_prob: float = Field(0.1, ge=0, le=1)
    random_from: Literal["batch", "image"] = "batch"
    mask_size: int | None = Field(None, ge=1)
    target: Literal["mean_color", "downsized", "pixels"] = "mean_color"
    loss: Literal["l2", "l1"] = "l2"
    bits: int = Field(3, ge=1, le=8)

    @model_validator(mode="after")
    def _shares_fit(self) -> Config:
        if self.mask_prob + self.random_prob > 1 + 1e-9:
            raise ValueError("mask_prob + random_prob must not exceed 1")
        if self.loss == "l1" and self.target != "pixels":
            raise ValueError(f"loss=l1 requires target=pixels; target={self.target} uses cross-entropy")
        return self


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
    groups_GS: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Corrupt exactly `count` = K patch embeddings of every image.

    generator: draws the noise where `noise_BM` is None.
    noise_BM: uniform in [0, 1), M = `noise_needed`.
    mask_prob: see `Config`.
    random_prob: see `Config`. A random patch is never the patch itself.
    random_from: `batch` draws from groups of `pool` consecutive images (0: the whole batch).
    groups_GS: int64, G groups of S patches that are corrupted together; `count` must be a multiple of S. None: each
        patch alone.

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
    groups = torch.arange(n, device=tokens_BND.device)[:, None] if groups_GS is None else groups_GS
    chosen = noise_BM[:, : len(groups)].argsort(dim=1, stable=True)[:, : count // groups.shape[1]]
    indices_BK = groups.index_select(0, chosen.flatten()).reshape(b, count)
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


class Objective(BaseObjective):
    """The encoder, the mask token and a linear head on the corrupted patches' outputs."""

    encoder: ViTEncoder

    def __init__(self, encoder: Encoder, config: Config, classes: int | None = None) -> None:
        super().__init__()
        encoder = require_patches(encoder, "objective.name=masked_patch")
        self.encoder, self.config = encoder, config
        self.groups_GS: torch.Tensor
        self.register_buffer("groups_GS", self._groups(), persistent=False)
        number, size = self.groups_GS.shape
        self.count = size * max(1, round(config.mask_ratio * number))
        if config.target == "downsized" and encoder.patch_size < DOWNSIZED:
            raise UserError(f"objective.target=downsized needs patches of at least {DOWNSIZED} pixels")
        self.colors = 0 if config.target == "pixels" else 2 ** (config.bits * encoder.channels)
        if self.colors > _MOST_CLASSES:
            fitting = int(math.log2(_MOST_CLASSES)) // encoder.channels
            raise UserError(
                f"objective.bits={config.bits} with {encoder.channels} channels makes {self.colors:,} classes: "
                f"use {f'at most {fitting} bits, or ' if fitting else ''}objective.target=pixels"
            )
        slots = DOWNSIZED**2 if config.target == "downsized" else 1
        pixels = encoder.channels * encoder.patch_size**2
        self.mask_token = nn.Parameter(torch.empty(encoder.width))
        self.head = nn.Linear(encoder.width, pixels if config.target == "pixels" else slots * self.colors)
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", torch.zeros(self.colors))
        nn.init.normal_(self.mask_token, std=0.02)  # timm's scale for embeddings
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def _groups(self) -> torch.Tensor:
        """The patches of each square of `mask_size` pixels, int64 (G, S). Raises UserError if they do not fit."""
        patch, (height, width) = self.encoder.patch_size, self.encoder.image_size
        side = self.config.mask_size or patch
        if side % patch or height % side or width % side:
            raise UserError(
                f"objective.mask_size={side} must be a multiple of the patch size {patch} and divide the image of "
                f"{height}x{width} pixels"
            )
        numbers = torch.arange(self.encoder.patches).reshape(1, 1, *self.encoder.grid)
        return patch_pixels(numbers, side // patch).flatten(2)[0]

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
            groups_GS=self.groups_GS,
        )

    def targets(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """uint8 images -> the targets of every patch: int64 (B, N, slots), or float32 (B, N, P*P*C) in [0, 1]."""
        patch = self.encoder.patch_size
        if self.config.target == "pixels":
            return patch_pixels(images_BCHW, patch).flatten(2).float() / 255
        if self.config.target == "mean_color":
            return mean_color_classes(images_BCHW, patch, self.config.bits)[..., None]
        return downsized_classes(images_BCHW, patch, self.config.bits)

    def predict(self, batch: Batch, images_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Corrupt, encode, predict: (head outputs float32 (B, K, ...), corrupted patches (B, K), tokens (B, N, D))."""
        tokens, indices = self.corrupt(self.encoder.embed(images_BCHW), self.mask_token, batch)
        return self.head(self.encoder.encode(tokens, keep_BK=indices)).float(), indices, tokens

    def reconstruct(self, batch: Batch, images_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the model is given, what it predicts and what is true, as patches uint8 (B, N, C, P, P).

        Given are [mask] as gray, a random patch's pixels, or the patch unchanged; predicted are the corrupted patches.
        """
        outputs_BKO, indices_BK, _ = self.predict(batch, images_BCHW)
        patches = patch_pixels(images_BCHW, self.encoder.patch_size)
        # The batch's noise alone draws the corruption: pixels are corrupted as the embeddings are.
        given, _ = self.corrupt(patches.flatten(2), torch.full_like(patches[0, 0].flatten(), MASK_GRAY), batch)
        if self.config.target == "pixels":
            truth = patches
            predicted = (outputs_BKO.unflatten(-1, patches.shape[2:]).clamp(0, 1) * 255).byte()
        else:
            truth = self._colored(self.targets(images_BCHW))
            predicted = self._colored(outputs_BKO.unflatten(-1, (-1, self.colors)).argmax(-1))
        return given.reshape_as(patches), replaced(truth, indices_BK, predicted), truth

    def _colored(self, classes_BKS: torch.Tensor) -> torch.Tensor:
        """Classes of 1 or 4x4 cells per patch -> patches of these flat colors, uint8 (B, K, C, P, P)."""
        side = DOWNSIZED if self.config.target == "downsized" else 1
        colors = class_colors(classes_BKS, self.encoder.channels, self.config.bits)
        cells = colors.transpose(-1, -2).unflatten(-1, (side, side))
        of_pixel_P = torch.arange(self.encoder.patch_size, device=cells.device) * side // self.encoder.patch_size
        return cells.index_select(-1, of_pixel_P).index_select(-2, of_pixel_P)

    def forward(self, batch: Batch) -> StepOutput:
        """Loss and metrics over the corrupted patches alone; `summarize` adds those of the constant baseline."""
        images = device_images(batch)
        outputs_BKO, indices_BK, _ = self.predict(batch, images)
        targets = self.targets(images)
        targets_BKS = targets.gather(1, indices_BK[..., None].expand(-1, -1, targets.shape[-1]))
        if self.config.loss == "l1":
            loss = batch.mean((outputs_BKO - targets_BKS).abs().mean(dim=(1, 2)))
            return StepOutput(loss, {"level_shares": level_shares(batch, targets_BKS, images.shape[1])})
        if self.config.target == "pixels":
            loss = batch.mean((outputs_BKO - targets_BKS).square().mean(dim=(1, 2)))
            return StepOutput(loss, moments(batch, targets_BKS))
        logits = outputs_BKO.reshape(*targets_BKS.shape, self.colors)
        per_patch = F.cross_entropy(logits.flatten(0, 2), targets_BKS.flatten(), reduction="none")
        loss = batch.mean(per_patch.reshape(len(targets_BKS), -1).mean(1))
        hits = (logits.detach().argmax(-1) == targets_BKS).float().mean(dim=(1, 2))
        shares = class_shares(batch, targets_BKS, self.colors)
        return StepOutput(loss, {"accuracy": batch.mean(hits), "class_shares": shares})

    @torch.no_grad()
    def summarize(self, means: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Metrics of S steps -> what is logged: also `constant_*`, loss and accuracy of the best constant prediction.

        For classes it predicts their frequencies so far: those of one batch, which shows few of the classes, would
        flatter it. For pixels it is the mean patch of the steps' own targets (L2) or their median color (L1).
        """
        if self.config.target == "pixels":
            return constant_l1(means) if self.config.loss == "l1" else constant_l2(means)
        logged = dict(means)
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
