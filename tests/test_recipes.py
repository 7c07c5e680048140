"""Every shipped recipe can run, the paper's recipes have the paper's settings, and bases merge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_vit import execution, stage
from ssl_vit import recipe as recipes
from ssl_vit.interfaces import UserError
from ssl_vit.training.flops import training_flops
from ssl_vit.training.optim import peak_lr
from tests.shipped import comparisons
from tests.tars import packed

NAMES = sorted(recipes.shipped())
STAGES = [name for name in NAMES if name not in comparisons()]
IMAGENET, IMAGENET_21K = 1_281_167, 14_197_122


@pytest.mark.parametrize("name", NAMES)
def test_a_header_has_a_sentence_a_command_and_a_score(name: str) -> None:
    head, _ = recipes.shipped()[name].read_text().split("\nname: ")
    first, blank, *rest = head.splitlines()
    command = "ssl-vit demo" if name == "demo_digits" else f"{'compare' if name in comparisons() else 'train'} {name}"
    assert first.startswith("# ") and first.endswith((".", "?")) and blank == "#"
    assert all(line.startswith("#") for line in rest)
    assert command in head
    assert "Score" in head and ("measured" in head or "the paper's" in head)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_computes_a_step(name: str) -> None:
    """Forward and backward on the meta device, where ViT-H/14 needs no memory. ViTs have two blocks, to save time."""
    recipe = recipes.load_recipe(name)
    encoder = recipe.encoder.model_copy(update={"depth": 2} if recipe.encoder.name.startswith("vit_") else {})
    with torch.device("meta"):
        objective = stage.build_objective(recipe, stage.build_encoder(encoder, None), 10)
    assert training_flops(objective) > 0
    assert recipe.training.batch_size % recipe.data.lanes == 0


# Paper, tables 1 (name, million parameters without the head), 3 and 4, and appendix B.1.2.
SIZES = {
    "base": ("vit_base_patch16_224", 86),
    "large": ("vit_large_patch16_224", 307),
    "huge": ("vit_huge_patch14_224", 632),
}
PRETRAIN = {"name": "adamw", "lr": 2e-4, "warmup_steps": 10_000, "schedule": "cosine", "betas": (0.9, 0.999)}
SUPERVISED = {**PRETRAIN, "lr": 3e-3, "weight_decay": 0.3, "clip_norm": 1.0}
SUPERVISED_21K = {**SUPERVISED, "lr": 1e-3, "weight_decay": 0.03, "schedule": "linear"}
FINE_TUNE = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.0, "clip_norm": 1.0, "warmup_steps": 500}
MASKING = {"mask_ratio": 0.5, "mask_prob": 0.8, "random_prob": 0.1, "target": "mean_color", "bits": 3}
MLP, LINEAR = {"head": "mlp", "pooling": "token"}, {"head": "linear", "pooling": "token"}
PAPER: dict[str, Any] = {  # recipe: optimizer, dropout, image size, objective, batch size, steps
    "pretrain_vit_{}": (PRETRAIN, 0.0, 224, MASKING, 4096, 100_000),
    "supervised_vit_{}": (SUPERVISED, 0.1, 224, MLP, 4096, round(300 * IMAGENET / 4096)),
    "supervised_vit_{}_21k": (SUPERVISED_21K, 0.1, 224, MLP, 4096, round(90 * IMAGENET_21K / 4096)),
    "fine_tune_vit_{}": (FINE_TUNE | {"schedule": "cosine"}, 0.0, 384, LINEAR, 512, 20_000),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", PAPER)
def test_the_papers_recipes_have_the_papers_settings(kind: str, size: str) -> None:
    recipe = recipes.load_recipe(kind.format(size))
    optim, dropout, image_size, objective, batch_size, steps = PAPER[kind]
    name, parameters = SIZES[size]
    if size == "huge" and "fine_tune" in kind:
        image_size = 518
    assert recipe.optim.model_dump().items() >= optim.items()
    assert recipe.objective.model_dump().items() >= objective.items()
    assert (recipe.encoder.name, recipe.encoder.image_size, recipe.encoder.dropout) == (name, image_size, dropout)
    assert (recipe.data.augment.crop, recipe.data.augment.scale) == ("inception", (0.05, 1.0))
    assert recipe.training.batch_size == batch_size
    samples = IMAGENET_21K if kind.endswith("21k") else IMAGENET
    assert recipe.training.total_steps(samples) == pytest.approx(steps, rel=1e-4)
    same = recipes.load_recipe(f"pretrain_vit_{size}").encoder
    assert recipe.encoder == same.model_copy(update={"image_size": image_size, "dropout": dropout})
    if "pretrain" in kind:
        with torch.device("meta"):
            encoder = stage.build_encoder(recipe.encoder, None)
        assert sum(p.numel() for p in encoder.parameters()) / 1e6 == pytest.approx(parameters, rel=0.015)


def test_maes_and_simmims_recipes_have_their_settings() -> None:
    mae, simmim = recipes.load_recipe("mae_vit_base"), recipes.load_recipe("simmim_vit_base")
    expected = {
        "mask_ratio": 0.6,
        "mask_size": 32,
        "mask_prob": 1.0,
        "random_prob": 0.0,
        "target": "pixels",
        "loss": "l1",
    }
    assert simmim.objective.model_dump().items() >= expected.items()
    assert mae.objective.model_dump()["mask_ratio"] == 0.75
    for recipe, lr, batch_size, warmup in ((mae, 2.4e-3, 4096, 40), (simmim, 4e-4, 2048, 10)):
        assert peak_lr(recipe.optim, recipe.training.batch_size) == pytest.approx(lr)
        assert (recipe.encoder.name, recipe.training.epochs, recipe.optim.weight_decay) == (SIZES["base"][0], 800, 0.05)
        assert recipe.training.batch_size == batch_size
        assert recipe.optim.warmup_steps == pytest.approx(warmup * IMAGENET / batch_size, rel=1e-3)
    assert (mae.optim.betas, mae.data.augment.scale) == ((0.9, 0.95), (0.2, 1.0))
    assert (mae.encoder.positions, mae.optim.clip_norm, mae.optim.schedule) == ("sincos2d", 0.0, "cosine")


def test_lejepas_recipe_has_the_settings_of_its_example() -> None:
    lejepa = recipes.load_recipe("lejepa_vit_small")
    jitter = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2, "jitter_prob": 0.8}
    more = {"scale": (0.08, 1.0), "grayscale": 0.2, "blur": 0.5, "solarize": 0.2, "flip": True}
    assert lejepa.data.augment.model_dump().items() >= {**jitter, **more}.items()
    assert (lejepa.data.views, lejepa.training.epochs, lejepa.training.precision) == (4, 100, "bf16")
    assert 5e-4 <= lejepa.optim.lr <= 2e-3 and lejepa.optim.weight_decay == 0.05 and lejepa.optim.clip_norm == 0.0
    objective = lejepa.objective.model_dump()
    assert 0.02 <= objective["sigreg_weight"] <= 0.05 and 256 <= objective["directions"] <= 1024
    assert 16 <= objective["projection"] <= 128 and lejepa.encoder.name == "vit_small_patch16_224"


def test_the_small_baseline_has_big_visions_settings() -> None:
    recipe = recipes.load_recipe("supervised_vit_small")
    assert (recipe.training.epochs, recipe.training.batch_size) == (90, 1024)
    expected = {"lr": 1e-3, "weight_decay": 0.1, "warmup_steps": 10_000, "schedule": "cosine", "clip_norm": 1.0}
    assert recipe.optim.model_dump().items() >= expected.items()
    encoder, augment = recipe.encoder, recipe.data.augment
    assert (encoder.name, encoder.class_token, encoder.positions) == ("vit_small_patch16_224", False, "sincos2d")
    assert recipe.objective.model_dump().items() >= {"mixup": 0.2, "pooling": "mean", "head": "linear"}.items()
    assert (augment.crop, augment.rand_augment) == ("inception", "rand-m10-n2")


def test_the_walk_throughs_vit_has_its_size() -> None:
    """Embedding 784 + 16, two blocks of 3,280, the last norm and the head of 10 classes; class token and positions."""
    recipe = recipes.load_recipe("mnist_seed")
    objective = stage.build_objective(recipe, stage.build_encoder(recipe.encoder, None), 10)
    counts = {name: parameter.numel() for name, parameter in objective.named_parameters()}
    assert sum(counts.values()) == 7_850
    assert sum(n for name, n in counts.items() if not name.endswith(("pos_embed", "cls_token"))) == 7_562


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of 18 RGB images of 64x64 pixels and three classes."""
    folder, generator = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    for n in range(18):
        place = folder / "images" / "abc"[n % 3]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(place / f"{n}.jpg")
    packed(folder / "images", folder / "packed", shards=2)
    return folder / "packed"


