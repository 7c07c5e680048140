"""Comparisons of a few digits: everything is measured once, kept, and run again where it is missing or outdated."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from omegaconf import OmegaConf
from sklearn.datasets import load_digits

from ssl_vit import cli, execution, results
from ssl_vit.cli import compare as commands
from ssl_vit.comparison import work
from ssl_vit.comparison.checks import check
from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.plan import Plan
from ssl_vit.comparison.run import compare
from ssl_vit.data.packing.sources import digits
from ssl_vit.data.shards import open_shards
from ssl_vit.evaluators.labels import labels_of
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.models import EncoderConfig
from ssl_vit.models.factory import build
from ssl_vit.recipe import load_recipe
from ssl_vit.records import TaskRecord
from ssl_vit.report.export import environments
from ssl_vit.report.page import write_report
from ssl_vit.report.read import Comparison, read_comparison
from ssl_vit.report.summary import summarize
from ssl_vit.report.verdict import verdict
from ssl_vit.results import KEY
from ssl_vit.training import loop
from tests.tars import packed

from .conftest import STEPS, TUNING, Mini, quietly, rows, stamps

FROZEN = ("ssl", "supervised", "untrained", "pixels")
ARMS = ("ssl", "scratch", "supervised")


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["ssl-vit", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_every_arm_budget_and_seed_is_measured(finished: Comparison) -> None:
    frame = finished.table.frame
    found = {tuple(key) for key in frame[["evaluator", "arm", "labels_per_class", "seed"]].to_numpy().tolist()}
    expected = {("fine_tune", arm, b, seed) for arm in ARMS for b in (2, 3) for seed in (0, 1)}
    expected |= {
        (e, arm, b, seed) for e in ("knn", "linear_probe") for arm in FROZEN for b in (2, 3) for seed in (0, 1)
    }
    expected |= {("few_shot", arm, b, seed) for arm in FROZEN for b in (1, 2) for seed in (0, 1)}
    assert found == expected
    assert finished.missing == ()
    sweeps = [task.sweep for task in finished.tasks.values() if task.sweep]
    assert [len(sweep.candidates) for sweep in sweeps] == [2] * 6, "every arm gets the same trials"
    trained = frame[frame["evaluator"] == "fine_tune"]
    assert (trained[["flops", "images_seen"]] > 0).to_numpy().all()
    assert (frame["labels"] == 10 * frame["labels_per_class"]).all()
    runs = {name: finished.tasks[f"pretrain-{name}-0"].run for name in ("ssl", "supervised")}
    assert all(run and run.steps == 3 and run.flops > 0 for run in runs.values())
    for name in runs:
        assert (
            finished.paths[0] / str(finished.tasks[f"pictures-{name}"].pictures) / "attention_rollout.png"
        ).is_file()


def test_a_sweeps_winner_is_not_trained_again(finished: Comparison) -> None:
    folder = finished.paths[0] / "tasks"
    (swept,), about = results.load(folder / "sweep_fine_tune-ssl-2.json")
    assert (swept.labels_per_class, swept.seed, swept.arm) == (2, 0, "ssl")
    assert swept.selected == about["sweep"]["best"]
    assert results.load(folder / "fine_tune-ssl-2-0.json")[0] == []
    (other,) = results.load(folder / "fine_tune-ssl-2-1.json")[0]
    assert other.selected == swept.selected


def test_a_sweeps_winner_is_a_row_whenever_its_budget_is_measured(mini: Mini, tmp_path: Path) -> None:
    arms = {"given": {"label": "given", "recipe": "digits_ssl", "overrides": STEPS}}

    def budgets(*asked: int) -> list[int]:
        tuning = TUNING | {"sweep_labels_per_class": 2}
        recipe = mini(arms=arms, seeds=[0], evaluators={"fine_tune": tuning}, labels_per_class=[*asked])
        return [int(budget) for budget in quietly(recipe).table.frame["labels_per_class"]]

    assert budgets(2, 3) == [2, 3]
    (tmp_path / "run" / "tasks" / "sweep_fine_tune-given-2.json").unlink()
    assert budgets(3) == [3], "the sweep ran again"
    assert budgets(2, 3) == [2, 3]


def test_the_record_says_what_the_arms_are(finished: Comparison) -> None:
    ssl, scratch, supervised = finished.record.arms
    assert [arm.kind for arm in finished.record.arms] == ["pretrained", "scratch", "pretrained"]
    assert (ssl.run, scratch.run, ssl.uses_labels, supervised.uses_labels) == ("ssl", None, False, True)
    assert ssl.architecture == scratch.architecture == finished.record.references[0].architecture
    assert finished.record.command == "ssl-vit demo"
    assert finished.record.data["data test"].samples == 100
    assert [*environments(finished)] == ["all tasks"]
    assert {"versions.torch", "hardware.processor", "git"} <= {*environments(finished)["all tasks"]}


def test_missing_damaged_and_outdated_tasks_alone_are_run(mini: Mini, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings: dict[str, Any] = {"few_shot": {"labels_per_class": [1, 2]}, "fine_tune": TUNING, "knn": {"ks": [1]}}
    recipe = mini(evaluators=settings)
    whole, before = quietly(recipe), stamps(run)
    assert rows(quietly(recipe)) == rows(whole)
    assert stamps(run) == before, "a repeated command runs nothing"

    def again(recipe: Path) -> set[str]:
        before = stamps(run)
        found = quietly(recipe)
        assert found.missing == ()
        return {name for name, stamp in stamps(run).items() if before.get(name) != stamp}

    (run / "tasks" / "fine_tune-scratch-2-1.json").unlink()
    (run / "tasks" / "few_shot-ssl-0.json").write_text('{"id": "few')
    (run / "tasks" / "few_shot-pixels-0.json").write_text("{}")
    next(run.glob("tasks/few_shot-untrained-0.*.npz")).write_bytes(b"cut")
    expected = {"fine_tune-scratch-2-1", "few_shot-ssl-0", "few_shot-pixels-0", "few_shot-untrained-0"}
    assert again(recipe) == expected
    assert rows(quietly(recipe)) == rows(whole)
    settings["knn"]["ks"] = [3]
    assert again(mini(evaluators=settings)) == {f"knn-{row}-0" for row in ("ssl", "untrained", "pixels")}
    new = {f"fine_tune-{arm}-3-{seed}" for arm in ("ssl", "scratch") for seed in (0, 1)}
    new |= {f"sweep_fine_tune-{arm}-3" for arm in ("ssl", "scratch")}
    new |= {f"knn-{row}-0" for row in ("ssl", "untrained", "pixels")}
    assert again(mini(evaluators=settings, labels_per_class=[2, 3])) == new, "other fine-tunings stay as they are"


def test_two_processes_give_the_same_rows(mini: Mini, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "evaluators": {"few_shot": {"labels_per_class": [1]}, "fine_tune": TUNING},
        "pretrainings": 2,
    }
    one = quietly(mini(**changes, run=str(tmp_path / "one")))
    two = quietly(mini(**changes, run=str(tmp_path / "two"), jobs=2))
    assert two.missing == ()
    assert rows(one) == rows(two)
    frame = one.table.frame
    assert set(frame[frame["arm"] == "ssl"]["pretraining_seed"]) == {0, 1}
    assert (frame[frame["arm"] == "ssl"]["pretraining_seed"] == frame[frame["arm"] == "ssl"]["seed"]).all()


@pytest.mark.usefixtures("fewer_digits")
def test_several_sets_given_weights_and_settings_of_an_arm(
    few_digits: Path, finished: Comparison, mini: Mini, tmp_path: Path
) -> None:
    run, bare = finished.paths[0] / "ssl", tmp_path / "bare"
    bare.mkdir()
    for name in ("encoder.safetensors", "config.json"):
        shutil.copy(run / name, bare)
    (tmp_path / "two.yaml").write_text(f"""
