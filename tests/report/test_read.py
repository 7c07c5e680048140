"""What a report reads from disk, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssl_vit.files import sha256
from ssl_vit.interfaces import UserError
from ssl_vit.report.cells import remarks
from ssl_vit.report.read import read_directory


def write_run(folder: Path, name: str = "run") -> Path:
    (folder / "pictures").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("seed: 0\n")
    (folder / "summary.json").write_text(json.dumps({"steps": 2, "name": name}))
    (folder / "environment.json").write_text(json.dumps({"world_size": 1}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    for step in (500, 1000, 90):
        (folder / f"pictures/reconstruction_step_{step}.png").write_bytes(b"png")
    return folder


def test_reads_a_run_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    run = read_directory(write_run(tmp_path / "run"))
    assert run["kind"] == "run"
    assert run["metrics"] == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]
    assert run["broken_lines"] == 1
    assert run["recipe"] == "seed: 0\n"
    assert run["summary"] == {"steps": 2, "name": "run"}
    assert run["environment"] == {"world_size": 1}
    assert run["results"] is None
    assert run["path"] == tmp_path / "run"


def test_the_newest_picture_is_the_one_of_the_highest_step_not_of_the_last_name(tmp_path: Path) -> None:
    (picture,) = read_directory(write_run(tmp_path / "run"))["pictures"]
    assert picture.name == "reconstruction_step_1000.png"


def test_what_inspect_drew_comes_before_the_pictures_of_training(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "inspect").mkdir()
    for name in ("filters", "attention_rollout", "unknown"):
        (run / "inspect" / f"{name}.png").write_bytes(b"")
    assert [path.stem for path in read_directory(run)["pictures"]] == ["attention_rollout", "filters"]


def test_a_broken_line_in_the_middle_as_after_a_resume_loses_no_other(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 3, "loss": 1.0}\n')
    metrics = read_directory(run)["metrics"]
    assert [record["step"] for record in metrics] == [1, 2, 3]


def test_evaluations_alone_are_a_run(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"kind": "evaluations", "evaluations": []}')
    run = read_directory(tmp_path)
    assert (run["kind"], run["metrics"], run["recipe"], run["pictures"]) == ("run", [], "", [])


def test_reads_a_comparison_with_the_runs_that_exist(tmp_path: Path) -> None:
    write_run(tmp_path / "ssl")
    arms = [{"name": "ssl", "run": "ssl"}, {"name": "scratch", "run": None}, {"name": "supervised", "run": "gone"}]
    (tmp_path / "results.json").write_text(json.dumps({"kind": "comparison", "arms": arms}))
    found = read_directory(tmp_path)
    assert found["kind"] == "comparison"
    assert list(found["runs"]) == ["ssl"]
    assert len(found["runs"]["ssl"]["metrics"]) == 2


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda folder: folder / "missing", "no such directory"),
        (lambda folder: folder, "neither a run nor a comparison"),
        (lambda folder: write_run(folder / "run") / "recipe.yaml", "this is a file"),
    ],
)
def test_what_cannot_be_reported_is_named_in_plain_words(tmp_path: Path, prepare, words: str) -> None:  # type: ignore[no-untyped-def]
    path = prepare(tmp_path)
    with pytest.raises(UserError, match=words) as error:
        read_directory(path)
    assert str(path) in str(error.value)
    assert str(error.value).count("\n") <= 1


def test_damaged_results_are_named(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"kind": "compa')
    with pytest.raises(UserError, match=r"results\.json: not valid JSON"):
        read_directory(tmp_path)
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(UserError, match="expected a JSON object"):
        read_directory(tmp_path)


def test_results_of_weights_that_are_gone_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "encoder.safetensors").write_bytes(b"new")
    new = sha256(tmp_path / "encoder.safetensors")
    judged = [{"evaluator": "knn", "sha256": new}, {"evaluator": "knn", "sha256": "old"}, {"evaluator": "before"}]
    (tmp_path / "results.json").write_text(json.dumps({"kind": "evaluations", "evaluations": judged}))
    run = read_directory(tmp_path)
    assert run["results"]["evaluations"] == [judged[0], judged[2]]
    assert "1 result(s) of weights that are no longer there" in remarks(run)[0]
