"""What a report reads from disk, and what it says when it cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssl_vit import results
from ssl_vit.files import sha256, write_json
from ssl_vit.interfaces import Budget, UserError
from ssl_vit.records import ArmRecord
from ssl_vit.report.export import export
from ssl_vit.report.read import read
from ssl_vit.report.runs import flat, read_run
from ssl_vit.report.summary import EvaluationKey, summarize
from ssl_vit.report.tables import cost_table, place_tables, sweep_table
from tests.report.made import ARMS, SUMMARY, SWEEP, prediction, row, two_arms, write_comparison, write_run


def test_a_run_that_was_killed_and_resumed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "a", 0.6)
    lines = ['{"step": 1, "loss": 2.0}', '{"step": 2, "loss": 1.5}', '{"step": 3, "lo', '{"step": 2, "loss": 1.0}']
    samples = [{"shard": "s.tar", "key": key, "reason": "cut"} for key in "ab"]
    lines += ['{"step": 1e999, "loss": 1}', '{"step": 4, "loss": 1' + 400 * "0" + "}"]
    lines += ['{"step": 3, "loss": NaN}', json.dumps({"event": "skipped_samples", "count": 3, "samples": samples})]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    found = read_run(run)
    assert found.losses[["step", "loss"]].to_numpy().tolist() == [[1, 2.0], [2, 1.0]]
    skipped, broken = found.remarks
    assert "3 time(s): s.tar: a (cut); s.tar: b (cut)." in skipped and "3 incomplete line(s)" in broken


def test_pictures_of_inspect_come_before_the_newest_of_training(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "a", 0.6)
    (run / "pictures").mkdir()
    for step in (500, 1000, 90):
        (run / f"pictures/reconstruction_step_{step:08d}.png").write_bytes(b"")
    assert [path.name for path in read_run(run).pictures] == ["reconstruction_step_00001000.png"]
    (run / "inspect").mkdir()
    for name in ("filters", "attention_rollout", "unknown"):
        (run / "inspect" / f"{name}.png").write_bytes(b"")
    assert [path.stem for path in read_run(run).pictures] == ["attention_rollout", "filters"]


def test_results_of_other_weights_are_skipped_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "a", 0.6)
    assert len(read_run(run).evaluations) == 1
    (run / "encoder.safetensors").write_bytes(b"new")
    found = read_run(run)
    assert found.evaluations == () and "few_shot-1.json was measured on other weights" in found.remarks[0]
    write_run(tmp_path / "same", "a", 0.6, sha256=sha256(run / "encoder.safetensors"))
    shutil.copy(run / "encoder.safetensors", tmp_path / "same")
    assert len(read_run(tmp_path / "same").evaluations) == 1


def test_results_of_data_that_changed_are_skipped_once_there_are_newer_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "a", 0.6, shards={"train": "1", "test": "1"})
    write_run(tmp_path / "newer", "a", 0.8, shards={"train": "1", "test": "2"})
    for file in (tmp_path / "newer" / "results").iterdir():
        content = file.read_bytes().replace(b'"saved": "2', b'"saved": "3')
        (run / "results" / file.name.replace("few_shot-1", "few_shot-0")).write_bytes(content)
    (found,) = read([run]).runs.values()
    assert [one.path and one.path.stem for one in found.evaluations] == ["few_shot-0"]
    assert "few_shot-1.json was measured on data that has changed" in found.remarks[0]
    several = read([run, write_run(tmp_path / "b", "b", 0.7, shards={"train": "1", "test": "1"})])
    shared = several.table.frame.query("arm in ('a', 'b')").groupby("evaluator")["arm"].nunique()
    assert shared.max() == 2, "the other run was evaluated on the old data, too"
    (run / "results" / "few_shot-0.json").unlink()
    assert len(read_run(run).evaluations) == 1, "the results of the old data, while there are no others"


def test_unfinished_damaged_and_outdated_tasks_are_missing(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c", two_arms())
    cut, outdated = (folder / "tasks" / f"digits-fine_tune-ssl-5-0-{seed}.json" for seed in (0, 1))
    next(cut.parent.glob(f"{cut.stem}.*.npz")).write_bytes(b"cut short")
    outdated.write_text(outdated.read_text().replace('"fingerprint": "f-', '"fingerprint": "g-'))
    found = read([folder])
    assert set(found.missing) == {cut.stem, outdated.stem}
    assert len(found.table.results) == len(found.table.files) == 10
    assert all(row.arm in file.stem for row, file in zip(found.table.results, found.table.files, strict=True))


def test_runs_are_arms_of_what_was_measured_alike(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name, score) for name, score in (("a", 0.6), ("b", 0.65))]
    runs.append(write_run(tmp_path / "c", "c", 0.7, settings={"l2": 1.0}))
    found = read(runs)
    assert found.separate and found.arms[:3] == ("a", "b", "c")
    assert list(found.record.evaluators) == ["few_shot", "few_shot (2)"]
    by_evaluator = found.table.frame.groupby("evaluator")["arm"].unique()
    assert list(by_evaluator["few_shot"]) == ["a", "pixels", "b"], "raw pixels are the same for all: one row"
    assert list(by_evaluator["few_shot (2)"]) == ["c", "pixels"]


def test_references_of_equal_accuracy_that_predict_differently_are_two(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name, score) for name, score in (("a", 0.6), ("b", 0.65))]
    file = runs[1] / "results/few_shot-1.json"
    rows, about = results.load(file)
    other = [prediction(0.7, seed=one.seed + 7) for one in rows]
    rows = [replace(one, prediction=new) if one.arm == "pixels" else one for one, new in zip(rows, other, strict=True)]
    results.save(file, rows, **about)
    found = read(runs)
    assert found.table.frame["arm"].value_counts().to_dict() == {"a": 2, "pixels": 2, "b": 2, "pixels_b": 2}


def test_an_evaluator_whose_name_begins_that_of_another_one_keeps_it(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name, 0.6) for name in "ab"]
    file = runs[1] / "results/few_shot-1.json"
    rows, about = results.load(file)
    results.save(file, rows, **about | {"evaluator": "few"})
    assert set(read(runs).record.evaluators) == {"few_shot", "few"}


def test_references_of_runs_with_other_seeds_are_one(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name, score) for name, score in (("a", 0.6), ("b", 0.65))]
    file = runs[1] / "results/few_shot-1.json"
    rows, about = results.load(file)
    results.save(file, [replace(one, pretraining_seed=1) for one in rows], **about)
    found = read(runs)
    assert found.table.frame["arm"].value_counts().to_dict() == {"a": 2, "pixels": 2, "b": 2}


def test_an_evaluation_of_a_run_has_its_sweep_in_the_costs(tmp_path: Path) -> None:
    named = (SWEEP.model_copy(update={"source": name, "labels_per_class": 10}) for name in ("trained", "untrained"))
    swept = [sweep.model_dump(mode="json") for sweep in named]
    settings = {"sweep": {"optim.lr": [0.1, 0.2]}}
    run = write_run(tmp_path / "run", "a", 0.6)
    rows = [row(arm, 10, seed, 0.5, evaluator="fine_tune") for arm in ("trained", "untrained") for seed in (0, 1, 2)]
    about = {"evaluator": "fine_tune", "title": "Fine-tuning", "settings": settings, "metric": "accuracy"}
    about |= {"data": {"train": "data/train", "test": "data/test"}, "sha256": "unknown", "notes": ["one is gray"]}
    about |= {"environment": {"world_size": 4}}
    results.save(run / "results" / "fine_tune-1.json", rows, sweeps=swept, **about)
    found = read([run])
    costs = cost_table(found).frame.set_index("Cost")["a"]
    assert costs["Settings tried in sweeps"] == "2"
    assert costs[["Sweeps, images", "Evaluation, images", "Total, images"]].tolist() == ["64", "192", "896"]
    hours = [costs[f"{stage}, process-hours"] for stage in ("Sweeps", "Evaluation")]
    assert hours == [f"{4 * seconds / 3600:.4g}" for seconds in (3 - 2, 3 * 2)], "on four processes"
    assert len(sweep_table(found).frame) == 4 and not summarize(found).headlines
    assert "Fine-tuning: one is gray." in found.runs["a"].remarks
    shown = place_tables(found, summarize(found), EvaluationKey("data/test", "few_shot"))[0].frame.to_string()
    assert "of 3 seeds" not in shown, "few-shot had two, and that is all of them"


@pytest.mark.parametrize(("budget", "paid"), [(10, "64"), ("all", "128")])
def test_a_sweep_with_all_labels_is_paid_beside_its_winner(tmp_path: Path, budget: Budget, paid: str) -> None:
    """Its trainings leave out the held-out images, so that no row is one of them."""
    run = write_run(tmp_path / "run", "a", 0.6)
    swept = SWEEP.model_copy(update={"source": "trained", "labels_per_class": budget}).model_dump(mode="json")
    rows = [row("trained", budget, seed, 0.5, labels=40) for seed in (0, 1, 2)]
    about: dict[str, Any] = {"evaluator": "fine_tune", "title": "Fine-tuning", "settings": {}, "metric": "accuracy"}
    about |= {"data": {"train": "data/train", "test": "data/test"}, "sha256": "unknown", "sweeps": [swept]}
    results.save(run / "results" / "fine_tune-1.json", rows, **about)
    assert cost_table(read([run])).frame.set_index("Cost").loc["Sweeps, images", "a"] == paid


def test_a_run_is_evaluated_on_several_training_sets_together(tmp_path: Path) -> None:
    found = read([write_run(tmp_path / "run", "a", 0.6, data={"train": ["data/a", "data/b"], "test": "data/test"})])
    assert found.record.data["data/test train"].path == "data/a + data/b"
    assert export(found, "json")


def test_an_evaluation_of_another_version_is_refused_if_its_weights_are_still_there(tmp_path: Path) -> None:
    older = write_run(tmp_path / "b", "b", 0.6, sweeps={"trained, all labels": SWEEP.model_dump(mode="json")})
    with pytest.raises(UserError, match=r"few_shot-1\.json: written by another version"):
        read_run(older)
    (older / "encoder.safetensors").write_bytes(b"new")
    assert len(read_run(older).remarks) == 1, "of other weights, so it does not matter"


def test_settings_keep_their_numbers() -> None:
    assert flat({"a": 14197122, "b": {"c": 0.5}}) == {"a": "14,197,122", "b.c": "0.5"}


def test_an_evaluation_by_another_metric_replaces_none(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "a", 0.6)
    write_run(tmp_path / "other", "a", 0.6, metric="mean_per_class")
    for file in (tmp_path / "other" / "results").iterdir():
        shutil.copy(file, run / "results" / file.name.replace("few_shot-1", "few_shot-2"))
    found = read([run])
    assert len(found.runs["a"].evaluations) == 2 and len(found.table.results) == 8
    assert found.record.metrics == {"data/test": "accuracy", "data/test (mean per class)": "mean_per_class"}


def test_runs_on_the_same_images_under_two_paths_are_compared(tmp_path: Path) -> None:
    runs = []
    for name, place in (("a", "data"), ("b", "./data")):
        runs.append(
            write_run(
                tmp_path / name,
                name,
                0.6,
                data={"train": f"{place}/train", "test": f"{place}/test"},
                shards={"train": "1", "test": "2"},
            )
        )
    found = read(runs)
    assert set(found.table.frame["data"]) == {"data/test"} and list(found.record.evaluators) == ["few_shot"]
    assert set(found.table.frame["arm"]) == {"a", "b", "pixels"}


def test_a_supervised_run_used_its_labels(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name, 0.6) for name in ("masked", "supervised")]
    for changes in ({"classes": ("a", "b")}, {"objective": "classification"}):  # shards may name no classes
        summary = SUMMARY.model_copy(update=changes)
        write_json(runs[1] / "summary.json", summary.model_dump(mode="json"))
        costs = cost_table(read(runs)).frame.set_index("Cost")
        assert costs.loc["Pretraining labels"].tolist() == ["0", str(summary.samples)]


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda folder: [folder / "missing"], "no such directory"),
        (lambda folder: [folder], "neither a run nor a comparison"),
        (lambda folder: [write_run(folder / "run", "a", 0.5) / "recipe.yaml"], "no such directory"),
        (
            lambda folder: [write_comparison(folder / "c", two_arms()), write_run(folder / "run", "a", 0.5)],
            "report it alone",
        ),
    ],
)
def test_what_cannot_be_reported_is_named(tmp_path: Path, prepare: Callable[[Path], list[Path]], words: str) -> None:
    paths = prepare(tmp_path)
    with pytest.raises(UserError, match=words) as error:
        read(paths)
    assert not paths or str(paths[0]) in str(error.value)


def test_edited_tasks_and_plans_are_refused(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c", two_arms())
    task = min((folder / "tasks").glob("digits-*.json"))
    whole = task.read_text()
    task.write_text(json.dumps(json.loads(whole) | {"rows": [json.loads(whole)["rows"][0] | {"evaluator": "other"}]}))
    with pytest.raises(UserError, match=rf"{task.name}: its rows are not of the task"):
        read([folder])
    task.write_text(whole)
    plan = json.loads((folder / "plan.json").read_text())
    changes: list[dict[str, Any]] = [{"arms": []}, {"folds": 0}, {"max_seeds": -1}]
    for change in changes:
        (folder / "plan.json").write_text(json.dumps(plan | change))
        with pytest.raises(UserError, match=rf"plan\.json: .*\({next(iter(change))}: "):
            read([folder])


def test_files_of_another_version_are_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"header": {}, "pieces": []}')
    with pytest.raises(UserError, match=r"plan\.json: written by another version of ssl-vit"):
        read([tmp_path])
    (tmp_path / "plan.json").write_text('{"name": "c')
    with pytest.raises(UserError, match=r"plan\.json: not valid JSON"):
        read([tmp_path])
    run = write_run(tmp_path / "run", "a", 0.5)
    (run / "summary.json").write_text('{"name": "a", "pieces": 3}')
    with pytest.raises(UserError, match=r"summary\.json: written by another version"):
        read([run])


def test_the_winner_of_an_older_sweep_is_not_a_result_at_a_budget_that_is_no_longer_measured(tmp_path: Path) -> None:
    for number, (budgets, kept) in enumerate((((5, 10), True), ((10, 20), False))):
        folder = write_comparison(tmp_path / str(number), two_arms(budgets=budgets), sweeps={"ssl": SWEEP})
        for task, rows in (("digits-fine_tune-ssl-5-0-0", []), ("sweep-ssl", [row("ssl", 5, 0, 0.9)])):
            file = folder / "tasks" / f"{task}.json"
            if file.exists():  # the sweep trained that model already
                results.save(file, rows, **results.load(file)[1])
        assert (0.9 in [one.accuracy for one in read([folder]).table.results]) == kept


def test_a_method_that_is_the_label_of_another_arm_is_told_apart(tmp_path: Path) -> None:
    given = ArmRecord(name="given", label="masked patch prediction", kind="weights", run="w")
    rows = [*two_arms(), *(row("given", 5, seed, 0.9) for seed in range(3))]
    found = read([write_comparison(tmp_path / "c", rows, arms=(*ARMS, given))])
    assert found.spoken("ssl") == f"masked patch prediction ({ARMS[0].label})"
    assert found.spoken("scratch") == "training from scratch"
