from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from ssl_vit.interfaces import RunError, UserError
from ssl_vit.models import EncoderConfig
from ssl_vit.models.exchange import exports
from ssl_vit.models.exchange.exports import Use, export
from ssl_vit.models.exchange.imports import import_weights
from ssl_vit.models.factory import build, load, state
from ssl_vit.models.vit import ViTEncoder

Make = Callable[..., Any]

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
MEAN_STD = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
PLAIN: list[dict[str, Any]] = [
    {"channels": 1, "mean": 0.3, "std": 0.2, "heads": 1},
    {"image_size": (16, 24), "mlp_ratio": 1.5, **MEAN_STD},
]
OTHERS: list[dict[str, Any]] = [
    {"positions": "sincos2d", "class_token": False},
    {"positions": "learned_2d"},
    {"positions": "none"},
    {"name": "deit3_small_patch16_224"},  # no position for the class token
    {"name": "vit_tiny_r_s16_p8_224", "image_size": 64, "patch_size": 1},
]


def images_for(encoder: Any) -> torch.Tensor:
    shape = (3, encoder.channels, *encoder.image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def tokens(encoder: Any, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = encoder.encode(encoder.network.patch_embed(images))
    return found


def comes_back(ours: Any, folder: Path) -> None:
    import_weights(str(folder), folder.parent / "back")
    back: Any = load(folder.parent / "back")
    mine, theirs = state(ours), state(back)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert (back.mean, back.std) == (ours.mean, ours.std)
    assert getattr(back, "norm_eps", None) == getattr(ours, "norm_eps", None)


@pytest.mark.parametrize("settings", [*PLAIN, *OTHERS], ids=str)
def test_to_timm_and_back(make_encoder: Make, shaken: Make, tmp_path: Path, settings: dict[str, Any]) -> None:
    ours = shaken(make_encoder(**settings))
    pooling: Any = "token" if ours.has_class_token and ours.channels == 1 else "mean"
    export(ours, tmp_path / "timm", "timm", "the card", Use(256 / 224, pooling))
    network = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    images = images_for(ours)
    with torch.no_grad():
        assert torch.equal(network.forward_features(images), tokens(ours, images))
        assert torch.allclose(network(images), ours.pool(tokens(ours, images), pooling), atol=1e-6), pooling
    data = timm.data.resolve_data_config(model=network)
    assert math.floor(data["input_size"][1] / data["crop_pct"]) == round(256 / 224 * ours.image_size[0])
    assert (data["input_size"], tuple(data["mean"])) == ((ours.channels, *ours.image_size), ours.mean)
    assert (tmp_path / "timm" / "README.md").read_text() == "the card"
    comes_back(ours, tmp_path / "timm")


def test_a_resnet_to_timm(tmp_path: Path) -> None:
    ours = build(EncoderConfig(name="test_resnet", image_size=64)).eval()
    export(ours, tmp_path / "timm", "timm", "")
    comes_back(ours, tmp_path / "timm")
    with pytest.raises(UserError, match="test_resnet is not a VisionTransformer"):
        export(ours, tmp_path / "no", "transformers", "")


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
        torch.testing.assert_close(model.eval()(images)[0], tokens(ours, images), atol=1e-5, rtol=0)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf")
    height, width = ours.image_size
    cropped = processor.crop_size if height == width else processor.size  # a square is resized, then cropped
    assert (tuple(processor.image_mean), cropped["width"]) == (ours.mean, width)
    comes_back(ours, tmp_path / "hf")


def test_a_class_token_without_a_position_gets_one_of_zero(shaken: Make, tmp_path: Path) -> None:
    ours = shaken(ViTEncoder("vit_tiny_patch16_224", {**SMALL, "no_embed_class": True, "qkv_bias": False}, 0.5, 0.5))
    export(ours, tmp_path / "hf", "transformers", "")  # which compares the outputs


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"reg_tokens": 2}, "no place for reg_token"),
        ({"class_token": False, "global_pool": "avg", "fc_norm": False}, "needs cls_token"),
        ({"init_values": 0.1}, r"no place for blocks\.0\.ls1\.gamma"),
        ({"norm_layer": "rmsnorm"}, r"needs norm\.bias"),
        ({"pre_norm": True}, r"needs patch_embed\.proj\.bias; it has no place for norm_pre"),
    ],
)
def test_what_transformers_cannot_say_is_refused(tmp_path: Path, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"transformers' ViT cannot represent vit_tiny_patch16_224.*{why}"):
        export(ViTEncoder("vit_tiny_patch16_224", SMALL | arguments, 0.5, 0.5), tmp_path / "hf", "transformers", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["timm", "transformers"])
def test_relative_positions_stay_here(make_encoder: Make, tmp_path: Path, to: Any) -> None:
    with pytest.raises(UserError, match=r"relative positions.*ssl_vit\.load"):
        export(make_encoder(positions="relative"), tmp_path / to, to, "")
    assert not list(tmp_path.iterdir())


def test_what_only_the_outputs_show_is_found(make_encoder: Make, tmp_path: Path) -> None:
    """An activation function has no tensor; timm's folder has no epsilon."""
    ours = ViTEncoder("vit_base_patch16_clip_quickgelu_224", SMALL | {"pre_norm": False}, 0.5, 0.5)
    with pytest.raises(RunError, match="transformers's outputs differ from the encoder's by"):
        export(ours, tmp_path / "hf", "transformers", "")
    with pytest.raises(UserError, match=r"layer norms of epsilon 1e-06, these weights 1e-12.*--to transformers"):
        export(make_encoder(norm_eps=1e-12), tmp_path / "timm", "timm", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["timm", "transformers"])
def test_outputs_that_differ_leave_nothing(
    make_encoder: Make, shaken: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    """The weights are changed on their way to the disk."""
    write = exports.save_file

    def bend(tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        write({key: tensor * (1.001 if "proj" in key else 1) for key, tensor in tensors.items()}, *rest)

    monkeypatch.setattr(exports, "save_file", bend)
    with pytest.raises(RunError, match="outputs differ from the encoder's by"):
        export(shaken(make_encoder()), tmp_path / "out", to, "")
    assert not list(tmp_path.iterdir())


def test_a_missing_library_and_a_disk_that_refuses(
    make_encoder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"transformers is not installed.*pip install 'ssl-vit\[export\]'"):
        export(make_encoder(), tmp_path / "out", "transformers", "")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write there"):
        export(make_encoder(), tmp_path / "file" / "out", "timm", "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
