"""`ssl-vit inspect` on real runs: every file, every number, and what users get wrong."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from ssl_vit import cli
from ssl_vit.analysis import attention, figures, inspection
from ssl_vit.models import EncoderConfig, factory
from tests.tars import encoded, write_tar

Call = Callable[..., tuple[int, str]]
PICTURES = {
    "filters",
    "position_similarity",
    "attention_distance",
    "attention_rollout",
    "feature_map",
    "embedding_map",
    "nearest_neighbors",
    "reconstructions",
}


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw them takes most of the time."""
    monkeypatch.setattr(figures, "_DPI", 50)


def call(*arguments: object) -> int:
    """The exit code of a command line run in this process."""
    before, sys.argv = sys.argv, ["ssl-vit", *map(str, arguments)]
    try:
        cli.main()
        return 0
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = before


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)


def write_shards(folder: Path, count: int, broken: tuple[int, ...] = ()) -> Path:
    images = {f"{n:06d}.png": encoded(Image.fromarray(pixels(n))) for n in range(count)}
    write_tar(folder / "000000.tar", images | {f"{n:06d}.png": b"no picture" for n in broken})
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 unlabeled pictures of 20x20 pixels; of the first ten two are broken, of the two in their place one."""
    return write_shards(tmp_path_factory.mktemp("shards") / "train", 24, broken=(1, 8, 10))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """Two steps of masked patch pretraining."""
    folder = tmp_path_factory.mktemp("run") / "ssl"
    sizes = ["image_size=16", "channels=3", "patch_size=4", "width=16", "depth=3", "heads=2"]
    training = ["steps=2", "batch_size=8", "picture_every=2"]
    keys = [f"data.train={shards}", f"run={folder}", "data.lanes=1", *(f"encoder.{size}" for size in sizes)]
    assert call("train", "digits_ssl", *keys, *(f"training.{key}" for key in training)) == 0
    return folder


def numbers_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "numbers.json").read_text()))


def test_a_run_gets_every_picture_and_the_numbers_of_its_first_readable_images(
    run: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--images", 2, "--distance-images", 10, "--map-images", 12]
    assert call("inspect", run, "--data", shards, *more) == 0
    out = run / "inspect"
    assert str(out / "index.html") in capsys.readouterr().out
    assert {path.stem for path in out.glob("*.png")} == PICTURES
    for path in out.glob("*.png"):
        with Image.open(path) as picture:
            assert min(picture.size) > 40 and len(set(picture.convert("L").getdata())) > 16
    page = (out / "index.html").read_text()
    assert page.count("data:image/png;base64,") == len(PICTURES)
    assert not re.findall(r'(?:src|href)="(?!data:)', page) and "<script" not in page, "it asks nothing of the network"
    assert "Not available" not in page and "{{" not in page and "undefined" not in page
    assert "first 2 of" in page and "000001" in page  # which sample was skipped
    assert "each of" not in page and "16×16 pixels in a grid of 4×4 patches" in page.replace("&times;", "×")
    found = numbers_of(out)
    assert [skip["key"] for skip in found["skipped"]] == ["000001", "000008", "000010"]
    assert (found["images"], found["distance_images"], found["map_images"], found["step"]) == (2, 10, 12, 2)
    assert found["neighbors"] == {"same_class": None, "maps": ["PCA"]}, "these images have no labels"
    assert found["weights"] == str(run / "checkpoints" / "step_00000002")
    good = [number for number in range(13) if number not in (1, 8, 10)]
    stack = torch.stack([torch.from_numpy(pixels(number)).permute(2, 0, 1) for number in good])
    # The recipe's evaluation_resize is 1.0, and 16 pixels the run's size.
    resized = v2.functional.resize(stack, [16, 16], antialias=True)
    distances = attention.attention_distance(factory.load(run), resized)  # type: ignore[arg-type]
    np.testing.assert_allclose(found["attention_distance"]["pixels"], distances, rtol=1e-6)


def test_the_page_and_the_numbers_have_no_credentials_of_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"data": "https://me:SECRET@host/a.tar?sig=SECRET", "skipped": ["https://host/\u00e9 a.tar?sig=SECRET x"]}
    page = SimpleNamespace(render=lambda **given: json.dumps(given["numbers"]))  # the real one needs more numbers
    monkeypatch.setattr(inspection, "template", lambda path: page)
    inspection._write(tmp_path, {}, numbers)
    assert "SECRET" not in (tmp_path / "index.html").read_text()
    assert numbers_of(tmp_path) == {
        "data": "https://...@host/a.tar?...",
        "skipped": ["https://host/\u00e9 a.tar?... x"],
    }


def test_a_checkpoint_at_another_size_and_shape(run: Path, shards: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run, tmp_path / "run")
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("position_resampling: timm", "position_resampling: google"))
    step = shutil.copytree(run / "checkpoints" / "step_00000002", run / "checkpoints" / "best")
    arguments = ["--data", shards, "--out", tmp_path / "out", "--image-size", "24x12", "--images", 2]
    assert call("inspect", step, *arguments) == 0
    found = numbers_of(tmp_path / "out")
    assert (found["weights"], found["step"]) == (str(step), 2), "whatever its folder is called"
    assert (found["image_size"], found["grid"]) == ([24, 12], [6, 3])
    assert found["position_resampling"] == "google"
    assert (tmp_path / "out" / "reconstructions.png").exists()


def test_two_images_have_no_map(run: Path, shards: Path, tmp_path: Path) -> None:
    for images, there in ((5, True), (2, False)):
        assert call("inspect", run, "--data", shards, "--out", tmp_path, "--images", 2, "--map-images", images) == 0
        assert (tmp_path / "embedding_map.png").exists() == (tmp_path / "nearest_neighbors.png").exists() == there
        assert (numbers_of(tmp_path)["neighbors"] is not None) == there


@pytest.mark.parametrize(
    "sizes",
    [
        {"name": "vit_tiny_r_s16_p8_224", "image_size": (32, 64), "depth": 2},
        {"name": "vit_wee_patch16_reg1_gap_256", "image_size": 16, "patch_size": 4, "depth": 2, "channels": 1},
        *(
            {"name": "vit_tiny_patch16_224", "image_size": 16, "patch_size": 4, "depth": 2, "positions": kind}
            for kind in ("sincos2d", "relative")
        ),
    ],
    ids=["hybrid", "register, no class token, gray", "fixed positions", "relative positions"],
)
def test_weights_alone_have_all_but_the_reconstructions(
    shards: Path, tmp_path: Path, sizes: dict[str, Any], saved: Callable[..., Path]
) -> None:
    weights = saved(tmp_path / "weights", factory.build(EncoderConfig(**sizes)))
    assert call("inspect", weights, "--data", shards, "--images", 2, "--distance-images", 2) == 0
    out = weights / "inspect"
    kind = sizes.get("positions", "learned")
    missing = {"reconstructions", *(["position_similarity"] if kind == "relative" else [])}
    assert {path.stem for path in out.glob("*.png")} == PICTURES - missing
    page = (out / "index.html").read_text()
    assert "Not available: only a checkpoint" in page
    assert ("hybrid" in page) == ("_r_" in sizes["name"]) and ("are fixed (sincos2d)" in page) == (kind == "sincos2d")
    assert ("(encoder.positions=relative)" in page) == (kind == "relative")
    assert ("no class token" in page) == ("gap" in sizes["name"]) == ("1 register(s)" in page)


def test_reconstructions_need_a_checkpoint_of_a_masked_patch_run(run: Path, shards: Path, tmp_path: Path) -> None:
    bare, supervised = tmp_path / "bare", tmp_path / "supervised"
    shutil.copytree(run, bare)
    shutil.rmtree(bare / "checkpoints")
    (bare / "inspect").mkdir(exist_ok=True)
    for kept in ("reconstructions.png", "notes.txt"):
        (bare / "inspect" / kept).write_text("old")
    shutil.copytree(run, supervised)
    recipe = (run / "recipe.yaml").read_text()
    start, end = recipe.index("objective:"), recipe.index("optim:")
    other = "objective: {name: classification, classes: 3}\n"
    (supervised / "recipe.yaml").write_text(recipe[:start] + other + recipe[end:])
    for folder in (bare, supervised):
        assert call("inspect", folder, "--data", shards, "--images", 2, "--distance-images", 2) == 0
        assert (
            "only a checkpoint of a masked_patch or masked_autoencoder run"
            in (folder / "inspect" / "index.html").read_text()
        )
        assert not (folder / "inspect" / "reconstructions.png").exists()
    assert (bare / "inspect" / "notes.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere", "--data", "SHARDS"], ["nowhere", "no such run"]),
        (["RUN", "--data", "BAD"], ["none of its first 3 image(s) can be read", "000000"]),
        (["RUN", "--data", "SHARDS", "--image-size", "18"], ["18", "patch size 4", "16 or 20"]),
        (["RUN", "--data", "SHARDS", "--image-size", "16x"], ["--image-size 16x", "256x384"]),
        (["CNN", "--data", "SHARDS"], ["VisionTransformer", "resnet18"]),
    ],
)
def test_what_cannot_be_pictured_is_named_with_what_to_do(
    run: Path,
    shards: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    saved: Callable[..., Path],
    arguments: list[str],
    expected: list[str],
) -> None:
    places = {"RUN": run, "SHARDS": shards}
    if "BAD" in arguments:
        places["BAD"] = write_shards(tmp_path / "bad", 3, broken=(0, 1, 2))
    if "CNN" in arguments:
        places["CNN"] = saved(tmp_path / "cnn", factory.build(EncoderConfig(name="resnet18", image_size=32)))
    capsys.readouterr()
    code = call("inspect", *(places.get(word, word) for word in arguments))
    text = capsys.readouterr().err
    assert code == 2 and text.startswith("error: ") and len(text.splitlines()) <= 2
    for part in expected:
        assert part in text


def test_pictures_that_cannot_be_written_are_no_wrong_input(
    run: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert call("inspect", run, "--data", shards, "--out", tmp_path / "file") == 1
    assert "file: cannot write the pictures there" in capsys.readouterr().err


def test_pictures_are_not_written_among_the_images(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There they would count as images of a class."""
    for number in range(4):
        (folder := tmp_path / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (number, 0, 0)).save(folder / f"{number}.png")
    assert call("inspect", run, "--data", tmp_path / "images", "--out", tmp_path / "images" / "pictures") == 2
    assert "lies inside" in capsys.readouterr().err and not (tmp_path / "images" / "pictures").exists()