@pytest.fixture
def one_step(shards: Path, tmp_path: Path) -> Callable[..., Path]:
    """Train a recipe for a step on a CPU and return its run directory."""

    def run(name: str, *more: str) -> Path:
        folder = tmp_path / name
        keys = [f"data.train={shards}", f"run={folder}", "training.steps=1", "training.batch_size=4", "data.lanes=2"]
        keys += ["data.workers=0", "training.precision=fp32", "training.trackers={}"]
        keys += ["training.auto_batch=false", "training.accumulate=1"]
        torch.set_num_threads(1)
        execution.train(recipes.load_recipe(name, [*keys, *more]), quiet=True)
        line: dict[str, Any] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
        assert line["step"] == 1 and np.isfinite(line["loss"])
        return folder

    return run


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("cifar10_vit_tiny", []),
        ("tin100_vit_small", ["encoder.depth=2"]),
        pytest.param("tin100_vit_small", [], marks=pytest.mark.slow),
    ],
)
def test_each_stage_of_a_family_trains(family: str, keys: list[str], one_step: Callable[..., Path]) -> None:
    pretrained = one_step(f"{family}_ssl", *keys)
    one_step(f"{family}_supervised", *keys)
    one_step(f"{family}_fine_tune", f"init_from={pretrained}", *keys)
    one_step(f"{family}_scratch", *keys)


