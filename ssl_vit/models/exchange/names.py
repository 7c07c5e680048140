"""Names of a ViT's tensors: timm's, and transformers' on disk."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

Tensors = dict[str, torch.Tensor]

_PARTS = ("query", "key", "value")
_TRANSFORMERS = {  # timm's name: transformers' name, both without `.weight`, `.bias` and the number of the block
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
    "norm1": "layernorm_before",
    "attn.query": "attention.attention.query",
    "attn.key": "attention.attention.key",
    "attn.value": "attention.attention.value",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
_NAME = re.compile(r"((?:blocks|encoder\.layer)\.(\d+)\.)?(.+?)(\.weight|\.bias)?")


def to_transformers(tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, list[str]]:
    """timm's tensors -> the tensors of transformers' ViTModel, and the names that have no place there."""
    named, unknown = {}, []
    for name, tensor in tensors.items():
        split = zip(_PARTS, tensor.chunk(3), strict=True) if ".attn.qkv." in name else [("qkv", tensor)]
        for part, value in split:
            if renamed := _rename(name.replace("qkv", part), _TRANSFORMERS, "encoder.layer"):
                named[renamed] = value.contiguous()
            else:
                unknown.append(name)
    return named, unknown


def from_transformers(tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, list[str]]:
    """The reverse, from ViTModel or a model around one (`vit.`), and the names of what is not part of the encoder."""
    table = {theirs: ours for ours, theirs in _TRANSFORMERS.items()}
    names = {name: _rename(name.removeprefix("vit."), table, "blocks") for name in tensors}
    renamed_tensors = {renamed: tensors[name] for name, renamed in names.items() if renamed}
    return _join_qkv(renamed_tensors), [name for name, renamed in names.items() if not renamed]


def _rename(name: str, table: Mapping[str, str], blocks: str) -> str | None:
    match = _NAME.fullmatch(name)
    if match is None or (stem := table.get(match[3])) is None:
        return None
    return f"{f'{blocks}.{match[2]}.' if match[1] else ''}{stem}{match[4] or ''}"


def _join_qkv(named: Tensors) -> Tensors:
    """Query, key and value of each block as timm's one tensor; incomplete ones stay apart."""
    for query in [name for name in named if ".attn.query." in name]:
        parts = [query.replace("query", part) for part in _PARTS]
        if all(part in named for part in parts):
            named[query.replace("query", "qkv")] = torch.cat([named.pop(part) for part in parts])
    return named
