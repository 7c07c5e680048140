"""The cost of a verdict, of stored comparisons whose costs are known by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench_verdict import Design, needed, seconds, verdicts, wall_seconds

from ssl_vit.files import write_json
from ssl_vit.interfaces import UserError
from ssl_vit.records import TaskResult
from ssl_vit.report.read import Comparison, read
from ssl_vit.report.summary import Difference, summarize
from ssl_vit.results import Result
from tests.report.made import SWEEP, row, two_arms, write_comparison


def varied(seeds: int) -> list[Result]:
    """Rows of two arms at two budgets, whose difference varies with the seed."""
    arms = {arm: [one for one in two_arms(seeds=seeds) if one.arm == arm] for arm in ("ssl", "scratch")}
    gains = [0.1 + 0.07 * (one.seed * 3 % 5) for one in arms["ssl"]]
    better = [
        row("ssl", one.labels_per_class, one.seed, 0.5 + gain) for one, gain in zip(arms["ssl"], gains, strict=True)
    ]
    return [*better, *arms["scratch"]]


def comparison(folder: Path, **changes: object) -> tuple[Comparison, Difference]:
    """Two budgets, four seeds, a sweep per arm: 20 s of pretraining, and 2 s for every other task."""
    rows = [*varied(4), row("ssl", 5, 0, 0.7, evaluator="few_shot")]
    found = read([write_comparison(folder, rows, sweeps={"ssl": SWEEP, "scratch": SWEEP}, **changes)])  # type: ignore[arg-type]
    (head,) = summarize(found).headlines
    return found, head


def test_the_seconds_of_every_part(tmp_path: Path) -> None:
    found, head = comparison(tmp_path)
    fixed = {"pretraining": 20.0, "sweeps": 4.0, "frozen features": 2.0, "pictures": 0.0}
    assert seconds(found, head, Design(4, 1)) == fixed | {"fine-tuning": 2 * 2 * 4 * 2.0}
    assert seconds(found, head, Design(10, 1)) == fixed | {"fine-tuning": 2 * 2 * 10 * 2.0}
    more = seconds(found, head, Design(10, 3), alone=True)
    assert more == {**fixed, "pretraining": 60.0, "fine-tuning": 2 * 2 * 10 * 2.0, "frozen features": 0.0}


def test_the_planner_finds_the_seeds_that_were_measured(tmp_path: Path) -> None:
    found, head = comparison(tmp_path)
    assert head.estimate.half_width
    assert needed(found, head, 1.001 * head.estimate.half_width) == Design(4, 1)
    narrower = needed(found, head, 0.9 * head.estimate.half_width)
    assert narrower and narrower.seeds > 4
    assert needed(found, head, 1e-9) is None


def test_with_several_pretrainings_they_are_what_is_counted(tmp_path: Path) -> None:
    rows = [replace(one, pretraining_seed=one.seed // 2) for one in varied(6)]
    found = read([write_comparison(tmp_path, rows, pretrainings=3)])
    (head,) = summarize(found).headlines
    assert head.unit == "pretraining" and head.estimate.half_width
    assert needed(found, head, 1.001 * head.estimate.half_width) == Design(6, 3)


def test_wall_time_has_no_pauses(tmp_path: Path) -> None:
    found, _ = comparison(tmp_path)
    times = {"a": ("12:00:10", 10.0), "b": ("12:00:15", 12.0), "c": ("12:00:30", 5.0), "d": ("13:00:00", 20.0)}
    tasks = {
        name: TaskResult(fingerprint="", seconds=took, saved=f"2026-01-01T{saved}+00:00")
        for name, (saved, took) in times.items()
    }
    assert wall_seconds(replace(found, tasks=tasks)) == 30 + 20


def test_a_verdict_and_what_has_none(tmp_path: Path) -> None:
    comparison(tmp_path / "c")
    (found,) = verdicts(tmp_path / "c", 0.5)
    assert found.needed == Design(3, 1) and found.pair == "masked patch prediction minus training from scratch"
    assert sum(found.seconds["needed by two arms"].values()) == 20 + 4 + 2 * 2 * 3 * 2
    (found,) = verdicts(tmp_path / "c", 1e-9)
    assert found.needed is None and set(found.seconds) == {"measured"}
    comparison(tmp_path / "unfinished", missing=["pretrain-ssl"])
    with pytest.raises(UserError, match="unfinished: 1 tasks are not done"):
        verdicts(tmp_path / "unfinished", 0.01)
    (tmp_path / "old").mkdir()
    write_json(tmp_path / "old" / "plan.json", {"header": {"name": "demo_digits"}})
    with pytest.raises(UserError, match="written by another version of ssl-vit"):
        verdicts(tmp_path / "old", 0.01)
