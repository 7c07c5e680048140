"""What bare tensors say of their model: sizes from the shapes, the number of heads by timm's own families."""

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

# width: the plain ViT of that width (paper, table 1; Ti and S are timm's)
FAMILIES = {
    192: "vit_tiny_patch16_224",
    384: "vit_small_patch16_224",
    768: "vit_base_patch16_224",
    1024: "vit_large_patch16_224",
    1280: "vit_huge_patch14_224",
    1408: "vit_giant_patch14_224",
    1664: "vit_gigantic_patch14_224",
}
PLAIN = "vit_base_patch16_224"  # what another width is an edition of: every size is overridden


@dataclass
class Found:
    """Tensors under timm's names, and the model that they were found to belong to.

    name, arguments: what timm builds it from; own: what `ViTEncoder` takes beside (`norm_eps`, ...). left_out: names of
    tensors that are no part of the encoder. notes: what the source does not say and was deduced. assumed: the same of
    mean and std, where they were assumed.
    """

    name: str
    arguments: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    mean: PerChannel
    std: PerChannel
    own: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    license: str | None = None


def family(width: int, depth: int) -> tuple[str, int | None]:
    """timm's plain ViT of this width, and its heads if the depth is its own too (else None)."""
    name = FAMILIES.get(width, PLAIN)
    named = named_encoder(name)
    return name, named.heads if (named.width, len(named.network.blocks)) == (width, depth) else None


def read_sizes(
    tensors: Mapping[str, torch.Tensor],
    origin: str,
    *,
    name: str | None = None,
    heads: int | None = None,
    image_size: tuple[int, int] | None = None,
) -> tuple[str, dict[str, Any], list[str]]:
    """Tensors under timm's names -> (timm's name, what to override in it, what had to be deduced).

    name, heads, image_size (pixels): where the source or the user says them. Raises UserError where the tensors are no
    ViT's, where one that tells a size is missing, and where heads or image cannot be told.
    """
    depth = 1 + max((int(found[1]) for key in tensors if (found := re.match(r"blocks\.(\d+)\.", key))), default=-1)
    if not depth:
        shown = ", ".join(sorted(tensors)[:3])
        raise UserError(f"{origin}: no ViT under timm's, transformers' or Google's names; it holds {shown}, ...")
    if any(key.startswith("patch_embed.backbone.") for key in tensors):
        return _hybrid(tensors, origin, name)
    stem, positions = _need(tensors, "patch_embed.proj.weight", 4, origin), _need(tensors, "pos_embed", 3, origin)
    hidden = _need(tensors, "blocks.0.mlp.fc1.weight", 2, origin).shape[0]
    width, channels, *patch = stem.shape
    notes = []
    if heads is None and name is not None:
        heads = named_encoder(name).heads
    elif heads is None:
        name, heads = family(width, depth)
        if heads is None and width % 64 == 0 and width >= min(FAMILIES):
            heads = width // 64
        if heads is None:
            raise UserError(f"{origin}: width {width} and depth {depth} do not tell the heads: give --heads")
        notes.append(f"taken for {name} with {heads} heads, by its width {width} and depth {depth}")
    if width % heads:
        raise UserError(f"{origin}: {heads} heads do not divide its width {width}")
    arguments: dict[str, Any] = {
        "patch_size": patch[0] if patch[0] == patch[1] else tuple(patch),
        "in_chans": channels,
        "embed_dim": width,
        "depth": depth,
        "num_heads": heads,
        "mlp_ratio": ratio(width, hidden),
        **_parts(tensors),
    }
    prefix = arguments["class_token"] + arguments.get("reg_tokens", 0)
    count = positions.shape[1]
    if image_size is None:
        # Without a word on the image it is square; positions then have a square number of entries, prefix or not.
        own = next((n for n in (count - prefix, count) if n > 0 and math.isqrt(n) ** 2 == n), None)
        if own is None:
            raise UserError(f"{origin}: pos_embed has {count} entries, which is no square of patches and {prefix} more")
        image_size = (math.isqrt(own) * patch[0], math.isqrt(own) * patch[1])
    patches = (image_size[0] // patch[0]) * (image_size[1] // patch[1])
    arguments["img_size"] = image_size[0] if image_size[0] == image_size[1] else image_size
    if prefix and count == patches:
        arguments["no_embed_class"] = True
    return name or family(width, depth)[0], arguments, notes


def _parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """timm's arguments for the parts that a ViT has or has not, told by their tensors."""
    parts: dict[str, Any] = {"class_token": "cls_token" in tensors}
    last = "fc_norm.weight" in tensors and "norm.weight" not in tensors  # the last norm comes after pooling
    if last or not parts["class_token"]:
        parts |= {"global_pool": "avg", "fc_norm": last}
    if "reg_token" in tensors:
        parts["reg_tokens"] = tensors["reg_token"].shape[1]
    if "blocks.0.attn.qkv.bias" not in tensors:
        parts["qkv_bias"] = False
    if "blocks.0.ls1.gamma" in tensors:
        parts["init_values"] = 1e-5  # any number makes the layer scales, which are then loaded
    if "blocks.0.attn.q_norm.weight" in tensors:
        parts["qk_norm"] = True
    if "norm_pre.weight" in tensors:
        parts["pre_norm"] = True
    return parts


def _hybrid(
    tensors: Mapping[str, torch.Tensor], origin: str, name: str | None
) -> tuple[str, dict[str, Any], list[str]]:
    if name is None:
        raise UserError(
            f"{origin}: a hybrid's CNN cannot be told from its tensors: give --name, such as vit_base_r50_s16_224"
        )
    named = named_encoder(name)
    deep = "patch_embed.backbone.stem.conv.weight" in tensors
    stem = _need(tensors, f"patch_embed.backbone.{'stem.' if deep else ''}conv.weight", 4, origin)
    side = math.isqrt(_need(tensors, "pos_embed", 3, origin).shape[1])  # with the class token's entry or without
    return name, {"img_size": side * named.patch_size, "in_chans": stem.shape[1]}, []


def _need(tensors: Mapping[str, torch.Tensor], key: str, dimensions: int, origin: str) -> torch.Tensor:
    if key not in tensors:
        raise UserError(f"{origin}: {key} is missing")
    if tensors[key].ndim != dimensions:
        raise UserError(f"{origin}: {key} is {tuple(tensors[key].shape)}, which is no ViT's")
    return tensors[key]


def ratio(width: int, hidden: int) -> float:
    """The mlp_ratio from which timm's `int(width * mlp_ratio)` makes `hidden`."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)
