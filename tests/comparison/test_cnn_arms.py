"""A ResNet as the supervised and the scratch arm beside a ViT that learned by masks."""

from __future__ import annotations

from pathlib import Path

import yaml

from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.run import compare
from ssl_vit.report.page import write_report

SHORT = ["training.steps=2", "training.epochs=null", "training.batch_size=16", "data.lanes=4", "data.workers=0"]
RESNET = ["encoder.name=test_resnet", "encoder.image_size=32", "encoder.channels=1", *SHORT]


def test_a_resnet_takes_part_as_a_supervised_and_as_a_scratch_arm(few_digits: Path, tmp_path: Path) -> None:
    recipe = {
        "name": "cnn",
        "run": str(tmp_path / "run"),
        "seeds": [0, 1],
        "labels_per_class": [2],
        "data": {name: f"{few_digits}/{name}" for name in ("train", "test")},
        "arms": {
            "ssl": {"label": "SSL", "recipe": "digits_ssl", "overrides": SHORT[::2]},
            "scratch": {"label": "ViT from scratch"},
            "cnn": {"label": "ResNet", "recipe": "supervised_resnet50", "overrides": RESNET},
            "cnn_scratch": {"label": "ResNet from scratch", "like": "cnn"},
        },
        "evaluators": {
            "few_shot": {"shots": [1], "pooling": "mean"},
            "fine_tune": {"lrs": [0.003], "steps": [2], "batch_size": 8, "lanes": 4, "pooling": "mean"},
        },
    }
    (tmp_path / "cnn.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    results = compare(load_comparison(tmp_path / "cnn.yaml"), "", lambda text: None)
    assert results["finished"] and results["missing"] == []
    found = {(row["evaluator"], row["arm"], row["seed"]) for row in results["measurements"]}
    frozen = ("ssl", "cnn", "untrained", "untrained_cnn", "pixels")
    tuned = ("ssl", "scratch", "cnn", "cnn_scratch")
    assert found == {("few_shot", arm, seed) for arm in frozen for seed in (0, 1)} | {
        ("fine_tune", arm, seed) for arm in tuned for seed in (0, 1)
    }
    flops = {row["arm"]: row["flops"] for row in results["measurements"] if row["evaluator"] == "fine_tune"}
    assert flops["cnn"] == flops["cnn_scratch"] != flops["scratch"] == flops["ssl"]
    pictures = {arm["name"]: arm["pictures"] for arm in results["arms"]}
    assert pictures["ssl"] and not pictures["cnn"]  # a ResNet has no attention to look at
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "ResNet from scratch" in page and "attention rollout of SSL" in page
