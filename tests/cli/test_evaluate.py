"""`ssl-vit eval`: datasets, and what it prints."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ssl_vit import execution, recipe
from ssl_vit.data.packing import pack
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import open_source
from ssl_vit.report.read import read
from ssl_vit.report.statistics import points
from ssl_vit.report.summary import summarize

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trained(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for split in ("train", "test"):
        (folder / split).symlink_to(few_digits / split)
    keys = [f"data.train={folder}/train", f"run={folder}/run", "training.steps=2", "training.batch_size=16"]
    execution.train(recipe.load_recipe("digits_ssl", keys), quiet=True)
    return folder


@pytest.fixture
def evaluate(trained: Path, called: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """(exit code, stdout, stderr) of `ssl-vit eval RUN ...`. The run has no results of other tests."""
    shutil.rmtree(trained / "run" / "results", ignore_errors=True)
    monkeypatch.setenv("COLUMNS", "200")
    return partial(called, "eval", trained / "run")


def test_several_data_sets_are_columns_of_one_table(trained: Path, tmp_path: Path, evaluate: Call) -> None:
    other = tmp_path / "other"
    pack(open_source("digits"), other, Options(subset=5, holdout=0.05, seed=9), progress=False)
    code, shown, _ = evaluate("few_shot", "--data", trained, "--data", other, "labels_per_class=[2]")
    assert code == 0 and str(trained) in shown and str(other) in shown
    (row,) = [line for line in shown.splitlines() if "2 labels per class" in line and " trained" in line]
    assert row.count("±") == 2
    stored = read([trained / "run"])
    there = [points(one.estimate, "") for one in summarize(stored).accuracies if one.arm == stored.arms[0]]
    assert len(there) == 2 and all(one in row for one in there), "the same intervals as in the report"
    seeds = stored.table.frame.query("arm == @stored.arms[0]").groupby("data")["accuracy"]
    assert all(f"({100 * statistics.stdev(accuracies):.1f})" in row for _, accuracies in seeds) and len(seeds) == 2
    code, shown, _ = evaluate(
        "few_shot", "--data", f"{trained}/train", "--test", f"{trained}/test", "labels_per_class=[2]"
    )
    table = shown.split("saved in")[0]
    assert f"{trained}/test" in table and f"{trained}/train" not in table, "the numbers are about the test images"


def test_a_home_directory_is_expanded(
    trained: Path, evaluate: Call, called: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(trained))
    code, _, error = called("eval", "~/run", "few_shot", "labels_per_class=1", "seeds=[0]", "--data", str(trained))
    assert code == 0, error
    assert [*(trained / "run/results").glob("few_shot-*.json")]


@pytest.mark.usefixtures("fewer_digits")
def test_a_suite_has_its_own_metric_and_settings(trained: Path, tmp_path: Path, evaluate: Call) -> None:
    (tmp_path / "suite.yaml").write_text(f"""
folder: {tmp_path}/packed
sets:
  named: {{train: {trained}/train, test: {trained}/test, metric: mean_per_class, evaluators: {{knn: {{ks: [3]}}}}}}
  packed: {{source: digits}}
""")
    arguments = ["knn", "--suite", tmp_path / "suite.yaml", "labels_per_class=4"]
    code, shown, _ = evaluate(*arguments, "--json")
    found = json.loads(shown)
    named, packed = found["about"]
    assert code == 0 and (named["metric"], named["settings"]["ks"]) == ("mean_per_class", [3])
    assert (packed["metric"], packed["settings"]["ks"]) == ("accuracy", [10, 20])
    code, shown, _ = evaluate(*arguments, "--json", "--metric", "accuracy")
    assert code == 0 and {one["metric"] for one in json.loads(shown)["about"]} == {"accuracy"}

    assert {row["data"] for row in found["rows"]} == {"named", "packed"}
    assert {row["labels_per_class"] for row in found["rows"]} == {4} and "prediction" not in found["rows"][0]
    mean = next(row["mean_per_class"] for row in found["rows"] if row["data"] == "named" and row["arm"] == "trained")
    assert json.loads((tmp_path / "packed" / "packed" / "train" / "info.json").read_text())["samples"] == 400
    code, shown, told = evaluate(*arguments, "--per-class")
    assert "packing" not in told, "packed once"
    row = next(line for line in shown.splitlines() if " trained" in line and "labels per class" in line)
    assert f"{100 * mean:.1f}" in row and "named: mean of the per-class accuracies" in shown


def test_a_set_may_be_named_labels_and_no_place_is_empty(
    trained: Path, tmp_path: Path, evaluate: Call, called: Call
) -> None:
    (tmp_path / "suite.yaml").write_text(f"sets: {{labels: {{train: {trained}/train, test: {trained}/test}}}}")
    code, shown, told = evaluate("knn", "--suite", tmp_path / "suite.yaml", "ks=3", "labels_per_class=4")
    assert code == 0 and "labels" in shown, told
    for option in ("--test", "--suite", "--data"):
        code, _, told = called("eval", str(trained / "run"), "knn", option, "")
        assert code == 2 and "one of them is empty" in told


def test_settings_replace_those_of_a_suite(trained: Path, tmp_path: Path, evaluate: Call) -> None:
    (tmp_path / "suite.yaml").write_text(f"""
