from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf

from ssl_vit import cli
from ssl_vit.interfaces import UserError
from ssl_vit.models import EncoderConfig
from ssl_vit.models.exchange.exports import export
from ssl_vit.models.exchange.imports import import_weights, recipe_keys
from ssl_vit.models.exchange.sizes import ratio, read_sizes
from ssl_vit.models.factory import load, state
from ssl_vit.stage import build_encoder

Make = Callable[..., Any]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}


def timm_vit(shaken: Make, **arguments: Any) -> Any:
    return shaken(timm.create_model("vit_tiny_patch16_224", **SMALL | {"num_classes": 0} | arguments))


def normalized(model: Any, images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(n).reshape(-1, 1, 1) for n in (model.mean, model.std))
    return (images / 255 - mean) / std


def same(tensors: dict[str, torch.Tensor], folder: Path) -> bool:
    ours = state(load(folder))
    return ours.keys() == tensors.keys() and all(torch.equal(tensor, tensors[key]) for key, tensor in ours.items())


# --- timm ---


def test_a_timm_folder(tmp_path: Path, shaken: Make, pixels: Make) -> None:
    parts = {"in_chans": 4, "class_token": False, "global_pool": "avg", "fc_norm": False}
    network = timm_vit(shaken, num_classes=7, **parts)
    network.pretrained_cfg |= {"mean": (0.1, 0.2, 0.3, 0.4), "std": (0.5,) * 4, "input_size": (4, 32, 32)}
    save_for_hf(network, tmp_path / "timm", safe_serialization=True, model_args=SMALL | parts)
    _, found = import_weights(str(tmp_path / "timm"), tmp_path / "out")
    ours = load(tmp_path / "out")
    assert found.skipped == ["head.weight", "head.bias"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["imported"]["skipped"] == found.skipped
    assert (ours.name, ours.mean, ours.std) == ("vit_tiny_patch16_224", (0.1, 0.2, 0.3, 0.4), (0.5,) * 4)
    images = pixels(ours)
    with torch.no_grad():
        assert torch.equal(ours.encode(ours.embed(images)), network.forward_features(ours.normalized(images)))  # type: ignore[attr-defined]


def test_a_pool_by_attention_is_a_head(tmp_path: Path, shaken: Make, pixels: Make) -> None:
    network = shaken(timm.create_model("vit_base_patch16_siglip_224", num_classes=0, **SMALL))
    save_for_hf(network, tmp_path / "timm", safe_serialization=True, model_args=SMALL)
    _, found = import_weights(str(tmp_path / "timm"), tmp_path / "out")
    ours = load(tmp_path / "out")
    assert found.skipped == [key for key in network.state_dict() if key.startswith("attn_pool.")] != []
    images = pixels(ours)
    with torch.no_grad():
        tokens = network.forward_features(ours.normalized(images))
        assert torch.equal(ours(images), tokens)
        assert torch.equal(ours.represent(images, "mean"), tokens.mean(1))
    export(ours, tmp_path / "back", "timm", "")  # which loads it in timm, and compares
    assert recipe_keys(ours)["name"] == "vit_base_patch16_siglip_224"


def test_a_timm_resnet(tmp_path: Path, pixels: Make) -> None:
    network = timm.create_model("test_resnet", num_classes=5).eval()
    save_for_hf(network, tmp_path / "timm", safe_serialization=True)
    _, found = import_weights(str(tmp_path / "timm"), tmp_path / "out")
    ours = load(tmp_path / "out")
    images = pixels(ours)
    with torch.no_grad():
        assert torch.equal(ours(images), network.forward_features(ours.normalized(images)).flatten(2).mT)
    assert found.skipped == ["fc.weight", "fc.bias"]
    assert recipe_keys(ours)["name"] == "test_resnet"


# --- bare checkpoints ---


PARTS = [
    {},
    {"init_values": 0.1},
    {"reg_tokens": 3},
    {"reg_tokens": 4, "no_embed_class": True},
    {"qk_norm": True},
    {"qkv_bias": False},
    {"pre_norm": True},
    {"global_pool": "avg"},
    {"class_token": False, "global_pool": "avg"},
    {"class_token": False, "global_pool": "avg", "fc_norm": False},
    {"in_chans": 2, "mlp_ratio": 2.7, "img_size": 64},
]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_a_bare_checkpoint_tells_its_parts(tmp_path: Path, shaken: Make, pixels: Make, parts: dict[str, Any]) -> None:
    network = timm_vit(shaken, num_classes=3, **parts)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    _, found = import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", heads=3)
    ours = load(tmp_path / "out")
    assert found.skipped == ["head.weight", "head.bias"]
    assert (ours.mean, ours.std) == (((0.5,) * 2,) * 2 if "in_chans" in parts else IMAGENET)
    images = pixels(ours)
    with torch.no_grad():
        assert torch.equal(ours(images), network.forward_features(ours.normalized(images)))


def test_dinov2s_own_registers(tmp_path: Path, shaken: Make, pixels: Make) -> None:
    """There the class token has a position and the registers, behind it, have none."""
    network = timm_vit(shaken, reg_tokens=4, no_embed_class=True, init_values=0.1)
    tensors = network.state_dict()
    position = torch.randn(1, 1, 48)
    theirs = {name: tensor for name, tensor in tensors.items() if name != "reg_token"}
    theirs |= {"register_tokens": tensors["reg_token"], "mask_token": torch.zeros(1, 48)}
    theirs["cls_token"] = tensors["cls_token"] - position
    theirs["pos_embed"] = torch.cat([position, tensors["pos_embed"]], 1)
    torch.save(theirs, tmp_path / "weights.pth")
    _, found = import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", heads=3)
    ours = load(tmp_path / "out")
    assert found.skipped == ["mask_token"] and ours.prefix_tokens == 5
    images = pixels(ours)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), network.forward_features(ours.normalized(images)))