folder: {tmp_path}/packed
sets:
  first: {{train: {few_digits}/train, test: {few_digits}/test, metric: mean_per_class}}
  second: {{source: digits, evaluators: {{few_shot: {{labels_per_class: [3]}}}}}}
""")
    own = {"few_shot": {"pooling": "patches"}}
    arms = {
        "ssl": {"label": "a run", "weights": str(run)},
        "bare": {"label": "weights alone", "weights": str(bare)},
        "patches": {"label": "all patches", "weights": str(run), "evaluators": own},
    }
    settings = {"few_shot": {"labels_per_class": [1]}, "knn": {"ks": [1]}}
    found = quietly(mini(arms=arms, evaluators=settings, data={"suite": "two.yaml"}, labels_per_class=[2, "5%", "all"]))
    frame = found.table.frame
    budgets = {tuple(key) for key in frame[["data", "evaluator", "labels_per_class"]].to_numpy().tolist()}
    assert budgets == {("first", "few_shot", 1), ("second", "few_shot", 3)} | {
        (data, "knn", budget) for data in ("first", "second") for budget in (2, "5%", "all")
    }
    assert found.record.metrics == {"first": "mean_per_class", "second": "accuracy"}
    ssl, alone, _ = found.record.arms
    assert ssl.summary and ssl.summary.steps == 3, "the cost of given weights comes from their run"
    assert (ssl.starts_from, alone.starts_from) == (None, str(bare)), "nothing tells what made the weights alone"

    def accuracies(arm: str, **place: Any) -> list[float]:
        rows = frame[frame["arm"] == arm]
        for key, value in place.items():
            rows = rows[rows[key] == value]
        return [float(value) for value in rows["accuracy"]]

    assert accuracies("ssl") == accuracies("bare"), "both see the same images"
    assert accuracies("ssl", evaluator="few_shot") != accuracies("patches", evaluator="few_shot")
    assert accuracies("ssl", evaluator="knn") == accuracies("patches", evaluator="knn")
    all_labels = [accuracies("ssl", data=data, labels_per_class="all") for data in ("first", "second")]
    assert all_labels[0] == all_labels[1], "the same digits, packed twice"


def test_a_resnet_takes_part_beside_a_vit(mini: Mini, tmp_path: Path) -> None:
    short = [*STEPS, "training.epochs=null", "data.lanes=4", "data.workers=0"]
    resnet = ["encoder.name=test_resnet", "encoder.image_size=32", "encoder.channels=1", *short]
    arms = {
        "ssl": {"label": "SSL", "recipe": "digits_ssl", "overrides": [*STEPS, "training.precision=bf16"]},
        "scratch": {"label": "ViT from scratch"},
        "cnn": {"label": "ResNet", "recipe": "supervised_resnet50", "overrides": resnet},
        "cnn_scratch": {"label": "ResNet from scratch", "like": "cnn"},
    }
    tuning = TUNING | {"sweep": {"training.steps": [2]}}
    found = quietly(
        mini(
            arms=arms, seeds=[0], pictures=True, evaluators={"few_shot": {"labels_per_class": [1]}, "fine_tune": tuning}
        )
    )
    assert found.missing == ()
    frame = found.table.frame
    rows = {name: set(part["arm"]) for name, part in frame.groupby("evaluator")}
    assert rows == {"few_shot": {"ssl", "cnn", "untrained", "untrained_cnn", "pixels"}, "fine_tune": set(arms)}
    flops = frame[frame["evaluator"] == "fine_tune"].set_index("arm")["flops"].to_dict()
    assert flops["cnn"] == flops["cnn_scratch"] != flops["scratch"] == flops["ssl"]
    pictures = {name: found.tasks[f"pictures-{name}"].pictures for name in ("ssl", "cnn")}
    assert pictures == {"ssl": "pictures/ssl", "cnn": None}, "a ResNet has no attention to draw"
    assert "ResNet from scratch" in write_report([tmp_path / "run"], tmp_path / "report.html").read_text()


def test_tasks_one_by_one_are_the_comparison(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", mini(), f"run={tmp_path}/parts"]
    assert call(monkeypatch, *command, "--list") == 0
    head, *listed = capsys.readouterr().out.splitlines()
    assert head == f"# run: {tmp_path}/parts"
    tasks = {line.split("\t")[0]: line.split("\t")[1:] for line in listed}
    assert tasks["pretrain-ssl-0"] == ["0", "missing"]
    assert tasks["few_shot-ssl-0"] == ["1", "missing"]
    assert tasks["few_shot-pixels-0"] == ["0", "missing"]
    assert not (tmp_path / "parts").exists(), "a list writes nothing"
    assert call(monkeypatch, *command, "--only", "few_shot-ssl-0") == 0
    assert set(stamps(tmp_path / "parts")) == {"few_shot-ssl-0", "pretrain-ssl-0"}, "with what it needs"
    for identifier in reversed(tasks):
        assert call(monkeypatch, *command, "--only", identifier) == 0
    capsys.readouterr()
    assert call(monkeypatch, *command, "--list") == 0
    assert capsys.readouterr().out.count("\tmissing") == 0
    assert rows(quietly(mini(run=str(tmp_path / "parts")))) == rows(quietly(mini(run=str(tmp_path / "whole"))))
    assert call(monkeypatch, *command, "--only", "few_shot-nobody") == 2
    assert "few_shot-nobody: no such task" in capsys.readouterr().err
    other = {"label": "other", "recipe": "digits_ssl", "overrides": STEPS}
    auto = {"label": "auto", "recipe": "digits_ssl", "overrides": [*STEPS, "training.precision=auto"]}
    for arms, code in (({"ssl": auto, "other": other}, 2), ({"ssl": auto}, 0)):
        assert call(monkeypatch, "compare", mini(arms=arms), f"run={tmp_path}/auto", "--list") == code
    assert "precision=auto of ssl is measured by the first task" in capsys.readouterr().err
    elsewhere = {**auto, "overrides": [*STEPS, "training.precision=tf32"]}
    for option, code in (("--list", 0), ("--only", 2)):
        more = [] if option == "--list" else ["pretrain-ssl-0"]
        assert call(monkeypatch, "compare", mini(arms={"ssl": elsewhere}), f"run={tmp_path}/gpu", option, *more) == code
    assert "tf32 needs an NVIDIA GPU" in capsys.readouterr().err, "a list is made on any machine"
    assert call(monkeypatch, *command, "--only", "") == 2, "an empty id is no whole comparison"


def test_the_demo_packs_the_digits_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(commands, "_compare", lambda name, overrides, command: asked.append([name, *overrides]))
    assert call(monkeypatch, "demo", "--out", tmp_path, "seeds=[7]", "pretrainings=1") == 0
    ((name, *overrides),) = asked
    study = load_comparison(name, overrides)
    assert (name, study.comparison.seeds) == ("demo_digits", (7,))
    assert len(study.folds) == len(load_comparison(name).folds) > 1, "as many as the recipe says"
    folds = [labels_of(open_shards(str(fold.test))) for fold in study.folds]
    np.testing.assert_array_equal(np.concatenate(folds), load_digits().target)
    starts = np.cumsum([0, *map(len, folds)])
    assert {*starts.tolist()} <= {*digits.FORMS, 1797}, "every form is in one fold"
    train, first = open_shards(study.folds[0].train or ""), study.sets["data"]
    assert first == study.folds[0] and train.samples + len(folds[0]) == 1797


def test_a_cross_validation_tests_every_image_once(mini: Mini, tmp_path: Path, fewer_digits: None) -> None:
    """Its table is that of the folds' own comparisons put together."""
    packed("digits", tmp_path / "folds", "train", folds=2, shards=4)
    folds = [f"{tmp_path}/folds/fold_{number}" for number in (0, 1)]
    tuning = TUNING | {"sweep": {"training.steps": [2]}}
    changes: dict[str, Any] = {
        "evaluators": {"few_shot": {"labels_per_class": [1]}, "fine_tune": tuning},
        "frozen_seeds": [0],
    }
    crossed = changes | {"data": {"folds": folds}, "run": str(tmp_path / "both")}
    whole = quietly(mini(**crossed))
    assert whole.missing == () and whole.record.folds == 2
    assert {run.name for run in (tmp_path / "both").iterdir() if run.name.startswith("ssl")} == {
        "ssl-fold0",
        "ssl-fold1",
    }
    offset = 0
    for train, test in (folds[::-1], folds):
        alone = quietly(mini(data={"train": train, "test": test}, run=f"{tmp_path}/{Path(test).name}", **changes))
        samples = open_shards(test).samples
        keys = [tuple(key) for key in whole.table.frame[[*KEY]].to_numpy().tolist()]
        for row in alone.table.results:
            joined = whole.table.results[keys.index(tuple(getattr(row, name) for name in KEY))].prediction
            mine = slice(*np.searchsorted(joined.images, [offset, offset + samples]))
            np.testing.assert_array_equal(joined.images[mine] - offset, row.prediction.images)
            np.testing.assert_array_equal(joined.predicted[mine], row.prediction.predicted)
        offset += samples
    assert {len(one.prediction.images) for one in whole.table.results} == {offset}
    said = "\n".join(verdict(whole, summarize(whole)))
    assert f"{offset} test images, cross-validated over 2 folds" in said and "only once per fold" in said
    (tmp_path / "both" / "tasks" / "fine_tune-ssl-2-1-fold1.json").unlink()
    partly = read_comparison(tmp_path / "both")
    assert len(partly.table.results) == len(whole.table.results) - 1, "a row needs all its folds"
    assert rows(quietly(mini(**crossed))) == rows(whole)


