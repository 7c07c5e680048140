from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch

from ssl_vit.interfaces import RunError, UserError
from ssl_vit.models import EncoderConfig
from ssl_vit.models.exchange import exports
from ssl_vit.models.exchange.exports import export
from ssl_vit.models.exchange.imports import import_weights
from ssl_vit.models.factory import build, load, state
from ssl_vit.models.vit import ViTEncoder

Make = Callable[..., Any]

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
MEAN_STD = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
PLAIN = [
    {},
    {"channels": 1, "mean": 0.3, "std": 0.2, "heads": 1},
    {"image_size": (16, 24), **MEAN_STD},
    {"positions": "sincos2d", "mlp_ratio": 1.5},
]
REGISTERS = {"name": "vit_small_patch14_reg4_dinov2"}  # and a layer scale
NO_TOKEN = {"class_token": False}
NO_PLACE_FOR_TOKEN = {"name": "deit3_small_patch16_224"}
HYBRID = {"name": "vit_tiny_r_s16_p8_224", "image_size": 64, "patch_size": 1}


def images_for(encoder: Any, count: int = 3) -> torch.Tensor:
    shape = (count, encoder.channels, *encoder.image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def tokens(encoder: Any, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = encoder.encode(encoder.network.patch_embed(images))
    return found


def unchanged(ours: Any, back: Any) -> bool:
    mine, theirs = state(ours), state(back)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


# --- timm ---


@pytest.mark.parametrize("settings", [*PLAIN, REGISTERS, NO_TOKEN, NO_PLACE_FOR_TOKEN, HYBRID], ids=str)
def test_to_timm_and_back(make_encoder: Make, shaken: Make, tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = shaken(make_encoder(**settings))
    export(ours, tmp_path / "timm", "timm", "the card")
    network = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    images = images_for(ours)
    with torch.no_grad():
        assert torch.equal(network.forward_features(images), tokens(ours, images))
    data = timm.data.resolve_data_config(model=network)
    assert data["input_size"] == (ours.channels, *ours.image_size)
    channels = ours.mean
    assert tuple(data["mean"]) == channels
    assert (tmp_path / "timm" / "README.md").read_text() == "the card"
    import_weights(str(tmp_path / "timm"), tmp_path / "back")
    back = load(tmp_path / "back")
    assert unchanged(ours, back)
    assert (back.name, back.mean, back.std, back.own_settings) == (ours.name, ours.mean, ours.std, ours.own_settings)


def test_a_resnet_to_timm(tmp_path: Path) -> None:
    ours = build(EncoderConfig(name="test_resnet", image_size=64)).eval()
    export(ours, tmp_path / "timm", "timm", "")
    import_weights(str(tmp_path / "timm"), tmp_path / "back")
    assert unchanged(ours, load(tmp_path / "back"))
    with pytest.raises(UserError, match="transformers' ViT cannot be a ResNet"):
        export(ours, tmp_path / "no", "transformers", "")


def test_an_epsilon_that_timm_cannot_say_is_refused(make_encoder: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"layer norms of epsilon 1e-06, these weights 1e-12.*--to transformers"):
        export(make_encoder(norm_eps=1e-12), tmp_path / "timm", "timm", "")
    assert not list(tmp_path.iterdir())


# --- transformers ---


@pytest.mark.parametrize("settings", [*PLAIN, {"norm_eps": 0.1}], ids=str)
def test_to_transformers_and_back(make_encoder: Make, shaken: Make, tmp_path: Path, settings: dict[str, Any]) -> None:
    import transformers

    ours = shaken(make_encoder(**settings))
    export(ours, tmp_path / "hf", "transformers", "the card")
    loaded: Any = transformers.ViTModel.from_pretrained(
        tmp_path / "hf", add_pooling_layer=False, output_loading_info=True
    )
    model, loading = loaded
    assert not any(loading.values())
    images = images_for(ours)
    with torch.no_grad():
        found = model.eval()(images).last_hidden_state
    torch.testing.assert_close(found, tokens(ours, images), atol=1e-5, rtol=0)
    processor = transformers.ViTImageProcessor.from_pretrained(tmp_path / "hf")
    mean = ours.mean
    assert tuple(processor.image_mean) == mean
    assert (processor.size["height"], processor.size["width"]) == ours.image_size
    import_weights(str(tmp_path / "hf"), tmp_path / "back")
    back = load(tmp_path / "back")
    assert unchanged(ours, back)
    assert (back.mean, back.std, back.norm_eps) == (ours.mean, ours.std, ours.norm_eps)
    assert all(parameter.dtype == torch.float32 for parameter in ours.parameters()), "the export leaves it as it was"


def test_a_class_token_without_a_position_gets_one_of_zero(shaken: Make, tmp_path: Path) -> None:
    import transformers

    ours = shaken(ViTEncoder("vit_tiny_patch16_224", {**SMALL, "no_embed_class": True, "qkv_bias": False}, 0.5, 0.5))
    export(ours, tmp_path / "hf", "transformers", "")
    model = transformers.ViTModel.from_pretrained(tmp_path / "hf", add_pooling_layer=False).eval()
    images = images_for(ours)
    with torch.no_grad():
        torch.testing.assert_close(model(images).last_hidden_state, tokens(ours, images), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"reg_tokens": 2}, "no place for reg_token"),
        ({"class_token": False, "global_pool": "avg", "fc_norm": False}, "needs cls_token"),
        ({"init_values": 0.1}, r"no place for blocks\.0\.ls1\.gamma, .* and 1 more"),
        ({"proj_bias": False}, r"needs blocks\.0\.attn\.proj\.bias"),
        ({"norm_layer": "rmsnorm"}, r"needs norm\.bias"),
        ({"qk_norm": True}, r"no place for blocks\.0\.attn\.q_norm\.weight"),
        ({"pre_norm": True}, r"needs patch_embed\.proj\.bias; it has no place for norm_pre"),
        ({"global_pool": "avg"}, r"needs norm\.weight, norm\.bias; it has no place for fc_norm"),
    ],
)
def test_what_transformers_cannot_say_is_refused(tmp_path: Path, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"transformers' ViT cannot be vit_tiny_patch16_224.*{why}"):
        export(ViTEncoder("vit_tiny_patch16_224", SMALL | arguments, 0.5, 0.5), tmp_path / "hf", "transformers", "")
    assert not list(tmp_path.iterdir())


