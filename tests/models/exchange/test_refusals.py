"""What an import must not do: run code, take half a file, lose a tensor without a word, write over a folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf

from ssl_vit.interfaces import UserError
from ssl_vit.models.exchange.imports import import_weights

Make = Callable[..., Any]


def timm_vit(shaken: Make) -> Any:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    return shaken(timm.create_model("vit_tiny_patch16_224", num_classes=0, **sizes))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path, shaken: Make) -> None:
    content = {"model": timm_vit(shaken).state_dict(), "args": Bomb(tmp_path / "ran")}
    for name, new in (("zip.pth", True), ("old.pth", False)):
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=new)
        with pytest.raises(
            UserError, match=rf"{name}: not a readable checkpoint of plain tensors; nothing in it was run"
        ):
            import_weights(str(tmp_path / name), tmp_path / "out", heads=3)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "zip.pth", weights_only=False)
    assert (tmp_path / "ran").exists(), "the bomb works where it is let"


def spoil(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    if how == "missing":
        del tensors["blocks.1.norm2.bias"]
    elif how == "shape":
        tensors["blocks.1.attn.proj.bias"] = torch.ones(47)
    elif how == "unknown in a block":
        tensors["blocks.1.gamma_1"] = torch.ones(48)
    elif how == "positions":
        tensors["pos_embed"] = torch.ones(1, 19, 48)
    elif how == "no positions":
        del tensors["pos_embed"]
    elif how == "linear patches":
        tensors["patch_embed.proj.weight"] = torch.ones(48, 192)
    elif how == "another model":
        return {"conv1.weight": torch.ones(3), "layer1.0.bn.bias": torch.ones(3)}
    elif how == "one key missing":
        del tensors["norm.weight"]
    return tensors


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"blocks\.1\.norm2\.bias is missing"),
        ("one key missing", r"norm\.weight is missing"),
        ("shape", r"blocks\.1\.attn\.proj\.bias is \(47,\), not \(48,\)"),
        ("unknown in a block", r"blocks\.1\.gamma_1 is unknown"),
        ("positions", "19 entries, which is not a square"),
        ("no positions", "pos_embed is missing"),
        ("linear patches", r"patch_embed\.proj\.weight is \(48, 192\)"),
        ("another model", r"no ViT under timm's, transformers' or Google's names; it holds conv1\.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, shaken: Make, how: str, message: str) -> None:
    save_file(spoil(timm_vit(shaken).state_dict(), how), tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match=message):
        import_weights(str(tmp_path / "weights.safetensors"), tmp_path / "out", heads=3)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]


def write(path: Path, kind: str, tensors: dict[str, torch.Tensor]) -> Path:
    if kind == "cut":
        save_file(tensors, path := path / "weights.safetensors")
        path.write_bytes(path.read_bytes()[:5000])
    elif kind == "cut pth":
        torch.save(tensors, path := path / "weights.pth")
        path.write_bytes(path.read_bytes()[:5000])
    elif kind == "text":
        (path := path / "weights.pth").write_text("hello")
    elif kind == "text as safetensors":
        (path := path / "weights.safetensors").write_text("hello, this is no header")
    elif kind == "list":
        torch.save([1, 2], path := path / "weights.pt")
    elif kind == "no tensors":
        torch.save({"epoch": 1, "optimizer": {"lr": 2}}, path := path / "weights.pt")
    elif kind == "a picture":
        (path := path / "cat.jpg").write_bytes(b"\xff\xd8")
    elif kind == "an empty folder":
        (path := path / "folder").mkdir()
    elif kind == "a config alone":
        (path := path / "folder").mkdir()
        (path / "config.json").write_text('{"model_type": "vit"}')
    elif kind == "no JSON":
        (path := path / "folder").mkdir()
        (path / "config.json").write_text("{")
    elif kind == "another timm model":
        (path := path / "folder").mkdir()
        (path / "config.json").write_text('{"architecture": "swin_tiny_patch4_window7_224", "pretrained_cfg": {}}')
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "not a readable checkpoint"),
        ("cut pth", "not a readable checkpoint"),
        ("text", "not a readable checkpoint"),
        ("text as safetensors", "not a readable checkpoint"),
        ("list", "not a readable checkpoint"),
        ("no tensors", "no tensors there.* it holds epoch, optimizer"),
        ("a picture", r"weights are read from \.safetensors"),
        ("an empty folder", r"has no config\.json"),
        ("a config alone", "holds no model.safetensors and no pytorch_model.bin"),
        ("no JSON", "config.json is not readable"),
        ("another timm model", "SwinTransformer"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, shaken: Make, kind: str, message: str) -> None:
    path = write(tmp_path, kind, timm_vit(shaken).state_dict())
    with pytest.raises(UserError, match=message):
        import_weights(str(path), tmp_path / "out", heads=None if path.is_dir() else 3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("vit_tiny_patch16_224.augreg", "timm cannot load it.*augreg"),
        ("vit_tny_patch16_224", "no such file, folder or timm model; did you mean vit_tiny_patch16_224"),
        ("weights.pth", "no such file"),
        ("./runs/none", "no such file"),
        ("convnext_tiny.fb_in1k", "ConvNeXt"),
    ],
)
def test_names_that_are_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match=message):
        import_weights(weights, tmp_path / "out")


def test_what_tells_itself_takes_no_sizes(tmp_path: Path, shaken: Make) -> None:
    save_for_hf(timm_vit(shaken), tmp_path / "timm", safe_serialization=True)
    for asked in ({"heads": 3}, {"name": "vit_tiny_patch16_224"}):
        with pytest.raises(UserError, match="remove --name and --heads"):
            import_weights(str(tmp_path / "timm"), tmp_path / "out", **asked)


def test_our_own_weights_need_no_import(tmp_path: Path, make_encoder: Make, saved: Make) -> None:
    saved(tmp_path, make_encoder())
    with pytest.raises(UserError, match="without import"):
        import_weights(str(tmp_path), tmp_path / "out")


def test_an_occupied_folder_is_left_alone(tmp_path: Path, shaken: Make) -> None:
    torch.save(timm_vit(shaken).state_dict(), tmp_path / "weights.pth")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="out exists and is not empty"):
        import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", heads=3)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"
    (tmp_path / "out" / "thesis.tex").unlink()
    import_weights(str(tmp_path / "weights.pth"), tmp_path / "out", heads=3)
