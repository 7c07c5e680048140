"""Weights of timm, transformers and bare checkpoints come in bit for bit, and nothing in them is run."""

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
from torch import nn

from ssl_vit import cli
from ssl_vit.interfaces import UserError
from ssl_vit.models import EncoderConfig
from ssl_vit.models.exchange.exports import export
from ssl_vit.models.exchange.imports import import_weights
from ssl_vit.models.factory import load, state
from ssl_vit.stage import build_encoder
from tests.hostile.corpus import Bomb

Make = Callable[..., Any]

TINY = "vit_tiny_patch16_224"  # 3 heads
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}


def timm_vit(shaken: Make, **arguments: Any) -> Any:
    return shaken(timm.create_model(TINY, **SMALL | {"num_classes": 0} | arguments))


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
    network.pretrained_cfg |= {"crop_pct": 0.9}
    save_for_hf(network, tmp_path / "timm", safe_serialization=True, model_args=SMALL | parts)
    _, found = import_weights(str(tmp_path / "timm"), tmp_path / "out")
    ours: Any = load(tmp_path / "out")
    assert found.skipped == ["head.weight", "head.bias"]
    assert found.notes == [
        "timm resizes test images to 35 pixels, then crops; here data.evaluation_resize sets the resize"
    ]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["imported"]["skipped"] == found.skipped
    assert (ours.name, ours.mean, ours.std) == (TINY, (0.1, 0.2, 0.3, 0.4), (0.5,) * 4)
    images = pixels(ours)
    with torch.no_grad():
        assert torch.equal(ours(images), network.forward_features(ours.normalized(images)))
    for given in ({"heads": 3}, {"name": TINY}):
        with pytest.raises(UserError, match="remove --name and --heads"):
            import_weights(str(tmp_path / "timm"), tmp_path / "again", **given)


def test_attention_pooling_is_a_head(tmp_path: Path, shaken: Make, pixels: Make) -> None:
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


# --- bare checkpoints ---


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (TINY, {"qkv_bias": False}),
        (TINY, {"no_embed_class": True}),
        (TINY, {"class_token": False, "global_pool": "avg", "fc_norm": False}),
        (TINY, {"in_chans": 2, "mlp_ratio": 2.7, "img_size": 64}),
        ("vit_small_patch14_reg4_dinov2", {}),  # registers and layer scale
        ("vit_base_patch16_clip_quickgelu_224", {}),  # a norm before the blocks, another activation, another epsilon
        ("vit_tiny_r_s16_p8_224", {"img_size": 64}),
    ],
    ids=str,
)
def test_a_bare_checkpoint_and_a_name(
    tmp_path: Path, shaken: Make, pixels: Make, name: str, parts: dict[str, Any]
) -> None:
    sizes = {key: value for key, value in SMALL.items() if "_r_" not in name}
    network = shaken(timm.create_model(name, num_classes=3, **sizes | parts))
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    heads = None if "_r_" in name else 3
    _, found = import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", name=name, heads=heads)
    ours = load(tmp_path / "out")
    assert found.skipped == ["head.weight", "head.bias"]
    assert ours.mean == ((0.5, 0.5) if "in_chans" in parts else network.pretrained_cfg["mean"])
    images = pixels(ours)
    with torch.no_grad():
        assert torch.equal(ours(images), network.forward_features(ours.normalized(images)))


@pytest.mark.parametrize("wrapper", ["", "model_ema", "teacher"])
def test_wrappers_of_training_scripts_are_removed(tmp_path: Path, shaken: Make, wrapper: str) -> None:
    tensors = timm_vit(shaken).state_dict()
    decoder = {"mask_token": torch.ones(1, 1, 16), "decoder_blocks.0.norm1.weight": torch.ones(16)}  # as in MAE's
    prefix = "backbone." if wrapper == "teacher" else "module."
    parallel = {f"{prefix}{key}": tensor for key, tensor in (tensors | decoder).items()}
    content = parallel if not wrapper else {"epoch": 3, "args": argparse.Namespace(lr=0.1), wrapper: parallel}
    if wrapper == "model_ema":  # the average is taken, not the last weights
        content |= {"model": {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}}
    if wrapper == "teacher":  # DINO's checkpoint
        content |= {"student": {f"module.{key}": torch.zeros_like(tensor) for key, tensor in parallel.items()}}
    torch.save(content, tmp_path / "checkpoint.pt")
    _, found = import_weights(str(tmp_path / "checkpoint.pt"), tmp_path / "out", name=TINY, heads=3, mean=0.5, std=0.25)
    assert same(tensors, tmp_path / "out") and found.skipped == [*decoder]
    assert (load(tmp_path / "out").mean, load(tmp_path / "out").std) == ((0.5,) * 3, (0.25,) * 3)


