from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssl_vit.interfaces import UserError
from ssl_vit.models.exchange.imports import import_weights
from ssl_vit.models.factory import load, state
from tests.hostile.corpus import Bomb

Make = Callable[..., Any]
Arrays = dict[str, np.ndarray]

SIZES = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 2, "heads": 3, "mlp_ratio": 3.0}
# (what the blocks' parts are called): Google's repository and AugReg; big_vision
PAPER = {"attention": "MultiHeadDotProductAttention_1", "norm2": "LayerNorm_2", "mlp": "MlpBlock_3"}
BIG_VISION = {"attention": "MultiHeadDotProductAttention_0", "norm2": "LayerNorm_1", "mlp": "MlpBlock_0"}


def google(tensors: dict[str, torch.Tensor], heads: int, names: dict[str, str], positions: str) -> Arrays:
    """Google's layout: kernels are (in, out), images are rows x columns x channels, heads have an axis of their own."""
    weights = {name: tensor.numpy() for name, tensor in tensors.items()}
    arrays = {
        "embedding/kernel": weights["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": weights["patch_embed.proj.bias"],
        positions: weights["pos_embed"],
        "Transformer/encoder_norm/scale": weights["norm.weight"],
        "Transformer/encoder_norm/bias": weights["norm.bias"],
    }
    if "cls_token" in weights:
        arrays["cls"] = weights["cls_token"]
    width = weights["norm.bias"].size
    for layer in range(sum(name.endswith(".norm1.weight") and name.startswith("blocks.") for name in weights)):
        ours, theirs = f"blocks.{layer}", f"Transformer/encoderblock_{layer}"
        for norm, name in (("norm1", "LayerNorm_0"), ("norm2", names["norm2"])):
            arrays[f"{theirs}/{name}/scale"] = weights[f"{ours}.{norm}.weight"]
            arrays[f"{theirs}/{name}/bias"] = weights[f"{ours}.{norm}.bias"]
        attention = f"{theirs}/{names['attention']}"
        for place, part in enumerate(("query", "key", "value")):
            rows = slice(place * width, (place + 1) * width)
            kernel = weights[f"{ours}.attn.qkv.weight"][rows].T
            arrays[f"{attention}/{part}/kernel"] = kernel.reshape(width, heads, width // heads)
            arrays[f"{attention}/{part}/bias"] = weights[f"{ours}.attn.qkv.bias"][rows].reshape(heads, width // heads)
        arrays[f"{attention}/out/kernel"] = weights[f"{ours}.attn.proj.weight"].T.reshape(heads, width // heads, width)
        arrays[f"{attention}/out/bias"] = weights[f"{ours}.attn.proj.bias"]
        for place in (0, 1):
            arrays[f"{theirs}/{names['mlp']}/Dense_{place}/kernel"] = weights[f"{ours}.mlp.fc{place + 1}.weight"].T
            arrays[f"{theirs}/{names['mlp']}/Dense_{place}/bias"] = weights[f"{ours}.mlp.fc{place + 1}.bias"]
    return arrays


def stacked(arrays: Arrays) -> Arrays:
    """big_vision's scanned encoder: the blocks' arrays one upon the other."""
    blocks = [name for name in arrays if "encoderblock_0" in name]
    rest = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    others = [[arrays[name.replace("_0/", f"_{n}/", 1)] for n in range(int(SIZES["depth"]))] for name in blocks]
    return rest | {
        name.replace("encoderblock_0", "encoderblock"): np.stack(layers)
        for name, layers in zip(blocks, others, strict=True)
    }


def prefixed(arrays: Arrays, prefix: str) -> Arrays:
    return {prefix + name: array for name, array in arrays.items()}


OLD = "Transformer/posembed_input/pos_embedding"
HEAD = {"head/kernel": np.ones((48, 5), np.float32), "head/bias": np.ones(5, np.float32)}
PRE_LOGITS = {"pre_logits/kernel": np.ones((48, 48), np.float32), "pre_logits/bias": np.ones(48, np.float32)}
OPTIMIZER = {"opt/state/step": np.array(3), "opt/state/param_states/cls/grad_ema": np.ones((1, 1, 48), np.float32)}


def written(path: Path, arrays: Arrays) -> str:
    np.savez(path, **dict[str, Any](arrays))
    return str(path)


@pytest.mark.parametrize("layout", ["paper", "trainer", "big_vision", "stacked", "no class token"])
def test_every_layout_comes_in_bit_for_bit(make_encoder: Make, shaken: Make, tmp_path: Path, layout: str) -> None:
    channels = 1 if layout == "paper" else 3
    ours = shaken(make_encoder(**SIZES, channels=channels, class_token=layout != "no class token"))
    tensors = state(ours)
    if layout in ("paper", "trainer"):
        arrays = google(tensors, 3, PAPER, OLD)
        extra = HEAD | PRE_LOGITS
        content = arrays | extra
        if layout == "trainer":
            content, extra = prefixed(content, "opt/target/") | OPTIMIZER, prefixed(extra, "opt/target/") | OPTIMIZER
    else:  # positions for the patches alone: the class token's own is zero
        if layout != "no class token":
            tensors["pos_embed"][:, 0] = 0
        alone = tensors | {"pos_embed": tensors["pos_embed"][:, -16:]}
        arrays = google(alone, 3, BIG_VISION, "pos_embedding")
        content = prefixed((stacked(arrays) if layout == "stacked" else arrays) | HEAD, "params/")
        extra = prefixed(HEAD, "params/")
    _, found = import_weights(written(tmp_path / "weights.npz", content), tmp_path / "out")
    back = load(tmp_path / "out")
    assert state(back).keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in state(back).items())
    assert sorted(found.skipped) == sorted(extra)
    assert (back.image_size, back.channels) == ((32, 32), channels) and back.heads == 3
    assert (back.mean, back.std) == ((0.5,) * channels, (0.5,) * channels) and back.norm_eps == 1e-6
    assert ("class token's position is zero" in " ".join(found.notes)) == (layout in ("big_vision", "stacked"))


def test_objects_are_refused_and_nothing_in_them_runs(make_encoder: Make, tmp_path: Path) -> None:
    bomb = np.empty(1, object)
    bomb[0] = Bomb(tmp_path / "ran")
    arrays = google(state(make_encoder(**SIZES)), 3, PAPER, OLD) | {"head/bias": bomb}
    np.savez(tmp_path / "weights.npz", **dict[str, Any](arrays))
    with pytest.raises(UserError, match=r"not a readable \.npz of plain arrays"):
        import_weights(str(tmp_path / "weights.npz"), tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights.npz"]


def spoil(arrays: Arrays, how: str) -> Arrays:
    block = "Transformer/encoderblock_1"
    if how == "missing":
        del arrays[f"{block}/MlpBlock_3/Dense_1/bias"]
    elif how == "broadcast":
        arrays[f"{block}/LayerNorm_0/scale"] = np.ones(1, np.float32)
    elif how == "interpolated":
        arrays[OLD] = np.ones((1, 12, 48), np.float32)
    elif how == "unknown":
        arrays[f"{block}/LayerScale_0/scale"] = np.ones(48, np.float32)
    elif how == "another shape":
        arrays[f"{block}/MlpBlock_3/Dense_0/kernel"] = np.ones((48, 10), np.float32)
    elif how == "hybrid":
        arrays["conv_root/kernel"] = np.ones((7, 7, 3, 8), np.float32)
    elif how == "no blocks":
        return {name: array for name, array in arrays.items() if "encoderblock" not in name}
    else:
        return {"weights": np.ones(3)}
    return arrays


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "do not fit together.*encoderblock_1/MlpBlock_3/Dense_1/bias"),
        ("broadcast", r"they hold [\d,]+ numbers, the model"),
        ("interpolated", "12 positions are not a square"),
        ("unknown", r"they hold [\d,]+ numbers, the model"),
        ("another shape", "do not fit together"),
        ("no blocks", "do not fit together"),
        ("hybrid", "a hybrid; import timm's copy"),
        ("something else", "no ViT in Google's layout .*it holds weights"),
        ("cut", "not a readable"),
    ],
)
def test_what_does_not_fit_is_refused(make_encoder: Make, tmp_path: Path, how: str, message: str) -> None:
    arrays = google(state(make_encoder(**SIZES)), 3, PAPER, OLD)
    path = tmp_path / "weights.npz"
    written(path, arrays if how == "cut" else spoil(arrays, how))
    if how == "cut":
        path.write_bytes(path.read_bytes()[:9999])
    with pytest.raises(UserError, match=message):
        import_weights(str(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()
