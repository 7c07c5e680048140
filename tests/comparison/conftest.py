"""A comparison small enough to run in a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.run import compare
from ssl_vit.report.read import Comparison

STEPS = ["training.steps=2", "training.batch_size=16", "training.picture_every=0", "training.trackers={}"]
TUNING = {
    "sweep": {"optim.lr": [0.001, 0.003], "training.steps": [2]},
    "training": {"batch_size": 8},
    "head": {"pooling": "mean"},
    "lanes": 4,
    "sweep_labels_per_class": None,
}

Mini = Callable[..., Path]


@pytest.fixture
def mini(few_digits: Path, tmp_path: Path) -> Mini:
    """Write a recipe: an arm that pretrains for two steps, and scratch, on a few digits. Keywords replace its keys."""

    def write(**changes: Any) -> Path:
        content = {
            "name": "mini",
            "run": str(tmp_path / "run"),
            "seeds": [0, 1],
            "frozen_seeds": [0, 1],
            "labels_per_class": [2],
            "pictures": False,
            "controls": False,
            "data": {name: f"{few_digits}/{name}" for name in ("train", "test")},
            "arms": {
                "ssl": {"label": "SSL", "recipe": "digits_ssl", "overrides": STEPS},
                "scratch": {"label": "scratch"},
            },
            "evaluators": {"few_shot": {"labels_per_class": [1, 2]}},
        }
        (tmp_path / "mini.yaml").write_text(yaml.safe_dump(content | changes, sort_keys=False))
        return tmp_path / "mini.yaml"

    return write


@pytest.fixture(scope="session")
def finished(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """The demo's comparison on a few digits, with every kind of task and evaluator; not to be written to."""
    short = "training.steps=3,training.batch_size=16"
    overrides = [
        f"run={tmp_path_factory.mktemp('finished')}/run",
        f"data={{train: {few_digits}/train, test: {few_digits}/test, folds: []}}",
        "jobs=1",
        "controls=false",
        "seeds=[0,1]",
        "frozen_seeds=[0,1]",
        "pretrainings=1",
        "labels_per_class=[2,3]",
        f"arms.ssl.overrides=[{short}]",
        f"arms.supervised.overrides=[{short}]",
        "evaluators.few_shot.labels_per_class=[1,2]",
        f"evaluators.fine_tune={json.dumps(TUNING)}",
        "evaluators.knn={ks: [1]}",
        "evaluators.linear_probe={}",
    ]
    return compare(load_comparison("demo_digits", overrides), command="ssl-vit demo", say=lambda text: None)


def quietly(recipe: Path, *overrides: str) -> Comparison:
    return compare(load_comparison(recipe, overrides), say=lambda text: None)


def rows(found: Comparison) -> list[dict[str, Any]]:
    """The table without what differs from run to run."""
    frame = found.table.frame.drop(columns=["seconds"])
    return [dict(row) for row in frame.to_dict(orient="records")]


def stamps(run: Path) -> dict[str, int]:
    """When each task's file was written, by task."""
    return {path.stem: path.stat().st_mtime_ns for path in (run / "tasks").glob("*.json")}