# What would make a task impossible is an error before the first one.


def refused(recipe: Path, words: str, *overrides: str) -> None:
    """Both `compare` and what a dry run and a list do refuse it, and nothing is written."""
    study = load_comparison(recipe, overrides)
    run = study.comparison.run_directory
    before = {path: path.read_bytes() for path in run.rglob("*.json")}
    for attempt in (lambda: check(study), lambda: compare(study, say=lambda text: None)):
        with pytest.raises(UserError, match=words):
            attempt()
    assert {path: path.read_bytes() for path in run.rglob("*.json")} == before


def test_an_arm_that_cannot_run_is_named(few_digits: Path, mini: Mini, tmp_path: Path) -> None:
    shutil.copytree(few_digits / "train", tmp_path / "nameless")
    (tmp_path / "nameless" / "info.json").unlink()
    (tmp_path / "nameless" / "packing.jsonl").unlink()
    for keys, words in (
        ([f"data.train={tmp_path}/nameless"], "objective.classes"),
        (["data.samples=2000"], "data.samples=2000"),
        (["encoder.heads=5"], r"encoder\.heads=5"),
    ):
        long = {"label": "SSL", "recipe": "digits_ssl", "overrides": ["training.steps=100000"]}
        other = {"label": "x", "recipe": "digits_supervised", "overrides": keys}
        refused(mini(arms={"ssl": long, "other": other}), rf"arms\.other: .*{words}")
    refused(mini(arms={"given": {"label": "x", "weights": str(tmp_path / "none")}}), str(tmp_path / "none"))


