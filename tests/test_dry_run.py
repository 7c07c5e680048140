"""`train --dry-run`, `compare --dry-run` and `doctor`: what they say is what a run does, and nothing is written."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import ssl_vit
from ssl_vit import dry_run as module
from ssl_vit import health
from ssl_vit.cli import app
from ssl_vit.data import samples
from ssl_vit.data.shards import open_training
from ssl_vit.interfaces import UserError
from ssl_vit.recipe import load_recipe
from ssl_vit.training import memory
from tests.data.packing.pictures import encoded, write


def dry_run(*arguments: str, recipe: str = "digits_ssl") -> Any:
    return CliRunner().invoke(app, ["train", recipe, "--dry-run", *arguments], catch_exceptions=False)


def test_a_dry_run_counts_what_the_run_would_do_and_writes_nothing(
    few_digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = [f"data.train={few_digits}/train", "training.steps=100", "training.batch_size=40", "encoder.depth=2"]
    found = json.loads(dry_run("--json", *keys).stdout)
    assert (found["epochs"], found["samples"], found["classes"]) == (10.0, 400, 10)
    width, hidden, patches, classes = 64, 128, 16, 8
    block = 4 * width * width + 4 * width + 2 * width * hidden + hidden + width + 4 * width
    outside = (4 * width + width) + (patches + 1) * width + width + 2 * width + width + (classes * width + classes)
    assert found["parameters"] == 2 * block + outside
    assert found["weights_mib"] == round(16 * (2 * block + outside) / 2**20, 1)
    averaged = json.loads(dry_run("--json", *keys, "training.ema=0.9").stdout)
    assert averaged["weights_mib"] == round(20 * (2 * block + outside) / 2**20, 1)
    assert found["steps"] == 100
    assert found["hours"] >= 0
    assert found["recipe"]["encoder"]["depth"] == 2
    assert not list(tmp_path.iterdir())
    text = dry_run(*keys).stdout
    assert "parameters" in text
    assert "nothing was trained" in text


def test_activations_grow_with_the_batch_and_shrink_when_they_are_recomputed(few_digits: Path) -> None:
    def kept(*keys: str) -> float:
        found = json.loads(dry_run("--json", f"data.train={few_digits}/train", *keys).stdout)
        return float(found["activations_mib"])

    whole = kept("training.batch_size=64")
    assert kept("training.batch_size=128") == pytest.approx(2 * whole, rel=0.05)
    assert kept("training.batch_size=64", "training.accumulate=2") == pytest.approx(whole / 2, rel=0.05)
    assert kept("training.batch_size=64", "training.checkpoint_activations=true") < 0.5 * whole


def test_data_are_timed_as_most_batches_of_the_training_read_them(
    few_digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few images are read from shards once, and then from memory."""
    opened, original = list[object](), samples.open_picture

    def open_picture(*arguments: Any) -> Any:
        opened.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(samples, "open_picture", open_picture)

    def seconds(images: int, per_image: float, steps: int = 1000) -> float:
        opened.clear()
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: len(opened) * per_image))
        keys = [f"data.train={few_digits}/train", "training.batch_size=8", f"training.steps={steps}"]
        settings = load_recipe("digits_ssl", keys)
        return module.measure(settings, open_training(settings.data), np.arange(images)).data_seconds

    assert seconds(40, 0.001) == seconds(400, 0.001) == 0
    assert seconds(400, 0.001, steps=3) == 8 * 0.001  # every image once
    assert seconds(400, 1) == 8  # after 3 seconds


