"""Every shipped recipe is one that runs, and the paper's recipes hold the paper's numbers."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_vit import api, plugins, stage
from ssl_vit import recipe as recipes
from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.plan import Plan
from ssl_vit.interfaces import UserError
from ssl_vit.training.flops import training_flops

NAMES = sorted(recipes.shipped())
COMPARISONS = [name for name in NAMES if "arms" in recipes.read(recipes.shipped()[name])]
STAGES = [name for name in NAMES if name not in COMPARISONS]
IMAGENET, IMAGENET_21K = 1_281_167, 14_197_122


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_opens_with_what_it_does_its_command_and_its_score(name: str) -> None:
    text = recipes.shipped()[name].read_text()
    head = text[: text.index("\nname: ")]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"ssl-vit {'compare' if name in COMPARISONS else 'train'} {name}" in head.replace(
        "-m ssl_vit", "ssl-vit"
    ) or (name == "demo_digits" and "ssl-vit demo" in head)
    assert "Score" in head
    assert any(word in head for word in ("measured", "the paper", "yours to find"))


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_comparison_is_whole(name: str) -> None:
    study = load_comparison(name)
    assert Plan(study, study.comparison.run_directory, study.sets).pieces


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_makes_a_step_without_numbers(name: str) -> None:
    """The whole forward and backward pass, on torch's meta device: ViT-H/14 needs no memory there."""
    recipe = recipes.load_recipe(name)
    with torch.device("meta"):
        encoder = stage.build_encoder(recipe.encoder, None)
        objective = plugins.load("objectives", recipe.objective.name).Objective(encoder, recipe.objective, 10)  # type: ignore[attr-defined]
    assert training_flops(objective) > 0
    assert recipe.training.batch_size % recipe.data.lanes == 0


