"""A ViT's tensors under timm's names and as transformers writes them to disk, with query, key and value apart."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

# timm's name: transformers' name
_TOP = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}
_BLOCK = {
    "norm1": "layernorm_before",
    "attn.query": "attention.attention.query",
    "attn.key": "attention.attention.key",
    "attn.value": "attention.attention.value",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
_PARTS = ("query", "key", "value")
_TIMM_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_LAYER = re.compile(r"encoder\.layer\.(\d+)\.(.+)")


def to_transformers(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """timm's tensors -> the tensors of transformers' ViTModel, and the names for which it has no place."""
    named, homeless = {}, []
    for name, tensor in tensors.items():
        pieces = {name: tensor}
        if ".attn.qkv." in name:
            pieces = {name.replace("qkv", part): piece for part, piece in zip(_PARTS, tensor.chunk(3), strict=True)}
        for own, piece in pieces.items():
            block = _TIMM_BLOCK.fullmatch(own)
            renamed = _rename(block[2], _BLOCK) if block else _rename(own, _TOP)
            if renamed is None:
                homeless.append(name)
            else:
                named[f"encoder.layer.{block[1]}.{renamed}" if block else renamed] = piece.contiguous()
    return named, homeless


def from_transformers(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The reverse, from ViTModel or a model around one (`vit.`); the names of what is not the encoder's come second."""
    top, block = ({theirs: ours for ours, theirs in names.items()} for names in (_TOP, _BLOCK))
    named, others = {}, []
    for name, tensor in tensors.items():
        own = name.removeprefix("vit.")
        layer = _LAYER.fullmatch(own)
        renamed = _rename(layer[2], block) if layer else _rename(own, top)
        if renamed is None:
            others.append(name)
        else:
            named[f"blocks.{layer[1]}.{renamed}" if layer else renamed] = tensor
    for query in [name for name in named if ".attn.query." in name]:
        parts = [query.replace("query", part) for part in _PARTS]
        if all(part in named for part in parts):
            named[query.replace("query", "qkv")] = torch.cat([named.pop(part) for part in parts])
    return named, others


def _rename(name: str, names: Mapping[str, str]) -> str | None:
    """`name` by the table, which gives whole names or names without their `.weight` or `.bias`; None: not in it."""
    stem, dot, kind = name.rpartition(".")
    if name in names:
        return names[name]
    return f"{names[stem]}.{kind}" if dot and kind in ("weight", "bias") and stem in names else None
