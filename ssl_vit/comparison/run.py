"""Running the pieces of a comparison that are missing: all of them, here or in several processes, or a single one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ssl_vit import plugins, runs, stage
from ssl_vit.comparison.config import ONLY, DataSet, Study
from ssl_vit.comparison.plan import Piece, Plan
from ssl_vit.comparison.suites import prepare
from ssl_vit.comparison.work import do, is_done, pretraining_of
from ssl_vit.data.shards import ShardSet, check_same_classes, open_shards, open_training
from ssl_vit.environment import environment
from ssl_vit.evaluators.context import silent
from ssl_vit.files import read_json, write_json
from ssl_vit.interfaces import UserError
from ssl_vit.recipe import save
from ssl_vit.report.merge import PLAN, merge, update
from ssl_vit.runs import is_main_process
from ssl_vit.training import distributed
from ssl_vit.training.distributed import make_accelerator

Say = Callable[[str], None]


def look(study: Study, sets: dict[str, DataSet]) -> tuple[Plan, dict[tuple[str, str], ShardSet], dict[str, ShardSet]]:
    """The plan of a study on these sets, their shards by (set, part), and the arms' pretraining shards; writes nothing.

    Raises UserError for shards that cannot be opened and arms that cannot run, wherever that can be seen beforehand.
    """
    _check_directory(study)
    remote = next(iter(study.recipes.values())).data.remote if study.recipes else None
    opened = {
        (name, part): open_shards(path, *([remote] if remote else []))
        for name, chosen in sets.items()
        for part, path in (("train", str(chosen.train)), ("test", str(chosen.test)))
    }
    for name, chosen in sets.items():
        train, test = opened[name, "train"].classes, opened[name, "test"].classes
        check_same_classes(train, test, f"{chosen.train} and {chosen.test}")
    pretraining = {arm: open_training(r.data) for arm, r in study.recipes.items()}
    for arm, found in pretraining.items():
        try:
            stage.check(study.recipes[arm], found)
        except UserError as error:
            raise UserError(f"arms.{arm}: {error}") from None
    shards = {f"{name} {part}": found.fingerprint for (name, part), found in opened.items()}
    shards |= {f"{arm} pretrain": found.fingerprint for arm, found in pretraining.items()}
    plan = Plan(study, study.comparison.run_directory, sets, shards)
    for piece in plan.pieces:
        if piece.kind == "pretrain" and not is_done(plan, piece):
            settings = pretraining_of(plan, piece)
            runs.check(settings.run_directory, settings, pretraining[piece.arm].fingerprint)
    return plan, opened, pretraining


def _check_directory(study: Study) -> None:
    """Raises UserError where the comparison's directory holds something else."""
    run, name = study.comparison.run_directory, study.comparison.name
    held = "a training run" if (run / "recipe.yaml").is_file() else ""
    if (run / PLAN).is_file():
        try:
            other = read_json(run / PLAN)["header"]["name"]
        except (UserError, LookupError, TypeError):
            other = f"whose {PLAN} cannot be read"
        held = "" if other == name else f"the comparison {other}"
    if held:
        raise UserError(f"{run} holds {held}: give this comparison another directory with run=PATH")


def open_plan(study: Study, command: str, say: Say = print) -> Plan:
    """The plan of a study, its data sets packed and opened; written down (`comparison.yaml`, `plan.json`) for `report`.

    Raises UserError as `look` does.
    """
    c = study.comparison
    _check_directory(study)
    plan, opened, pretraining = look(study, prepare(study.sets, study.folder, say if is_main_process() else silent))
    content = _written(plan, opened, pretraining, command)
    if is_main_process():
        try:
            plan.run.mkdir(parents=True, exist_ok=True)
            save(c, plan.run / "comparison.yaml")
            write_json(plan.run / PLAN, content)
        except OSError as error:
            raise UserError(f"run={plan.run}: cannot write there: {error}") from None
    return plan


