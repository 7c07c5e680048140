"""The demo's comparison, made small: every arm, seed and budget is measured, and finished pieces are not run again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ssl_vit import cli, pieces
from ssl_vit.recipe import load_comparison

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
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "out"
    run_demo(out)
    return out


def run_demo(out: Path, *more: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ssl-vit", "demo", "--out", str(out), *TINY, *more])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert stop.value.code == 0


def stamps(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (out / "pieces").iterdir()}


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
    assert labels == {"ssl": 0, "scratch": 0, "supervised": 1437}
    assert results["summary"]["verdict"]


def test_the_report_is_one_page_that_needs_nothing_else(demo: Path) -> None:
    page = (demo / "report.html").read_text()
    assert json.loads((demo / "results.json").read_text())["summary"]["sentences"][0].split(",")[0] in page
    assert "<script src" not in page and "http://" not in page.replace("http://www.w3.org", "")


def test_a_repeated_command_runs_nothing_again(demo: Path) -> None:
    before, results = stamps(demo), json.loads((demo / "results.json").read_text())
    run_demo(demo)
    again = json.loads((demo / "results.json").read_text())
    assert stamps(demo) == before
    assert again["measurements"] == results["measurements"]


def test_missing_and_outdated_pieces_alone_are_run(demo: Path, tmp_path: Path) -> None:
    before, results = stamps(demo), json.loads((demo / "results.json").read_text())
    (demo / "pieces" / "fine_tune-scratch-2-1.json").unlink()
    run_demo(demo)
    assert {name for name, stamp in stamps(demo).items() if before.get(name) != stamp} == {"fine_tune-scratch-2-1.json"}
    assert [m["accuracy"] for m in json.loads((demo / "results.json").read_text())["measurements"]] == [
        m["accuracy"] for m in results["measurements"]
    ]
    before = stamps(demo)
    run_demo(demo, "evaluators.knn.ks=[3]")
    changed = {name for name, stamp in stamps(demo).items() if before[name] != stamp}
    assert changed == {f"knn-{arm}-0.json" for arm in ("ssl", "supervised", "untrained", "pixels")}


def test_pieces_come_after_what_they_need(demo: Path) -> None:
    comparison, arms = load_comparison("demo_digits", ["pretrain_per_seed=true"])
    done: set[str] = set()
    for piece in pieces.pieces(pieces.Plan(comparison, arms, demo)):
        assert set(piece.after) <= done, piece
        assert piece.id not in done, "ids are unique"
        done.add(piece.id)
    assert {f"pretrain-ssl-{seed}" for seed in comparison.seeds} <= done
