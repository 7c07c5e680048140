"""`train --dry-run`, `compare --dry-run` and `doctor`: what they say is what a run does, and nothing is written."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ssl_vit import health
from ssl_vit.cli import app
from ssl_vit.comparison import preview as compared
from ssl_vit.data.packing import pack
from ssl_vit.data.packing.sources import open_source
from ssl_vit.interfaces import UserError
from ssl_vit.stage import DryRun
from ssl_vit.stage import dry_run as measure


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "train"
    pack(open_source("digits", split="test"), folder, shards=4, progress=False)
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


SMALL = ["encoder.depth=1", "training.steps=60", "training.batch_size=32", "data.workers=0"]
COMPARED = [
    "seeds=[0,1]", "labels_per_class=[2,5]", "jobs=1", "pictures=false", "evaluators.fine_tune.steps=[10,20]",
    "evaluators.fine_tune.lrs=[0.001,0.003]", "evaluators.fine_tune.batch_size=32",
]  # fmt: skip


def dry_compare(digits: Path, *arguments: str) -> Any:
    keys = [f"data.train={digits}", f"data.test={digits}", *COMPARED]
    keys += [f"arms.{arm}.overrides=[{','.join(SMALL)}]" for arm in ("ssl", "supervised")]
    return CliRunner().invoke(app, ["compare", "demo_digits", "--dry-run", *arguments, *keys], catch_exceptions=False)


def test_a_dry_comparison_counts_its_pieces_and_hours_and_writes_nothing(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seconds = iter(range(1, 100))
    stages = []

    def measured(settings: Any) -> Any:
        """Each kind of training really tried, and given a time of its own to count with."""
        stages.append(settings)
        return replace(measure(settings), compute_seconds=float(next(seconds)), data_seconds=0.0)

    monkeypatch.setattr(compared, "dry_run", measured)
    found = json.loads(dry_compare(digits, "--json").stdout)
    pieces = {"pretrain": 2, "choose": 3 * 2, "measure": 3 * 2 * 2 + 4}  # 4: few-shot of two arms and two references
    assert found["pieces"] == {"all": sum(pieces.values()), "done": 0, "missing": pieces}
    assert [settings.objective.name for settings in stages[:2]] == ["masked_patch", "classification"]
    assert found["arms"]["ssl"]["pretraining"]["parameters"] > 10_000
    assert found["arms"]["ssl"]["pretraining_hours"] == pytest.approx(1 * 60 / 3600, abs=1e-3)
    assert found["arms"]["supervised"]["pretraining_hours"] == pytest.approx(2 * 60 / 3600, abs=1e-3)
    # Of each label budget a sweep of two rates at both lengths, and a longest training for each of two seeds.
    steps = 2 * (2 * (10 + 20) + 2 * 20)
    tried = next(n for n, settings in enumerate(stages, 1) if settings.optim.lr == 0.003 and n > 2)
    assert stages[tried - 1].training.batch_size == 32
    assert found["arms"]["scratch"]["fine_tuning_hours"] == pytest.approx(tried * steps / 3600, abs=1e-3)
    assert found["arms"]["scratch"]["features_hours"] == 0 < found["arms"]["untrained"]["features_hours"]
    hours = sum(row[key] for row in found["arms"].values() for key in row if key.endswith("_hours"))
    assert found["time"]["hours_in_all"] == pytest.approx(hours, abs=5e-3)
    assert not list(tmp_path.iterdir())


def test_a_dry_comparison_in_words(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = dry_compare(digits).stdout
    for words in ("ssl", "scratch", "24, 0 of them done; missing: 2 pretrain", "hours in all", "nothing was written"):
        assert words in text
    assert not list(tmp_path.iterdir())


def test_a_dry_comparison_packs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sets = ["data.train=null", "data.test=null", "data.sets.mine.source=digits"]
    with pytest.raises(UserError, match=r"mine is not packed yet.*ssl-vit shards make digits shards/mine/train"):
        dry = ["compare", "demo_digits", "--dry-run", *sets]
        CliRunner().invoke(app, dry, catch_exceptions=False)
    assert not list(tmp_path.iterdir())


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
        (["eval", "run", "knn", "--suite", "local", "--test", "x"], "leave --test out"),
    ],
)
def test_options_that_would_be_ignored_are_refused(arguments: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_comparisons_dry_run_minds_no_run_of_its_own_training(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "digits_ssl").mkdir(parents=True)
    (tmp_path / "runs" / "digits_ssl" / "notes.txt").write_text("")
    arms = "arms={ssl: {label: SSL, recipe: digits_ssl}, scratch: {label: scratch}}"
    data = [f"data.train={digits}", f"data.test={digits}", "labels_per_class=[2]", "seeds=[0]"]
    arguments = ["compare", "demo_digits", "--dry-run", "--json", *data, arms, "evaluators={few_shot: {shots: [1]}}"]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0


@pytest.mark.parametrize(("workers", "whole", "third"), [(0, 5.0, 3.0), (2, 3.0, 2.0)])
def test_reading_adds_to_a_step_where_no_loader_process_does_it_meanwhile(
    workers: int, whole: float, third: float
) -> None:
    numbers = {field.name: 1 for field in fields(DryRun)} | {"compute_seconds": 3.0, "data_seconds": 2.0}
    found = DryRun(**numbers | {"workers": workers})  # type: ignore[arg-type]
    assert (found.step_seconds(), found.step_seconds(1 / 3)) == (whole, third)
