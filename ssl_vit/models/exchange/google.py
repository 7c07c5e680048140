"""Google's original `.npz` (vision_transformer, AugReg, SAM, big_vision), by timm's loader.

timm's loader interpolates, broadcasts and passes over what does not fit; here the model is built to the file's own
sizes, so that none of it happens, and the numbers on both sides are counted.
"""

from __future__ import annotations

import math
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

from ssl_vit.interfaces import UserError
from ssl_vit.models.exchange.sizes import Found, family, ratio
from ssl_vit.models.factory import named_encoder

_PREFIXES = ("", "opt/target/", "params/", "params/img/")
_ENCODER = re.compile(r"(embedding|cls|pos_embedding|Transformer|conv_root|gn_root|block\d+)(/|$)")
_BLOCK_NUMBER = re.compile(r"(?<=encoderblock)_\d+")
_READ = re.compile(  # by timm's loader, which passes over any other name
    r"embedding/(kernel|bias)|cls|pos_embedding|Transformer/(posembed_input/pos_embedding|encoder_norm/(scale|bias))"
    r"|Transformer/encoderblock/(LayerNorm_[012]/(scale|bias)|MlpBlock_[03]/Dense_[01]/(kernel|bias)"
    r"|MultiHeadDotProductAttention_[01]/(query|key|value|out)/(kernel|bias))"
    r"|conv_root/kernel|gn_root/(scale|bias)|block\d+/unit\d+/(conv(\d|_proj)/kernel|gn(\d|_proj)/(scale|bias))"
)


def read(path: Path, name: str | None = None) -> Found:
    """Weights of a `.npz` under timm's names; `name` (timm's) is needed for hybrids only.

    Where the file keeps positions for the patches alone (big_vision), the class token's entry is zero, which computes
    the same. Raises UserError for a damaged file, objects in it, a layout that is none of Google's, missing tensors.
    """
    arrays = _open(path)
    prefix = next((p for p in _PREFIXES if f"{p}embedding/kernel" in arrays), None)
    if prefix is None:
        raise UserError(f"{path}: no ViT in Google's layout (no embedding/kernel); it holds {_some(arrays)}")
    own = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
    encoder = {key: value for key, value in own.items() if _ENCODER.match(key)}
    if wrong := _unfitting(encoder):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(f"{path}: its encoder is no ViT of Google's: {'; '.join(wrong[:3])}{more}")
    try:
        name, arguments, patches_only, notes = _sizes(encoder, path, name)
        vit = timm.create_model(name, num_classes=0, no_embed_class=patches_only, **arguments).eval()
        vit.load_pretrained(str(path), prefix=prefix)
    except KeyError as error:
        raise UserError(f"{path}: incomplete: {error.args[0]}") from None
    except (ValueError, IndexError, TypeError, AssertionError, RuntimeError) as error:
        raise UserError(f"{path}: its tensors do not fit together: {str(error).splitlines()[0]}") from None
    tensors = vit.state_dict()
    theirs, ours = sum(value.size for value in encoder.values()), sum(value.numel() for value in tensors.values())
    if theirs != ours:
        raise UserError(f"{path}: its encoder has {theirs:,} numbers, but {name} of its sizes {ours:,}")
    if patches_only:
        positions = tensors["pos_embed"]
        tensors["pos_embed"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
        notes.append("the class token's position is zero: the file adds positions to the patches only")
    left_out = [key for key in arrays if key.removeprefix(prefix) not in encoder]
    return Found(name, arguments, tensors, 0.5, 0.5, left_out=left_out, notes=notes)


def _open(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not a readable .npz of plain arrays: {error}") from None


def _unfitting(arrays: dict[str, np.ndarray]) -> list[str]:
    """What is wrong with an encoder's tensors: names that nothing reads, shapes other than in the first block."""
    shapes: dict[str, tuple[int, ...]] = {}
    wrong = []
    for key, value in arrays.items():
        alike = _BLOCK_NUMBER.sub("", key)
        if not _READ.fullmatch(alike):
            wrong.append(f"{key} is unknown")
        elif value.shape != (first := shapes.setdefault(alike, value.shape)):
            wrong.append(f"{key} is {value.shape}, not {first}")
    return wrong


def _sizes(arrays: dict[str, np.ndarray], path: Path, name: str | None) -> tuple[str, dict[str, Any], bool, list[str]]:
    """(timm's name, its arguments, whether a class token goes without a position, what was deduced)."""
    embedding = arrays["embedding/kernel"]
    table = "pos_embedding" if "pos_embedding" in arrays else "Transformer/posembed_input/pos_embedding"
    positions, class_token = arrays[table].shape[-2], "cls" in arrays
    side = math.isqrt(positions)
    if positions not in (side**2, side**2 + class_token):
        raise UserError(f"{path}: {table} has {positions} entries, which is no square of patches")
    notes = []
    if "conv_root/kernel" in arrays:
        if name is None:
            raise UserError(f"{path}: a hybrid: say which with --name, such as vit_base_r50_s16_224")
        pixels, channels = named_encoder(name).patch_size, arrays["conv_root/kernel"].shape[2]
        arguments: dict[str, Any] = {"img_size": side * pixels, "in_chans": channels}
    else:
        (rows, columns, channels, width), depth, heads, hidden = embedding.shape, *_block(arrays)
        if name is None:
            name, _ = family(width, depth)
            notes.append(f"taken for {name} by its width {width} and depth {depth}")
        arguments = {
            "img_size": side * rows if rows == columns else (side * rows, side * columns),
            "patch_size": rows if rows == columns else (rows, columns),
            "in_chans": channels,
            "embed_dim": width,
            "depth": depth,
            "num_heads": heads,
            "mlp_ratio": ratio(width, hidden),
        }
    if not class_token:
        arguments |= {"class_token": False, "global_pool": "avg", "fc_norm": False}
    return name, arguments, class_token and positions == side**2, notes


def _block(arrays: dict[str, np.ndarray]) -> tuple[int, int, int]:
    """Depth, heads and hidden MLP width, from blocks apart (`encoderblock_0`) or stacked (`encoderblock`)."""
    first = next(iter(sorted(key for key in arrays if key.endswith("query/kernel"))), "query/kernel")
    heads = arrays[first].shape[-2]
    hidden = next((value.shape[-1] for key, value in arrays.items() if key.endswith("Dense_0/kernel")), 0)
    if "/encoderblock/" in first:
        return arrays[first].shape[0], heads, hidden
    blocks = {match[1] for key in arrays if (match := re.match(r"Transformer/encoderblock_(\d+)/", key))}
    return len(blocks), heads, hidden


def _some(arrays: dict[str, np.ndarray]) -> str:
    return ", ".join(sorted(arrays)[:3]) or "nothing"