@pytest.mark.parametrize(
    "name",
    [
        *("cifar10_cpu_simmim", "pretrain_mae_cpu"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mae_vit_base", "simmim_vit_base")),
    ],
)
def test_masked_autoencoders_and_simmim_train(name: str, one_step: Callable[..., Path]) -> None:
    one_step(name, "training.picture_every=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "keys"), [("base", []), ("large", ["encoder.depth=2"]), ("huge", ["encoder.depth=2"])]
)
def test_the_papers_stages_train(size: str, keys: list[str], one_step: Callable[..., Path]) -> None:
    """ViT-B/16 whole; L and H with two blocks, to fit into memory."""
    pretrained = one_step(f"pretrain_vit_{size}", *keys)
    one_step(f"supervised_vit_{size}", *keys)
    one_step(f"supervised_vit_{size}_21k", *keys)
    one_step(f"fine_tune_vit_{size}", f"init_from={pretrained}", *keys)


@pytest.mark.slow
def test_the_small_baseline_trains(one_step: Callable[..., Path]) -> None:
    one_step("supervised_vit_small")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_recipe_with_a_base_states_what_differs(tmp_path: Path) -> None:
    base = recipes.load_recipe("digits_ssl")
    write(tmp_path / "wide.yaml", "base: digits_ssl\nname: wide\nencoder: {width: 128}\n")
    text = "base: wide\nname: longer\ntraining: {epochs: 3}\nobjective: {name: classification}\n"
    found = recipes.load_recipe(write(tmp_path / "longer.yaml", text))
    assert found.encoder == base.encoder.model_copy(update={"width": 128})
    assert (found.training.steps, found.training.epochs) == (None, 3)
    assert (found.optim, found.data) == (base.optim, base.data)
    assert found.objective.model_dump()["head"] == "mlp"
    recipes.save(found, tmp_path / "resolved.yaml")
    assert "base" not in recipes.read(tmp_path / "resolved.yaml")
    assert recipes.load_recipe(tmp_path / "resolved.yaml") == found


def test_a_length_that_is_unset_leaves_that_in_the_other_unit() -> None:
    training = recipes.load_recipe("mae_vit_base", ["training.steps=null"]).training
    assert (training.steps, training.epochs) == (None, 800)


def test_a_base_next_to_its_recipe_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, seed in (("near", 1), ("here", 99)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "common.yaml", f"base: digits_ssl\nname: common\nseed: {seed}\n")
    top = write(tmp_path / "near" / "top.yaml", "base: common.yaml\nname: top\n")
    monkeypatch.chdir(tmp_path / "here")
    assert recipes.load_recipe(top).seed == 1


def test_values_may_be_numpy_arrays_and_scalars() -> None:
    values = {"optim": {"lr": np.logspace(-4, -2, 3)[0]}, "seed": np.arange(3)[1], "optim.betas": np.array([0.8, 0.9])}
    found = recipes.load_recipe("digits_ssl", values)
    assert (found.optim.lr, found.seed, found.optim.betas) == (1e-4, 1, (0.8, 0.9))
    with pytest.raises(UserError, match="key 1 is not a string"):
        recipes.load_recipe("digits_ssl", {1: 2})  # type: ignore[dict-item]


def test_another_objective_on_the_command_line_replaces_the_section() -> None:
    found = recipes.load_recipe("digits_supervised", ["objective.name=masked_patch", "objective.bits=2"])
    assert found.objective.model_dump()["bits"] == 2


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("base: pretrain_vit_tyni", "pretrain_vit_tyni.*did you mean 'pretrain_vit_tiny'"),
        ("base: a", "a.yaml: base=a"),
        ("base: b", "b.yaml: base=a"),
        ("base: digits_ssl\noptim: {schedul: 1}", "a.yaml: optim.schedul.*did you mean 'schedule'"),
        ("base: digits_ssl\ntraining: 3", "a.yaml: training"),
        ("base: digits_ssl\ntraining: {1: 3}", "a.yaml: key 1 is not a string"),
        ("base: digits_ssl\non: 3", "a.yaml: key True is not a string"),
        (f"base: {'a' * 300}", r"a\.yaml: base: a+: no such recipe"),
        ("base: digits_ssl\ntraining: [3]", "a.yaml: training: a list cannot replace settings"),
        ("base: digits_ssl\noptim: {lr: 0.1, schedule: {a: 1}}", "a.yaml: optim.schedule"),
    ],
)
def test_a_wrong_base_is_named(text: str, facts: str, tmp_path: Path) -> None:
    write(tmp_path / "b.yaml", "base: a\n")
    with pytest.raises(UserError, match=facts):
        recipes.load_recipe(write(tmp_path / "a.yaml", f"{text}\n"))