def test_loader_processes_of_a_dry_run_end_before_it_times_the_computation(
    few_digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_recipe("digits_ssl", [f"data.train={few_digits}/train", "data.workers=2", "training.batch_size=8"])
    before = {*multiprocessing.active_children()}  # other tests may keep a pool
    find, left = memory.find_accumulation, list[object]()

    def find_accumulation(*arguments: Any) -> int:
        left.extend({*multiprocessing.active_children()} - before)
        return find(*arguments)

    monkeypatch.setattr(memory, "find_accumulation", find_accumulation)
    found = module.measure(settings, open_training(settings.data))
    assert found.workers == 2
    assert found.step_seconds == max(found.compute_seconds, found.data_seconds), "they read beside the computation"
    assert not left


def test_the_processes_of_a_dry_run_agree_on_the_number_of_passes(
    few_digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward pass may wait for the other processes."""
    settings = load_recipe("digits_ssl", [f"data.train={few_digits}/train", "training.batch_size=8"])
    seconds, slowest = iter([1.0, 2.0, 3.0]), iter([0, 10_000])
    monkeypatch.setattr(memory, "find_accumulation", lambda *_: 1)
    monkeypatch.setattr(memory, "forward_backward", lambda *_: (next(seconds), 0))
    monkeypatch.setattr(module, "largest", lambda milliseconds: next(slowest))
    module.measure(settings, open_training(settings.data))
    assert next(seconds) == 3.0, "another process has taken ten seconds after the second pass"


def test_doctor_names_what_would_stop_or_slow_a_run(
    few_digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner().invoke(app, ["doctor", "--data", str(tmp_path / "nowhere")])
    assert done.exit_code == 1 and "nowhere" in done.stdout
    monkeypatch.setattr(health, "cpu_count", lambda: 64)
    monkeypatch.setattr(health.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30, total=1 << 40))
    done = CliRunner().invoke(app, ["doctor", "--data", f"{few_digits}/train", "--run", str(tmp_path), "--json"])
    found = {(finding["about"], finding["level"]): finding["text"] for finding in json.loads(done.stdout)}
    assert "torch" in found["versions", "ok"] and "1 GiB free" in found["disk", "stop"]
    assert found["shards", "ok"].endswith("train: 400 samples in 4 shards, 10 classes")
    both = CliRunner().invoke(app, ["doctor", "--data", str(few_digits)]).stdout
    assert "train: 400 samples" in both and "test: " in both, "the parts that `data=PLACE` of train and compare reads"


def test_doctor_looks_at_the_disk_of_a_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    disk = [finding.text for finding in health.examine(None, "~/runs") if finding.about == "disk"]
    assert disk[-1].endswith(f"free at {tmp_path}")


def test_a_dry_run_refuses_what_the_run_would(few_digits: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    train, run = f"data.train={few_digits}/train", f"run={tmp_path}/run"
    with pytest.raises(UserError, match="is not empty and holds no run"):
        dry_run(train, f"run={tmp_path}")
    with pytest.raises(UserError, match=r"data\.workers=5"):
        dry_run(train, "data.workers=5")
    with pytest.raises(UserError, match=r"training\.trackers|tracker"):
        dry_run(train, run, "training.trackers={foo: {}}")
    with pytest.raises(UserError, match=r"optim\.layer_decay: timm defines no layer groups"):
        dry_run(train, run, "encoder.name=pit_ti_224", "optim.layer_decay=0.5", recipe="supervised_resnet50")
    for number in range(2):
        write(tmp_path / f"images/{number}.png", encoded("PNG", number) if number else b"damaged")
    images = [f"data.train={tmp_path}/images", "training.batch_size=1", "data.lanes=1"]
    with pytest.raises(UserError, match=r"0\.png.*data\.on_bad_sample=fail"):
        dry_run(run, *images, "data.on_bad_sample=fail")
    with pytest.raises(UserError, match=r"images: the images have no labels"):
        dry_run(run, *images, "probe.every=1")
    steps = "training.steps=1"
    ssl_vit.train("digits_ssl", data={"train": str(few_digits / "train")}, run=tmp_path / "run", training={"steps": 1})
    dry_run(train, run, steps)
    with pytest.raises(UserError, match="was trained on other shards"):
        dry_run(f"data.train={few_digits}/test", run, steps)
