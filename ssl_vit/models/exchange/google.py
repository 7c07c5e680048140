"""Google's `.npz` checkpoints (vision_transformer, AugReg, SAM, big_vision), by timm's own reader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

from ssl_vit.files import read_arrays
from ssl_vit.interfaces import UserError
from ssl_vit.models.exchange.sizes import PLAIN, Imported, position_sizes, ratio

_PREFIXES = ("", "opt/target/", "params/", "params/img/")
_ENCODER = re.compile(r"(embedding|cls|pos_embedding|Transformer|conv_root)(/|$)")


def read(path: Path) -> Imported:
    """The encoder of a `.npz` under timm's names.

    Where the file has positions for the patches alone (big_vision), the class token gets a position of zero, which
    computes the same. Raises UserError for a damaged file, objects in it, and a layout that is not Google's.
    """
    try:
        arrays = read_arrays(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable .npz of plain arrays: {error}") from None
    prefix = next((p for p in _PREFIXES if f"{p}embedding/kernel" in arrays), None)
    if prefix is None:
        shown = ", ".join(sorted(arrays)[:3]) or "nothing"
        raise UserError(f"{path}: no ViT in Google's layout (no embedding/kernel); it holds {shown}")
    arrays_under_prefix = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
    encoder = {key: array for key, array in arrays_under_prefix.items() if _ENCODER.match(key)}
    if "conv_root/kernel" in encoder:
        raise UserError(f"{path}: a hybrid; import timm's copy of it, such as vit_base_r50_s16_224.orig_in21k")
    try:
        arguments = _sizes(encoder, str(path))
        network = timm.create_model(PLAIN, num_classes=0, **arguments)
        network.load_pretrained(str(path))
    except (LookupError, TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"{path}: its arrays do not fit together ({type(error).__name__}: {error})") from None
    # timm would broadcast an array, or ignore one.
    size, needed = sum(array.size for array in encoder.values()), sum(p.numel() for p in network.parameters())
    if size != needed:
        raise UserError(f"{path}: its arrays do not fit together: they hold {size:,} numbers, the model {needed:,}")
    tensors, notes = network.state_dict(), list[str]()
    if arguments.pop("no_embed_class", False):
        positions = tensors["pos_embed"]
        tensors["pos_embed"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
        notes.append("the class token's position is zero: the file adds positions to the patches only")
    skipped = [key for key in arrays if key.removeprefix(prefix) not in encoder]
    return Imported(PLAIN, arguments, tensors, 0.5, 0.5, skipped=skipped, notes=notes)


def _sizes(arrays: Mapping[str, np.ndarray], origin: str) -> dict[str, Any]:
    """The arguments with which timm's plain ViT becomes the model of these arrays."""

    def last(end: str) -> tuple[int, ...]:
        return next((array.shape for key, array in arrays.items() if key.endswith(end)), ())

    rows, columns, channels, width = arrays["embedding/kernel"].shape
    blocks = {key.split("/")[1] for key in arrays if key.startswith("Transformer/encoderblock")}
    stacked = "encoderblock" in blocks
    arguments = {
        "patch_size": (rows, columns),
        "in_chans": channels,
        "embed_dim": width,
        "depth": len(arrays["Transformer/encoderblock/LayerNorm_0/scale"]) if stacked else len(blocks),
        "num_heads": last("query/kernel")[-2],
        "mlp_ratio": ratio(width, last("Dense_0/kernel")[-1]),
    }
    if "cls" not in arrays:
        arguments |= {"class_token": False, "global_pool": "avg", "fc_norm": False}
    return arguments | position_sizes(last("pos_embedding")[-2], int("cls" in arrays), (rows, columns), origin)