# --- architectures other than VisionTransformers ---


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("test_resnet", {"in_chans": 1}),
        ("test_convnext", {}),
        pytest.param("vit_small_patch16_dinov3", {}, marks=pytest.mark.slow),  # rotary positions
    ],
)
def test_a_checkpoint_of_any_architecture_states_its_name(
    tmp_path: Path, shaken: Make, name: str, parts: dict[str, Any]
) -> None:
    network = shaken(timm.create_model(name, num_classes=4, **parts))
    torch.save({"arch": f"{name}.tag", "state_dict": network.state_dict()}, tmp_path / "last.pth.tar")
    ours, found = import_weights(str(tmp_path / "last.pth.tar"), tmp_path / "out")
    heads = {key for key in network.state_dict() if key not in timm.create_model(name, num_classes=0).state_dict()}
    cfg = timm.get_pretrained_cfg(name)
    assert set(found.skipped) == heads and len(heads) == 2
    assert ours.mean == (cfg.mean if not parts else (0.5,))
    assert ours.image_size == cfg.input_size[1:]
    assert same({key: value for key, value in network.state_dict().items() if key not in heads}, tmp_path / "out")


def test_a_safetensors_file_states_its_name(tmp_path: Path, shaken: Make) -> None:
    network = timm_vit(shaken)
    save_file(network.state_dict(), tmp_path / "bare.safetensors")
    with pytest.raises(UserError, match="does not state its architecture"):
        import_weights(str(tmp_path / "bare.safetensors"), tmp_path / "out")
    with pytest.raises(UserError, match="timm has no architecture 'vit_tiny'"):
        import_weights(str(tmp_path / "bare.safetensors"), tmp_path / "out", name="vit_tiny")
    save_file(network.state_dict(), tmp_path / "named.safetensors", {"architecture": TINY})
    import_weights(str(tmp_path / "named.safetensors"), tmp_path / "out", heads=3)
    assert same(network.state_dict(), tmp_path / "out")


def test_files_of_dinov2_are_renamed_by_timm(tmp_path: Path, shaken: Make) -> None:
    name = "vit_small_patch14_reg4_dinov2"
    network = shaken(timm.create_model(name, num_classes=0))
    tensors = network.state_dict()
    tensors["register_tokens"], tensors["mask_token"] = tensors.pop("reg_token"), torch.zeros(1, 384)
    tensors["pos_embed"] = torch.cat([torch.ones(1, 1, 384), tensors["pos_embed"]], dim=1)
    tensors["cls_token"] = tensors["cls_token"] - 1  # it has a position of its own there
    torch.save(tensors, tmp_path / "dinov2.pth")
    import_weights(str(tmp_path / "dinov2.pth"), tmp_path / "out", name=name)
    ours, expected = state(load(tmp_path / "out")), network.state_dict()
    assert all(torch.allclose(ours[key], tensor, atol=1e-6) for key, tensor in expected.items())


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"does not fit timm's test_convnext"):
        import_weights(str(tmp_path / "w.pth"), tmp_path / "out", name="test_convnext")


@pytest.mark.parametrize("how", ["less", "prefix"])
def test_missing_tensors_are_refused_where_timm_ignores_them(tmp_path: Path, how: str) -> None:
    tensors = timm.create_model("dla46_c").state_dict()
    torch.save(tensors, tmp_path / "whole.pth")
    import_weights(str(tmp_path / "whole.pth"), tmp_path / "out", name="dla46_c")
    assert same({key: value for key, value in tensors.items() if not key.startswith("fc.")}, tmp_path / "out")
    missing = "level0.0.weight"
    for key in [missing] if how == "less" else [*tensors]:
        tensors[f"other.{key}"] = tensors.pop(key)
    torch.save(tensors, tmp_path / "w.pth")
    with pytest.raises(UserError, match=rf"does not fit timm's dla46_c: it lacks .*{missing}"):
        import_weights(str(tmp_path / "w.pth"), tmp_path / "other", name="dla46_c")


