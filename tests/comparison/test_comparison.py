"""The demo's comparison, made small: every arm, seed and budget is measured, and finished pieces are not run again."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from ssl_vit import api, cli, evaluators
from ssl_vit.cli import runs as commands
from ssl_vit.comparison.config import DataSet, load_comparison, load_suite, suites
from ssl_vit.comparison.plan import Piece, Plan
from ssl_vit.comparison.run import _Clock, compare, look
from ssl_vit.comparison.suites import packed, prepare
from ssl_vit.data.packing import pack
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.shards import open_shards
from ssl_vit.interfaces import UserError
from ssl_vit.report.page import write_report

TINY = [
    "jobs=1",
    "seeds=[0,1]",
    "labels_per_class=[2,3]",
    "arms.ssl.overrides=[training.steps=3,training.batch_size=16]",
    "arms.supervised.overrides=[training.steps=3,training.batch_size=16]",
    "evaluators.few_shot.shots=[1,2]",
    "evaluators.fine_tune.steps=[2]",
    "evaluators.fine_tune.lrs=[0.001,0.003]",
    "evaluators.fine_tune.batch_size=8",
    "evaluators.knn={ks: [1]}",
    "evaluators.linear_probe={cs: [0.1, 1.0]}",
]


@pytest.fixture(scope="module")
def demo(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo on fewer digits, which it finds where it would pack all of them."""
    out = tmp_path_factory.mktemp("demo") / "out"
    (out / "data").mkdir(parents=True)
    for split in ("train", "test"):
        (out / "data" / split).symlink_to(few_digits / split)
    run_demo(out)
    return out


