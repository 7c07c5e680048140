"""Hugging Face's ViTs come in with what they compute; transformers itself writes every folder here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ssl_vit.interfaces import UserError
from ssl_vit.models import EncoderConfig
from ssl_vit.models.exchange.imports import import_weights, recipe_keys
from ssl_vit.models.factory import load, state
from ssl_vit.stage import build_encoder

Make = Callable[..., Any]


def normalized(model: Any, images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(n).reshape(-1, 1, 1) for n in (model.mean, model.std))
    return (images / 255 - mean) / std


def same(tensors: dict[str, torch.Tensor], folder: Path) -> bool:
    ours = state(load(folder))
    return ours.keys() == tensors.keys() and all(torch.equal(tensor, tensors[key]) for key, tensor in ours.items())


def transformers_folder(folder: Path, kind: str, processor: dict[str, Any] | None = None, **settings: Any) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
    sizes |= {"image_size": 24, "patch_size": 8, "initializer_range": 0.5}
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    config_class, extra = (
        (transformers.ViTMAEConfig, decoder | {"mask_ratio": 0.0})
        if kind.startswith("ViTMAE")
        else (transformers.ViTConfig, {})
    )
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, kind)(config_class(**sizes | extra | settings)).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    if processor:
        transformers.ViTImageProcessor(**processor).save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "settings", "skipped"),
    [
        ("ViTModel", {}, ["pooler.dense.bias", "pooler.dense.weight"]),
        ("ViTModel", {"image_size": [16, 24], "num_channels": 1, "layer_norm_eps": 0.1}, ["pooler.dense.bias"]),
        ("ViTForImageClassification", {"qkv_bias": False}, ["classifier.bias", "classifier.weight"]),
    ],
)
def test_a_transformers_folder_computes_what_it_did(
    tmp_path: Path, pixels: Make, kind: str, settings: dict[str, Any], skipped: list[str]
) -> None:
    channels = settings.get("num_channels", 3)
    processor = {"image_mean": [0.1, 0.2, 0.3][:channels], "image_std": [0.4, 0.5, 0.6][:channels]}
    theirs = transformers_folder(tmp_path / "hf", kind, processor, **settings)
    _, found = import_weights(str(tmp_path / "hf"), tmp_path / "out")
    ours = load(tmp_path / "out")
    assert set(skipped) <= set(found.skipped) <= {*skipped, "pooler.dense.weight"}
    assert ours.norm_eps == settings.get("layer_norm_eps", 1e-12)
    assert (ours.mean, ours.std) == (((0.1,), (0.4,)) if channels == 1 else ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    images = pixels(ours)
    with torch.no_grad():
        expected = getattr(theirs, "vit", theirs)(normalized(ours, images)).last_hidden_state
        torch.testing.assert_close(ours(images), expected, atol=1e-5, rtol=1e-5)


def test_transformers_mae_keeps_the_encoder(tmp_path: Path, pixels: Make) -> None:
    theirs = transformers_folder(tmp_path / "hf", "ViTMAEForPreTraining")
    _, found = import_weights(str(tmp_path / "hf"), tmp_path / "out")
    ours = load(tmp_path / "out")
    assert found.skipped
    assert all(name.startswith("decoder.") for name in found.skipped)
    assert any("no preprocessor_config.json" in note for note in found.notes)
    images = pixels(ours)
    noise = torch.arange(9.0).repeat(2, 1)  # of which MAE makes the order of the patches: as they are
    with torch.no_grad():
        expected = theirs.vit(normalized(ours, images), noise=noise).last_hidden_state  # type: ignore[union-attr, operator]
        torch.testing.assert_close(ours(images), expected, atol=1e-5, rtol=1e-5)


def test_a_transformers_folder_needs_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers_folder(tmp_path / "hf", "ViTModel")
    monkeypatch.setitem(sys.modules, "transformers", None)
    import_weights(str(tmp_path / "hf"), tmp_path / "out")
    file = tmp_path / "hf" / "model.safetensors"
    import_weights(str(file), tmp_path / "by file")  # its config.json lies beside it
    (tmp_path / "hf" / "config.json").unlink()
    with pytest.raises(UserError, match="width 32 and depth 2: give --heads"):
        import_weights(str(file), tmp_path / "bare")
    _, found = import_weights(str(file), tmp_path / "bare", heads=4)
    assert any("epsilon" in note for note in found.notes)
    assert same(state(load(tmp_path / "out")), tmp_path / "bare")
    assert same(state(load(tmp_path / "out")), tmp_path / "by file")
    assert load(tmp_path / "bare").norm_eps == load(tmp_path / "out").norm_eps == 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deit"}, "nor a ViT.s .model_type deit"),
        ({"hidden_act": "relu"}, "activation is relu"),
        ({"num_attention_heads": 5}, "5 heads do not divide its width 32"),
        ({"image_size": 64}, "pos_embed"),
    ],
)
def test_another_config_than_the_weights_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    transformers_folder(tmp_path / "hf", "ViTModel")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message):
        import_weights(str(tmp_path / "hf"), tmp_path / "out")


def test_images_that_are_not_normalized_stay_so(tmp_path: Path) -> None:
    transformers_folder(tmp_path / "hf", "ViTModel", {"do_normalize": False})
    import_weights(str(tmp_path / "hf"), tmp_path / "out")
    assert (load(tmp_path / "out").mean, load(tmp_path / "out").std) == ((0.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize("channels", [3, 1])
def test_the_recipe_keys_make_init_from_fit(tmp_path: Path, pixels: Make, channels: int) -> None:
    transformers_folder(tmp_path / "hf", "ViTModel", num_channels=channels)
    mean = (0.1, 0.2, 0.3) if channels == 3 else 0.1
    model, _ = import_weights(str(tmp_path / "hf"), tmp_path / "out", mean=mean)
    keys = recipe_keys(model)
    assert ("norm_eps" in keys) and ("mlp_ratio" in keys) and "depth" in keys
    started = build_encoder(EncoderConfig(**keys), str(tmp_path / "out")).eval()
    with torch.no_grad():
        assert torch.equal(started(pixels(started)), load(tmp_path / "out")(pixels(started)))