# name: parameters (millions), what is optimized how, and for how long; paper's table 1, tables 3 and 4, appendix B.1.2.
SIZES = {
    "base": ("vit_base_patch16_224", 86),
    "large": ("vit_large_patch16_224", 307),
    "huge": ("vit_huge_patch14_224", 632),
}
PRETRAIN = {"name": "adamw", "lr": 2e-4, "warmup_steps": 10_000, "schedule": "cosine", "betas": (0.9, 0.999)}
ON_IMAGENET = {**PRETRAIN, "lr": 3e-3, "weight_decay": 0.3, "clip_norm": 1.0}
ON_IMAGENET_21K = {**ON_IMAGENET, "lr": 1e-3, "weight_decay": 0.03, "schedule": "linear"}
SIZE_224 = {"dropout": 0.1, "image_size": 224}
FINE_TUNE = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.0, "clip_norm": 1.0, "warmup_steps": 500}
PAPER = {
    "pretrain_vit_{}": (PRETRAIN, {"dropout": 0.0, "image_size": 224}, 4096, 100_000),
    "supervised_vit_{}": (ON_IMAGENET, SIZE_224, 4096, round(300 * IMAGENET / 4096)),
    "supervised_vit_{}_21k": (ON_IMAGENET_21K, SIZE_224, 4096, round(90 * IMAGENET_21K / 4096)),
    "fine_tune_vit_{}": (FINE_TUNE | {"schedule": "cosine"}, {"dropout": 0.0, "image_size": 384}, 512, 20_000),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", PAPER)
def test_the_papers_recipes_hold_the_papers_numbers(kind: str, size: str) -> None:
    recipe = recipes.load_recipe(kind.format(size))
    optim, encoder, batch, steps = PAPER[kind]
    name, parameters = SIZES[size]
    if size == "huge" and kind == "fine_tune_vit_{}":
        encoder = encoder | {"image_size": 518}
    assert recipe.optim.model_dump() | optim == recipe.optim.model_dump()
    assert recipe.encoder.model_dump() | encoder | {"name": name} == recipe.encoder.model_dump()
    assert recipe.training.batch_size == batch
    samples = IMAGENET_21K if kind.endswith("21k") else IMAGENET
    assert recipe.training.total_steps(samples) == pytest.approx(steps, rel=1e-4)
    assert recipe.data.augment.crop == "inception" and recipe.data.augment.scale == (0.05, 1.0)
    with torch.device("meta"):
        encoder = stage.build_encoder(recipe.encoder, None)
    found = sum(parameter.numel() for parameter in encoder.parameters()) / 1e6
    assert found == pytest.approx(parameters, rel=0.015)  # without the paper's classification head
    objective = recipe.objective.model_dump()
    if "pretrain" in kind:
        expected = {"mask_ratio": 0.5, "mask_prob": 0.8, "random_prob": 0.1, "target": "mean_color", "bits": 3}
    else:
        expected = {"head": "linear" if "fine_tune" in kind else "mlp", "pooling": "token"}
    assert objective | expected == objective


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of 16 RGB pictures of 64x64 pixels and three classes, made by hand."""
    folder = tmp_path_factory.mktemp("shards")
    generator, listed = np.random.default_rng(0), []
    for shard in range(2):
        with tarfile.open(folder / f"{shard:06d}.tar", "w") as tar:
            for n in range(8 * shard, 8 * shard + 8):
                picture = io.BytesIO()
                Image.fromarray(generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(picture, "JPEG")
                for name, data in ((f"{n:06d}.jpg", picture.getvalue()), (f"{n:06d}.cls", str(n % 3).encode())):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
        listed.append({"file": f"{shard:06d}.tar", "samples": 8})
    (folder / "info.json").write_text(json.dumps({"classes": ["a", "b", "c"], "samples": 16, "shards": listed}))
    return folder


def one_step(name: str, shards: Path, run: Path, *more: str) -> Path:
    keys = [f"data.train={shards}", f"run={run}", "training.steps=1", "training.batch_size=4", "data.lanes=2"]
    keys += ["data.workers=0", "training.precision=fp32", "training.trackers={}"]
    keys += ["training.auto_batch=false", "training.accumulate=1"]
    recipe = recipes.load_recipe(name, [*keys, *more])
    torch.set_num_threads(1)
    api.train(recipe, quiet=True)
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert line["step"] == 1
    assert np.isfinite(line["loss"])
    return run


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("cifar10_vit_tiny", []),
        ("tin100_vit_small", ["encoder.depth=2"]),
        pytest.param("tin100_vit_small", [], marks=pytest.mark.slow),
    ],
)
def test_each_stage_of_a_family_makes_a_real_step(family: str, keys: list[str], shards: Path, tmp_path: Path) -> None:
    """The fine-tuning from what the pretraining wrote."""
    pretrained = one_step(f"{family}_ssl", shards, tmp_path / "ssl", *keys)
    one_step(f"{family}_supervised", shards, tmp_path / "supervised", *keys)
    one_step(f"{family}_fine_tune", shards, tmp_path / "fine_tune", f"init_from={pretrained}", *keys)
    one_step(f"{family}_scratch", shards, tmp_path / "scratch", *keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "keys"), [("base", []), ("large", ["encoder.depth=2"]), ("huge", ["encoder.depth=2"])]
)
def test_the_papers_stages_make_a_real_step(size: str, keys: list[str], shards: Path, tmp_path: Path) -> None:
    """ViT-B/16 whole; L and H at their width and image size with two of their blocks, to fit into a small memory."""
    pretrained = one_step(f"pretrain_vit_{size}", shards, tmp_path / "ssl", *keys)
    one_step(f"supervised_vit_{size}", shards, tmp_path / "supervised", *keys)
    one_step(f"supervised_vit_{size}_21k", shards, tmp_path / "supervised_21k", *keys)
    one_step(f"fine_tune_vit_{size}", shards, tmp_path / "fine_tune", f"init_from={pretrained}", *keys)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_recipe_on_a_base_holds_what_differs(tmp_path: Path) -> None:
    base = recipes.load_recipe("digits_ssl")
    write(tmp_path / "wide.yaml", "base: digits_ssl\nname: wide\nencoder: {width: 128}\n")
    lower = write(
        tmp_path / "longer.yaml", "base: wide\nname: longer\ntraining: {epochs: 3}\nobjective: {name: classification}\n"
    )
    found = recipes.load_recipe(lower)
    assert found.encoder == base.encoder.model_copy(update={"width": 128})
    assert (found.training.steps, found.training.epochs) == (None, 3)
    assert (found.optim, found.data) == (base.optim, base.data)
    assert found.objective.model_dump()["head"] == "mlp"
    recipes.save(found, tmp_path / "resolved.yaml")
    assert "base" not in recipes.read(tmp_path / "resolved.yaml")
    assert recipes.load_recipe(tmp_path / "resolved.yaml") == found


def test_a_base_is_looked_for_beside_its_recipe_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, seed in (("beside", 1), ("here", 99)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "common.yaml", f"base: digits_ssl\nname: common\nseed: {seed}\n")
    top = write(tmp_path / "beside" / "top.yaml", "base: common.yaml\nname: top\n")
    monkeypatch.chdir(tmp_path / "here")
    assert recipes.load_recipe(top).seed == 1


def test_a_run_directory_stands_for_its_recipe(tmp_path: Path) -> None:
    recipes.save(recipes.load_recipe("digits_ssl", ["seed=7"]), tmp_path / "recipe.yaml")
    assert recipes.load_recipe(tmp_path).seed == 7


def test_an_objective_on_the_command_line_replaces_the_recipes() -> None:
    found = recipes.load_recipe("digits_supervised", ["objective.name=masked_patch", "objective.bits=2"])
    assert found.objective.model_dump()["bits"] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: pretrain_vit_tyni", "pretrain_vit_tyni.*did you mean 'pretrain_vit_tiny'"),
        ("base: a", "a.yaml: base=a leads back to this recipe"),
        ("base: b", "b.yaml: base=a leads back to this recipe"),
        ("base: digits_ssl\noptim: {schedul: 1}", "a.yaml: optim.schedul: unknown key; did you mean 'schedule'"),
        ("base: digits_ssl\ntraining: 3", "a.yaml: training"),
    ],
)
def test_a_wrong_base_is_named(text: str, words: str, tmp_path: Path) -> None:
    write(tmp_path / "b.yaml", "base: a\n")
    with pytest.raises(UserError, match=words):
        recipes.load_recipe(write(tmp_path / "a.yaml", f"{text}\n"))
