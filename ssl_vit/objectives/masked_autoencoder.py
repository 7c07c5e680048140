"""Masked autoencoder (He et al. 2022, arXiv 2111.06377): encode a quarter of the patches, predict the rest."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block
from torch import nn

from ssl_vit.data.augment import device_images
from ssl_vit.interfaces import Batch, ObjectiveConfig, StepOutput, UserError
from ssl_vit.models import Pooling
from ssl_vit.models.blocks import make_last, run_all, run_last, take
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.factory import require_patches
from ssl_vit.models.objective import Objective as BaseObjective
from ssl_vit.models.vit import ViTEncoder
from ssl_vit.objectives.patches import MASK_GRAY, constant_l2, moments, patch_pixels, replaced

_EPS = 1e-6  # of the layer norms and of the targets' variance, as in MAE's code
_BASE = 768  # the width of ViT-B, from which on MAE's own decoder is the default
_HEAD = 32  # width of a decoder head: 512 / 16


class Config(ObjectiveConfig):
    """Defaults are MAE's for ViT-B/16 and larger; its decoder would cost more than a small encoder.

    mask_ratio: fraction of the patches that the encoder does not see (round(ratio * N), at least 1, at most N - 1).
    decoder_width: width of the decoder. None: 512 for encoders of width 768 and more; for smaller ones half the
        encoder's width (rounded up to a multiple of 32).
    decoder_depth: number of decoder blocks. None: 8 for encoders of width 768 and more; for smaller ones a third of the
        encoder's depth (at least 1).
    decoder_heads: attention heads of the decoder. None: decoder_width / 32.
    """

    pooling: ClassVar[Pooling] = "mean"  # of timm's model: the class token is not trained

    name: Literal["masked_autoencoder"] = "masked_autoencoder"
    mask_ratio: float = Field(0.75, gt=0, lt=1)
    decoder_width: int | None = Field(None, ge=4, le=16384)
    decoder_depth: int | None = Field(None, ge=1, le=1024)
    decoder_heads: int | None = Field(None, ge=1, le=1024)


class Objective(BaseObjective):
    """The encoder on the visible patches and its prefix tokens, and a decoder on all.

    The loss is the mean squared error on the masked patches. Their pixels, as the encoder's input has them, are shifted
    and scaled to mean 0 and variance 1 per patch.
    """

    encoder: ViTEncoder

    def __init__(self, encoder: Encoder, config: Config, classes: int | None = None) -> None:
        """Raises UserError for an encoder that is not a plain ViT of 2 patches or more, and for a decoder of sizes that
        do not fit together."""
        super().__init__()
        key = "objective.name=masked_autoencoder"
        encoder = require_patches(encoder, key)
        if encoder.patches < 2 or encoder.channels * encoder.patch_size**2 < 2:
            raise UserError(f"{key} needs at least 2 patches per image and 2 values per patch: set encoder.patch_size")
        self.encoder, self.config = encoder, config
        self.masked = min(max(1, round(config.mask_ratio * encoder.patches)), encoder.patches - 1)
        small, depth = encoder.width < _BASE, len(encoder.network.blocks)
        width = config.decoder_width or (-(-encoder.width // (2 * _HEAD)) * _HEAD if small else 512)
        heads = config.decoder_heads or max(1, width // _HEAD)
        if width % 4 or width % heads:
            raise UserError(f"objective.decoder_width={width} must be a multiple of 4 and of its {heads} heads")
        norm = partial(nn.LayerNorm, eps=_EPS)
        self.entry = nn.Linear(encoder.width, width)
        self.mask_token = nn.Parameter(torch.empty(width))
        self.blocks = nn.ModuleList(
            Block(width, heads, qkv_bias=True, norm_layer=norm)
            for _ in range(config.decoder_depth or (max(1, depth // 3) if small else 8))
        )
        make_last(self.blocks[-1])
        self.norm = norm(width)
        self.head = nn.Linear(width, encoder.channels * encoder.patch_size**2)
        self.positions: torch.Tensor
        self.register_buffer("positions", build_sincos2d_pos_embed([*encoder.grid], width), persistent=False)
        nn.init.normal_(self.mask_token, std=0.02)
        for module in (self.entry, *self.blocks.modules(), self.head):
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def noise_per_sample(self) -> int:
        return self.encoder.patches

    def enter(self, encoded: torch.Tensor, order_BN: torch.Tensor) -> torch.Tensor:
        """The encoder's output tokens (B, P + K, D) -> what the decoder reads (B, P + N, decoder width).

        Prefix tokens, visible patches, then the mask token for the others, each with the position that `order` gives.
        """
        seen = self.entry(encoded)
        hidden = self.mask_token.expand(len(seen), self.masked, -1)
        positions = self.positions.index_select(0, order_BN.flatten()).unflatten(0, order_BN.shape)
        return torch.cat([seen, hidden], dim=1) + F.pad(positions, (0, 0, self.encoder.prefix_tokens, 0))

    def predict(self, batch: Batch, images_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask by the batch's noise, encode, decode: (float32 (B, M, C*P*P), the M masked patches, int64 (B, M))."""
        order_BN = batch.noise.argsort(dim=1, stable=True)
        visible_BK, masked_BM = order_BN.split([self.encoder.patches - self.masked, self.masked], dim=1)
        tokens = self.enter(self.encoder.encode_visible(self.encoder.embed(images_BCHW), visible_BK), order_BN)
        *before, last = self.blocks
        tokens = run_all(before, tokens, grad_checkpointing=self.encoder.network.grad_checkpointing)
        tokens = run_last(last, tokens, lambda every: every[:, -self.masked :])
        return self.head(self.norm(tokens)).float(), masked_BM

    def _pixels(self, images_BCHW: torch.Tensor, index_BM: torch.Tensor) -> torch.Tensor:
        """uint8 images -> the pixels of these patches as the encoder's input has them, float32 (B, M, C, P, P)."""
        return self.encoder.normalized(take(patch_pixels(images_BCHW, self.encoder.patch_size), index_BM))

    def targets(self, images_BCHW: torch.Tensor, index_BM: torch.Tensor) -> torch.Tensor:
        """uint8 images -> the targets of these patches, float32 (B, M, C*P*P), mean 0 and variance 1 per patch."""
        pixels_BMS = self._pixels(images_BCHW, index_BM).flatten(2)
        variance, mean = torch.var_mean(pixels_BMS, dim=-1, keepdim=True)
        return (pixels_BMS - mean) / (variance + _EPS).sqrt()

    def reconstruct(self, batch: Batch, images_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the encoder sees (the rest gray), the predictions, and the image, as patches uint8 (B, N, C, P, P).

        The predictions get their patch's own mean and variance back.
        """
        outputs_BMS, masked_BM = self.predict(batch, images_BCHW)
        truth, encoder = patch_pixels(images_BCHW, self.encoder.patch_size), self.encoder
        pixels = self._pixels(images_BCHW, masked_BM)
        variance, mean = torch.var_mean(pixels, dim=(-3, -2, -1), keepdim=True)
        values = outputs_BMS.reshape_as(pixels) * (variance + _EPS).sqrt() + mean
        predicted = ((values + encoder.shift) / encoder.scale).round().clamp(0, 255).byte()
        given = replaced(truth, masked_BM, torch.full_like(predicted, MASK_GRAY))
        return given, replaced(truth, masked_BM, predicted), truth

    def forward(self, batch: Batch) -> StepOutput:
        images = device_images(batch)
        outputs_BMS, masked_BM = self.predict(batch, images)
        targets_BMS = self.targets(images, masked_BM)
        loss = batch.mean((outputs_BMS - targets_BMS).square().mean(dim=(1, 2)))
        return StepOutput(loss, moments(batch, targets_BMS))

    def summarize(self, means: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Metrics of S steps -> what is logged: also `constant_loss`, that of the best constant prediction, about 1."""
        return constant_l2(means)
