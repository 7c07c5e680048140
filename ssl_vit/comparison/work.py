"""Doing one piece of a comparison, and what it leaves on disk."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from ssl_vit import api
from ssl_vit.analysis import inspection
from ssl_vit.comparison.plan import Piece, Plan
from ssl_vit.environment import environment
from ssl_vit.evaluators import runner
from ssl_vit.evaluators.context import EvalContext
from ssl_vit.files import read_json, write_json
from ssl_vit.interfaces import UserError
from ssl_vit.recipe import Recipe
from ssl_vit.report.merge import finished
from ssl_vit.runs import SUMMARY, is_main_process, wait_for_everyone
from ssl_vit.training import distributed

PICTURES = "pictures"


def path_of(plan: Plan, identifier: str) -> Path:
    return plan.run / "pieces" / f"{identifier}.json"


def read(plan: Plan, identifier: str) -> dict[str, Any]:
    """The result of a finished piece."""
    return dict(read_json(path_of(plan, identifier))["result"])


def is_done(plan: Plan, piece: Piece) -> bool:
    """Whether the piece's result is on disk and was made from what the plan says now."""
    return finished(path_of(plan, piece.id), plan.fingerprint(piece)) is not None


def do(plan: Plan, piece: Piece) -> str:
    """Run a piece, unless another job has done it meanwhile, and store its result; returns its id."""
    with _held(plan, piece):
        if not distributed.gather(is_done(plan, piece))[0]:  # what the main process sees counts
            result = run_piece(plan, piece)
            if is_main_process():
                done = {"id": piece.id, "fingerprint": plan.fingerprint(piece), "hardware": environment()["hardware"]}
                done["processes"] = int(os.environ.get("WORLD_SIZE", 1))
                write_json(path_of(plan, piece.id), done | {"result": result})
    wait_for_everyone()  # what comes next may read it
    return piece.id


@contextmanager
def _held(plan: Plan, piece: Piece) -> Iterator[None]:
    """Keep other jobs of the same comparison from doing the same piece; they wait."""
    folder = plan.run / "pieces"
    folder.mkdir(parents=True, exist_ok=True)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # the processes of one job do a piece together
        yield
        return
    with FileLock(folder / f".{piece.id}.lock"):
        yield


def pretraining_of(plan: Plan, piece: Piece) -> Recipe:
    """The recipe of a piece that pretrains, with its own directory and seed."""
    settings = plan.study.recipes[piece.arm]
    seed = piece.seed if plan.study.comparison.pretrain_per_seed else settings.seed
    return settings.model_copy(update={"run": str(plan.weights(piece.arm, piece.seed)), "seed": seed})


def run_piece(plan: Plan, piece: Piece) -> dict[str, Any]:
    """Do one piece and return its result; raises UserError, RunError or Stopped as training and evaluation do."""
    if piece.kind == "pretrain":
        return read_json(api.train(pretraining_of(plan, piece)) / SUMMARY)
    if piece.kind == "pictures":
        return _pictures(plan, piece)
    start = time.perf_counter()
    task = make_task(plan, piece)
    source = "pixels" if piece.arm == "pixels" else "trained" if piece.arm in plan.with_encoder else "untrained"
    judge = plan.evaluators[piece.data][piece.evaluator]
    if piece.kind == "choose":
        record, _ = runner.sweep(judge, task, source, piece.budget, piece.seed)
        result: dict[str, Any] = {"choice": record.model_dump(mode="json")}
    else:
        best = None
        budgets = runner.budgets(judge, plan.study.comparison.labels_per_class)
        if runner.has_sweep(judge):
            budgets = (piece.budget,)
            best = read(plan, piece.after[0])["choice"]["best"]
        measured = runner.measure(judge, task, source, budgets, plan.seeds_of(piece), best)
        rows = [{k: v for k, v in asdict(one).items() if k != "prediction"} for one in measured if one.primary]
        result = {"measurements": rows}
    return result | {"skipped": task.skipped_names(), "seconds": round(time.perf_counter() - start, 2)}


def make_task(plan: Plan, piece: Piece) -> EvalContext:
    """What the piece judges: its arm's encoder, or an untrained one of the same kind, on its data set."""
    like, data = plan.like(piece.arm), plan.sets[piece.data]
    weights, settings = plan.weights(piece.arm, piece.seed), plan.settings.get(like)
    if weights is None and settings is None:  # only a file says what the architecture is
        weights = plan.weights(like, piece.seed)
    task = api.make_context(
        weights,
        settings or plan.prepared_by(like),
        str(data.train),
        str(data.test),
        seed=piece.seed,
        cache=plan.run / "features",
        metric=data.metric,
    )
    if settings is None:
        task.objective = None  # nothing says what these weights were trained for
    return task


def _pictures(plan: Plan, piece: Piece) -> dict[str, Any]:
    """The inspection of an arm's encoder on the first test images, beside the comparison's pieces."""
    weights = plan.weights(piece.arm, piece.seed)
    assert weights
    out = plan.run / PICTURES / piece.arm
    if not is_main_process():
        return {}
    try:
        page = api.inspect(weights, str(plan.sets[piece.data].test), out, inspection.Options())
    except UserError as error:  # a CNN has no attention to look at: the page does without
        return {"folder": None, "why": str(error)}
    numbers = json.loads((page.parent / "numbers.json").read_text())
    return {"folder": f"{PICTURES}/{piece.arm}", "skipped": numbers.get("skipped", [])}
