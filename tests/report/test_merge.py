"""Results put together from whatever pieces are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ssl_vit.interfaces import UserError
from ssl_vit.report.merge import merge
from ssl_vit.report.page import write_report


def piece(identifier: str, kind: str, arm: str, **more: Any) -> dict[str, Any]:
    place = {"data": "data", "evaluator": "fine_tune", "budget": 5, "seed": 0, "fingerprint": f"f-{identifier}"}
    return {"id": identifier, "kind": kind, "arm": arm, **place, **more}


PIECES = [
    piece("pretrain-ssl-0", "pretrain", "ssl"),
    piece("choose-ssl", "choose", "ssl"),
    piece("choose-scratch", "choose", "scratch"),
    *(piece(f"fine-{arm}-{seed}", "measure", arm, seed=seed) for arm in ("ssl", "scratch") for seed in (0, 1)),
]


def measured(accuracy: float, seed: int) -> dict[str, Any]:
    row = {"accuracy": accuracy, "mean_per_class": accuracy, "per_class": [accuracy], "name": "5", "main": True}
    place = {"labels_per_class": 5, "labels": 50, "seed": seed, "images_seen": 64, "flops": 1e6, "seconds": 2.0}
    return row | place | {"chosen": {}, "notes": []}


def result_of(entry: dict[str, Any]) -> dict[str, Any]:
    skipped = [{"shard": "a.tar", "key": "7", "reason": "cut"}]
    if entry["kind"] == "pretrain":
        sizes = {"steps": 10, "images_seen": 640, "flops": 5e9, "parameters": 100, "samples": 900, "processes": 4}
        return sizes | {"seconds": 1800.0}
    if entry["kind"] == "choose":
        choice = {"tried": [{"lr": 1}, {"lr": 2}], "chosen": {"lr": 2}, "measured": None}
        return {"choice": choice | {"images_seen": 128, "flops": 2e6, "seconds": 3.0}, "skipped": skipped}
    score = 0.79 + entry["seed"] / 50 if entry["arm"] == "ssl" else 0.395 + entry["seed"] / 100
    return {"measurements": [measured(score, entry["seed"])], "skipped": skipped}


def write(run: Path, only: set[str] | None = None, **changed: str) -> Path:
    (run / "pieces").mkdir(parents=True)
    header = {"name": "c", "title": "C", "seeds": [0, 1], "sets": {"data": {"metric": "accuracy", "classes": 10}}}
    header |= {"evaluators": {"fine_tune": {"title": "Fine-tuning", "trains_encoder": True}}, "command": "x"}
    arms = [
        {"name": "ssl", "label": "SSL", "run": "ssl", "needs_labels": False, "architecture": "a"},
        {"name": "scratch", "label": "scratch", "run": None, "needs_labels": False, "architecture": "a"},
    ]
    entries = [
        entry | {"fingerprint": changed.get(entry["id"].replace("-", "_"), entry["fingerprint"])} for entry in PIECES
    ]
    plan = {"header": header, "arms": arms, "references": {}, "pieces": entries}
    (run / "plan.json").write_text(json.dumps(plan))
    for entry in PIECES:
        if only is None or entry["id"] in only:
            done = {key: entry[key] for key in ("id", "fingerprint")} | {"hardware": {"processor": run.name}}
            (run / "pieces" / f"{entry['id']}.json").write_text(json.dumps(done | {"result": result_of(entry)}))
    return run


def test_all_pieces_make_a_finished_comparison(tmp_path: Path) -> None:
    results = merge([write(tmp_path / "run")])
    assert results["finished"] and results["missing"] == []
    assert len(results["measurements"]) == 4
    assert "per_class" not in results["measurements"][0]
    ssl, scratch = results["arms"]
    assert ssl["pretraining"]["device_hours"] == 2.0, "half an hour on four processes"
    assert (scratch["pretraining"], scratch["labels_used"]) == (None, 0)
    assert ssl["tuning"] == {"images_seen": 128, "flops": 2e6, "seconds": 3.0}
    assert [len(choice["tried"]) for choice in scratch["choices"]] == [2]
    assert len(results["skipped"]) == 1, "a sample that two pieces skipped is one sample"
    assert results["summary"]["verdict"].startswith("With 5 labels a class, SSL pretraining gains +40.0")


def test_what_an_arm_cost_in_all_counts_every_trained_model_once(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    ssl, scratch = (arm["total"] for arm in merge([run])["arms"])
    assert {name: scratch[name] for name in ("images_seen", "flops", "seconds")} == {
        "images_seen": 128 + 2 * 64,
        "flops": 2e6 + 2 * 1e6,
        "seconds": 3.0 + 2 * 2.0,
    }
    assert ssl["images_seen"] == scratch["images_seen"] + 640
    assert ssl["device_hours"] == pytest.approx((1800 * 4 + 7) / 3600), "the pretraining ran on four processes"
    path = run / "pieces" / "choose-scratch.json"
    swept = json.loads(path.read_text())
    swept["result"]["choice"]["measured"], swept["processes"] = measured(0.4, 0), 2
    path.write_text(json.dumps(swept))
    scratch = merge([run])["arms"][1]["total"]
    assert scratch["images_seen"] == 128 + 64, "seed 0's model is one of the sweep's"
    assert scratch["device_hours"] == pytest.approx((3.0 * 2 + 2.0) / 3600)
    text = write_report([run], run / "report.html").read_text()
    assert "In all, images</th><td>896</td><td>192</td>" in text


def test_what_is_missing_is_named_and_the_page_says_so(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {"pretrain-ssl-0", "fine-ssl-0"})
    results = merge([run])
    assert not results["finished"]
    assert results["missing"] == ["choose-ssl", "choose-scratch", "fine-ssl-1", "fine-scratch-0", "fine-scratch-1"]
    text = write_report([run], run / "report.html").read_text()
    assert "has not finished: 5 piece(s) are missing" in text
    assert "79.0 (1 seed)" in text


def test_nothing_finished_at_all_is_still_a_page(tmp_path: Path) -> None:
    run = write(tmp_path / "run", set())
    assert "No verdict yet" in write_report([run], run / "report.html").read_text()


def test_a_piece_made_from_something_else_does_not_count(tmp_path: Path) -> None:
    run = write(tmp_path / "run", fine_ssl_0="f-of-other-settings")
    assert merge([run])["missing"] == ["fine-ssl-0"]


def test_a_damaged_plan_is_named_and_a_damaged_piece_is_missing(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    for name in ("pieces/fine-ssl-0.json", "plan.json"):
        (run / name).write_text((run / name).read_text()[:20])
        if name == "plan.json":
            with pytest.raises(UserError, match=r"plan\.json: not valid JSON"):
                write_report([run], run / "report.html")
        else:
            assert merge([run])["missing"] == ["fine-ssl-0"]


def test_parts_from_several_machines_are_one_comparison(tmp_path: Path) -> None:
    ids = [entry["id"] for entry in PIECES]
    one, two = write(tmp_path / "one", set(ids[:4])), write(tmp_path / "two", set(ids[3:]))
    whole, together = merge([write(tmp_path / "whole")]), merge([one, two])
    assert [found["processor"] for found in together.pop("hardware")] == ["one", "two"]
    whole.pop("hardware")
    assert together == whole
    assert "gains +40.0" in write_report([two, one], tmp_path / "report.html").read_text()


def test_other_comparisons_are_not_merged(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two", fine_ssl_0="other")
    with pytest.raises(UserError, match=r"two and .*one are not of the same comparison \(piece fine-ssl-0 differs\)"):
        merge([one, two])