def test_training_images_that_are_test_images_are_refused(few_digits: Path, mini: Mini, tmp_path: Path) -> None:
    pretrained = {"label": "SSL", "recipe": "digits_ssl", "overrides": [*STEPS, f"data.train={few_digits}/train"]}
    for train in (f"{few_digits}/test", f"{few_digits}#test", f"{few_digits}/../{few_digits.name}/test"):
        sets = {"train": train, "test": f"{few_digits}/test"}
        refused(mini(arms={"ssl": pretrained}, data=sets), "includes images of the test set")
    shutil.copytree(few_digits / "test", tmp_path / "copy")
    for train in (f"{tmp_path}/copy", f"{few_digits}/t*/*.tar"):  # over several folders no info.json is read
        sets = {"train": train, "test": f"{few_digits}/test"}
        refused(mini(arms={"ssl": pretrained}, data=sets), "includes images of the test set")


def test_a_run_whose_objective_is_gone_and_its_checkpoint_used_labels(
    few_digits: Path, mini: Mini, tmp_path: Path
) -> None:
    keys = [*STEPS, f"run={tmp_path}/old", f"data.train={few_digits}/train"]
    run = execution.train(load_recipe("digits_supervised", keys))
    recipe = OmegaConf.load(run / "recipe.yaml")
    recipe.objective = {"name": "gone"}
    OmegaConf.save(recipe, run / "recipe.yaml")
    for weights in (run, next((run / "checkpoints").iterdir())):
        study = load_comparison(mini(arms={"old": {"weights": str(weights)}}))
        assert check(study).plan.uses_labels("old"), weights