# --- transformers ---


def transformers_folder(folder: Path, kind: str, processor: dict[str, Any] | None = None, **settings: Any) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 80,
    }
    sizes |= {"image_size": 24, "patch_size": 8, "initializer_range": 0.5}
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    mae = kind.startswith("ViTMAE")
    config = transformers.ViTMAEConfig if mae else transformers.ViTConfig
    torch.manual_seed(0)
    extra = decoder | {"mask_ratio": 0.0} if mae else {}
    model: nn.Module = getattr(transformers, kind)(config(**sizes | extra | settings)).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)  # type: ignore[operator]
    if processor:
        transformers.ViTImageProcessor(**processor).save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "settings", "skipped"),
    [
        ("ViTModel", {"image_size": [16, 24], "num_channels": 1, "layer_norm_eps": 0.1}, ["pooler.dense.bias"]),
        ("ViTForImageClassification", {"qkv_bias": False}, ["classifier.bias", "classifier.weight"]),
    ],
)
def test_a_transformers_folder_computes_what_it_did(
    tmp_path: Path, pixels: Make, kind: str, settings: dict[str, Any], skipped: list[str]
) -> None:
    channels = settings.get("num_channels", 3)
    mean, std = (0.1, 0.2, 0.3)[:channels], (0.4, 0.5, 0.6)[:channels]
    theirs: Any = transformers_folder(tmp_path / "hf", kind, {"image_mean": [*mean], "image_std": [*std]}, **settings)
    _, found = import_weights(str(tmp_path / "hf"), tmp_path / "out")
    ours = load(tmp_path / "out")
    assert set(skipped) <= set(found.skipped) <= {*skipped, "pooler.dense.weight"}
    assert (ours.norm_eps, ours.mean, ours.std) == (settings.get("layer_norm_eps", 1e-12), mean, std)
    images = pixels(ours)
    with torch.no_grad():
        expected = getattr(theirs, "vit", theirs)(normalized(ours, images)).last_hidden_state
        torch.testing.assert_close(ours(images), expected, atol=1e-5, rtol=1e-5)


def test_what_a_transformers_folder_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    transformers_folder(tmp_path / "hf", "ViTModel", {"do_normalize": False})
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: config[key] for key in config.keys() - {"layer_norm_eps", "hidden_act"}}))
    import_weights(str(tmp_path / "hf"), tmp_path / "out")
    ours: Any = load(tmp_path / "out")
    assert (ours.norm_eps, ours.mean, ours.std) == (1e-12, (0.0,) * 3, (1.0,) * 3), "pixels are not normalized"