def run_demo(out: Path, *more: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ssl-vit", "demo", "--out", str(out), *TINY, *more])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert stop.value.code == 0


def mini(folder: Path, demo: Path, **changes: Any) -> Path:
    """A recipe of an arm that pretrains for two steps, and scratch, on the demo's digits; keywords replace its keys."""
    arms = {"ssl": {"label": "SSL", "recipe": "digits_ssl"}, "scratch": {"label": "scratch"}}
    arms["ssl"]["overrides"] = ["training.steps=2", "training.batch_size=16"]  # type: ignore[assignment]
    content = {
        "name": "mini",
        "run": str(folder / "run"),
        "seeds": [0, 1],
        "labels_per_class": [2],
        "pictures": False,
        "data": {name: f"{demo}/data/{name}" for name in ("train", "test")},
        "arms": arms,
        "evaluators": {"few_shot": {"shots": [1, 2]}},
    }
    (folder / "mini.yaml").write_text(yaml.safe_dump(content | changes, sort_keys=False))
    return folder / "mini.yaml"


def quietly(recipe: Path) -> dict[str, Any]:
    return compare(load_comparison(recipe), "", lambda text: None)


def stamps(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (out / "pieces").glob("*.json")}


def test_the_demo_packs_the_digits_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(commands, "_compare", lambda name, overrides, command: asked.append([name, *overrides]))
    run_demo(tmp_path, "seeds=[7]")
    (words,) = asked
    assert words[0] == "demo_digits" and words[-1] == "seeds=[7]" and f"data.test={tmp_path}/data/test" in words
    images = load_digits().images
    for split, start, count in (("train", 0, 1437), ("test", 1437, 360)):
        shards = open_shards(f"{tmp_path}/data/{split}")
        assert shards.samples == count
        first = shards.open(0).read(0)
        assert isinstance(first, dict) and isinstance(first["png"], bytes)
        pixels = np.asarray(Image.open(io.BytesIO(first["png"])))
        np.testing.assert_array_equal(pixels, (images[start] * 255 / 16).round())


def test_the_environment_is_that_of_the_start_and_of_whoever_measured(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkout may have come to another commit by the end, and when a finished comparison is asked for again."""
    monkeypatch.setattr("ssl_vit.comparison.run.environment", lambda: {"pieces": len(stamps(tmp_path / "run"))})
    for _ in range(2):
        assert quietly(mini(tmp_path, demo))["environment"] == {"pieces": 0}


def test_every_arm_budget_and_seed_is_measured(demo: Path) -> None:
    results = json.loads((demo / "results.json").read_text())
    found = {(r["evaluator"], r["arm"], r["labels_per_class"], r["seed"]) for r in results["measurements"]}
    frozen = ("ssl", "supervised", "untrained", "pixels")
    expected = {("fine_tune", a, b, s) for a in ("ssl", "scratch", "supervised") for b in (2, 3) for s in (0, 1)}
    expected |= {(e, a, b, s) for e in ("knn", "linear_probe") for a in frozen for b in (2, 3) for s in (0, 1)}
    expected |= {("few_shot", a, b, s) for a in frozen for b in (1, 2) for s in (0, 1)}
    assert found == expected
    assert all(0 <= row["accuracy"] <= 1 for row in results["measurements"])
    tried = {arm["name"]: [len(choice["tried"]) for choice in arm["choices"]] for arm in results["arms"]}
    assert tried == {arm: [2, 2] for arm in ("ssl", "scratch", "supervised")}, "every arm gets the same trials"
    labels = {arm["name"]: arm["labels_used"] for arm in results["arms"]}
    assert labels == {"ssl": 0, "scratch": 0, "supervised": 400}
    assert results["summary"]["verdict"]


def test_the_report_is_one_page_that_needs_nothing_else(demo: Path) -> None:
    page = (demo / "report.html").read_text()
    assert json.loads((demo / "results.json").read_text())["summary"]["sentences"][0].split(",")[0] in page
    assert "<script src" not in page and "http://" not in page.replace("http://www.w3.org", "")


def test_every_arm_is_pictured_and_costed(demo: Path) -> None:
    results = json.loads((demo / "results.json").read_text())
    assert results["finished"] and results["missing"] == []
    arms = {arm["name"]: arm for arm in results["arms"]}
    for name in ("ssl", "supervised"):
        assert (demo / arms[name]["pictures"] / "attention_rollout.png").is_file()
        assert arms[name]["pretraining"]["flops"] > 0 and arms[name]["pretraining"]["device_hours"] > 0
    assert arms["scratch"]["pictures"] is None
    for row in results["measurements"]:
        trained = row["evaluator"] == "fine_tune"
        assert (row["flops"] > 0, row["images_seen"] > 0) == (trained, trained)
        assert row["labels"] == 10 * row["labels_per_class"]
    assert "attention rollout of masked patch prediction" in (demo / "report.html").read_text()


def test_a_repeated_command_runs_nothing_again(demo: Path) -> None:
    before, results = stamps(demo), json.loads((demo / "results.json").read_text())
    run_demo(demo)
    again = json.loads((demo / "results.json").read_text())
    assert stamps(demo) == before
    assert again["measurements"] == results["measurements"]


def changed(before: dict[str, int], out: Path) -> set[str]:
    return {name.removesuffix(".json") for name, stamp in stamps(out).items() if before.get(name) != stamp}


def test_missing_and_outdated_pieces_alone_are_run(demo: Path) -> None:
    before, results = stamps(demo), json.loads((demo / "results.json").read_text())
    (demo / "pieces" / "fine_tune-scratch-2-1.json").unlink()
    run_demo(demo)
    assert changed(before, demo) == {"fine_tune-scratch-2-1"}
    accuracies = [m["accuracy"] for m in json.loads((demo / "results.json").read_text())["measurements"]]
    assert accuracies == [m["accuracy"] for m in results["measurements"]]
    before = stamps(demo)
    run_demo(demo, "evaluators.knn.ks=[3]")
    assert changed(before, demo) == {f"knn-{arm}-0" for arm in ("ssl", "supervised", "untrained", "pixels")}
    before = stamps(demo)
    run_demo(demo, "evaluators.knn.ks=[3]", "labels_per_class=[2,3,4]", "evaluators.few_shot.shots=[1,2]")
    new = {f"{kind}-{arm}-4{s}" for arm in ("ssl", "scratch", "supervised") for kind, s in (("choose_fine_tune", ""),)}
    new |= {f"fine_tune-{arm}-4-{seed}" for arm in ("ssl", "scratch", "supervised") for seed in (0, 1)}
    frozen = {f"{e}-{arm}-0" for e in ("knn", "linear_probe") for arm in ("ssl", "supervised", "untrained", "pixels")}
    assert changed(before, demo) == new | frozen, "a budget more leaves the others' fine-tunings as they are"


def plan_of(run: Path, *overrides: str) -> Plan:
    study = load_comparison("demo_digits", [*overrides, f"run={run}"])
    return Plan(study, run, study.sets, {"ssl pretrain": "a", "supervised pretrain": "b"})


def test_pieces_come_after_what_they_need(tmp_path: Path) -> None:
    done: set[str] = set()
    plan = plan_of(tmp_path, "pretrain_per_seed=true")
    for piece in plan.pieces:
        assert set(piece.after) <= done, piece
        assert piece.id not in done, "ids are unique"
        done.add(piece.id)
    for seed in plan.study.comparison.seeds:
        assert {f"pretrain-ssl-{seed}", f"few_shot-untrained-{seed}"} <= done, "another initialization for every seed"
    assert "few_shot-pixels-0" in done and "few_shot-pixels-1" not in done


def test_what_has_no_pretraining_does_not_depend_on_how_others_pretrain(tmp_path: Path) -> None:
    """Scratch, the untrained reference and raw pixels share an arm's architecture and image preparation, no more."""

    def prints(*overrides: str) -> dict[str, str]:
        plan = plan_of(tmp_path, *overrides)
        return {piece.id: plan.fingerprint(piece) for piece in plan.pieces}

    def differ(*overrides: str) -> set[str]:
        found = prints(*overrides)
        return {name.split("-")[1] for name, value in found.items() if value != base.get(name)}

    base = prints()
    assert differ("arms.ssl.overrides=[training.steps=9,optim.lr=1e-3,data.augment.crop=inception,seed=5]") == {"ssl"}
    assert differ("arms.ssl.overrides=[training.log_every=7,data.workers=2,training.keep_last=9]") == set()
    every = {"ssl", "scratch", "untrained", "pixels"}
    assert differ("arms.ssl.overrides=[data.evaluation_resize=1.2]") == {*every, "untrained_supervised"}
    assert differ("seeds=[0,1]") == {"ssl", "supervised", "untrained", "pixels"}, "frozen features cover all seeds"


def test_sweeps_depend_on_the_number_that_their_set_counts_by(tmp_path: Path) -> None:
    def prints(metric: str) -> dict[str, str]:
        data = f"data={{train: null, test: null, sets: {{digits: {{train: a, test: b, metric: {metric}}}}}}}"
        study = load_comparison("demo_digits", [data])
        plan = Plan(study, tmp_path, study.sets, {"ssl pretrain": "a", "supervised pretrain": "b"})
        return {piece.id: plan.fingerprint(piece) for piece in plan.pieces}

    one, other = prints("accuracy"), prints("mean_per_class")
    assert {name.partition("-")[0] for name in one if one[name] != other[name]} == {"choose_fine_tune", "fine_tune"}


def test_results_depend_on_the_shards_that_they_were_measured_on(tmp_path: Path) -> None:
    def prints(**shards: str) -> dict[str, str]:
        study = load_comparison("demo_digits")
        plan = Plan(study, tmp_path, study.sets, {"ssl pretrain": "a", "supervised pretrain": "b"} | shards)
        return {piece.id: plan.fingerprint(piece) for piece in plan.pieces}

    base = prints()
    for shards, kinds in (({"data test": "x"}, {"pretrain"}), ({"ssl pretrain": "x"}, {"ssl"})):
        differ = {name for name, value in prints(**shards).items() if value != base[name]}
        if "data test" in shards:
            assert {name.split("-")[0] for name in base.keys() - differ} == kinds, "all but the pretrainings"
        else:
            assert {name.split("-")[1] for name in differ} == kinds, "all of that arm, and nothing else"


def test_each_architecture_has_its_own_untrained_twin_and_scratch(tmp_path: Path) -> None:
    wide = "arms.supervised.overrides=[encoder.width=32]"
    plan = plan_of(tmp_path, wide, "arms.small={label: small scratch, like: supervised}")
    assert plan.references == ("untrained", "untrained_supervised", "pixels")
    assert plan.architecture("small") == plan.architecture("supervised") == plan.architecture("untrained_supervised")
    assert plan.architecture("scratch") == plan.architecture("ssl") == plan.architecture("untrained")
    assert plan.architecture("ssl") != plan.architecture("supervised")
    assert {p.arm for p in plan.pieces if p.evaluator == "few_shot"} == {"ssl", "supervised", *plan.references}
    assert {p.arm for p in plan.pieces if p.evaluator == "fine_tune"} == {"ssl", "scratch", "supervised", "small"}


def test_dropout_makes_no_other_untrained_encoder_but_another_scratch(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "arms.supervised.overrides=[encoder.dropout=0.1]")
    assert plan.references == ("untrained", "pixels")
    with_dropout = plan_of(tmp_path, "arms.ssl.overrides=[encoder.dropout=0.1]")
    one, two = ({piece.id: p.fingerprint(piece) for piece in p.pieces} for p in (plan, with_dropout))
    assert one["fine_tune-scratch-1-0"] != two["fine_tune-scratch-1-0"]


MAJORITY = """
from pydantic import Field
import numpy as np
from ssl_vit.evaluators.base import Judge, LabeledConfig, score
from ssl_vit.interfaces import Measurement


class Config(LabeledConfig):
    boost: float = Field(1.0, gt=0)


class Evaluator(Judge):
    title = "The most frequent label"

    def measure(self, task, source, budgets, seeds, choice=None):
        test = task.features(source, "test", self.config.representation)
        for (budget, seed), train in task.labeled_features(source, self.config.representation, budgets, seeds):
            guess = np.full_like(test.labels, np.bincount(train.labels).argmax())
            place = {"labels_per_class": budget, "labels": len(train.labels), "seed": seed}
            yield Measurement(name=str(budget), **place, **score(guess, test.labels, task.classes))
"""


def test_a_new_evaluator_is_one_file(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "majority.py").write_text(MAJORITY)
    monkeypatch.setattr(evaluators, "__path__", [*evaluators.__path__, str(tmp_path)])
    result = api.evaluate(demo / "ssl", "majority", f"{demo}/data/train", f"{demo}/data/test")
    assert result["values"]["trained/all/mean"] == pytest.approx(0.1, abs=0.03)
    results = quietly(mini(tmp_path, demo, evaluators={"majority": {"boost": 2}}))
    found = {(m["evaluator"], m["arm"], m["seed"]) for m in results["measurements"]}
    assert found == {("majority", arm, seed) for arm in ("ssl", "untrained", "pixels") for seed in (0, 1)}
    assert "The most frequent label" in write_report([tmp_path / "run"], tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("fewer_digits")
def test_several_sets_and_given_weights(demo: Path, tmp_path: Path) -> None:
    """Two data sets in one comparison, an encoder that is there already, percent budgets, classes' mean as metric."""
    suite = tmp_path / "two.yaml"
    suite.write_text(f"""
name: two
folder: {tmp_path}/packed
sets:
  first: {{train: {demo}/data/train, test: {demo}/data/test, metric: mean_per_class}}
  second: {{source: digits, evaluators: {{few_shot: {{shots: [3]}}}}}}
""")
    arms = {"ssl": {"label": "given", "weights": f"{demo}/ssl"}}
    evaluators = {"few_shot": {"shots": [1]}, "knn": {"ks": [1]}}
    recipe = mini(
        tmp_path,
        demo,
        arms=arms,
        evaluators=evaluators,
        data={"suite": suite.name},
        labels_per_class=[2, "5%", "all"],
    )
    results = quietly(recipe)
    budgets = {(m["data"], m["evaluator"], m["labels_per_class"]) for m in results["measurements"]}
    assert budgets == {("first", "few_shot", 1), ("second", "few_shot", 3)} | {
        (data, "knn", budget) for data in ("first", "second") for budget in (2, "5%", "all")
    }
    assert results["sets"]["first"] == {"metric": "mean_per_class", "classes": 10}
    (ssl,) = results["arms"]
    assert ssl["pretraining"]["steps"] == 3, "the costs of given weights come from their run"
    found = {m["data"]: m for m in results["measurements"] if (m["arm"], m["labels_per_class"]) == ("ssl", "all")}
    assert found["first"]["accuracy"] == found["second"]["accuracy"], "the same digits, packed twice"
    row = next(r for r in results["summary"]["accuracy"] if (r["data"], r["evaluator"]) == ("first", "few_shot"))
    assert row["mean"] == pytest.approx(
        sum(m["mean_per_class"] for m in results["measurements"] if m["data"] == "first" and m["arm"] == "ssl"
            and m["evaluator"] == "few_shot") / 2
    )  # fmt: skip


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ssl-vit", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_pieces_one_by_one_are_the_comparison(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["compare", str(mini(tmp_path, demo)), f"run={tmp_path}/parts"]
    assert call(monkeypatch, *arguments, "--list") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == f"# run: {tmp_path}/parts"
    listed = {row.split("\t")[0]: row.split("\t")[1:] for row in rows}
    assert listed["pretrain-ssl-0"] == ["0", "missing"] and listed["few_shot-ssl-0"] == ["1", "missing"]
    assert listed["few_shot-pixels-0"] == ["0", "missing"]
    assert not (tmp_path / "parts").exists(), "a list writes nothing"
    assert call(monkeypatch, *arguments, "--only", "few_shot-ssl-0") == 0
    assert "pretrain-ssl-0: done" in capsys.readouterr().out, "what it needs is done first"
    assert call(monkeypatch, "report", f"{tmp_path}/parts") == 0
    assert "2 piece(s) are missing" in (tmp_path / "parts" / "report.html").read_text()
    for identifier in reversed(listed):
        assert call(monkeypatch, *arguments, "--only", identifier) == 0
    assert call(monkeypatch, *arguments, "--list") == 0
    assert capsys.readouterr().out.count("\tmissing") == 0
    whole = [argument.replace("/parts", "/whole") for argument in arguments]
    assert call(monkeypatch, *whole) == 0
    assert call(monkeypatch, "report", f"{tmp_path}/parts") == 0
    parts, at_once = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("parts", "whole"))
    assert parts["finished"] and without_times(parts) == without_times(at_once)
    assert call(monkeypatch, *arguments, "--only", "few_shot-nobody") == 2
    assert "few_shot-nobody: no such piece" in capsys.readouterr().err
    assert call(monkeypatch, *arguments, "--only", "") == 2, "an empty id is no whole comparison"


def test_the_directory_of_another_comparison_is_refused(demo: Path, tmp_path: Path) -> None:
    quietly(mini(tmp_path, demo, evaluators={"few_shot": {"shots": [1]}}))
    before = (tmp_path / "run" / "plan.json").read_bytes()
    with pytest.raises(UserError, match="holds the comparison mini: give this comparison another directory"):
        quietly(mini(tmp_path, demo, name="other"))
    assert (tmp_path / "run" / "plan.json").read_bytes() == before
    (tmp_path / "run" / "plan.json").write_text("[]")
    with pytest.raises(UserError, match=r"whose plan\.json cannot be read"):
        quietly(mini(tmp_path, demo))
    with pytest.raises(UserError, match="holds a training run"):
        load = load_comparison(mini(tmp_path, demo), [f"run={demo}/ssl"])
        look(load, load.sets)
    assert not (demo / "ssl" / "plan.json").exists()


def test_what_a_pretraining_starts_from_counts_by_its_content(demo: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    for name in ("encoder.safetensors", "config.json"):
        shutil.copy(demo / "ssl" / name, weights)
    study = load_comparison(mini(tmp_path, demo), [f"arms.ssl.overrides=[init_from={weights}]"])

    def prints() -> dict[str, str]:
        plan = Plan(study, tmp_path, study.sets, {})
        return {piece.id: plan.fingerprint(piece) for piece in plan.pieces}

    before = prints()
    shutil.copy(demo / "supervised" / "encoder.safetensors", weights)
    differ = {name for name, value in prints().items() if value != before[name]}
    assert differ == {"pretrain-ssl-0", "few_shot-ssl-0"}


def test_given_weights_see_the_same_images_and_count_with_their_config(demo: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    for name in ("encoder.safetensors", "config.json"):
        shutil.copy(demo / "ssl" / name, weights)
    arms = {name: {"label": name, "weights": str(path)} for name, path in (("ssl", demo / "ssl"), ("given", weights))}
    recipe = mini(tmp_path, demo, arms=arms)
    found: dict[str, list[float]] = {}
    results = quietly(recipe)
    for measured in results["measurements"]:
        found.setdefault(measured["arm"], []).append(measured["accuracy"])
    assert found["given"] == found["ssl"]
    origin = {arm["name"]: (arm["labels_used"], arm["starts_from"]) for arm in results["arms"]}
    assert origin == {"ssl": (0, None), "given": (None, str(weights))}, "nothing tells what made the weights alone"
    study = load_comparison(recipe)

    def prints() -> dict[str, str]:
        plan = Plan(study, tmp_path, study.sets, {})
        return {piece.id: plan.fingerprint(piece) for piece in plan.pieces}

    before, config = prints(), json.loads((weights / "config.json").read_text())
    config["pretrained_cfg"]["mean"] = [0.25]
    (weights / "config.json").write_text(json.dumps(config))
    differ = {name for name, value in prints().items() if value != before[name]}
    assert "few_shot-given-0" in differ and "few_shot-ssl-0" not in differ


def test_a_head_is_judged_of_the_arms_that_have_one(demo: Path, tmp_path: Path) -> None:
    study = load_comparison("demo_digits", [f"run={tmp_path}", "evaluators.own_head={}"])
    plan = Plan(study, tmp_path, study.sets, {})
    assert [piece.id for piece in plan.pieces if piece.evaluator == "own_head"] == ["own_head-supervised-0"]
    study = load_comparison(mini(tmp_path, demo), ["evaluators.own_head={}"])
    with pytest.raises(UserError, match="no arm's recipe trains a classifier"):
        _ = Plan(study, tmp_path, study.sets, {}).pieces


def test_sets_that_number_other_classes_are_refused(demo: Path, tmp_path: Path) -> None:
    other = shutil.copytree(demo / "data" / "test", tmp_path / "test")
    info = json.loads((other / "info.json").read_text())
    (other / "info.json").write_text(json.dumps(info | {"classes": info["classes"][:9]}))  # none of the last: no matter
    api.evaluate(demo / "supervised", "own_head", f"{demo}/data/train", str(other))  # none of the last: no matter
    (other / "info.json").write_text(json.dumps(info | {"classes": info["classes"][::-1]}))
    words = "have other classes: class 0 is 0 in one, 9 in the other"
    with pytest.raises(UserError, match=words):
        quietly(mini(tmp_path, demo, data={"train": f"{demo}/data/train", "test": str(other)}))
    for evaluator in ("knn", "own_head"):
        with pytest.raises(UserError, match=words):
            api.evaluate(demo / "supervised", evaluator, f"{demo}/data/train", str(other))
    with pytest.raises(UserError, match=f"what .*supervised was trained on and .* {words}"):
        api.evaluate(demo / "supervised", "own_head", str(other), str(other))


def test_what_is_left_is_told_once_every_kind_was_seen() -> None:
    pieces = [Piece("a", "measure", "x", evaluator="knn"), Piece("b", "measure", "y", evaluator="knn")]
    pieces += [Piece("c", "pretrain", "x")]
    said: list[str] = []
    clock = _Clock(pieces, 2, said.append)
    for piece, seconds in zip(pieces[::2] + pieces[1:2], (60.0, 240.0, 50.0), strict=True):
        clock.done(piece, seconds)
    assert said == ["[1/3] a  (0:00:00)", "[2/3] c  (0:00:00, about 0:00:30 left)", "[3/3] b  (0:00:00)"]


def without_times(value: Any) -> Any:
    """A document without what differs from run to run: times, machines, places."""
    if isinstance(value, dict):
        left_out = ("seconds", "device_hours", "command", "environment", "hardware")
        return {key: without_times(part) for key, part in value.items() if key not in left_out}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def test_precision_may_differ_between_pretrainings_and_judging(demo: Path, tmp_path: Path) -> None:
    steps = ["training.steps=1", "training.batch_size=16"]
    arms = {
        name: {"label": name, "recipe": "digits_ssl", "overrides": [*steps, f"training.precision={name}"]}
        for name in ("fp32", "bf16")
    }
    results = quietly(mini(tmp_path, demo, arms=arms))
    assert results["finished"]
    assert list(results["references"]) == ["untrained", "untrained_bf16", "pixels"], "each judged in its own precision"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["evaluators.knn={seeds: [1]}"], "evaluators.knn.seeds: a comparison sets this itself"),
        (["evaluators={kn: {}}"], "did you mean 'knn'"),
        (["arms.scratch.like=nobody"], "arms.scratch.like=nobody: that is no arm with a recipe"),
        (["arms={a b: {label: x, recipe: digits_ssl}}"], "names are made of letters"),
        (["arms={pixels: {label: x, recipe: digits_ssl}}"], "'pixels': raw pixels and untrained encoders have such"),
        (["arms={untrained_2: {label: x, recipe: digits_ssl}}"], "'untrained_2': raw pixels and untrained encoders"),
        (["arms.ssl.weights=x"], "give recipe or weights, not both"),
        (
            ["arms={pieces: {label: x, recipe: digits_ssl}}"],
            "'pieces': a comparison keeps something else",
        ),
        (["arms.scratch.overrides=[encoder.depth=7]"], "overrides are of a recipe, and this arm has none"),
        (["seeds=[-1]"], "seeds.0: Input should be greater than or equal to 0"),
        (["data.suite=transfer"], "give train and test, or sets, or suite"),
        (["labels_per_class=[10,zero]"], "a label budget is"),
        (["labels_per_class=[all,'100%']"], "labels_per_class: all is named twice"),
        (["seeds=[1,0,1]"], "seeds: 1 is named twice"),
        (
            ["arms.ssl.overrides=[probe.every=5,probe.patience=2]"],
            "probe.patience would end this pretraining by labels",
        ),
        (["data.sets={a: {train: x}}"], "give train and test .shards., or source"),
    ],
)
def test_wrong_comparisons_are_named(keys: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_comparison("demo_digits", keys)


def test_a_comparison_needs_an_arm_with_a_encoder_and_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no arm has a recipe or weights"):
        load_comparison(mini(tmp_path, tmp_path, arms={"only": {"label": "x"}}))
    with pytest.raises(UserError, match=r"transfers: no such suite; shipped ones: .*transfer"):
        load_comparison(mini(tmp_path, tmp_path, data={"suite": "transfers"}))
    with pytest.raises(UserError, match="give train and test, or sets, or suite"):
        load_comparison(mini(tmp_path, tmp_path, data={}))


def test_an_arm_that_cannot_run_is_named_before_any_piece(demo: Path, tmp_path: Path) -> None:
    """Whatever its recipe, its shards and the model say; the first arm alone would train for long."""
    shutil.copytree(demo / "data" / "train", tmp_path / "nameless")
    (tmp_path / "nameless" / "info.json").unlink()
    (tmp_path / "nameless" / "packing.jsonl").unlink()
    for keys, words in (
        ([f"data.train={tmp_path}/nameless"], "objective.classes: the shards' info.json names no classes"),
        (["data.samples=2000"], "data.samples=2000: .* has 400 samples"),
        (["encoder.heads=5"], "encoder.width=64 is not a multiple"),
    ):
        long = {"label": "SSL", "recipe": "digits_ssl", "overrides": ["training.steps=100000"]}
        arms = {"ssl": long, "other": {"label": "x", "recipe": "digits_supervised", "overrides": keys}}
        with pytest.raises(UserError, match=rf"arms\.other: .*{words}"):
            quietly(mini(tmp_path, demo, arms=arms))
        assert not (tmp_path / "run").exists()


def test_the_shipped_suites_are_whole() -> None:
    for name in suites():
        suite = load_suite(name)
        for key, chosen in suite.sets.items():
            assert chosen.source or chosen.train, key
    assert set(load_suite("transfer").sets) == {"cifar10", "cifar100", "pets", "flowers102", "imagenet"}
    with pytest.raises(UserError, match=r"sets\.x\.evaluators\.knn\.kk: unknown key"):
        load_suite("local", overrides=["sets.x={source: digits, evaluators: {knn: {kk: 1}}}"])


def test_a_changed_recipe_is_refused_before_anything_is_written(demo: Path, tmp_path: Path) -> None:
    recipe = mini(tmp_path, demo)
    quietly(recipe)
    before = (tmp_path / "run" / "plan.json").read_bytes()
    changed = load_comparison(recipe, ["arms.ssl.overrides=[training.steps=3,training.batch_size=16]"])
    with pytest.raises(UserError, match=r"holds a run of another recipe \(training.steps: 2 -> 3\)"):
        look(changed, changed.sets)
    with pytest.raises(UserError, match="holds a run of another recipe"):
        compare(changed, "", lambda text: None)
    assert (tmp_path / "run" / "plan.json").read_bytes() == before


def test_files_that_were_cut_short_are_made_anew(demo: Path, tmp_path: Path) -> None:
    recipe, run = mini(tmp_path, demo), tmp_path / "run"
    whole = quietly(recipe)
    (run / "pieces" / "few_shot-ssl-0.json").write_text('{"id": "few')
    (run / "pieces" / "few_shot-pixels-0.json").write_text("{}")
    (run / "results.json").write_text('{"kind": "comp')
    again = quietly(recipe)
    assert again["finished"] and without_times(again) == without_times(whole)


def test_settings_of_one_set_are_merged_into_those_of_all(demo: Path, tmp_path: Path) -> None:
    places = {part: f"{demo}/data/{part}" for part in ("train", "test")}
    flips = {"fine_tune": {"augment": {"flip": True}}}
    sets = {"one": places, "other": {**places, "evaluators": flips}}
    tuning = {"augment": {"scale": [0.5, 1.0], "flip": False}, "lrs": [0.01]}
    study = load_comparison(mini(tmp_path, demo, data={"sets": sets}, evaluators={"fine_tune": tuning}))
    one, other = (study.evaluators[name]["fine_tune"].model_dump() for name in ("one", "other"))
    assert other["augment"] == one["augment"] | {"flip": True} and one["augment"]["scale"] == (0.5, 1.0)


def test_a_folder_packed_from_something_else_is_no_source_of_a_set(tmp_path: Path) -> None:
    folder, said = tmp_path / "packed", list[str]()
    prepare({"digits": DataSet(source="digits")}, folder, said.append)
    assert len(said) == 2 and not prepare({"digits": DataSet(source="digits")}, folder, said.append)["digits"].source
    assert len(said) == 2, "it is there"
    with pytest.raises(UserError, match=r"was packed from something else \(source digits, now other\)"):
        prepare({"digits": DataSet(source="other")}, folder, said.append)
    with pytest.raises(UserError, match="was packed from something else"):
        packed({"digits": DataSet(source="digits", splits=("test", "train"))}, folder)
    shutil.rmtree(folder / "digits")
    for part in ("train", "test"):
        source = open_source("digits", split=part)
        pack(source, folder / "digits" / part, subset=2 if part == "test" else None, shards=1, progress=False)
    with pytest.raises(UserError, match=r"digits/test holds a part of it only \(.*2 images a class"):
        prepare({"digits": DataSet(source="digits")}, folder, said.append)
