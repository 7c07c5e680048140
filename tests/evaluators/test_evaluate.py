"""`eval` on a real run: every evaluator beside its two references, from the command line's function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssl_vit import experiment, recipe
from ssl_vit.data import pack, sources
from ssl_vit.interfaces import UserError

FAST = {
    "few_shot": ["shots=[1,5]"],
    "knn": ["ks=[5]"],
    "linear_probe": ["cs=[0.1]", "labels_per_class=5"],
    "fine_tune": [
        "lrs=[0.01]",
        "steps=[4]",
        "batch_size=16",
        "labels_per_class=5",
        "seeds=[0,1]",
        "augment.flip=false",
    ],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for split in ("train", "test"):
        pack.make(sources.open_source("digits", split=split), folder / split, shards=4, progress=False)
    keys = [f"data.train={folder}/train", f"run={folder}/run", "training.steps=3", "training.batch_size=16"]
    experiment.train(recipe.load_recipe("digits_ssl", keys), quiet=True)
    return folder


@pytest.mark.parametrize("name", FAST)
def test_every_evaluator_shows_both_references(trained: Path, name: str) -> None:
    run = trained / "run"
    result = experiment.evaluate(run, name, f"{trained}/train", f"{trained}/test", FAST[name])
    assert {key.split("/")[0] for key in result["values"]} == {"trained", "untrained", "pixels"}
    accuracies = [v for k, v in result["values"].items() if k.endswith(("mean", "accuracy", "k=5"))]
    assert accuracies and all(0 <= value <= 1 for value in accuracies)
    saved = json.loads((run / "results.json").read_text())["evaluations"]
    assert [old for old in saved if old["evaluator"] == name] == [json.loads(json.dumps(result))]


def test_repeating_an_evaluation_replaces_its_result(trained: Path) -> None:
    results = [
        experiment.evaluate(trained / "run", "knn", f"{trained}/train", f"{trained}/test", ["ks=[7]"]) for _ in range(2)
    ]
    assert results[0]["values"] == results[1]["values"], "frozen features are the same every time"
    saved = json.loads((trained / "run" / "results.json").read_text())["evaluations"]
    assert sum(old["settings"].get("ks") == [7] for old in saved) == 1


def test_a_checkpoint_is_judged_like_a_run(trained: Path) -> None:
    newest = sorted((trained / "run" / "checkpoints").iterdir())[-1]
    run, checkpoint = (
        experiment.evaluate(path, "knn", f"{trained}/train", f"{trained}/test", ["ks=[5]"])["values"]
        for path in (trained / "run", newest)
    )
    assert run == checkpoint


def test_fine_tuning_at_another_resolution(trained: Path) -> None:
    keys = [*FAST["fine_tune"], "image_size=12", "seeds=[0]"]
    values = experiment.evaluate(trained / "run", "fine_tune", f"{trained}/train", f"{trained}/test", keys)["values"]
    assert 0 <= values["trained/mean"] <= 1


@pytest.mark.parametrize(
    ("run", "name", "keys", "expected"),
    [
        ("run", "few_shots", [], "did you mean 'few_shot'"),
        ("run", "few_shot", ["shot=[1]"], "did you mean 'shots'"),
        ("nowhere", "knn", [], "no such run"),
        ("train", "knn", [], "no backbone.safetensors"),
    ],
)
def test_wrong_input_is_named(trained: Path, run: str, name: str, keys: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        experiment.evaluate(trained / run, name, f"{trained}/train", f"{trained}/test", keys)