def test_an_arm_includes_the_run_that_it_starts_from(few_digits: Path, mini: Mini, tmp_path: Path) -> None:
    keys = [*STEPS, f"run={tmp_path}/first", f"data.train={few_digits}/train"]
    first = execution.train(load_recipe("digits_supervised", keys))
    begun = {"label": "SSL", "recipe": "digits_ssl", "overrides": [*STEPS, f"init_from={first}"]}
    study = load_comparison(mini(arms={"ssl": begun}))
    assert check(study).plan.uses_labels("ssl")
    with pytest.raises(UserError, match=r"evaluators\.own_head: no arm has the objective"):
        check(load_comparison(mini(arms={"ssl": begun}, evaluators={"own_head": {}})))  # its objective has no head
    longer = {"label": "longer", "compute_of": "ssl"}
    fine_tune = {"fine_tune": TUNING | {"sweep": {}}}
    refused(mini(arms={"ssl": begun, "longer": longer}, evaluators=fine_tune), "compute_of: arms.ssl starts from other")
    (first / "summary.json").unlink()
    refused(mini(arms={"given": {"label": "x", "weights": str(first)}}), "has not finished training")


def test_an_evaluator_that_cannot_train_an_encoder_is_found_before_pretraining(
    mini: Mini, saved: Callable[..., Path], tmp_path: Path
) -> None:
    gap = build(EncoderConfig(image_size=8, patch_size=2, width=16, depth=1, heads=2, channels=1, class_token=False))
    saved(tmp_path / "gap", gap)
    ssl = {"label": "SSL", "recipe": "digits_ssl", "overrides": STEPS}
    given = {"label": "given", "weights": str(tmp_path / "gap")}
    tuned = {"fine_tune": TUNING | {"sweep": {}, "head": {"pooling": "token"}}}
    refused(mini(arms={"ssl": ssl, "given": given}, evaluators=tuned), "needs a class token")
    gray = ["encoder.name=densenet121", "encoder.channels=1", "encoder.mean=0.5", "encoder.std=0.5"]
    cnn = {"label": "CNN", "recipe": "cifar10_cpu_resnet", "overrides": [*STEPS, *gray]}
    dropped = {"fine_tune": TUNING | {"sweep": {}, "head": {"pooling": "mean"}, "drop_path": 0.1}}
    refused(mini(arms={"cnn": cnn}, evaluators=dropped), "drop_path_rate")
    wider = {"label": "SSL", "recipe": "digits_ssl", "overrides": [*STEPS, f"init_from={tmp_path}/gap"]}
    refused(mini(arms={"ssl": wider}), r"arms\.ssl: .*gap does not fit this encoder")


