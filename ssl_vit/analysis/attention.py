"""Attention of a trained ViT: probabilities by layer, mean attention distance, attention rollout.

timm's blocks use fused attention, which returns no probabilities. Here they are computed again from the queries and
keys that a block gives to the fused kernel, for any kind of block; the model itself runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from ssl_vit.interfaces import UserError
from ssl_vit.models.vit import ViTEncoder

_MAP_NUMBERS = 2**24  # of one layer's attention held at once (64 MiB in float32), unless one image alone has more


class Probabilities(TorchFunctionMode):
    """Within it, each fused attention call adds softmax(scale * q k^T + bias), (B, H, T, T), to `maps` and runs as
    before."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            queries, keys = args[:2]
            given = kwargs or {}
            bias = given.get("attn_mask")  # of relative positions
            if (bias is not None and bias.dtype == torch.bool) or given.get("is_causal") or given.get("scale"):
                raise UserError("attention with a mask or a scale of its own cannot be pictured")
            logits = queries * queries.shape[-1] ** -0.5 @ keys.mT
            self.maps.append((logits if bias is None else logits + bias).softmax(-1))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def attention_maps(encoder: ViTEncoder, images_BCHW: torch.Tensor) -> Iterator[torch.Tensor]:
    """The attention probabilities (B, H, T, T) of each layer, one at a time, while the forward pass runs.

    T counts prefix tokens and patches; row q holds how query token q spreads its attention over all tokens and sums to
    1. Where a block makes several attention calls (parallel or differential attention), H counts the heads of all.
    Raises UserError for attention with a mask or a scale of its own, and where timm's fused attention is switched off.
    """
    tokens = encoder.enter(encoder.embed(images_BCHW))
    for layer, block in enumerate(encoder.network.blocks):
        with Probabilities() as seen:
            tokens = block(tokens)
        if not seen.maps:
            raise UserError(f"{encoder.name}: layer {layer} did not use fused attention; unset TIMM_FUSED_ATTN")
        maps = seen.maps.pop() if len(seen.maps) == 1 else torch.cat(seen.maps, dim=1)
        del seen
        yield maps


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
    found = []
    for group in _groups(encoder, images_NCHW):
        rolled = None
        for maps in attention_maps(encoder, group):
            mixed = maps.mean(1)
            mixed.diagonal(dim1=-2, dim2=-1).add_(1)
            mixed /= mixed.sum(-1, keepdim=True)
            rolled = mixed if rolled is None else mixed @ rolled
        assert rolled is not None
        row = rolled[:, 0] if encoder.has_class_token else rolled[:, prefix:].mean(1)
        found.append(row[:, prefix:].reshape(-1, *encoder.grid).cpu().double())
    return torch.cat(found).numpy()
