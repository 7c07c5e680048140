"""`compare --dry-run`: what it says is what the comparison does, and nothing is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ssl_vit.cli import app
from ssl_vit.comparison import dry_run as module
from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.dry_run import dry_run_comparison
from ssl_vit.data import evaluation
from ssl_vit.dry_run import measure
from ssl_vit.models.vit import ViTEncoder

from .conftest import Mini, quietly

ARMS = {
    "ssl": {"label": "SSL", "recipe": "digits_ssl", "overrides": ["training.steps=60", "training.batch_size=32"]},
    "scratch": {"label": "scratch"},
}
SWEEP = {
    "fine_tune": {
        "sweep": {"optim.lr": [0.001, 0.003], "training.steps": [10, 20]},
        "training": {"batch_size": 32},
        "head": {"pooling": "mean"},
        "lanes": 4,
    }
}


def test_it_counts_tasks_and_hours_and_writes_nothing(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[str] = []

    def measured(recipe: Any, *shards: Any) -> Any:
        """Each kind of training really measured, and given a time of its own to count with."""
        times.append(recipe.objective.name)
        return replace(measure(recipe, *shards), compute_seconds=float(len(times)), data_seconds=0.0)

    monkeypatch.setattr(module, "measure", measured)
    recipe = mini(arms=ARMS, labels_per_class=[2, 5], evaluators={"few_shot": {"labels_per_class": [1]}, **SWEEP})
    found = dry_run_comparison(load_comparison(recipe))
    assert found.missing == {"pretrain": 1, "sweep": 2 * 2, "measure": 2 * 2 * 2 + 3}
    assert (found.tasks, found.done) == (sum(found.missing.values()), 0)
    ssl, scratch, untrained = (found.arms[name] for name in ("ssl", "scratch", "untrained"))
    assert ssl.pretraining and ssl.pretraining.parameters > 10_000
    assert ssl.pretraining_hours == pytest.approx(1 * 60 / 3600)
    assert times == ["masked_patch", "classification"]
    # For each label budget a sweep of two rates at both lengths, which trains the first seed's model, and the longest
    # training for the second seed.
    steps = 2 * (2 * (10 + 20) + 20)
    assert scratch.fine_tuning_hours == ssl.fine_tuning_hours == pytest.approx(2 * steps / 3600)
    assert scratch.features_hours == 0 < untrained.features_hours
    hours = [one.pretraining_hours + one.fine_tuning_hours + one.features_hours for one in found.arms.values()]
    assert found.hours == pytest.approx(sum(hours))
    assert found.memory_mib > 0
    assert [path.name for path in tmp_path.iterdir()] == ["mini.yaml"]


def test_what_is_done_is_not_counted(mini: Mini) -> None:
    recipe = mini()
    quietly(recipe)
    found = dry_run_comparison(load_comparison(recipe))
    assert (found.missing, found.done, found.hours) == ({}, found.tasks, 0)


def test_a_probe_that_is_trained_has_its_hours(mini: Mini) -> None:
    def hours(epochs: int) -> float:
        probe = {"method": "lars", "training": {"epochs": epochs, "batch_size": 8}, "lanes": 4}
        study = load_comparison(mini(evaluators={"linear_probe": probe}, labels_per_class=[2]))
        return dry_run_comparison(study).arms["ssl"].features_hours

    assert hours(2000) > 20 * hours(20) > 0


def test_in_words_and_as_json(mini: Mini, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "digits_ssl").mkdir(parents=True)  # where this arm's recipe would train alone
    (tmp_path / "runs" / "digits_ssl" / "notes.txt").write_text("")
    arguments = ["compare", str(mini()), "--dry-run"]
    text = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    missing = "4, 0 of them done; missing: 1 pretrain"
    for words in (
        "ssl",
        "scratch",
        missing,
        " hours, ",
        "(except linear_probe with method=lars)",
        "nothing was trained",
    ):
        assert words in text
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert found["arms"]["ssl"]["pretraining"]["steps"] == 2
    assert not (tmp_path / "run").exists()


def test_features_are_timed_in_evaluation_batches(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a training step with the batch size of pretraining, whose time and memory another training may need."""
    sizes = list[int]()

    def represent(encoder: Any, images: torch.Tensor, *how: Any) -> torch.Tensor:
        if images.device.type != "meta":  # else it is only checked
            assert not torch.is_grad_enabled()
            assert not encoder.training
            sizes.append(len(images))
        return torch.zeros(len(images), 4)

    monkeypatch.setattr(ViTEncoder, "represent", represent)
    monkeypatch.setattr(evaluation, "_kept", {})
    study = load_comparison(mini(evaluators={"few_shot": {"labels_per_class": [1]}}))
    found = dry_run_comparison(study)
    assert not evaluation._kept, "else the next encoder would be timed without reading"
    assert sizes
    assert len(sizes) % 4 == 0
    assert max(sizes) <= module._TIMED_IMAGES // 4
    assert found.arms["ssl"].features_hours > 0


def test_features_of_one_batch_are_timed(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMED_IMAGES", 1)
    found = dry_run_comparison(load_comparison(mini(evaluators={"few_shot": {"labels_per_class": [1]}})))
    assert found.arms["ssl"].features_hours > 0
