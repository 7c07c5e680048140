"""`train --dry-run`, `compare --dry-run` and `doctor`: what they say is what a run does, and nothing is written."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ssl_vit import health
from ssl_vit.cli import app
from ssl_vit.data.packing import pack
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import open_source
from ssl_vit.interfaces import UserError
from ssl_vit.stage import DryRun


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "train"
    pack(open_source("digits", split="test"), folder, Options(shards=4), progress=False)
    return folder


def dry_run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", "digits_ssl", "--dry-run", *arguments], catch_exceptions=False)


def test_a_dry_run_counts_what_the_run_would_do_and_writes_nothing(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = [f"data.train={digits}", "training.steps=90", "training.batch_size=40", "encoder.depth=2"]
    found = json.loads(dry_run("--json", *keys).stdout)
    assert (found["epochs"], found["samples"], found["shards"], found["classes"]) == (10.0, 360, 4, 10)
    width, hidden, patches, classes = 64, 128, 16, 8
    block = 4 * width * width + 4 * width + 2 * width * hidden + hidden + width + 4 * width
    outside = (4 * width + width) + (patches + 1) * width + width + 2 * width + width + (classes * width + classes)
    assert found["parameters"] == 2 * block + outside
    assert found["weights_mib"] == round(16 * (2 * block + outside) / 2**20, 1)
    assert found["steps"] == 90
    assert found["hours"] >= 0
    assert found["recipe"]["encoder"]["depth"] == 2
    assert not list(tmp_path.iterdir())
    text = dry_run(*keys).stdout
    assert "parameters" in text
    assert "nothing was written" in text


def test_activations_grow_with_the_batch_and_shrink_when_they_are_recomputed(digits: Path) -> None:
    def kept(*keys: str) -> float:
        found = json.loads(dry_run("--json", f"data.train={digits}", *keys).stdout)
        return float(found["activations_mib"])

    whole = kept("training.batch_size=64")
    assert kept("training.batch_size=128") == pytest.approx(2 * whole, rel=0.05)
    assert kept("training.batch_size=64", "training.accumulate=2") == pytest.approx(whole / 2, rel=0.05)
    assert kept("training.batch_size=64", "training.checkpoint_activations=true") < 0.5 * whole


def test_what_would_stop_the_run_stops_the_dry_run(digits: Path) -> None:
    with pytest.raises(UserError, match="too few"):
        dry_run(f"data.train={digits}", "data.workers=5")


def test_doctor_says_what_is_there(digits: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--data", str(digits), "--json"])
    findings = {(finding["about"], finding["level"]): finding["text"] for finding in json.loads(done.stdout)}
    assert "torch" in findings["versions", "ok"]
    assert findings["shards", "ok"] == "360 samples in 4 shards, 10 classes"
    assert "processor" in CliRunner().invoke(app, ["doctor"]).stdout


def test_doctor_names_what_would_stop_or_slow_a_run(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner().invoke(app, ["doctor", "--data", str(tmp_path / "nowhere")])
    assert done.exit_code == 1
    assert "stop  shards" in done.stdout
    assert "nowhere" in done.stdout
    monkeypatch.setattr(health.os, "cpu_count", lambda: 64)
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")  # a list is legal: a number for each level of nesting
    slow = [finding for finding in health.examine(str(digits), str(tmp_path)) if finding.level == "slow"]
    assert any("--shards 64" in finding.text for finding in slow)
    assert any("OMP_NUM_THREADS=2" in finding.text for finding in slow)
    monkeypatch.setattr(
        health.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 30, "total": 1 << 40})
    )
    assert any(f.level == "stop" and f.about == "disk" for f in health.examine(None, str(tmp_path)))


def test_a_dry_run_refuses_what_the_run_would(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        dry_run(f"data.train={digits}", f"run={tmp_path}")
    with pytest.raises(UserError, match=r"training\.trackers|tracker"):
        dry_run(f"data.train={digits}", f"run={tmp_path}/run", "training.trackers={foo: {}}")


def test_a_dry_run_counts_the_samples_that_are_drawn_from(digits: Path, tmp_path: Path) -> None:
    keys = [f"data.train={digits}", f"run={tmp_path}/run", "data.samples=64", "training.batch_size=16"]
    found = json.loads(dry_run(*keys, "training.steps=4", "data.lanes=4", "--json").stdout)
    assert (found["samples"], found["epochs"]) == (64, 1.0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "digits_ssl", "--json"], "--json goes with --dry-run"),
        (["compare", "demo_digits", "--list", "--json"], "--json goes with --dry-run"),
        (["eval", "run", "knn", "--suite", "local", "--test", "x"], "--test"),
    ],
)
def test_options_that_would_be_ignored_are_refused(arguments: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize(("workers", "whole", "third"), [(0, 5.0, 3.0), (2, 3.0, 2.0)])
def test_reading_adds_to_a_step_where_no_loader_process_does_it_meanwhile(
    workers: int, whole: float, third: float
) -> None:
    numbers = {field.name: 1 for field in fields(DryRun)} | {"compute_seconds": 3.0, "data_seconds": 2.0}
    found = DryRun(**numbers | {"workers": workers})  # type: ignore[arg-type]
    assert (found.step_seconds(), found.step_seconds(1 / 3)) == (whole, third)
