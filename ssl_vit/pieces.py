"""The independent pieces of a comparison: which there are, what each depends on, and doing one.

A piece (a pretraining, a sweep, one fine-tuning, one evaluation of frozen features) is a file under `pieces/`, named by
what it is and fingerprinted by everything its result depends on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ssl_vit import experiment
from ssl_vit.evaluators import few_shot, fine_tune, knn, linear_probe
from ssl_vit.evaluators.features import Task
from ssl_vit.evaluators.labels import labels_of
from ssl_vit.interfaces import UserError
from ssl_vit.recipe import Comparison, Recipe

_SET_BY_COMPARISON = {
    "few_shot": ("seeds",),
    "knn": ("labels_per_class", "seed"),
    "linear_probe": ("labels_per_class", "seed"),
    "fine_tune": ("labels_per_class", "seeds", "tune_seed"),
}


@dataclass(frozen=True)
class Piece:
    """One independent unit of work. after: ids of the pieces whose results it needs."""

    id: str
    kind: str
    arm: str
    budget: int = 0
    seed: int = 0
    evaluator: str = ""
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A comparison, its arms' training recipes, and where it lives."""

    comparison: Comparison
    recipes: dict[str, Recipe]
    run: Path
    shards: dict[str, str] = field(default_factory=dict)


def pieces(plan: Plan) -> list[Piece]:
    """Every piece of the comparison, each after the ones it needs."""
    c = plan.comparison
    found: list[Piece] = []
    for name, config in c.evaluators.items():
        for key in sorted(config.model_fields_set.intersection(_SET_BY_COMPARISON.get(name, ()))):
            raise UserError(f"evaluators.{name}.{key}: a comparison sets this itself, by seeds and labels_per_class")
    unknown = set(c.evaluators) - {"few_shot", "knn", "linear_probe", "fine_tune"}
    if unknown:
        raise UserError(f"evaluators.{unknown.pop()}: a comparison knows few_shot, knn, linear_probe and fine_tune")
    for arm in c.arms:
        for seed in c.seeds if c.pretrain_per_seed else c.seeds[:1]:
            if arm in plan.recipes:
                found.append(Piece(f"pretrain-{arm}-{seed}", "pretrain", arm, seed=seed))
    first = c.seeds[0]
    for arm in (*c.arms, "untrained", "pixels"):
        if arm in c.arms and "fine_tune" in c.evaluators:
            for budget in tuning_budgets(c):
                needs = _pretrained(plan, arm, first)
                found.append(Piece(f"choose-{arm}-{budget}", "choose", arm, budget, first, "fine_tune", needs))
            for budget in c.labels_per_class:
                for seed in c.seeds:
                    after = (f"choose-{arm}-{_tuned_at(c, budget)}", *_pretrained(plan, arm, seed))
                    found.append(
                        Piece(f"fine_tune-{arm}-{budget}-{seed}", "fine_tune", arm, budget, seed, "fine_tune", after)
                    )
        if arm in plan.recipes or arm not in c.arms:
            for name in c.evaluators:
                if name != "fine_tune":
                    for seed in c.seeds if c.pretrain_per_seed and arm in plan.recipes else (first,):
                        after = _pretrained(plan, arm, seed)
                        found.append(
                            Piece(f"{name}-{arm}-{seed}", "features", arm, seed=seed, evaluator=name, after=after)
                        )
    return found


def tuning_budgets(c: Comparison) -> tuple[int, ...]:
    """The label budgets at which each arm's sweep runs: one for all where the recipe names it, else every budget."""
    return tuple(dict.fromkeys(_tuned_at(c, budget) for budget in c.labels_per_class))


def _tuned_at(c: Comparison, budget: int) -> int:
    config = c.evaluators["fine_tune"]
    assert isinstance(config, fine_tune.Config)
    return config.tune_labels_per_class or budget


def _pretrained(plan: Plan, arm: str, seed: int) -> tuple[str, ...]:
    if arm not in plan.recipes:
        return ()
    return (f"pretrain-{arm}-{seed if plan.comparison.pretrain_per_seed else plan.comparison.seeds[0]}",)


def arm_run(plan: Plan, arm: str, seed: int) -> Path:
    """The run directory of an arm's pretraining."""
    return plan.run / (f"{arm}_seed{seed}" if plan.comparison.pretrain_per_seed else arm)