def test_weights_that_saw_test_images_are_not_started_from(few_digits: Path, mini: Mini, tmp_path: Path) -> None:
    def trained(name: str, *keys: str) -> Path:
        return execution.train(load_recipe("digits_ssl", [*STEPS, f"run={tmp_path / name}", *keys]))

    seen = trained("seen", f"data.train={few_digits}/test")
    later = trained("later", f"data.train={few_digits}/train", f"init_from={seen}")
    labeled = [f"probe.data={few_digits}/test", "probe.patience=3", "probe.every=2"]
    stopped = trained("stopped", f"data.train={few_digits}/train", *labeled)
    refused(mini(arms={"given": {"label": "x", "weights": str(stopped)}}), r"arms\.given: .*images of the test set")
    begun = {"label": "SSL", "recipe": "digits_ssl", "overrides": [*STEPS, f"init_from={stopped}"]}
    with pytest.raises(UserError, match=r"arms\.ssl: probe\.patience"):
        load_comparison(mini(arms={"ssl": begun}))
    for start in (seen, later):
        begun = {"label": "SSL", "recipe": "digits_ssl", "overrides": [*STEPS, f"init_from={start}"]}
        refused(mini(arms={"ssl": begun}), r"arms\.ssl: .*includes images of the test set")
    refused(mini(arms={"given": {"label": "x", "weights": str(later)}}), r"arms\.given: .*images of the test set")