def compare(study: Study, command: str, say: Say = print) -> dict[str, Any]:
    """Run what is missing and return (and write) the comparison's results. Raises UserError as `open_plan` does."""
    jobs = study.comparison.jobs
    if jobs > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("jobs: several processes were launched, which share every piece; set jobs=1")
    plan = open_plan(study, command, say)
    make_accelerator()  # the launched processes must agree from here on
    undone = distributed.gather([piece.id for piece in plan.pieces if not is_done(plan, piece)])[0]
    missing = [piece for piece in plan.pieces if piece.id in undone]
    say(f"{study.comparison.name}: {len(plan.pieces)} pieces, {len(plan.pieces) - len(missing)} of them done before")
    begun = environment() if missing else None  # now: the checkout may change before the end
    clock = _Clock(missing, jobs, say)
    if jobs == 1:
        for piece in missing:
            start = time.monotonic()
            do(plan, piece)
            clock.done(piece, time.monotonic() - start)
    elif missing:
        _run_in_processes(plan, missing, jobs, clock)
    return update(plan.run, begun) if is_main_process() else merge([plan.run])


def run_only(plan: Plan, identifier: str, say: Say = print) -> None:
    """Run one piece, and before it those it needs that nobody has done; wait for those that another job is doing.

    Raises UserError for an id that the comparison does not have.
    """
    piece = next((piece for piece in plan.pieces if piece.id == identifier), None)
    if piece is None:
        raise UserError(f"{identifier}: no such piece; `ssl-vit compare RECIPE --list` prints the ids")
    if is_done(plan, piece):
        say(f"{piece.id}: done before")
        return
    for need in piece.after:
        run_only(plan, need, say)
    do(plan, piece)
    say(f"{piece.id}: done")


class _Clock:
    """Says which piece is done, how long all have taken, and how long the others may take: as pieces of their kind did,
    once there was one of every kind that is left."""

    def __init__(self, missing: list[Piece], jobs: int, say: Say) -> None:
        self.left, self.count, self.jobs, self.say = list(missing), len(missing), jobs, say
        self.took: dict[tuple[str, str], list[float]] = {}
        self.start = time.monotonic()

    def done(self, piece: Piece, seconds: float) -> None:
        self.left.remove(piece)
        self.took.setdefault((piece.kind, piece.evaluator), []).append(seconds)
        spent = timedelta(seconds=round(time.monotonic() - self.start))
        kinds = [self.took.get((other.kind, other.evaluator)) for other in self.left]
        expected = sum(statistics.fmean(times) for times in kinds if times) / self.jobs
        left = f", about {timedelta(seconds=round(expected))} left" if self.left and all(kinds) else ""
        self.say(f"[{self.count - len(self.left)}/{self.count}] {piece.id}  ({spent}{left})")


def stages(plan: Plan) -> dict[str, int]:
    """By id: 0 for a piece that needs none, else one more than the latest it needs. Pieces of one stage are
    independent of each other."""
    found: dict[str, int] = {}
    for piece in plan.pieces:
        found[piece.id] = 1 + max((found[need] for need in piece.after), default=-1)
    return found


def _run_in_processes(plan: Plan, missing: list[Piece], jobs: int, clock: _Clock) -> None:
    # Small models are bound by overhead: several processes of one thread each use the cores better than one of many.
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    context = multiprocessing.get_context("spawn")
    stopping = context.Event()
    begin = (os.getpid(), stopping)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_init_worker, initargs=begin) as pool:
        try:
            _schedule(pool, plan, missing, clock)
        except BaseException:  # Ctrl-C too: what runs saves and stops, instead of being waited for to its end
            stopping.set()
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _schedule(pool: ProcessPoolExecutor, plan: Plan, missing: list[Piece], clock: _Clock) -> None:
    """Keep the pool's processes busy with pieces whose needs are done."""
    waiting, open_ids, running = list(missing), {p.id for p in missing}, dict[Future[str], tuple[Piece, float]]()
    while waiting or running:
        ready = [piece for piece in waiting if not open_ids.intersection(piece.after)]
        for piece in ready[: plan.study.comparison.jobs - len(running)]:
            waiting.remove(piece)
            running[pool.submit(_do, plan, piece, os.getpid())] = piece, time.monotonic()
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            piece, start = running.pop(future)
            future.result()
            open_ids.discard(piece.id)
            clock.done(piece, time.monotonic() - start)


_stopping: Any = None  # in a worker: set once the comparison ends early