def test_transformers_mae_keeps_the_encoder_and_needs_no_transformers(
    tmp_path: Path, pixels: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: Any = transformers_folder(tmp_path / "hf", "ViTMAEForPreTraining")
    monkeypatch.setitem(sys.modules, "transformers", None)
    _, found = import_weights(str(tmp_path / "hf"), tmp_path / "out")
    import_weights(str(tmp_path / "hf" / "model.safetensors"), tmp_path / "by file")  # its config.json is beside it
    ours = load(tmp_path / "out")
    assert same(state(ours), tmp_path / "by file")
    assert found.skipped and all(name.startswith("decoder.") for name in found.skipped)
    assert any("no preprocessor_config.json" in note for note in found.notes)
    images = pixels(ours)
    noise = torch.arange(9.0).repeat(2, 1)  # MAE orders the patches by it: as they are
    with torch.no_grad():
        expected = theirs.vit(normalized(ours, images), noise=noise).last_hidden_state
        torch.testing.assert_close(ours(images), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deit"}, "model_type deit"),
        ({"hidden_act": "relu"}, "activation is relu"),
        ({"image_size": 64}, "pos_embed"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    transformers_folder(tmp_path / "hf", "ViTModel")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message):
        import_weights(str(tmp_path / "hf"), tmp_path / "out")


BAD_CONFIGS: list[dict[str, Any]] = [
    *({"image_size": size} for size in ("24", None, 24.0)),
    *({"num_attention_heads": heads} for heads in ("2", -2)),
    *({"layer_norm_eps": epsilon} for epsilon in ("x", -9)),
    *({"architecture": name} for name in (5, None)),
    *({"image_mean": mean} for mean in (None, "abc", [[0.5]] * 3)),
]


def test_a_description_of_other_types_is_refused(tmp_path: Path) -> None:
    """Wherever it is noticed: while sizes are read, while the model is built, or when it computes."""
    transformers_folder(tmp_path / "hf", "ViTModel")
    model, pixels = tmp_path / "hf" / "config.json", tmp_path / "hf" / "preprocessor_config.json"
    described = json.loads(model.read_text())
    for change in BAD_CONFIGS:
        model.write_text(json.dumps(described if "image_mean" in change else described | change))
        pixels.write_text(json.dumps(change if "image_mean" in change else {}))
        with pytest.raises(UserError, match="hf: "):
            import_weights(str(tmp_path / "hf"), tmp_path / "out")
        assert not (tmp_path / "out").exists()


# --- what follows an import ---


def test_the_command_prints_what_was_assumed_and_a_recipe_that_fits_starts_from_it(
    tmp_path: Path, shaken: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ssl-vit", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0)

    monkeypatch.chdir(tmp_path)
    torch.save(timm_vit(shaken, num_classes=3).state_dict(), tmp_path / "weights.pth")
    arguments = ["import", "weights.pth", "out", "--name", TINY, "--heads", "3", "--mean", "0.1,0.2,0.3"]
    assert call(*arguments) == 0
    text = capsys.readouterr().out
    assert "skipped: head.weight, head.bias" in text
    assert "note: the file has no mean and std" in text
    assert "mean (0.1, 0.2, 0.3)" in text and f"init_from=out encoder.name={TINY}" in text
    sizes: dict[str, Any] = {"name": TINY, "image_size": 32, "patch_size": 8, "width": 48, "depth": 2}
    colors = {"mean": (0.1, 0.2, 0.3), "std": 0.5}
    assert same(state(build_encoder(EncoderConfig(**sizes, **colors), "out")), tmp_path / "out")
    with pytest.raises(UserError, match=r"out does not fit this encoder: encoder\.mean is \(0\.1, 0\.2, 0\.3\)"):
        build_encoder(EncoderConfig(**sizes), "out")
    assert call(*arguments[:2], "out2", "--mean", "gray") == 2
    assert "--mean gray: give a number" in capsys.readouterr().err


# --- what is refused ---


def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path, shaken: Make) -> None:
    content = {"model": timm_vit(shaken).state_dict(), "args": Bomb(tmp_path / "ran")}
    for name, new in (("zip.pth", True), ("old.pth", False)):
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=new)
        with pytest.raises(UserError, match=rf"{name}: not a readable checkpoint of plain tensors; nothing in it was"):
            import_weights(str(tmp_path / name), tmp_path / "out", name=TINY)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "zip.pth", weights_only=False)
    assert (tmp_path / "ran").exists(), "the bomb works where it is let"


def test_what_a_name_may_be(tmp_path: Path, shaken: Make) -> None:
    torch.save(timm_vit(shaken).state_dict(), tmp_path / "a.pth")
    model, _ = import_weights(str(tmp_path / "a.pth"), tmp_path / "out", name="vit_small_patch16_224.dino", heads=3)
    assert model.name == "vit_small_patch16_224", "the tag names other weights"
    assert model.mean == pytest.approx((0.485, 0.456, 0.406)), "that of the tag"
    (tmp_path / "junk.pth").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"junk\.pth: not a readable checkpoint"):
        import_weights(str(tmp_path / "junk.pth"), tmp_path / "other", name=TINY)
    with pytest.raises(UserError, match=r"nofile\.pth: no such file"):
        import_weights(str(tmp_path / "nofile.pth"), tmp_path / "other", name=TINY)


