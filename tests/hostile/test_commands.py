"""The corpus through every command that reads it: exit code, message, memory and time; nothing of it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile import corpus
from tests.hostile.driver import Outcome, run

SIZES = {"image_size": 16, "channels": 3, "patch_size": 4, "width": 16, "depth": 2, "heads": 2}
KEYS = [
    *(f"encoder.{key}={value}" for key, value in SIZES.items()),
    *("training.batch_size=16", "training.steps=8", "training.picture_every=0", "training.trackers={}"),
]
MIB = 700  # an image of 89 million pixels takes more, but none of these may be decoded


def train(data: object, *more: str) -> list[object]:
    return ["train", "digits_supervised", f"data.train={data}", *KEYS, *more]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, saved: Callable[..., Path]) -> Path:
    """A folder with sound shards, `good`, and an encoder, `model`."""
    from ssl_vit.models import EncoderConfig, factory

    folder = tmp_path_factory.mktemp("hostile")
    corpus.sound(folder / "good")
    saved(folder / "model", factory.build(EncoderConfig(name="vit_tiny_patch16_224", **SIZES)))
    return folder


def harmless(outcome: Outcome, *codes: int) -> None:
    """These exit codes, messages without a traceback or raw control characters, and bounded memory and time."""
    assert outcome.codes == list(codes), outcome.text[-3000:]
    assert "Traceback" not in outcome.text, outcome.text[-3000:]
    assert "\x1b]" not in outcome.text and "\x07" not in outcome.text
    assert outcome.mib < MIB and outcome.seconds < 30, outcome


@pytest.mark.parametrize("command", ["make", "verify", "center", "inception", "eval", "embed"])
def test_images(place: Path, tmp_path: Path, command: str) -> None:
    corpus.with_images(tmp_path / "images")
    (tmp_path / "loose" / "a").mkdir(parents=True)
    for name, data in {**corpus.images(), **corpus.harmless(), **corpus.other_formats()}.items():
        (tmp_path / "loose" / "a" / name).write_bytes(data)
    arguments, code = {
        "make": (["shards", "make", "loose", "made", "--jobs", 1], 0),
        "verify": (["shards", "verify", "images", "--jobs", 1], 1),
        "center": (train("images", "run=run", "data.augment.crop=center"), 0),
        "inception": (train("images", "run=run", "data.augment.crop=inception"), 0),
        "eval": (["eval", place / "model", "few_shot", "--data", "images", "--test", place / "good", "seeds=[0]"], 0),
        "embed": (["embed", place / "model", "images", "--out", "out.parquet", "--workers", 1], 0),
    }[command]
    outcome = run(tmp_path, arguments)
    harmless(outcome, code)
    bad = {name.partition(".")[0] for name in corpus.images()}
    if command in ("make", "verify"):
        assert all(name in outcome.text for name in bad), outcome.text
        assert not (tmp_path / "loose" / "file").exists()
    if command in ("center", "inception"):
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        skipped = {sample["key"].partition("_")[2] for row in rows for sample in row.get("samples", [])}
        assert skipped == bad | {"png_text"}
    if command == "eval":  # of the images that it chose
        assert "labeled images could not be read" in outcome.text
    if command == "embed":
        assert f"{len(bad) + 1} unreadable sample(s)" in outcome.text


@pytest.mark.parametrize("name", corpus.SETS)
def test_sets(place: Path, tmp_path: Path, name: str) -> None:
    build, words, refused = corpus.SETS[name]
    build(tmp_path / name)
    checking, training = ["shards", "verify", name, "--jobs", 1], train(name, "run=run", "data.workers=0")
    outcome = run(tmp_path, checking, training)
    unreadable = "error: " in outcome.text.split("defect(s)")[0].splitlines()[0]
    harmless(outcome, 2 if unreadable else 1, 2 if refused else 0)
    assert words in outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("name", corpus.SETS)
def test_sets_in_other_commands(place: Path, tmp_path: Path, name: str) -> None:
    build, _, refused = corpus.SETS[name]
    build(tmp_path / name)
    outcome = run(
        tmp_path,
        ["shards", "stats", name],
        ["eval", place / "model", "few_shot", "--data", name, "--test", place / "good", "seeds=[0]"],
        ["embed", place / "model", name, "--out", "out.parquet"],
        ["inspect", place / "model", "--data", name, "--out", "inspected"],
        train(name, "run=run", "data.workers=2"),
    )
    read = 2 if refused else 0
    harmless(outcome, 2, read, read, outcome.codes[3], read)
    assert outcome.codes[3] in (0, 2)


def test_weights(tmp_path: Path) -> None:
    mark, files = tmp_path / "mark", corpus.weights(tmp_path / "mark")
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    named = {name: [] if name.endswith(".npz") else ["--name", "vit_tiny_patch16_224"] for name in files}
    outcome = run(tmp_path, *(["import", name, f"out_{name}", *options] for name, options in named.items()))
    harmless(outcome, *[2] * len(files))
    assert not mark.exists() and not [*tmp_path.glob("out_*")]


def test_configurations_of_models(place: Path, tmp_path: Path) -> None:
    config = json.loads((place / "model" / "config.json").read_text())
    (tmp_path / "pickle.pth").write_bytes(corpus.weights(tmp_path / "mark")["pickle.pth"])
    for name, arguments in corpus.models().items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "encoder.safetensors").symlink_to(place / "model" / "encoder.safetensors")
        changed = config | {"model_args": config["model_args"] | arguments}
        (tmp_path / name / "config.json").write_text(json.dumps(changed))
    outcome = run(tmp_path, *(["embed", name, place / "good", "--out", "o.parquet"] for name in corpus.models()))
    harmless(outcome, *[2] * len(corpus.models()))
    assert not (tmp_path / "mark").exists()


def test_results(tmp_path: Path) -> None:
    found = corpus.runs(tmp_path)
    shown = {"metrics", "environment", "aliases"}
    outcome = run(tmp_path, *(["report", folder] for folder in found.values()))
    harmless(outcome, *(0 if name in shown else 2 for name in found))
    assert "<script>" not in (tmp_path / "environment" / "report.html").read_text()
    assert (tmp_path / "aliases" / "report.html").stat().st_size < 1 << 20


def test_recipes(tmp_path: Path) -> None:
    for name, text in corpus.RECIPES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text(text)
    files = [f"{name}/recipe.yaml" for name in corpus.RECIPES]
    commands = [[command, file, "--dry-run"] for command in ("train", "compare") for file in files]
    overrides = [train("x", f"name={'[' * 20_000}"), train("x", f"seed={'9' * 10_000}"), train("x", "a=&a [*a]")]
    outcome = run(tmp_path, *commands, *overrides)
    harmless(outcome, *[2] * (len(commands) + len(overrides)))
    assert not [*tmp_path.rglob("pwned")]
    assert "nested_keys/recipe.yaml: not readable YAML: nested more than 50 levels deep" in outcome.text
    assert "too_large/recipe.yaml: not readable YAML: larger than 1 MiB" in outcome.text


def test_bad_samples_end_an_evaluation_where_they_must_not_be_skipped(place: Path, tmp_path: Path) -> None:
    """Also where the features were kept when they were skipped; and sets that differ are noted."""
    corpus.with_images(tmp_path / "images")
    corpus.write_tar(tmp_path / "images" / "000000.tar", corpus.members(100, 32))  # not an image of the training
    keys = ["run=run", "data.augment.crop=center", "training.steps=2"]
    evaluate = ["eval", "run", "few_shot", "--data", place / "good", "--test", "images", "seeds=[0]"]
    outcome = run(tmp_path, train(place / "good", *keys), evaluate)
    harmless(outcome, 0, 0)
    assert "are gray, and" not in outcome.text
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("on_bad_sample: skip", "on_bad_sample: fail"))
    outcome = run(tmp_path, evaluate)
    harmless(outcome, 2)
    assert "sample z00_jpeg_header" in outcome.text and "data.on_bad_sample=fail" in outcome.text


def test_sets_that_differ_are_noted(place: Path, tmp_path: Path) -> None:
    corpus.sound(tmp_path / "gray")
    for n in range(2):
        content = corpus.members(32 * n, 32)
        gray = {name: corpus.encoded(1, mode="L") if name.endswith("png") else data for name, data in content.items()}
        corpus.write_tar(tmp_path / "gray" / f"{n:06d}.tar", gray)
    about = corpus.info(tmp_path / "gray", classes=[*corpus.CLASSES, "3"])
    (tmp_path / "gray" / "info.json").write_text(json.dumps(about))
    outcome = run(tmp_path, ["eval", place / "model", "knn", "--data", place / "good", "--test", "gray", "ks=[1]"])
    harmless(outcome, 0)
    assert "names 3 classes" in outcome.text and "names 4" in outcome.text
    assert "0 of 32 images" in outcome.text and "32 of 32" in outcome.text
