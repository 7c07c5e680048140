"""Evaluators and comparisons on one CUDA GPU."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from tests.gpu.runs import ssl_vit, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.fixture(scope="module")
def pretrained(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("pretrained") / "run"
    train(
        "digits_ssl", f"data.train={few_digits}/train", f"run={run}", "training.steps=200", "training.picture_every=0"
    )
    return run


@pytest.mark.parametrize(
    "evaluator",
    ["few_shot labels_per_class=[5]", "linear_probe labels_per_class=[5] sweep={} c=1", "knn", "attentive_probe"],
)
def test_frozen_features_score_as_on_a_cpu(pretrained: Path, few_digits: Path, tmp_path: Path, evaluator: str) -> None:
    """100 test images; rounding may move a few across a boundary."""
    command = ["eval", str(pretrained), *evaluator.split(), "--data", str(few_digits), "--json"]
    accuracies = []
    for gpu in (True, False):
        found = json.loads(ssl_vit(*command, gpu=gpu))
        accuracies.append([row["accuracy"] for row in found["rows"]])
    print(f"\n{evaluator}: {accuracies[0]} on the GPU, {accuracies[1]} on the CPU")
    assert accuracies[0] and accuracies[0] == pytest.approx(accuracies[1], abs=0.05)


def test_tasks_side_by_side_on_one_gpu(few_digits: Path, tmp_path: Path) -> None:
    """Four tasks at the same time give what one task after the other gives, within rounding."""
    data = f"data={{train: {few_digits}/train, test: {few_digits}/test, folds: []}}"
    settings = ["demo_digits", data, "controls=false", "seeds=[0,1]", "frozen_seeds=[0,1]", "labels_per_class=[5]"]
    settings += ["arms.ssl.overrides=[training.steps=50]", "arms.supervised.overrides=[training.steps=50]"]
    settings += ["evaluators.fine_tune.training.steps=20"]
    accuracies = []
    for jobs in (1, 4):
        run = tmp_path / str(jobs)
        ssl_vit("compare", *settings, f"jobs={jobs}", f"run={run}")
        ssl_vit("report", str(run), "--format", "csv", "--out", str(run / "rows.csv"))
        with (run / "rows.csv").open() as file:
            accuracies.append([float(row["accuracy"]) for row in csv.DictReader(file)])
    assert accuracies[0] and accuracies[0] == pytest.approx(accuracies[1], abs=0.1)