sets:
  two:
    train: ["{trained}/train", "{trained}/train"]
    test: {trained}/test
    evaluators: {{few_shot: {{sweep: {{l2: [1, 2]}}}}}}
""")
    arguments = ["few_shot", "--suite", tmp_path / "suite.yaml", "labels_per_class=4", "seeds=0"]
    code, shown, shown_errors = evaluate(*arguments, "sweep={}", "l2=4", "--json")
    assert code == 0, shown_errors
    (about,) = json.loads(shown)["about"]
    assert (about["settings"]["sweep"], about["settings"]["l2"]) == ({}, 4) and len(about["data"]["train"]) == 2


def test_settings_of_a_suite_are_for_its_protocol_alone(trained: Path, tmp_path: Path, evaluate: Call) -> None:
    own = "labels_per_class: [2], seeds: [0]"
    (tmp_path / "suite.yaml").write_text(f"""
sets:
  one:
    train: {trained}/train
    test: {trained}/test
    evaluators: {{fine_tune: {{sweep: {{optim.lr: [0.5]}}, training: {{steps: 3, batch_size: 8}}, {own}}}}}
""")
    arguments = ["fine_tune", "--suite", tmp_path / "suite.yaml", "--json"]
    code, shown, told = evaluate(*arguments)
    assert code == 0, told
    assert json.loads(shown)["about"][0]["settings"]["training"]["steps"] == 3
    keys = ["labels_per_class=2", "seeds=0", "training.epochs=1", "training.batch_size=16"]
    code, shown, told = evaluate(*arguments, "protocol=mae", *keys)
    assert code == 0, told
    settings = json.loads(shown)["about"][0]["settings"]
    assert settings["protocol"] == "mae" and 0.5 not in settings["sweep"].get("optim.lr", [])


def test_shards_of_the_test_set_under_another_name_are_refused(trained: Path, tmp_path: Path, evaluate: Call) -> None:
    recipe = (trained / "run" / "recipe.yaml").read_text()
    (trained / "run" / "recipe.yaml").write_text(recipe.replace(f"{trained}/train", f"{trained}/test/*.tar"))
    try:
        code, _, told = evaluate("knn", "--data", f"{trained}/train", "--test", f"{trained}/test")
    finally:
        (trained / "run" / "recipe.yaml").write_text(recipe)
    assert code == 2 and "on images of the test set" in told


@pytest.mark.parametrize("key", ["metric=mean_per_class", "data=x", "test=x", "model=x", "say=x"])
def test_a_key_that_is_no_evaluators_is_named(evaluate: Call, key: str) -> None:
    code, _, shown = evaluate("knn", key)
    assert code == 2 and key.partition("=")[0] in shown and "Traceback" not in shown


def test_per_class_accuracies_are_those_of_the_predictions(trained: Path, evaluate: Call) -> None:
    code, shown, _ = evaluate("knn", "--data", trained, "ks=[5]", "--per-class")
    found = execution.evaluate(trained / "run", "knn", f"{trained}/train", f"{trained}/test", ["ks=[5]"])
    prediction = found.results[0].prediction
    share = prediction.correct[prediction.labels == 3].mean()
    (row,) = [line.split() for line in shown.splitlines() if line.split()[1:2] == ["3"]]
    assert code == 0 and f"{100 * share:.1f}" in row and str((prediction.labels == 3).sum()) in row


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "x", "--suite", "local"], "--suite cannot be combined"),
        (["--suite", "transfr"], "transfr: no such suite"),
        (["--data", "a", "--data", "b", "--test", "c"], "--test goes with one --data"),
        (["--data", "nowhere"], "nowhere: no such file or folder in "),
        (["--per-class", "--json"], "are mutually exclusive"),
        (["--real-labels", "real.json", "--suite", "transfer"], "leave out --suite"),
        (["--real-labels", "real.json", "--data", "a", "--data", "b"], "one --data"),
    ],
)
def test_wrong_data_is_named(evaluate: Call, arguments: list[str], expected: str) -> None:
    code, _, told = evaluate("knn", *arguments)
    assert code == 2 and expected in told


def test_a_wrong_evaluator_comes_before_missing_data_and_a_comparison_names_its_runs(
    trained: Path, tmp_path: Path, evaluate: Call, called: Call
) -> None:
    code, _, error = evaluate("few_shott", "--data", "nowhere")
    assert code == 2 and "did you mean 'few_shot'" in error
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "ssl").symlink_to(trained / "run")
    code, _, error = called("eval", tmp_path, "few_shot")
    assert code == 2 and f"is a comparison; name the run of one of its arms: {tmp_path}/ssl" in error


@pytest.mark.parametrize(("metric", "budget"), [("accuracy", 2), ("mean_per_class", 3)])
def test_results_are_logged_to_tensorboard_at_the_step_of_the_weights(
    trained: Path, evaluate: Call, metric: str, budget: int
) -> None:
    how = "--data", trained, "--metric", metric, f"labels_per_class=[{budget}]", "ks=[1]", "--json"
    code, shown, _ = evaluate("knn", *how)
    assert code == 0
    (row,) = [row for row in json.loads(shown)["rows"] if row["arm"] == "trained"]
    events = EventAccumulator(str(trained / "run" / "results")).Reload()
    (event,) = events.Scalars(f"knn/trained/{budget}")
    assert event.step == 2 and event.value == pytest.approx(row[metric])