@pytest.mark.parametrize("wrapper", ["", "model", "state_dict", "model_ema"])
def test_wrappers_come_off(tmp_path: Path, shaken: Make, wrapper: str) -> None:
    tensors = timm_vit(shaken).state_dict()
    parallel = {f"module.{key}": tensor for key, tensor in tensors.items()}
    last = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    content = parallel if not wrapper else {"epoch": 3, "args": argparse.Namespace(lr=0.1), wrapper: parallel}
    if wrapper == "model_ema":
        content |= {"model": last}  # the average is taken, not the last weights
    torch.save(content, tmp_path / "checkpoint.pt")
    _, found = import_weights(str(tmp_path / "checkpoint.pt"), tmp_path / "out", heads=3, mean=0.5, std=0.25)
    assert same(tensors, tmp_path / "out")
    assert not found.notes, "nothing is assumed where all is said"
    assert (load(tmp_path / "out").mean, load(tmp_path / "out").std) == ((0.5,) * 3, (0.25,) * 3)


def test_an_mae_checkpoint_keeps_the_encoder(tmp_path: Path, shaken: Make) -> None:
    """The layout of MAE's own `*_full.pth`: encoder and decoder side by side under `model`."""
    encoder = timm_vit(shaken).state_dict()
    decoder = {"mask_token": torch.ones(1, 1, 16), "decoder_pos_embed": torch.ones(1, 17, 16)}
    decoder |= {"decoder_embed.weight": torch.ones(16, 48), "decoder_blocks.0.norm1.weight": torch.ones(16)}
    decoder |= {"decoder_norm.weight": torch.ones(16), "decoder_pred.bias": torch.ones(192)}
    torch.save({"model": encoder | decoder, "optimizer": {"state": {}}, "scaler": {}}, tmp_path / "mae.pth")
    _, found = import_weights(str(tmp_path / "mae.pth"), tmp_path / "out", heads=3)
    assert same(encoder, tmp_path / "out")
    assert sorted(found.skipped) == sorted(decoder)
    assert (load(tmp_path / "out").mean, load(tmp_path / "out").std) == IMAGENET
    assert any("ImageNet's" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_half_precision_is_widened(tmp_path: Path, shaken: Make, kind: str) -> None:
    halves = {key: tensor.bfloat16() for key, tensor in timm_vit(shaken).state_dict().items()}
    path = tmp_path / f"weights.{kind}"
    save_file(halves, path) if kind == "safetensors" else torch.save(halves, path)
    import_weights(str(path), tmp_path / "out", heads=3)
    assert same({key: tensor.float() for key, tensor in halves.items()}, tmp_path / "out")


@pytest.mark.parametrize(
    ("width", "depth", "name", "heads"),
    [
        (192, 12, "vit_tiny_patch16_224", 3),
        (384, 12, "vit_small_patch16_224", 6),
        (768, 12, "vit_base_patch16_224", 12),
        (1024, 24, "vit_large_patch16_224", 16),
        (1280, 32, "vit_huge_patch14_224", 16),  # 80 a head, not 64
        (768, 8, "vit_base_patch16_224", 12),
        (512, 8, "vit_base_patch16_224", 8),
    ],
)
def test_heads_are_told_by_width_and_depth(width: int, depth: int, name: str, heads: int) -> None:
    with torch.device("meta"):
        tensors = {"patch_embed.proj.weight": torch.empty(width, 3, 16, 16), "cls_token": torch.empty(1, 1, width)}
        tensors |= {"pos_embed": torch.empty(1, 197, width), "blocks.0.attn.qkv.bias": torch.empty(3 * width)}
        tensors |= {f"blocks.{n}.mlp.fc1.weight": torch.empty(4 * width, width) for n in range(depth)}
    found, arguments, notes = read_sizes(tensors, "file")
    assert (found, arguments["num_heads"], arguments["img_size"], arguments["mlp_ratio"]) == (name, heads, 224, 4.0)
    assert notes == [f"taken for {name} with {heads} heads, by its width {width} and depth {depth}"]


def test_a_small_width_does_not_tell_the_heads(tmp_path: Path, make_encoder: Make, saved: Make) -> None:
    """By the rule of 64 a head it would have one."""
    weights = saved(tmp_path / "ours", make_encoder(width=64, heads=4)) / "encoder.safetensors"
    with pytest.raises(UserError, match="without import"):
        import_weights(str(weights), tmp_path / "out")
    weights = weights.rename(tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match="width 64 and depth 2: give --heads"):
        import_weights(str(weights), tmp_path / "out")
    with pytest.raises(UserError, match="5 heads do not divide its width 64"):
        import_weights(str(weights), tmp_path / "out", heads=5)


def test_a_name_tells_the_heads_and_what_tensors_do_not_show(tmp_path: Path, shaken: Make) -> None:
    torch.save(timm_vit(shaken, pre_norm=True).state_dict(), tmp_path / "weights.pth")
    import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", name="vit_base_patch16_clip_quickgelu_224")
    ours: Any = load(tmp_path / "out")
    assert (ours.heads, ours.norm_eps, type(ours.network.blocks[0].mlp.act).__name__) == (12, 1e-5, "QuickGELU")


def test_every_hidden_width_can_be_said() -> None:
    assert all(int(width * ratio(width, hidden)) == hidden for width in (48, 192, 1408) for hidden in range(1, 7000))


# --- what follows an import ---


def test_the_recipe_keys_of_a_hybrid_count_cells(make_encoder: Make) -> None:
    ours = make_encoder(name="vit_tiny_r_s16_p8_224", image_size=64, patch_size=1)
    keys = recipe_keys(ours)
    assert keys["patch_size"] == 1
    assert build_encoder(EncoderConfig(**keys), None).grid == ours.grid


def test_no_recipe_keys_for_what_no_recipe_builds(tmp_path: Path, shaken: Make) -> None:
    torch.save(timm_vit(shaken, reg_tokens=2).state_dict(), tmp_path / "weights.pth")
    model, _ = import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", heads=3)
    assert recipe_keys(model) == {}


def test_the_command_says_what_it_took_for_granted(
    tmp_path: Path, shaken: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(timm_vit(shaken, num_classes=3).state_dict(), tmp_path / "weights.pth")
    monkeypatch.chdir(tmp_path)
    arguments = ["ssl-vit", "import", "weights.pth", "out", "--heads", "3", "--mean", "0.1,0.2,0.3"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    said = capsys.readouterr().out
    assert "skipped: head.weight, head.bias" in said
    assert "note: the file has no mean and std" in said
    assert "ssl-vit train RECIPE init_from=out encoder.name=vit_base_patch16_224 encoder.image_size=32" in said
    assert "encoder.mean=[0.1,0.2,0.3]" in said
    monkeypatch.setattr(sys, "argv", [*arguments[:3], "out2", "--mean", "gray"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "--mean gray: give a number" in capsys.readouterr().err