def _init_worker(parent: int, stopping: Any) -> None:
    """One thread a process where there are as many processes as cores; and no process outlives the comparison."""
    global _stopping
    _stopping = stopping
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
        if os.getppid() != parent or _stopping.is_set():
            os._exit(1)  # nobody is left to take the result, and the pool would wait for its next piece for ever


def _written(
    plan: Plan, opened: dict[tuple[str, str], ShardSet], pretraining: dict[str, ShardSet], command: str
) -> dict[str, Any]:
    """What `report` must know of a comparison besides its pieces' results."""
    c = plan.study.comparison
    data = {part if name == ONLY else f"{name} {part}": _describe(shards) for (name, part), shards in opened.items()}
    known = {shards.fingerprint for shards in opened.values()}
    for arm, shards in pretraining.items():
        if shards.fingerprint not in known:
            known.add(shards.fingerprint)
            data[f"pretraining of {arm}"] = _describe(shards)
    judges = {name: judge for judged in plan.evaluators.values() for name, judge in judged.items()}
    return {
        "header": {
            "name": c.name,
            "title": c.title or c.name,
            "command": command,
            "data": data,
            "sets": {
                name: {"metric": chosen.metric, "classes": _classes(opened[name, "test"])}
                for name, chosen in plan.sets.items()
            },
            "labels_per_class": list(c.labels_per_class),
            "seeds": list(c.seeds),
            "seeds_vary": _seeds_vary(plan),
            "notes": list(c.notes),
            "jobs": c.jobs,
            "study": c.study,
            "evaluators": {
                name: {
                    "title": judge.title,
                    "trains_encoder": judge.trains_encoder,
                    "settings": {
                        data: judged[name].config.model_dump(mode="json") for data, judged in plan.evaluators.items()
                    },
                }
                for name, judge in judges.items()
            },
        },
        "arms": [_arm(plan, arm) for arm in c.arms],
        "references": {name: plan.architecture(name) for name in plan.references},
        "pieces": [
            {key: getattr(piece, key) for key in ("id", "kind", "arm", "data", "evaluator", "budget", "seed")}
            | {"fingerprint": plan.fingerprint(piece)}
            for piece in plan.pieces
        ],
    }


def _arm(plan: Plan, arm: str) -> dict[str, Any]:
    c = plan.study.comparison
    settings = plan.settings.get(arm)
    needs_labels = False
    if settings:
        module = plugins.load("objectives", settings.objective.name)  # type: ignore[attr-defined]
        needs_labels = getattr(module.Objective, "needs_labels", False)
    weights = plan.weights(arm, c.seeds[0])
    given = c.arms[arm].weights
    begun = settings.init_from if settings else None
    path = Path(given or "") / "summary.json"
    summary = read_json(path) if given and path.is_file() else None
    return {
        "name": arm,
        "label": c.arms[arm].label,
        "series": c.arms[arm].series,
        "run": given or (weights.name if weights else None),
        "objective": settings.objective.name if settings else None,  # type: ignore[attr-defined]
        "architecture": plan.architecture(arm),
        "needs_labels": needs_labels,
        "summary": summary,
        # Weights whose making nothing here tells of: those given without a run, and those a training began with.
        "starts_from": given if given and not summary else begun,
    }


def _describe(shards: ShardSet) -> dict[str, Any]:
    return {"path": shards.spec, "samples": shards.samples, "classes": _classes(shards), "source": shards.source}


def _classes(shards: ShardSet) -> int | None:
    return len(shards.classes) if shards.classes else None


def _seeds_vary(plan: Plan) -> str:
    c = plan.study.comparison
    shared = "which images are labeled, the head's initialization, the order and augmentation of the images"
    if c.pretrain_per_seed and plan.study.recipes:
        whole = f"A seed changes the pretraining and the untrained encoder as a whole, {shared}"
        return f"{whole}; the intervals do not contain the choice of test images."
    scratch = ", and the whole initialization of what is trained from scratch" * (len(c.arms) > len(plan.with_encoder))
    return (
        f"A seed changes {shared}{scratch}; each pretraining ran once and serves all seeds, so the intervals do not "
        "contain the variation between pretrainings, nor the choice of test images."
    )