def test_what_no_candidate_or_budget_can_do_is_found_before_pretraining(mini: Mini) -> None:
    for evaluators, words in (
        ({"attentive_probe": {"memory_gib": 1e-4, "sweep": {}}}, "memory_gib"),
        ({"linear_probe": {"method": "lars", "labels_per_class": [5, 1], "lanes": 16}}, "lower lanes"),
        ({"fine_tune": TUNING | {"head": {"classes": 3}}}, "the labels have 10 classes"),
        ({"few_shot": {"sweep": {"block": [1, 70]}, "labels_per_class": [2]}}, "block=70"),
    ):
        refused(mini(evaluators=evaluators), words)


def test_labels_that_cannot_be_evaluated_on_are_named(
    few_digits: Path, mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = TUNING | {"held_out": 0.001}
    refused(mini(evaluators={"fine_tune": tuning}), r"evaluators\.fine_tune: held_out=0\.001")
    said: list[str] = []
    study = load_comparison(mini(labels_per_class=[2, 60], evaluators={"knn": {}}))
    check(study, said.append)
    (note,) = said
    assert "fewer than 60 usable images" in note and note.endswith(": 0, 1, 2, 3, 4, 5, 6, 7, 8, 9")
    monkeypatch.setattr("ssl_vit.evaluators.labels.labels_of", lambda shards: np.full(shards.samples, 3))
    refused(mini(), "one class")


def test_sets_that_number_other_classes_are_refused(few_digits: Path, mini: Mini, tmp_path: Path) -> None:
    other = Path(shutil.copytree(few_digits / "test", tmp_path / "test"))
    info = json.loads((other / "info.json").read_text())
    (other / "info.json").write_text(json.dumps(info | {"classes": info["classes"][::-1]}))
    refused(mini(data={"train": f"{few_digits}/train", "test": str(other)}), "different classes")


def test_the_directory_of_something_else_is_refused(finished: Comparison, mini: Mini) -> None:
    recipe = mini(evaluators={"few_shot": {"labels_per_class": [1]}})
    quietly(recipe)
    refused(recipe, "training.steps: 2 -> 3", "arms.ssl.overrides=[training.steps=3,training.batch_size=16]")
    refused(mini(name="other"), "holds the comparison mini.*run=PATH")
    refused(mini(), "holds a training run", f"run={finished.paths[0]}/ssl")
    refused(mini(), "is a file; name a directory", f"run={finished.paths[0]}/plan.json")
    refused(mini(), "plan.json is a file; name a directory", f"run={finished.paths[0]}/plan.json/x")


def test_several_launched_processes_share_every_task(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="jobs=1"):
        quietly(mini(jobs=2))


def test_another_job_s_task_is_waited_for(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that share a directory do each task once: who comes second waits, and finds it done."""
    recipe = mini(evaluators={"few_shot": {"labels_per_class": [1]}})
    study = load_comparison(recipe)
    checked = check(study)
    quietly(recipe)
    again: list[str] = []

    def run(plan: Plan, task: TaskRecord) -> Any:
        again.append(task.id)
        return [], {}

    monkeypatch.setattr(work, "_run", run)
    task = checked.missing[-1]
    path = work.path_of(checked.plan, task)
    done = path.rename(path.with_suffix(".other"))
    second = threading.Thread(target=work.do, args=(checked.plan, task))
    with FileLock(path.with_name(f".{task.id}.lock")):  # as the other job holds it
        second.start()
        second.join(0.5)
        assert second.is_alive()
        done.rename(path)
    second.join(60)
    assert not second.is_alive() and again == []


def test_a_full_disk_is_named_and_the_same_command_completes(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = mini(evaluators={"few_shot": {"labels_per_class": [1]}}), tmp_path / "run"
    write = results.write_json

    def full(path: Path, content: Any) -> None:
        if path.stem in ("plan", "few_shot-pixels-0"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr("ssl_vit.comparison.run.write_json", full)
        with pytest.raises(RunError, match=r"run: cannot write there: .*No space left"):
            quietly(recipe)
    with monkeypatch.context() as patched:
        patched.setattr(results, "write_json", full)
        with pytest.raises(RunError, match=r"few_shot-pixels-0: .*few_shot-pixels-0\.json: .*No space left.*\n1 of "):
            quietly(recipe)
    before = stamps(run)
    found = quietly(recipe)
    assert found.missing == ()
    assert stamps(run).items() > before.items(), "what was stored stays"


def test_a_result_that_is_missing_after_its_task_has_finished_is_an_error(
    mini: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssl_vit.comparison.executor.run", lambda *tasks, **options: None)  # wrote elsewhere
    with pytest.raises(RunError, match=r"tasks/pretrain-ssl-0\.json: not there, .*share run="):
        quietly(mini())


def test_a_sweep_that_was_stopped_resumes_with_its_next_candidate(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, tasks = mini(evaluators={"fine_tune": TUNING}, seeds=[0]), tmp_path / "run" / "tasks"
    train, trained = loop.train, 0

    def stopping(job: Any) -> Any:
        nonlocal trained
        trained += 1
        if trained == 2:  # the second candidate of the first task
            raise RunError("stopped")
        return train(job)

    monkeypatch.setattr(loop, "train", stopping)
    with pytest.raises(RunError, match="sweep_fine_tune-scratch-2: stopped"):
        quietly(recipe)
    assert [file.name for file in tasks.glob("*.unfinished/*.json")] == ["untrained_2_candidate0_part0.json"]
    trained = 10
    found = quietly(recipe)
    again = found.sweeps[0][1].best["optim.lr"] == 0.001  # the winner was trained before the stop
    assert trained == 10 + 1 + again, "the other candidate"
    assert found.missing == () and not [*tasks.glob("*.unfinished")]


def test_a_gpu_without_enough_memory_fails_one_task(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    run = work._run

    def full(plan: Plan, task: TaskRecord) -> Any:
        if task.arm == "pixels":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return run(plan, task)

    monkeypatch.setattr(work, "_run", full)
    with pytest.raises(
        RunError, match=r"few_shot-pixels-0: .*Tried to allocate 2 GiB\); lower jobs.*\n1 of .*\n.*ssl-vit report "
    ):
        quietly(mini(evaluators={"few_shot": {"labels_per_class": [1]}}))


def test_jobs_share_the_loader_processes(mini: Mini) -> None:
    study = load_comparison(mini(jobs=2, arms={"ssl": {"label": "SSL", "recipe": "pretrain_vit_tiny"}}))
    plan = Plan(study)
    assert study.recipes["ssl"].data.workers == 2
    assert plan.pretraining(plan.tasks[0]).data.workers == 1


def test_a_pretrained_encoder_that_was_removed_is_named(mini: Mini, tmp_path: Path) -> None:
    recipe, run = mini(), tmp_path / "run"
    quietly(recipe)
    shutil.rmtree(run / "ssl")
    (run / "tasks" / "few_shot-ssl-0.json").unlink()
    with pytest.raises(UserError, match=r"run/ssl: .*was removed; .*delete .*pretrain-ssl-0\.json to train it again"):
        quietly(recipe)
