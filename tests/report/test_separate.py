"""Runs made separately are compared as a comparison's arms are: alike settings alone, paired by seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ssl_vit.report import separate
from ssl_vit.report.page import read_all, write_report

ACCURACIES = {"a": [0.70, 0.74, 0.71], "b": [0.60, 0.66, 0.59]}


def write(folder: Path, *evaluations: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"kind": "evaluations", "evaluations": evaluations}))
    return folder


def few_shot(trained: list[float], *, test: str = "t", untrained: float = 0.4, **settings: Any) -> dict[str, Any]:
    rows = [
        {"source": source, "labels_per_class": 10, "labels": 40, "seed": seed, "accuracy": accuracy, "main": True}
        | {"mean_per_class": accuracy / 2, "per_class": [accuracy] * 4, "seconds": np.random.default_rng().random()}
        for source, values in (("trained", trained), ("untrained", [untrained] * len(trained)))
        for seed, accuracy in enumerate(values)
    ]
    rows += [row | {"accuracy": 0.0, "main": False} for row in rows]
    place = {"data": {"train": "labeled", "test": test}, "settings": {"l2": 1024.0, "block": None} | settings}
    return place | {"evaluator": "few_shot", "title": "Few-shot", "metric": "accuracy", "measurements": rows}


def shown(*runs: Path) -> list[list[list[str]]]:
    found = read_all([*runs])
    return [table.rows for table in separate.evaluation_tables([run.name for run in runs], found)]


def test_runs_and_what_they_share_are_rows_and_the_first_is_held_against_the_others(tmp_path: Path) -> None:
    accuracy, differences = shown(*(write(tmp_path / name, few_shot(values)) for name, values in ACCURACIES.items()))
    assert accuracy == [["a", "71.7 ± 2.1"], ["b", "61.7 ± 3.8"], ["the untrained encoder", "40.0 ± 0.0"]]
    test = stats.ttest_rel(ACCURACIES["a"], ACCURACIES["b"]).confidence_interval(0.95)
    half = 100 * (test.high - test.low) / 2
    assert differences[0] == ["a minus b", f"+10.0 ± {half:.1f}"]
    assert differences[1][0] == "a minus the untrained encoder"


def test_a_reference_that_differs_is_a_row_for_each_run(tmp_path: Path) -> None:
    one, two = (write(tmp_path / n, few_shot(ACCURACIES[n], untrained=u)) for n, u in (("a", 0.4), ("b", 0.3)))
    accuracy, differences = shown(one, two)
    assert [row[0] for row in accuracy] == ["a", "b", "the untrained encoder of a", "the untrained encoder of b"]
    assert [row[0] for row in differences][1:] == [
        "a minus the untrained encoder of a",
        "a minus the untrained encoder of b",
    ]


@pytest.mark.parametrize("other", [{"l2": 1.0}, {"test": "u"}])
def test_what_was_measured_otherwise_is_never_in_one_table(tmp_path: Path, other: dict[str, Any]) -> None:
    one, two = write(tmp_path / "a", few_shot([0.5, 0.6])), write(tmp_path / "b", few_shot([0.9, 0.8], **other))
    tables = shown(one, two)
    assert [rows[0][0] for rows in tables] == [
        "a",
        "a minus the untrained encoder",
        "b",
        "b minus the untrained encoder",
    ]


def test_the_metric_of_the_data_set_counts(tmp_path: Path) -> None:
    by_class = few_shot(ACCURACIES["a"]) | {"metric": "mean_per_class"}
    assert shown(write(tmp_path / "a", by_class))[0][0] == ["a", "35.8 ± 1.0"]


def test_the_page_tells_the_settings_once_and_what_the_intervals_cover(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, few_shot(values)) for name, values in ACCURACIES.items()]
    text = write_report(runs, tmp_path / "report.html").read_text()
    assert "Few-shot: t" in text and "Labeled images: labeled." in text and "the first is shown" in text
    assert "<summary>Settings</summary>l2 1024</details>" in text, "what is not set is not said"
    assert "Each run is one training" in text
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "recipe.yaml").write_text("seed: 0")
    assert "Each run is one training" not in write_report([tmp_path / "c"], tmp_path / "c.html").read_text()


def test_what_a_measurement_says_of_itself_is_said_of_the_tables(tmp_path: Path) -> None:
    judged = few_shot(ACCURACIES["a"])
    judged["measurements"][0]["notes"] = ["4 class(es) gave fewer than 10 images"]
    run = write(tmp_path / "a", judged)
    assert "Labeled images: labeled. Of settings" in write_report([run], tmp_path / "r.html").read_text()
    assert "first is shown. 4 class(es) gave fewer than 10 images." in (tmp_path / "r.html").read_text()
