"""Does one task of a comparison and stores its result."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ssl_vit import execution, records, results
from ssl_vit.analysis import inspection
from ssl_vit.analysis.loaded import Loaded
from ssl_vit.comparison.plan import Plan
from ssl_vit.data import DataConfig
from ssl_vit.environment import environment
from ssl_vit.evaluators import runner
from ssl_vit.evaluators.features import EvalContext
from ssl_vit.evaluators.parts import UNFINISHED, Parts
from ssl_vit.files import read_json
from ssl_vit.interfaces import UserError, is_main_process, world_size
from ssl_vit.models import factory
from ssl_vit.models.vit import ViTEncoder
from ssl_vit.progress import progress_bar
from ssl_vit.records import RunSummary, TaskRecord, TaskResult
from ssl_vit.results import Result
from ssl_vit.runs import SUMMARY
from ssl_vit.training import distributed
from ssl_vit.training.memory import out_of_memory

TASKS, PICTURES = "tasks", "pictures"
_TRY = 5  # seconds


def path_of(plan: Plan, task: TaskRecord) -> Path:
    return plan.run / TASKS / f"{task.id}.json"


def is_done(plan: Plan, task: TaskRecord) -> bool:
    """Whether the result is on disk, undamaged, and has the fingerprint of the current plan."""
    return results.finished(path_of(plan, task), task.fingerprint) is not None


def do(plan: Plan, task: TaskRecord) -> None:
    """Run a task, unless another job has done it meanwhile, and store its result.

    Raises UserError, RunError or Stopped as training and evaluation do.
    """
    path = path_of(plan, task)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _one_job(path.with_name(f".{task.id}.lock")):
        if not distributed.from_main(is_done(plan, task)):
            start = time.perf_counter()
            with out_of_memory(lambda: "lower jobs"):
                rows, about = _run(plan, task)
            with distributed.shared_errors(f"{path}: cannot write"):  # the next task may read the result
                if is_main_process():
                    result = TaskResult(
                        fingerprint=task.fingerprint,
                        processes=world_size(),
                        environment={key: value for key, value in environment().items() if key != "started"},
                        seconds=round(time.perf_counter() - start + about.pop("earlier_seconds", 0.0), 2),
                        **about,
                    )
                    results.save(path, rows, **result.model_dump(mode="json"))
                    shutil.rmtree(path.with_suffix(UNFINISHED), ignore_errors=True)


@contextmanager
def _one_job(path: Path) -> Iterator[None]:
    """Other jobs of the comparison wait for this one; the processes of one job do the task together."""
    lock = FileLock(path)

    def locked() -> bool:
        try:
            lock.acquire(timeout=_TRY)
        except Timeout:
            return False
        return True

    waiting = False
    while not distributed.from_main(is_main_process() and locked()):  # one long wait would make the others give up
        if is_main_process() and not waiting:
            print(f"another process is running this task: waiting (if there is none, delete {path})", file=sys.stderr)
        waiting = True
    try:
        yield
    finally:
        lock.release()


def _run(plan: Plan, task: TaskRecord) -> tuple[list[Result], dict[str, Any]]:
    """The rows of a task and the other fields of its `TaskResult`."""
    if task.kind == "pretrain":
        return [], {"run": records.read(execution.train(plan.pretraining(task)) / SUMMARY, RunSummary)}
    if task.kind == "pictures":
        with progress_bar(task.id, None):
            return [], _pictures(plan, task)
    row, (budgets, pretraining_seeds) = plan.rows[task.arm], plan.budgets_and_seeds(task)
    best = None
    for need in (need for need in plan.tasks if need.id in task.after and need.kind == "sweep"):
        swept, about = results.load(path_of(plan, need))
        best = about["sweep"]["best"]
        winners = {(result.arm, result.labels_per_class, result.seed) for result in swept}
        if (task.arm, task.labels_per_class, task.seed) in winners:
            return [], {}  # the sweep trained this model already
    evaluator, fields, rows = plan.evaluator(task.data, task.evaluator, task.arm), dict[str, Any](), list[Result]()
    if task.kind == "sweep":
        context = task_context(plan, task, task.seed)
        parts = Parts(path_of(plan, task).with_suffix(UNFINISHED), task.fingerprint, context)
        sweep, rows = runner.sweep(evaluator, context, row.source, task.labels_per_class, task.seed, parts)
        fields = {"sweep": sweep, "earlier_seconds": parts.earlier_seconds}
    elif row.kind == "control":
        for seed in pretraining_seeds:  # an untrained encoder each
            context = task_context(plan, task, seed + row.shift)
            rows += runner.measure(evaluator, context, row.source, budgets, [seed], best, shift=row.shift)
    else:
        context = task_context(plan, task, task.seed)
        rows += runner.measure(evaluator, context, row.source, budgets, [*pretraining_seeds], best)
    rows = [
        replace(
            result,
            data=task.data,
            evaluator=task.evaluator,
            arm=task.arm,
            fold=task.fold,
            pretraining_seed=pretraining_seeds[result.seed],
        )
        for result in rows
    ]
    return rows, fields | {"skipped": context.skipped_names()}


def task_context(plan: Plan, task: TaskRecord, initialization: int) -> EvalContext:
    """What a task evaluates: its arm's encoder, or an untrained one of the same architecture, on its dataset.

    initialization: seed of the untrained encoder.
    """
    like, data = plan.rows[task.arm].like, plan.split(task.data, task.fold)
    pretraining_seed = next(iter(plan.budgets_and_seeds(task)[1].values()))
    weights, own_recipe = plan.weights(task.arm, pretraining_seed, task.fold), plan.recipes.get(like)
    if weights is None and own_recipe is None:  # only a file says what the architecture is
        weights = plan.weights(like, pretraining_seed, task.fold)
    if weights is not None and not weights.exists():
        done = [plan.run / TASKS / f"{need}.json" for need in task.after if need.startswith("pretrain-")]
        again = f", or delete {done[0]} to train it again" if done else ""
        raise UserError(f"{weights}: this encoder was removed; restore it{again}")
    assert data.train is not None and data.test is not None
    settings = plan.preparation(like)
    prepared = settings.data if settings else DataConfig(train="")
    prepared = prepared.model_copy(update={"remote": plan.study.remote, "workers": plan.workers(prepared)})
    encoder = plan.outline(like) if weights is None else factory.load(weights)
    context = execution.make_context(
        Loaded(encoder, prepared, settings, weights),
        data.train,
        data.test,
        seed=initialization,
        cache=None if plan.rows[task.arm].kind == "control" else plan.run / "features",
        metric=data.metric,
    )
    context.title = task.id
    if own_recipe is None:
        context.objective = None  # nothing says what these weights were trained for
    return context


def _pictures(plan: Plan, task: TaskRecord) -> dict[str, Any]:
    """The inspection of an arm's encoder on the first test images."""
    weights, out = plan.weights(task.arm, task.seed, task.fold), Path(PICTURES) / task.arm
    device = distributed.make_accelerator().device  # every process takes part in it
    found: dict[str, Any] = {}
    with distributed.shared_errors():
        if weights and is_main_process() and isinstance(factory.load(weights), ViTEncoder):  # a CNN has no attention
            test, remote = str(plan.split(task.data, task.fold).test), plan.study.remote
            page = inspection.inspect(weights, test, plan.run / out, device=device, remote=remote)
            found = {"pictures": str(out), "skipped": read_json(page.parent / "numbers.json").get("skipped", [])}
    return found
