"""Arms x seeds x label budgets: running the pieces that are missing and putting the results together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch

from ssl_vit import experiment, plugins
from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.environment import environment
from ssl_vit.interfaces import UserError
from ssl_vit.pieces import Piece, Plan, arm_run, do, is_done, pieces, read, tuning_budgets
from ssl_vit.recipe import Comparison, Recipe, save
from ssl_vit.report.tables import summarise

Say = Callable[[str], None]


def compare(comparison: Comparison, recipes: dict[str, Recipe], command: str, say: Say = print) -> dict[str, Any]:
    """Run what is missing and return (and write) the comparison's results.

    Raises UserError when an arm cannot run, before the long work wherever that can be seen.
    """
    if not recipes:
        raise UserError(f"{comparison.name}: no arm has a recipe, so there is nothing to compare with scratch")
    if comparison.jobs > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("jobs: several processes were launched, which share every piece; set jobs=1")
    run = comparison.run_directory
    opened = {name: open_shards(path) for name, path in comparison.data.model_dump().items() if path}
    fingerprints = {name: shards.fingerprint for name, shards in opened.items()}
    fingerprints |= {
        f"{arm}.data.train": open_shards(settings.data.train).fingerprint for arm, settings in recipes.items()
    }
    plan = Plan(comparison, recipes, run, fingerprints)
    try:
        run.mkdir(parents=True, exist_ok=True)
        save(comparison, run / "comparison.yaml")
    except OSError as error:
        raise UserError(f"run={run}: cannot write there: {error}") from None
    todo = pieces(plan)
    missing = [piece for piece in todo if not is_done(plan, piece)]
    say(f"{comparison.name}: {len(todo)} pieces, {len(todo) - len(missing)} of them done before")
    _run_all(plan, missing, say)
    results = collect(plan, todo, opened, command)
    if experiment.is_main_process():
        experiment.write_json(run / "results.json", results)
    return results


def _run_all(plan: Plan, missing: list[Piece], say: Say) -> None:
    jobs = plan.comparison.jobs
    if jobs == 1:
        for number, piece in enumerate(missing, 1):
            do(plan, piece)
            say(f"[{number}/{len(missing)}] {piece.id}")
        return
    # Small models are bound by overhead: several processes of one thread each use the cores better than one of many.
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_init_worker, initargs=(os.getpid(),)) as pool:
        try:
            _schedule(pool, plan, missing, say)
        except BaseException:  # Ctrl-C too: what runs saves and stops, instead of being waited for to its end
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _schedule(pool: ProcessPoolExecutor, plan: Plan, missing: list[Piece], say: Say) -> None:
    """Keep the pool's processes busy with pieces whose needs are done."""
    waiting, open_ids, running = list(missing), {p.id for p in missing}, dict[Future[str], Piece]()
    while waiting or running:
        ready = [piece for piece in waiting if not open_ids.intersection(piece.after)]
        for piece in ready[: plan.comparison.jobs - len(running)]:
            waiting.remove(piece)
            running[pool.submit(_do, plan, piece, os.getpid())] = piece
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            piece = running.pop(future)
            future.result()
            open_ids.discard(piece.id)
            say(f"[{len(missing) - len(open_ids)}/{len(missing)}] {piece.id}")


def _init_worker(parent: int) -> None:
    """One thread a process where there are as many processes as cores; and no process outlives the comparison."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    threading.Thread(target=_stop_without, args=(parent,), daemon=True).start()


def _stop_without(parent: int) -> None:
    """Ask this process to save and stop once its parent is gone, killed or not."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def _do(plan: Plan, piece: Piece, parent: int) -> str:
    try:
        return do(plan, piece)
    finally:
        if os.getppid() != parent:
            os._exit(1)  # nobody is left to take the result, and the pool would wait for its next piece for ever


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
            row for piece in todo if piece.kind in ("fine_tune", "features") for row in read(plan, piece.id)["rows"]
        ],
        "jobs": c.jobs,
        "skipped": _skipped(plan, todo),
        "evaluators": {name: config.model_dump(mode="json") for name, config in c.evaluators.items()},
        "environment": environment(),
    }
    results["summary"] = summarise(results)
    return results


def _arm(plan: Plan, arm: str) -> dict[str, Any]:
    c = plan.comparison
    settings, first = plan.recipes.get(arm), c.seeds[0]
    pretraining = read(plan, f"pretrain-{arm}-{first}") if settings else None
    module = plugins.load("objectives", settings.objective.name) if settings else None  # type: ignore[attr-defined]
    uses_labels = getattr(module.Objective, "needs_labels", False) if module else False
    choices, costs = [], []
    if "fine_tune" in c.evaluators:
        for budget in tuning_budgets(c):
            choice = read(plan, f"choose-{arm}-{budget}")
            choices.append({"labels_per_class": budget, "tried": choice["tried"], "chosen": choice["chosen"]})
            costs.append(choice["cost"])
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
        "tuning": {name: sum(cost[name] for cost in costs) for name in ("images_seen", "seconds")} if costs else None,
    }


def _skipped(plan: Plan, todo: list[Piece]) -> list[dict[str, str]]:
    """Every sample that some evaluation or fine-tuning could not read, once."""
    found = [skip for piece in todo for skip in read(plan, piece.id).get("skipped", [])]
    return list({(skip["shard"], skip["key"]): skip for skip in found}.values())


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
