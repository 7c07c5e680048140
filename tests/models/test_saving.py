from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from ssl_vit.files import WEIGHTS
from ssl_vit.interfaces import UserError
from ssl_vit.models.factory import CONFIG, fresh, load, state, write_config

Make = Callable[..., Any]

# No position for the class token, registers, no class token at all, a pool by attention excluded, a norm after pooling.
OTHERS = [
    "deit3_small_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch16_siglip_gap_224",
    "vit_base_patch16_siglip_224",
    "vit_medium_patch16_reg4_gap_256",
]


@pytest.mark.parametrize(
    "overrides",
    [
        {"image_size": (8, 20), "positions": "sincos2d", "mean": 0.3, "std": 0.2, "mlp_ratio": 1.5, "init": "timm"},
        {"class_token": False, "channels": 1},
        {"image_size": (8, 20), "positions": "learned_2d"},
        {"positions": "none"},
        *({"name": name} for name in OTHERS),
        {"name": "vit_tiny_r_s16_p8_224", "image_size": 32},
    ],
    ids=str,
)
def test_saved_weights_open_here_and_in_timm(
    make_encoder: Make, tmp_path: Path, overrides: dict[str, Any], shaken: Make, pixels: Make, saved: Make
) -> None:
    encoder = shaken(make_encoder(**overrides))
    folder = saved(tmp_path / "weights", encoder)
    images = pixels(encoder)
    mean, std = encoder.mean[0], encoder.std[0]
    normalized = images.float() * (1 / (255 * std)) - mean / std
    reference = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    again = load(folder)
    assert not again.training
    assert (again.name, again.mean, again.std) == (encoder.name, encoder.mean, encoder.std)
    with torch.no_grad():
        expected = encoder(images)
        assert torch.equal(again(images), expected)
        assert torch.equal(reference.forward_features(normalized), expected)
    settings = reference.pretrained_cfg
    assert list(settings["input_size"]) == [encoder.channels, *encoder.image_size]
    assert list(settings["mean"]) == [*encoder.mean]
    assert list(settings["std"]) == [*encoder.std]


def test_a_pooling_that_the_encoder_lacks_is_not_saved(make_encoder: Make, tmp_path: Path, saved: Make) -> None:
    encoder = make_encoder(class_token=False)
    folder = saved(tmp_path, encoder)
    for pooling in ("token", "patches", None):
        write_config(encoder, folder / CONFIG, pooling=pooling)
        assert load(folder).network.global_pool == "avg"


def test_dropout_and_initialization_travel_with_the_weights(make_encoder: Make, tmp_path: Path, saved: Make) -> None:
    encoder = make_encoder(dropout=0.3, drop_path=0.2, position_std=0.5)
    again = load(saved(tmp_path, encoder))
    assert again.network.pos_drop.p == 0.3
    assert again.position_std == 0.5
    assert all(
        torch.equal(a, b)
        for a, b in zip(state(fresh(again, 3)).values(), state(fresh(encoder, 3)).values(), strict=True)
    )


@pytest.mark.parametrize("asked", ["run", "checkpoint", "published"])
def test_a_run_a_checkpoint_or_a_folder_opens(make_encoder: Make, tmp_path: Path, asked: str, saved: Make) -> None:
    old, new, published = (make_encoder(seed) for seed in (1, 2, 3))
    saved(tmp_path / "checkpoints" / "step_00000010", old)
    saved(tmp_path / "checkpoints" / "step_00000200", new)
    (tmp_path / "checkpoints" / "step_00000300").mkdir()  # without weights: passed over
    path, expected = {
        "run": (tmp_path, new),
        "checkpoint": (tmp_path / "checkpoints" / "step_00000010", old),
        "published": (saved(tmp_path, published) if asked == "published" else tmp_path, published),
    }[asked]
    assert torch.equal(load(str(path)).network.pos_embed, expected.network.pos_embed)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (WEIGHTS, b"cut"),
        (CONFIG, b"\xff\xfe"),
        (CONFIG, b"null"),
        (CONFIG, b'{"architecture": "vit_unknown", "pretrained_cfg": {}}'),
        (CONFIG, b'{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"mean": 0.5, "std": 0.5}}'),
    ],
)
def test_damaged_weights_are_reported_with_their_folder(
    make_encoder: Make, tmp_path: Path, saved: Make, file: str, content: bytes
) -> None:
    folder = saved(tmp_path / "weights", make_encoder())
    (folder / file).write_bytes((folder / file).read_bytes()[:99] if content == b"cut" else content)
    with pytest.raises(UserError, match=str(folder)):
        load(folder)


@pytest.mark.parametrize(
    ("name", "size", "other"),
    [
        ("vit_tiny_patch16_224", 3072, {"positions": "relative", "model_args": {"depth": 1}}),
        ("convnext_atto", 32, {"model_args": {"depths": [1, 1, 10**9, 1], "dims": [4] * 4}}),
    ],
)
def test_a_model_larger_than_its_weights_is_not_built(
    tmp_path: Path, name: str, size: int, other: dict[str, Any]
) -> None:
    """Nor one with large buffers, such as the distances of all pairs of patches, or with so many blocks."""
    config = {
        "architecture": name,
        "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, size, size]},
    }
    (tmp_path / CONFIG).write_text(json.dumps(config | other))
    save_file({"cls_token": torch.zeros(4)}, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match="larger model"):
        load(tmp_path)


def test_wrong_weights_are_listed_by_name(make_encoder: Make, tmp_path: Path, saved: Make) -> None:
    folder = saved(tmp_path, make_encoder())
    tensors = load_file(folder / WEIGHTS)
    del tensors["cls_token"]
    tensors |= {"head.weight": torch.zeros(2), "pos_embed": tensors["pos_embed"][:, :3].contiguous()}
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(
        UserError, match=r"Missing.*cls_token.*Unexpected.*head\.weight.*mismatch for pos_embed"
    ) as raised:
        load(folder)
    assert str(folder) in str(raised.value)
