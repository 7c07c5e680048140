"""The files that `ssl-vit compare` and `ssl-vit eval` leave, made without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from ssl_vit import results
from ssl_vit.files import write_json
from ssl_vit.interfaces import Budget
from ssl_vit.records import (
    ArmRecord,
    ComparisonRecord,
    Cost,
    DataRecord,
    EvaluatorRecord,
    ReferenceRecord,
    RunSummary,
    SkippedSample,
    SweepRecord,
    TaskRecord,
    TaskResult,
)
from ssl_vit.report.read import read
from ssl_vit.report.summary import Summary, summarize
from ssl_vit.report.verdict import verdict
from ssl_vit.results import Prediction, Result
from tests.tars import encoded, write_tar

SUMMARY = RunSummary(
    name="ssl",
    objective="masked_patch",
    steps=10,
    images_seen=640,
    flops=6e9,
    seconds=1800,
    parameters=1234,
    samples=900,
    processes=4,
)
ARMS = (
    ArmRecord(
        name="ssl",
        label="SSL [50%]",
        kind="pretrained",
        run="ssl",
        objective="masked_patch",
        trained_on="digits",
        saw=("digits",),
    ),
    ArmRecord(name="scratch", label="scratch", kind="scratch"),
)
SUPERVISED = ArmRecord(
    name="supervised",
    label="all labels",
    kind="pretrained",
    objective="classification",
    uses_labels=True,
    trained_on="digits",
    saw=("digits",),
)
EVALUATORS = {
    "fine_tune": EvaluatorRecord(title="Fine-tuning", trains_encoder=True, settings={"digits": {"steps": 5}}),
    "few_shot": EvaluatorRecord(title="Few-shot"),
}


def prediction(accuracy: float, *, seed: int = 0, images: int = 100, classes: int = 4, arm: str = "") -> Prediction:
    """Of images whose difficulty all arms and seeds share: the share of correct ones is `accuracy`, exactly."""
    labels = np.arange(images) % classes
    difficulty = np.random.default_rng(0).normal(size=images)
    own = np.random.default_rng([seed, *arm.encode()]).normal(size=images)
    order = np.argsort(difficulty + 0.3 * own)
    predicted = (labels + 1) % classes
    predicted[order[: round(accuracy * images)]] = labels[order[: round(accuracy * images)]]
    return Prediction(np.arange(images) + 7, labels, predicted)


def row(arm: str, budget: Budget, seed: int, accuracy: float, **changes: Any) -> Result:
    evaluator = changes.pop("evaluator", "fine_tune")
    found = changes.pop("prediction", None) or prediction(
        accuracy, seed=seed, arm=arm, images=changes.pop("images", 100)
    )
    values: dict[str, Any] = {
        "data": "digits",
        "pretraining_seed": 0,
        "labels": 4 * budget if isinstance(budget, int) else 0,
    }
    values |= {"images_seen": 64, "flops": 1e9, "seconds": 2.0} if evaluator == "fine_tune" else {}
    return Result(
        evaluator=evaluator, arm=arm, labels_per_class=budget, seed=seed, prediction=found,
        **(results.scored(found) | values | changes),
    )  # fmt: skip


def write_comparison(
    folder: Path,
    rows: Sequence[Result],
    *,
    arms: Sequence[ArmRecord] = ARMS,
    sweeps: Mapping[str, SweepRecord] | None = None,
    missing: Sequence[str] = (),
    skipped: Sequence[SkippedSample] = (),
    **changes: Any,
) -> Path:
    """A finished comparison of these rows, a task per row.

    sweeps: by arm. missing: ids of tasks that have not finished. changes: of the `ComparisonRecord`.
    """
    tasks = [
        TaskRecord(id=f"pretrain-{arm.name}", kind="pretrain", arm=arm.name) for arm in arms if arm.kind == "pretrained"
    ]
    for arm in sweeps or {}:
        tasks.append(
            TaskRecord(
                id=f"sweep-{arm}", kind="sweep", arm=arm, data="digits", evaluator="fine_tune", labels_per_class=5
            )
        )
    by_task: dict[str, Result] = {}
    for one in rows:
        seeds = f"{one.pretraining_seed}-{one.seed}{one.variant}" + f"-fold{one.fold}" * (one.fold > 0)
        name = f"{one.data}-{one.evaluator}-{one.arm}-{one.labels_per_class}-{seeds}"
        by_task[name] = one
        tasks.append(
            TaskRecord(
                id=name,
                kind="measure",
                arm=one.arm,
                data=one.data,
                evaluator=one.evaluator,
                labels_per_class=one.labels_per_class,
                seed=one.seed,
                fold=one.fold,
            )
        )
    kinds: dict[str, Literal["untrained", "pixels"]] = {"untrained": "untrained", "pixels": "pixels"}
    others = [name for name in dict.fromkeys(one.arm for one in rows) if name in kinds]
    record: dict[str, Any] = {
        "name": "c",
        "title": "A comparison",
        "command": "ssl-vit compare c",
        "seeds": tuple(sorted({one.seed for one in rows})),
        "frozen_seeds": tuple(sorted({one.seed for one in rows})),
        "metrics": dict.fromkeys(dict.fromkeys(one.data for one in rows), "accuracy"),
        "data": {"digits test": DataRecord(path="data/test", samples=100, classes=tuple("abcd"))},
        "arms": tuple(arms),
        "references": tuple(ReferenceRecord(name=name, kind=kinds[name], like=arms[0].name) for name in others),
        "evaluators": EVALUATORS,
        "tasks": tuple(task.model_copy(update={"fingerprint": f"f-{task.id}"}) for task in tasks),
    }
    plan = ComparisonRecord(**(record | changes))
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    write_json(folder / "plan.json", plan.model_dump(mode="json"))
    for task in plan.tasks:
        if task.id in missing:
            continue
        result = TaskResult(
            fingerprint=task.fingerprint,
            seconds=20.0 if task.kind == "pretrain" else 2.0,
            run=SUMMARY if task.kind == "pretrain" else None,
            sweep=(sweeps or {})[task.arm] if task.kind == "sweep" else None,
            skipped=tuple(skipped) if task.kind == "measure" else (),
        )
        found = [by_task[task.id]] if task.id in by_task else []
        results.save(folder / "tasks" / f"{task.id}.json", found, **result.model_dump(mode="json"))
    return folder


def write_shards(folder: Path) -> dict[str, DataRecord]:
    """The test images of `prediction` as a shard, each of its own gray. Returns `ComparisonRecord.data`."""
    members = {f"{n:03d}.png": encoded(Image.new("L", (8, 8), 2 * n)) for n in range(107)}
    members |= {f"{n:03d}.cls": b"%d" % ((n - 7) % 4) for n in range(107)}
    write_tar(folder / "000000.tar", sorted(members.items()))
    return {"digits test": DataRecord(path=str(folder), samples=107, classes=("zero", "one", "two", "three"))}


def write_run(folder: Path, name: str, accuracy: float, *, objective: str = "masked_patch", **about: Any) -> Path:
    """A run directory with losses, a recipe and one few-shot evaluation at two seeds."""
    (folder / "results").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("seed: 0\n")
    write_json(folder / "summary.json", SUMMARY.model_copy(update={"name": name, "objective": objective}).model_dump())
    lines = [{"step": n, "loss": 2 / n, "constant_loss": 1.9, "images_seen": 8 * n} for n in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        row(arm, 10, seed, value, evaluator="few_shot")
        for arm, value in (("trained", accuracy), ("pixels", 0.7))
        for seed in (0, 1)
    ]
    settings = {"evaluator": "few_shot", "title": "Few-shot", "settings": {"l2": 1024.0}, "metric": "accuracy"}
    settings |= {"data": {"train": "data/train", "test": "data/test"}, "classes": list("abcd"), "sha256": "unknown"}
    results.save(folder / "results" / "few_shot-1.json", rows, **(settings | about))
    return folder


def two_arms(gain: float = 0.2, *, budgets: Sequence[Budget] = (5, 10), seeds: int = 3, **changes: Any) -> list[Result]:
    """Rows of `ssl` and `scratch`: scratch at 50% and 5 points more per label budget, `ssl` better by `gain`."""
    return [
        row(arm, budget, seed, 0.5 + 0.05 * place + 0.01 * seed + (gain if arm == "ssl" else 0), **changes)
        for arm in ("ssl", "scratch")
        for place, budget in enumerate(budgets)
        for seed in range(seeds)
    ]


SWEEP = SweepRecord(
    candidates=(
        {"optim.lr": 0.1, "held_out_accuracy": 0.9, "held_out_parts": 1},
        {"optim.lr": 0.2, "held_out_accuracy": 0.5, "held_out_parts": 1},
    ),
    best={"optim.lr": 0.1},
    cost=Cost(images_seen=128, flops=2e9, seconds=3.0),
)


def said(folder: Path, rows: Sequence[Result], **changes: Any) -> str:
    """The verdict on a comparison of these rows. changes: see `write_comparison`."""
    comparison = read([write_comparison(folder, rows, **changes)])
    return "\n".join(verdict(comparison, summarize(comparison)))


def summary(folder: Path, rows: Sequence[Result], **changes: Any) -> Summary:
    """Of a comparison of these rows. changes: see `write_comparison`."""
    return summarize(read([write_comparison(folder, rows, **changes)]))