def run_piece(plan: Plan, piece: Piece) -> dict[str, Any]:
    """Do one piece and return its result; raises UserError or RunError as training and evaluation do."""
    c = plan.comparison
    if piece.kind == "pretrain":
        run = arm_run(plan, piece.arm, piece.seed)
        settings = plan.recipes[piece.arm]
        seed = piece.seed if c.pretrain_per_seed else settings.seed
        outcome = experiment.train(settings.model_copy(update={"run": str(run), "seed": seed}))
        if not outcome.finished:
            raise KeyboardInterrupt
        return dict(experiment.read_json(run / "summary.json"))
    task = _task(plan, piece)
    start = time.perf_counter()
    if piece.kind == "features":
        rows = list(_feature_rows(plan, piece, task))
        return {"rows": rows, "seconds": time.perf_counter() - start, "skipped": task.skipped_names()}
    config = c.evaluators["fine_tune"].model_copy(update={"labels_per_class": piece.budget, "tune_seed": c.seeds[0]})
    assert isinstance(config, fine_tune.Config)
    source = "trained" if piece.arm in plan.recipes else "untrained"
    labels = labels_of(task.train)
    if piece.kind == "choose":
        found = fine_tune.sweep(task, source, labels, config)
        winner = asdict(found.measured) if found.measured else None
        cost = {"images_seen": sum(row["steps"] for row in found.rows) * config.batch_size}
        cost["seconds"] = round(time.perf_counter() - start, 2)
        skipped = task.skipped_names()
        return {"tried": found.rows, "chosen": found.chosen, "winner": winner, "cost": cost, "skipped": skipped}
    choice = read(plan, f"choose-{piece.arm}-{_tuned_at(c, piece.budget)}")
    if piece.seed == config.tune_seed and choice["winner"]:
        measured = fine_tune.Measured(**choice["winner"])  # the sweep has trained this very run already
    else:
        measured = fine_tune.measure(task, source, labels, config, choice["chosen"], piece.seed)
    row = {"arm": piece.arm, "evaluator": "fine_tune", "labels_per_class": piece.budget, "seed": piece.seed}
    return {"rows": [{**row, **asdict(measured)}], "skipped": task.skipped_names()}


def _task(plan: Plan, piece: Piece) -> Task:
    like = plan.recipes.get(piece.arm) or next(iter(plan.recipes.values()))
    weights = arm_run(plan, piece.arm, piece.seed) if piece.arm in plan.recipes else None
    data = plan.comparison.data
    torch.manual_seed(like.seed)
    return experiment.make_task(weights, like, data.train, data.test, seed=piece.seed)


def _feature_rows(plan: Plan, piece: Piece, task: Task) -> Iterator[dict[str, Any]]:
    """Accuracies of an evaluator on frozen features, for every budget and seed."""
    c, config = plan.comparison, plan.comparison.evaluators[piece.evaluator]
    seeds = (piece.seed,) if c.pretrain_per_seed and piece.arm in plan.recipes else c.seeds
    source = piece.arm if piece.arm == "pixels" else "trained"
    pooling = config.pooling  # type: ignore[attr-defined]
    test = task.features(source, "test", pooling)

    def row(budget: int, seed: int, accuracy: float) -> dict[str, Any]:
        names = {"arm": piece.arm, "evaluator": piece.evaluator, "labels_per_class": budget, "seed": seed}
        return {**names, "accuracy": accuracy}

    if isinstance(config, few_shot.Config):
        train = task.features(source, "train", pooling)
        accuracies = few_shot.few_shot_accuracy(
            train.vectors, train.labels, test.vectors, test.labels, shots=config.shots, seeds=seeds, l2=config.l2
        )
        yield from (row(shots, seed, accuracy) for (shots, seed), accuracy in accuracies.items())
        return
    for budget in c.labels_per_class:
        for seed in seeds:
            few = task.labelled_features(source, pooling, budget, seed)
            arrays = (few.vectors, few.labels, test.vectors, test.labels)
            if isinstance(config, knn.Config):
                k = config.ks[0]
                yield row(budget, seed, knn.knn_accuracy(*arrays, ks=(k,), temperature=config.temperature)[k])
            else:
                assert isinstance(config, linear_probe.Config)
                accuracy, _ = linear_probe.probe_accuracy(
                    *arrays, cs=config.cs, held_out=config.held_out, seed=seed, max_iterations=config.max_iterations
                )
                yield row(budget, seed, accuracy)


def _fingerprint(plan: Plan, piece: Piece) -> str:
    """A hash of everything a piece's result depends on, and of nothing else, so that what is finished is reused."""
    c = plan.comparison
    settings = plan.recipes.get(piece.arm)
    # Without pretraining only the architecture and the preparation of the images matter; how often a run logs, never.
    like = (settings or next(iter(plan.recipes.values()))).model_dump(
        mode="json", include=None if settings else {"backbone", "data", "seed"}
    )
    for room, key in (path.split(".") for path in experiment.MAY_CHANGE if "." in path):
        like.get(room, {}).pop(key, None)
    content = {
        "format": 2,  # of the results below
        "recipe": {key: value for key, value in like.items() if key not in ("run", "name")},
        "shards": plan.shards,
        "per_seed": c.pretrain_per_seed,
    }
    if piece.kind != "pretrain":
        content["evaluator"] = c.evaluators[piece.evaluator].model_dump(mode="json")
        content["seeds"] = c.seeds if piece.kind == "features" else c.seeds[:1]
        content["budgets"] = c.labels_per_class if piece.kind == "features" else piece.budget
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _path(plan: Plan, identifier: str) -> Path:
    return plan.run / "pieces" / f"{identifier}.json"


def read(plan: Plan, identifier: str) -> dict[str, Any]:
    return dict(experiment.read_json(_path(plan, identifier))["result"])


def is_done(plan: Plan, piece: Piece) -> bool:
    path = _path(plan, piece.id)
    return path.exists() and experiment.read_json(path)["fingerprint"] == _fingerprint(plan, piece)


def do(plan: Plan, piece: Piece) -> str:
    """Run a piece and store its result, in whichever process this is; returns its id."""
    result = run_piece(plan, piece)
    if experiment.is_main_process():
        path = _path(plan, piece.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        experiment.write_json(path, {"id": piece.id, "fingerprint": _fingerprint(plan, piece), "result": result})
    experiment.wait_for_everyone()  # what comes next may read it
    return piece.id
