"""Attention of a trained ViT: probabilities by layer, mean attention distance, attention rollout.

timm's blocks use fused attention, which returns no probabilities. They are taken from an unfused copy of each block.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch

from ssl_vit.models.vit import ViTEncoder

_MAP_NUMBERS = 2**24  # of one layer's attention held at once (64 MiB in float32), unless one image alone has more


@torch.no_grad()
def attention_maps(encoder: ViTEncoder, images_BCHW: torch.Tensor) -> Iterator[torch.Tensor]:
    """The attention probabilities (B, H, T, T) of each layer, one at a time, while the forward pass runs.

    T counts prefix tokens and patches; row q holds how query token q spreads its attention over all tokens and sums to
    1. Where a block makes several attention calls (parallel or differential attention), H counts the heads of all.
    """
    tokens = encoder.enter(encoder.embed(images_BCHW))
    for block in encoder.network.blocks:
        unfused, maps = copy.deepcopy(block), list[torch.Tensor]()
        for module in unfused.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
                module.attn_drop.register_forward_pre_hook(lambda _, inputs, own=maps: own.append(inputs[0]))
        tokens = unfused(tokens)
        yield torch.cat(maps, dim=1)


def _groups(encoder: ViTEncoder, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The images in groups whose attention in one layer fits into memory."""
    tokens = encoder.prefix_tokens + encoder.patches
    return images_NCHW.split(max(1, _MAP_NUMBERS // (encoder.heads * tokens**2)))


def patch_distances(encoder: ViTEncoder) -> torch.Tensor:
    """Euclidean distances between all patch centers in pixels of the image, float64 (N, N)."""
    (rows, columns), (height, width) = encoder.grid, encoder.image_size
    y = (torch.arange(rows, dtype=torch.float64) + 0.5) * (height / rows)
    x = (torch.arange(columns, dtype=torch.float64) + 0.5) * (width / columns)
    centers_N2 = torch.cartesian_prod(y, x)
    return (centers_N2[:, None] - centers_N2[None]).square().sum(-1).sqrt()


@torch.no_grad()
def attention_distance(encoder: ViTEncoder, images_NCHW: torch.Tensor) -> np.ndarray:
    """Mean attention distance in pixels, float64 (layers, heads) (paper, section 4.5 and figure 7, right).

    For each query patch the distances to the key patches' centers, weighted by its attention; then the mean over query
    patches and images (uint8). Class token and registers are excluded, as queries and as keys; the attention that a
    patch pays to patches is scaled to sum to 1.
    """
    prefix = encoder.prefix_tokens
    distances = patch_distances(encoder).to(images_NCHW.device, torch.float32)
    total = torch.zeros(())
    for group in _groups(encoder, images_NCHW):
        rows = []
        for maps in attention_maps(encoder, group):
            between = maps[..., prefix:, prefix:]
            paid = between.sum(-1).clamp(min=torch.finfo(between.dtype).tiny)
            lengths_BHN = (between * distances).sum(-1) / paid
            rows.append(lengths_BHN.cpu().double().mean(-1).sum(0))
        total = total + torch.stack(rows)
    return (total / len(images_NCHW)).numpy()


@torch.no_grad()
def rollout(encoder: ViTEncoder, images_NCHW: torch.Tensor) -> np.ndarray:
    """Attention rollout over the image, float64 (N, grid rows, grid columns) (paper, section 4.5, figure 6; Abnar and
    Zuidema 2020).

    In each layer: mean over heads, plus the identity for the residual connection, rows scaled to sum to 1; the matrices
    multiplied through the layers. The result is the class token's row (without a class token: the mean of the patches'
    rows), at the patches; with the prefix tokens' entries it would sum to 1.
    """
    prefix = encoder.prefix_tokens
    maps_by_layer = []
    for group in _groups(encoder, images_NCHW):
        rolled = None
        for maps in attention_maps(encoder, group):
            mixed = maps.mean(1)
            mixed.diagonal(dim1=-2, dim2=-1).add_(1)
            mixed /= mixed.sum(-1, keepdim=True)
            rolled = mixed if rolled is None else mixed @ rolled
        assert rolled is not None
        row = rolled[:, 0] if encoder.has_class_token else rolled[:, prefix:].mean(1)
        maps_by_layer.append(row[:, prefix:].reshape(-1, *encoder.grid).cpu().double())
    return torch.cat(maps_by_layer).numpy()