SPOILED: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": ({"blocks.1.norm2.bias": None}, r"blocks\.1\.norm2\.bias"),
    "shape": ({"blocks.1.attn.proj.bias": torch.ones(47)}, r"blocks\.1\.attn\.proj\.bias"),
    "unknown in a block": ({"blocks.1.gamma_1": torch.ones(48)}, r"blocks\.1\.gamma_1"),
    "positions": ({"pos_embed": torch.ones(1, 19, 48)}, "19 positions are not a square"),
    "no positions": ({"pos_embed": None}, "pos_embed"),
    "width": ({"patch_embed.proj.weight": torch.ones(50, 3, 8, 8)}, "3 heads do not divide its width 50"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, shaken: Make, how: str) -> None:
    changes, message = SPOILED[how]
    tensors = timm_vit(shaken).state_dict() | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=message):
        import_weights(str(tmp_path / "w.safetensors"), tmp_path / "out", name=TINY, heads=3)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_another_width_than_the_names_needs_the_number_of_heads(tmp_path: Path, shaken: Make) -> None:
    torch.save(timm_vit(shaken).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(UserError, match=r"width 48 .*\(192\); give --heads"):
        import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", name=TINY)
    _, found = import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", name=TINY, heads=3)
    assert any("no image size" in note and "32x32" in note for note in found.notes)


def test_a_class_token_and_a_norm_after_pooling(tmp_path: Path, shaken: Make) -> None:
    """As in the published fine-tuned weights of MAE."""
    tensors = timm_vit(shaken, global_pool="avg").state_dict()
    assert "fc_norm.weight" in tensors and "norm.weight" not in tensors and "cls_token" in tensors
    torch.save(tensors, tmp_path / "weights.pth")
    import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", name=TINY, heads=3)
    assert same({key: value for key, value in tensors.items() if not key.startswith("head.")}, tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("weights.safetensors", "cut", "not a readable checkpoint"),
        ("weights.pt", {"epoch": 1, "optimizer": {"lr": 2}}, "no tensors there.* it holds epoch, optimizer"),
        ("cat.jpg", b"\xff\xd8", r"weights are read from \.safetensors"),
        ("folder/notes", b"", r"has no config\.json"),
        ("folder/config.json", b'{"model_type": "vit"}', r"holds no model\.safetensors and no pytorch_model\.bin"),
        ("folder/config.json", b'{"architecture": "swim_tiny"}', "timm has no architecture 'swim_tiny'"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, shaken: Make, file: str, content: Any, message: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "cut":
        tensors = timm_vit(shaken).state_dict()
        save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
        path.write_bytes(path.read_bytes()[:5000])
    else:
        torch.save(content, path)
    folder = path.parent if path.parent.name == "folder" else None
    with pytest.raises(UserError, match=message):
        import_weights(str(folder or path), tmp_path / "out", name=None if folder else TINY)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("vit_tiny_patch16_224.augreg", "timm cannot load it.*augreg"),
        ("vit_tny_patch16_224", "no such file, folder or timm model; did you mean vit_tiny_patch16_224"),
        ("~nosuchuser/w.pth", "no such"),
        ("bare.pth", "not a readable checkpoint"),
        ("ours", "does not need to be imported"),
        ("unsaved", "may not have saved one yet"),
        ("comparison", "is a comparison; name the run"),
    ],
)
def test_sources_that_cannot_be_imported(
    tmp_path: Path, make_encoder: Make, saved: Make, monkeypatch: pytest.MonkeyPatch, weights: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare.pth").touch()
    saved(tmp_path / "ours", make_encoder())
    for name in ("unsaved/recipe.yaml", "comparison/plan.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=message):
        import_weights(weights, tmp_path / "out")


def test_a_folder_of_timm_may_hold_a_recipe(tmp_path: Path, shaken: Make) -> None:
    save_for_hf(timm_vit(shaken), tmp_path / "given", safe_serialization=True, model_args=SMALL)
    (tmp_path / "given" / "recipe.yaml").touch()
    import_weights(str(tmp_path / "given"), tmp_path / "out")


def test_an_occupied_folder_is_kept(tmp_path: Path, shaken: Make) -> None:
    torch.save(timm_vit(shaken).state_dict(), tmp_path / "weights.pth")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="out exists and is not empty"):
        import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", name=TINY, heads=3)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"
    (tmp_path / "out" / "thesis.tex").unlink()
    import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", name=TINY, heads=3)


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path, shaken: Make) -> None:
    tensors = {key: torch.full_like(tensor, float("nan")) for key, tensor in timm_vit(shaken).state_dict().items()}
    torch.save(tensors, tmp_path / "weights.pth")
    with pytest.raises(UserError, match=r"weights\.pth: its features are infinite or NaN"):
        import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", name=TINY, heads=3)
    assert not (tmp_path / "out").exists()
