"""Google's `.npz` checkpoints (vision_transformer, AugReg, SAM, big_vision)."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import numpy as np
import torch

from ssl_vit.interfaces import UserError
from ssl_vit.models.exchange.names import from_google
from ssl_vit.models.exchange.sizes import PLAIN, Imported, read_sizes

_PREFIXES = ("", "opt/target/", "params/", "params/img/")
_ENCODER = re.compile(r"(embedding|cls|pos_embedding|Transformer|conv_root|gn_root|block\d+)(/|$)")


def read(path: Path, name: str | None = None) -> Imported:
    """The encoder of a `.npz` under timm's names; `name` (timm's) is needed for hybrids alone.

    Where the file has positions for the patches alone (big_vision), the class token gets a position of zero, which
    computes the same. Raises UserError for a damaged file, objects in it, and a layout that is not Google's.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not a readable .npz of plain arrays: {error}") from None
    prefix = next((p for p in _PREFIXES if f"{p}embedding/kernel" in arrays), None)
    if prefix is None:
        shown = ", ".join(sorted(arrays)[:3]) or "nothing"
        raise UserError(f"{path}: no ViT in Google's layout (no embedding/kernel); it holds {shown}")
    own = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
    encoder = {key: value for key, value in own.items() if _ENCODER.match(key)}
    try:
        heads = next((value.shape[-2] for key, value in encoder.items() if key.endswith("query/kernel")), None)
        tensors = from_google(encoder)
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: its arrays do not fit together: {error}") from None
    if name is None and "conv_root/kernel" in encoder:
        raise UserError(f"{path}: a hybrid; give --name, such as vit_base_r50_s16_224")
    arguments, notes = read_sizes(tensors, str(path), name or PLAIN, heads=heads), list[str]()
    if arguments.pop("no_embed_class", False):
        positions = tensors["pos_embed"]
        tensors["pos_embed"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
        notes.append("the class token's position is zero: the file adds positions to the patches only")
    skipped = [key for key in arrays if key.removeprefix(prefix) not in encoder]
    return Imported(name or PLAIN, arguments, tensors, 0.5, 0.5, skipped=skipped, notes=notes)
