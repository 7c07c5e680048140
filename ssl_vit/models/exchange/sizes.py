"""Sizes of a model from its tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ssl_vit.interfaces import UserError
from ssl_vit.models import PerChannel
from ssl_vit.models.factory import named_encoder

PLAIN = "vit_base_patch16_224"  # every size of it is overridden


@dataclass
class Imported:
    """Tensors under timm's names, and the model that they belong to.

    name, arguments: what timm builds it from.
    own: what `ViTEncoder` takes beside them (`norm_eps`, ...).
    skipped: names of tensors that are not part of the encoder.
    notes: what was assumed because the source does not say it.
    """

    name: str
    arguments: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    mean: PerChannel
    std: PerChannel
    own: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    license: str | None = None


def read_sizes(
    tensors: Mapping[str, torch.Tensor],
    origin: str,
    name: str,
    *,
    heads: int | None = None,
    image_size: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The arguments with which timm's `name` becomes the model of these tensors (under timm's names).

    heads: None: the name's own. image_size: pixels; None: a square.
    Raises UserError for tensors that are not a ViT's, LookupError or ValueError for missing or misshapen ones.
    """
    blocks = [int(match[1]) for key in tensors if (match := re.match(r"blocks\.(\d+)\.", key))]
    if not blocks:
        shown = ", ".join(sorted(tensors)[:3])
        raise UserError(f"{origin}: no ViT under timm's, transformers' or Google's names; it holds {shown}, ...")
    named = named_encoder(name)
    if any(key.startswith("patch_embed.backbone.") for key in tensors):
        stem = "stem." if "patch_embed.backbone.stem.conv.weight" in tensors else ""
        patch = [named.patch_size] * 2
        arguments: dict[str, Any] = {"in_chans": tensors[f"patch_embed.backbone.{stem}conv.weight"].shape[1]}
    else:
        width, channels, *patch = tensors["patch_embed.proj.weight"].shape
        if not heads and width != named.width:  # the tensors do not say how many there are
            raise UserError(f"{origin}: its width {width} is not that of {name} ({named.width}); give --heads")
        heads = heads or named.heads
        if width % heads:
            raise UserError(f"{origin}: {heads} heads do not divide its width {width}; give --heads")
        arguments = {
            "patch_size": square(patch),
            "in_chans": channels,
            "embed_dim": width,
            "depth": 1 + max(blocks),
            "num_heads": heads,
            "mlp_ratio": ratio(width, tensors["blocks.0.mlp.fc1.weight"].shape[0]),
        }
    last = "fc_norm.weight" in tensors and "norm.weight" not in tensors  # the last norm comes after pooling
    if "cls_token" not in tensors:
        arguments |= {"class_token": False, "global_pool": "avg", "fc_norm": last}
    elif last:
        arguments |= {"global_pool": "avg", "fc_norm": True}
    if "blocks.0.attn.qkv.bias" not in tensors:
        arguments["qkv_bias"] = False
    prefix = ("cls_token" in tensors) + (tensors["reg_token"].shape[1] if "reg_token" in tensors else 0)
    positions = tensors["pos_embed"].shape[1]
    return {**arguments, **position_sizes(positions, prefix, (patch[0], patch[1]), origin, image_size)}


def position_sizes(
    positions: int, prefix: int, patch: tuple[int, int], origin: str, image_size: tuple[int, int] | None = None
) -> dict[str, Any]:
    """timm's `img_size`, and `no_embed_class` where the prefix tokens have no positions.

    positions: how many there are. prefix: how many prefix tokens. image_size: pixels; None: a square.
    """
    if image_size is None:  # a square has a square number of patches; prefix tokens may have positions too
        side = next((math.isqrt(n) for n in (positions - prefix, positions) if n > 0 and math.isqrt(n) ** 2 == n), None)
        if side is None:
            raise UserError(f"{origin}: {positions} positions are not a square of patches plus {prefix}")
        image_size = (side * patch[0], side * patch[1])
    alone = prefix and positions == (image_size[0] // patch[0]) * (image_size[1] // patch[1])
    return {"img_size": square(image_size), **({"no_embed_class": True} if alone else {})}


def square(sides: list[int] | tuple[int, ...]) -> int | tuple[int, ...]:
    """(height, width), or one number where they agree."""
    return sides[0] if sides[0] == sides[1] else tuple(sides)


def ratio(width: int, hidden: int) -> float:
    """The mlp_ratio from which timm's `int(width * mlp_ratio)` makes `hidden`."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)
