"""`ssl-vit eval RUN own_head`: a supervised run's own classifier, as it was when the run ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ssl_vit import execution, recipe
from ssl_vit.data import DataConfig
from ssl_vit.data.evaluation import EvaluationStream, evaluation_batches
from ssl_vit.data.shards import open_shards
from ssl_vit.evaluators import own_head
from ssl_vit.evaluators.classifier import predict
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.models import factory
from ssl_vit.objectives import classification
from ssl_vit.training import checkpoint

KEYS = ["training.steps=60", "training.checkpoint_every=30", "training.picture_every=0", "encoder.depth=2"]


@pytest.fixture(scope="module")
def folder(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits, and a supervised and an SSL run on them."""
    folder = tmp_path_factory.mktemp("own_head")
    for split in ("train", "test"):
        (folder / split).symlink_to(few_digits / split)
    for name, steps in (("digits_supervised", 60), ("digits_ssl", 2)):
        keys = [*KEYS, f"data.train={folder}/train", f"run={folder}/{name}", f"training.steps={steps}"]
        execution.train(recipe.load_recipe(name, keys), quiet=True)
    return folder


def by_hand(folder: Path, saved: Path) -> tuple[float, float]:
    """Accuracy and mean confidence of a checkpoint's head over the test digits, without the evaluators."""
    settings = recipe.load_recipe(folder / "digits_supervised" / "recipe.yaml")
    assert isinstance(settings.objective, classification.Config)
    objective = classification.Objective(factory.load(saved), settings.objective, 10).eval()
    checkpoint.load_head(saved, objective)
    data = DataConfig(train="x", evaluation_resize=1.0)
    stream = EvaluationStream(open_shards(f"{folder}/test"), data, 8, 1, batch_size=90, needs_labels=True)
    hits, confidence = [], []
    with torch.no_grad():
        for batch, _ in evaluation_batches(stream, torch.device("cpu")):
            best = torch.softmax(objective.logits(batch.images), -1).max(-1)
            hits += (best.indices == batch.labels)[batch.valid].tolist()
            confidence += best.values[batch.valid].tolist()
    assert len(hits) == 100
    return float(np.mean(hits)), float(np.mean(confidence))


def test_it_is_the_accuracy_of_the_trained_classifier(folder: Path) -> None:
    run = folder / "digits_supervised"
    found = execution.evaluate(run, "own_head", f"{folder}/train", f"{folder}/test")
    (row,) = found.results
    assert (row.arm, row.labels_per_class, row.labels) == ("trained", "all", 400) and not row.notes
    accuracy, confidence = by_hand(folder, checkpoint.folders(run)[-1])
    assert row.accuracy == pytest.approx(accuracy, abs=1e-9)
    assert np.asarray(row.prediction.confidence).mean() == pytest.approx(confidence, rel=1e-5)
    assert row.accuracy > 0.5, "sixty steps teach most digits"
    early = checkpoint.folders(run)[0]
    other = execution.evaluate(early, "own_head", f"{folder}/train", f"{folder}/test").results[0].accuracy
    assert row.accuracy != other == pytest.approx(by_hand(folder, early)[0], abs=1e-9), "by its own head"


def test_all_seeds_have_the_same_predictions_and_are_predicted_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(own_head, "predict", lambda *given: calls.append(given) or predict(*given))  # type: ignore[func-returns-value]
    run, data = folder / "digits_supervised", (f"{folder}/train", f"{folder}/test")
    rows = execution.evaluate(run, "own_head", *data, ["seeds=[0,1,2]"]).results
    assert len(calls) == 1 and [row.seed for row in rows] == [0, 1, 2]
    assert len({row.accuracy for row in rows}) == 1


def test_runs_without_a_classifier_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="own_head needs a run whose objective is classification"):
        execution.evaluate(folder / "digits_ssl", "own_head", f"{folder}/train", f"{folder}/test")


def test_a_head_of_an_earlier_step_is_refused(folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(folder / "digits_supervised", tmp_path / "run")
    shutil.rmtree(checkpoint.folders(run)[-1])
    assert checkpoint.folders(run)
    with pytest.raises(UserError, match="its last checkpoint, with the head, is gone"):
        execution.evaluate(run, "own_head", f"{folder}/train", f"{folder}/test")


def test_a_run_that_is_still_trained_knows_its_classes_and_a_part_of_the_labels_counts(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    keys = [f"data.train={folder}/train", f"run={run}", "data.samples=50"]
    execution.train(recipe.load_recipe("digits_supervised", [*KEYS, *keys, "training.steps=4"]), quiet=True)
    measured = execution.evaluate(run, "own_head", f"{folder}/train", f"{folder}/test").results
    assert [(row.labels, row.notes) for row in measured] == [(50, ())], "what its head was trained on"
    (run / "summary.json").unlink()
    for split in ("train", "test"):
        shutil.copytree(folder / split, tmp_path / split)
        info = json.loads((tmp_path / split / "info.json").read_text())
        info["classes"].reverse()
        (tmp_path / split / "info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="have different classes: class 0 is 0 in one, 9 in the other"):
        execution.evaluate(run, "own_head", f"{tmp_path}/train", f"{tmp_path}/test")


def test_a_head_that_gives_no_numbers_is_named(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "digits_supervised", run)
    head = checkpoint.folders(run)[-1] / checkpoint.OBJECTIVE
    save_file({name: tensor.fill_(torch.nan) for name, tensor in load_file(head).items()}, head)
    with pytest.raises(RunError, match=r"the logits of image 0 of .*test are not finite"):
        execution.evaluate(run, "own_head", f"{folder}/train", f"{folder}/test")
