"""The one backbone that every stage shares: its configuration (torch-free; `backbone.py` builds it)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ssl_vit.interfaces import Config


class BackboneConfig(Config):
    """A timm Vision Transformer, by name, with any size overridden.

    name: a timm model whose class is VisionTransformer (`vit_base_patch16_224`, `vit_tiny_patch16_224`, ...).
    image_size: pixels (square). channels: 1 grey, 3 RGB, 4 RGBA. patch_size: pixels; None: the name's own.
    width, depth, heads, mlp_ratio: None: the name's own.
    dropout: after the position embedding and inside the MLPs and projections, as the paper puts it (table 3: 0.1).
    init: `jax` (the authors' initialisation: Xavier-uniform projections, as timm carries it) or `timm` (normal 0.02).
    position_std: standard deviation of the initial position embeddings (authors: 0.02).
    drop_path: stochastic depth rate of the last block.
    mean, std: normalisation of pixels scaled to [0, 1]; 0.5/0.5 gives the paper authors' [-1, 1].
    """

    name: str = "vit_base_patch16_224"
    image_size: int = Field(224, ge=1)
    channels: int = Field(3, ge=1)
    patch_size: int | None = Field(None, ge=1)
    width: int | None = Field(None, ge=1)
    depth: int | None = Field(None, ge=1)
    heads: int | None = Field(None, ge=1)
    mlp_ratio: float | None = Field(None, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    drop_path: float = Field(0.0, ge=0, lt=1)
    init: Literal["jax", "timm"] = "jax"
    position_std: float = Field(0.02, gt=0)
    mean: float = 0.5
    std: float = Field(0.5, gt=0)
