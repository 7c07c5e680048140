"""Names of a ViT's tensors: timm's, transformers' on disk, and Google's in `.npz` files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
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
_GOOGLE: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [  # applied one after the other
    (r"^Transformer/encoderblock_(\d+)/", r"blocks.\1."),
    (r"LayerNorm_0", "norm1"),
    (r"LayerNorm_[12]", "norm2"),
    (r"MlpBlock_[03]/Dense_0", "mlp.fc1"),
    (r"MlpBlock_[03]/Dense_1", "mlp.fc2"),
    (r"MultiHeadDotProductAttention_[01]/out", "attn.proj"),
    (r"MultiHeadDotProductAttention_[01]/", "attn."),
    (r"^Transformer/encoder_norm", "norm"),
    (r"^embedding/", "patch_embed.proj/"),
    (r"^cls$", "cls_token"),
    (r"^(Transformer/posembed_input/)?pos_embedding$", "pos_embed"),
    (r"^conv_root/", "patch_embed.backbone.stem.conv/"),  # from here on: hybrids
    (r"^gn_root/", "patch_embed.backbone.stem.norm/"),
    (r"^block(\d+)/unit(\d+)/", lambda n: f"patch_embed.backbone.stages.{int(n[1]) - 1}.blocks.{int(n[2]) - 1}."),
    (r"conv_proj", "downsample.conv"),
    (r"gn_proj", "downsample.norm"),
    (r"\bgn(\d)", r"norm\1"),
    (r"/(kernel|scale)$", ".weight"),
    (r"/bias$", ".bias"),
]


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
    found = {renamed: tensors[name] for name, renamed in names.items() if renamed}
    return _join_qkv(found), [name for name, renamed in names.items() if not renamed]


def from_google(arrays: Mapping[str, np.ndarray]) -> Tensors:
    """The arrays of Google's encoder, their prefix removed -> timm's tensors.

    There kernels are (in, out), images rows x columns x channels, and heads have an axis of their own. Blocks are apart
    (`encoderblock_0`) or stacked along a first axis (`encoderblock`). Unknown names stay unknown to timm too.
    """
    apart: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        stacked = enumerate(array) if "/encoderblock/" in name else ()
        apart |= {name.replace("/encoderblock/", f"/encoderblock_{n}/"): block for n, block in stacked} or {name: array}
    deep = any(name.startswith("block") for name in arrays)  # else a hybrid's CNN is its stem alone
    named = {}
    for name, array in apart.items():
        renamed = name
        for pattern, new in _GOOGLE:
            renamed = re.sub(pattern, new, renamed)
        named[renamed if deep else renamed.replace("backbone.stem.", "backbone.")] = torch.from_numpy(
            _reshaped(name, array)
        )
    return _join_qkv(named)


def _reshaped(name: str, array: np.ndarray) -> np.ndarray:
    if name.endswith("/kernel"):
        if array.ndim == 4:
            array = array.transpose(3, 2, 0, 1)
        else:
            array = (array.reshape(-1, array.shape[-1]) if "/out/" in name else array.reshape(len(array), -1)).T
    elif name.endswith(("/bias", "/scale")):
        array = array.reshape(-1)
    return np.ascontiguousarray(array)


def _rename(name: str, table: Mapping[str, str], blocks: str) -> str | None:
    found = _NAME.fullmatch(name)
    if found is None or (stem := table.get(found[3])) is None:
        return None
    return f"{f'{blocks}.{found[2]}.' if found[1] else ''}{stem}{found[4] or ''}"


def _join_qkv(named: Tensors) -> Tensors:
    """Query, key and value of each block as timm's one tensor; incomplete ones stay apart."""
    for query in [name for name in named if ".attn.query." in name]:
        parts = [query.replace("query", part) for part in _PARTS]
        if all(part in named for part in parts):
            named[query.replace("query", "qkv")] = torch.cat([named.pop(part) for part in parts])
    return named