def test_another_activation_is_found_by_the_outputs(tmp_path: Path) -> None:
    """It has no tensor, so only the comparison can see it."""
    ours = ViTEncoder("vit_base_patch16_clip_quickgelu_224", SMALL | {"pre_norm": False}, 0.5, 0.5)
    with pytest.raises(RunError, match="transformers's outputs differ from the encoder's by"):
        export(ours, tmp_path / "hf", "transformers", "")
    assert not list(tmp_path.iterdir())


# --- ONNX ---


def run_onnx(folder: Path, images: torch.Tensor) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"pixel_values": images.numpy()})
    return np.asarray(found)


@pytest.mark.parametrize(
    ("settings", "large"), [({"channels": 1, "image_size": (16, 24)}, False), (REGISTERS, True)], ids=str
)
def test_to_onnx(
    make_encoder: Make,
    shaken: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    large: bool,
) -> None:
    ours = shaken(make_encoder(**settings))
    if large:
        monkeypatch.setattr(exports, "_LARGE", 0)
    export(ours, tmp_path / "onnx", "onnx", "the card")
    files = ["README.md", "config.json", "model.onnx", *["model.onnx.data"] * large]
    assert sorted(path.name for path in (tmp_path / "onnx").iterdir()) == files
    for count in (1, 5):
        images = images_for(ours, count)
        found = run_onnx(tmp_path / "onnx", images)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, tokens(ours, images).numpy(), atol=1e-4)
    config = json.loads((tmp_path / "onnx" / "config.json").read_text())
    assert config["pretrained_cfg"]["mean"] == [0.5] * ours.channels


@pytest.mark.slow
def test_a_resnet_to_onnx(tmp_path: Path) -> None:
    ours: Any = build(EncoderConfig(name="test_resnet", image_size=64)).eval()
    export(ours, tmp_path / "onnx", "onnx", "")
    images = images_for(ours)
    with torch.no_grad():
        expected = ours.network.forward_features(images).flatten(2).mT
    np.testing.assert_allclose(run_onnx(tmp_path / "onnx", images), expected.numpy(), atol=1e-4)


# --- what goes wrong ---


@pytest.mark.parametrize("to", ["timm", "transformers", "onnx"])
def test_outputs_that_differ_leave_nothing(
    make_encoder: Make, shaken: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    """The weights are changed on their way to the disk, or in the runtime: each check must see it."""
    ours = shaken(make_encoder())
    write = exports.save_file

    def bend(tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        write({key: tensor * (1.001 if "proj" in key else 1) for key, tensor in tensors.items()}, *rest)

    monkeypatch.setattr(exports, "save_file", bend)
    if to == "onnx":
        run = SimpleNamespace(run=lambda _, inputs: [np.zeros((len(inputs["pixel_values"]), 17, 16), np.float32)])
        monkeypatch.setattr("onnxruntime.InferenceSession", lambda *_, **__: run)
    with pytest.raises(RunError, match="outputs differ from the encoder's by"):
        export(ours, tmp_path / "out", to, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("to", "package"), [("transformers", "transformers"), ("onnx", "onnxscript")])
def test_a_missing_library_is_named(
    make_encoder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"{package} is not installed.*pip install 'ssl-vit\[export\]'"):
        export(make_encoder(), tmp_path / "out", to, "")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_refuses_is_no_traceback(make_encoder: Make, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write there"):
        export(make_encoder(), tmp_path / "file" / "out", "timm", "")
