"""Arms x seeds x label budgets: which pieces there are, running the missing ones, and putting the results together.

A piece (a pretraining, a sweep, one fine-tuning, one evaluation of frozen features) is a file under `pieces/`, named by
what it is and fingerprinted by everything it depends on: a repeated command runs only what is missing.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ssl_vit import experiment
from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.evaluators import few_shot, fine_tune, knn, linear_probe
from ssl_vit.evaluators.features import Task, labels_of
from ssl_vit.interfaces import UserError
from ssl_vit.recipe import Comparison, Recipe, save
from ssl_vit.report.tables import summarise

Say = Callable[[str], None]


@dataclass(frozen=True)
class Piece:
    """One independent unit of work. after: ids of the pieces whose results it needs. key: what it depends on."""

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
    c, found = plan.comparison, []
    for arm in c.arms:
        for seed in c.seeds if c.pretrain_per_seed else c.seeds[:1]:
            if arm in plan.recipes:
                found.append(Piece(f"pretrain-{arm}-{seed}", "pretrain", arm, seed=seed))
    first = c.seeds[0]
    for arm in (*c.arms, "untrained", "pixels"):
        if arm in c.arms and "fine_tune" in c.evaluators:
            for budget in c.labels_per_class:
                choice = Piece(
                    f"choose-{arm}-{budget}", "choose", arm, budget, first, after=_pretrained(plan, arm, first)
                )
                found.append(choice)
                for seed in c.seeds:
                    after = (choice.id, *_pretrained(plan, arm, seed))
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
        return {"rows": rows, "seconds": time.perf_counter() - start}
    config = c.evaluators["fine_tune"].model_copy(update={"labels_per_class": piece.budget, "tune_seed": c.seeds[0]})
    assert isinstance(config, fine_tune.Config)
    source = "trained" if piece.arm in plan.recipes else "untrained"
    labels = labels_of(task.train)
    if piece.kind == "choose":
        tried = fine_tune.sweep(task, source, labels, config)
        return {"tried": tried, "chosen": fine_tune.best(tried), "seconds": time.perf_counter() - start}
    chosen = _read(plan, f"choose-{piece.arm}-{piece.budget}")["chosen"]
    train, _ = fine_tune.labelled(labels, config, piece.seed)
    measured = fine_tune.fine_tune(
        task, source, config, chosen["lr"], chosen["steps"], piece.seed, train, (task.test, None)
    )
    row = {"arm": piece.arm, "evaluator": "fine_tune", "labels_per_class": piece.budget, "seed": piece.seed}
    cost = {"images_seen": measured.images_seen, "seconds": round(measured.seconds, 2)}
    return {"rows": [{**row, "accuracy": measured.accuracy, **cost}]}


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
    train, test = (task.features(source, split, config.pooling) for split in ("train", "test"))  # type: ignore[attr-defined]
    arrays = (train.vectors, train.labels, test.vectors, test.labels)

    def row(budget: int, seed: int, accuracy: float) -> dict[str, Any]:
        names = {"arm": piece.arm, "evaluator": piece.evaluator, "labels_per_class": budget, "seed": seed}
        return {**names, "accuracy": accuracy}

    if isinstance(config, few_shot.Config):
        accuracies = few_shot.few_shot_accuracy(*arrays, shots=config.shots, seeds=seeds, l2=config.l2)
        yield from (row(shots, seed, accuracy) for (shots, seed), accuracy in accuracies.items())
        return
    for budget in c.labels_per_class:
        for seed in seeds:
            chosen = few_shot.choose_shots(train.labels, budget, seed)
            few = (train.vectors[chosen], train.labels[chosen], test.vectors, test.labels)
            if isinstance(config, knn.Config):
                k = config.ks[0]
                yield row(budget, seed, knn.knn_accuracy(*few, ks=(k,), temperature=config.temperature)[k])
            elif isinstance(config, linear_probe.Config):
                accuracy, _ = linear_probe.probe_accuracy(
                    *few, cs=config.cs, held_out=config.held_out, seed=seed, max_iterations=config.max_iterations
                )
                yield row(budget, seed, accuracy)
            else:
                raise UserError(
                    f"evaluators.{piece.evaluator}: a comparison knows few_shot, knn, linear_probe, fine_tune"
                )


def _fingerprint(plan: Plan, piece: Piece) -> str:
    """A hash of everything a piece's result depends on."""
    c = plan.comparison
    recipe = plan.recipes.get(piece.arm) or next(iter(plan.recipes.values()))
    content = {
        "recipe": recipe.model_dump(mode="json"),
        "evaluator": c.evaluators[piece.evaluator or "fine_tune"].model_dump(mode="json")
        if (piece.evaluator or "fine_tune") in c.evaluators and piece.kind != "pretrain"
        else None,
        "seeds": c.seeds,
        "budgets": c.labels_per_class if piece.kind == "features" else piece.budget,
        "shards": plan.shards,
        "per_seed": c.pretrain_per_seed,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _path(plan: Plan, identifier: str) -> Path:
    return plan.run / "pieces" / f"{identifier}.json"


def _read(plan: Plan, identifier: str) -> dict[str, Any]:
    return dict(experiment.read_json(_path(plan, identifier))["result"])


def _is_done(plan: Plan, piece: Piece) -> bool:
    path = _path(plan, piece.id)
    return path.exists() and experiment.read_json(path)["fingerprint"] == _fingerprint(plan, piece)


def _do(plan: Plan, piece: Piece) -> str:
    """Run a piece and store its result (in whichever process this is)."""
    result = run_piece(plan, piece)
    path = _path(plan, piece.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    experiment.write_json(path, {"id": piece.id, "fingerprint": _fingerprint(plan, piece), "result": result})
    return piece.id


def compare(comparison: Comparison, recipes: dict[str, Recipe], command: str, say: Say = print) -> dict[str, Any]:
    """Run what is missing and return (and write) the comparison's results.

    Raises UserError when an arm cannot run, before the long work wherever that can be seen.
    """
    if not recipes:
        raise UserError(f"{comparison.name}: no arm has a recipe, so there is nothing to compare with scratch")
    run = comparison.run_directory
    opened = {name: open_shards(path) for name, path in comparison.data.model_dump().items() if path}
    fingerprints = {name: f"{shards.spec}:{shards.counts}" for name, shards in opened.items()}
    plan = Plan(comparison, recipes, run, fingerprints)
    try:
        run.mkdir(parents=True, exist_ok=True)
        save(comparison, run / "comparison.yaml")
    except OSError as error:
        raise UserError(f"run={run}: cannot write there: {error}") from None
    todo = pieces(plan)
    missing = [piece for piece in todo if not _is_done(plan, piece)]
    say(f"{comparison.name}: {len(todo)} pieces, {len(todo) - len(missing)} of them done before")
    _run_all(plan, missing, say)
    results = collect(plan, todo, opened, command)
    experiment.write_json(run / "results.json", results)
    return results


def _run_all(plan: Plan, missing: list[Piece], say: Say) -> None:
    waiting, open_ids, total, jobs = list(missing), {p.id for p in missing}, len(missing), plan.comparison.jobs
    if jobs == 1:
        for number, piece in enumerate(missing, 1):
            _do(plan, piece)
            say(f"[{number}/{total}] {piece.id}")
        return
    # Small models are bound by overhead: several processes of one thread each use the cores better than one of many.
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_init_worker) as pool:
        running: dict[Future[str], Piece] = {}
        while waiting or running:
            ready = [piece for piece in waiting if not open_ids.intersection(piece.after)]
            for piece in ready[: jobs - len(running)]:
                waiting.remove(piece)
                running[pool.submit(_do, plan, piece)] = piece
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                piece = running.pop(future)
                future.result()
                open_ids.discard(piece.id)
                say(f"[{total - len(open_ids)}/{total}] {piece.id}")


def _init_worker() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def collect(plan: Plan, todo: list[Piece], opened: dict[str, ShardSet], command: str) -> dict[str, Any]:
    """Everything measured, with its settings, costs and summary, as one JSON document (`results.json`)."""
    c = plan.comparison
    results: dict[str, Any] = {
        "kind": "comparison",
        "name": c.name,
        "title": c.title or c.name,
        "command": command,
        "finished": True,
        "data": {name: _describe(shards) for name, shards in opened.items()},
        "labels_per_class": list(c.labels_per_class),
        "seeds": list(c.seeds),
        "seeds_vary": _seeds_vary(c),
        "notes": list(c.notes),
        "arms": [_arm(plan, arm) for arm in c.arms],
        "measurements": [
            row for piece in todo if piece.kind in ("fine_tune", "features") for row in _read(plan, piece.id)["rows"]
        ],
        "evaluators": {name: config.model_dump(mode="json") for name, config in c.evaluators.items()},
        "environment": experiment.environment(),
    }
    results["summary"] = summarise(results)
    return results


def _arm(plan: Plan, arm: str) -> dict[str, Any]:
    c = plan.comparison
    settings, first = plan.recipes.get(arm), c.seeds[0]
    pretraining = _read(plan, f"pretrain-{arm}-{first}") if settings else None
    uses_labels = bool(settings) and settings.objective.name != "masked_patch"  # type: ignore[union-attr]
    choices = []
    if "fine_tune" in c.evaluators:
        for budget in c.labels_per_class:
            choice = _read(plan, f"choose-{arm}-{budget}")
            choices.append({"labels_per_class": budget, "tried": choice["tried"], "chosen": choice["chosen"]})
    return {
        "name": arm,
        "label": c.arms[arm].label,
        "run": arm_run(plan, arm, first).name if settings else None,
        "objective": settings.objective.name if settings else None,  # type: ignore[attr-defined]
        "labels_used": pretraining["samples"] if uses_labels and pretraining else 0,
        "pretraining": {k: pretraining[k] for k in ("steps", "images_seen", "seconds", "parameters")}
        if pretraining
        else None,
        "choices": choices,
    }


def _describe(shards: ShardSet) -> dict[str, Any]:
    classes = len(shards.classes) if shards.classes else None
    return {"path": shards.spec, "samples": shards.samples, "classes": classes, "source": shards.source}


def _seeds_vary(c: Comparison) -> str:
    shared = "which images are labelled, the head's initialisation, the order and augmentation of the images"
    if c.pretrain_per_seed:
        return f"A seed changes the pretraining as a whole, {shared}."
    return (
        f"A seed changes {shared}, and the whole initialisation of the scratch arm; each pretraining ran once and "
        "serves all seeds, so the intervals do not contain the variation between pretrainings."
    )
