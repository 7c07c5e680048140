"""Adds seeds, or pretrainings, to a comparison until its headlines are decided: `compare --until-decided`.

Each look spends a part of the 5% error: `report/sequential.py` has the levels, which `Comparison.confidence` applies.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ssl_vit import records
from ssl_vit.comparison.config import Study
from ssl_vit.interfaces import UserError
from ssl_vit.records import ComparisonRecord, Look
from ssl_vit.report import statistics
from ssl_vit.report.read import PLAN, Comparison
from ssl_vit.report.sequential import MOST_LOOKS
from ssl_vit.report.summary import Difference, summarize

_GROWTH = 2.5  # the default maximum, as a multiple of the recipe's seeds


def resume(study: Study, *, until_decided: bool = False, max_seeds: int | None = None) -> Study:
    """Return the study with the seeds that earlier looks added, as recorded in its run directory.

    max_seeds: None is 2.5 times the recipe's seeds, or as recorded.

    Raises UserError for a maximum that is too small, or seeds, a maximum or a baseline that differ from the recorded
    ones.
    """
    path = study.comparison.run_directory / PLAN
    record = records.read(path, ComparisonRecord) if path.is_file() else None
    if record and record.looks:
        first, counted = record.looks[0], _lists(study)[-1]
        began = {key: getattr(record, key)[: len(getattr(study.comparison, key))] for key in _lists(study)}
        began |= {counted: getattr(record, counted)[: first.seeds], "pretrainings": first.pretrainings}
        if changed := [key for key, value in began.items() if getattr(study.comparison, key) != value]:
            raise UserError(
                f"{path}: its looks began with {changed[0]} other than the recipe's; undo that change, or give "
                "another directory with run=PATH"
            )
        if record.baseline != study.comparison.baseline:
            raise UserError(
                f"{path}: its looks tested baseline={record.baseline or 'null'}; keep it, or give another directory "
                "with run=PATH"
            )
        if max_seeds not in (None, record.max_seeds):
            raise UserError(
                f"--max-seeds: {path} has looks planned for {record.max_seeds} seeds; keep it, or give another "
                "directory with run=PATH"
            )
        added = {key: getattr(record, key) for key in (*_lists(study), "pretrainings")}
        study = replace(study, max_seeds=record.max_seeds, looks=record.looks, assigned=record.assigned)
        return _changed(study, **added)
    if not until_decided:
        return study
    count = _seeds(study)
    most = math.ceil(_GROWTH * count) if max_seeds is None else max_seeds
    if most <= count:
        raise UserError(f"--max-seeds={most}: the recipe already has {count} seeds; give a larger number")
    return replace(study, max_seeds=most)


def look(study: Study, comparison: Comparison) -> Study:
    """Add a look at the results to the study. A look at the same number of seeds is taken again, not added."""
    c, looks = study.comparison, study.looks
    seeds = _seeds(study)
    if not looks or looks[-1].seeds != seeds:
        looks = (*looks, Look(seeds=seeds, pretrainings=c.pretrainings, outcomes={}))
    with_new = replace(comparison, record=comparison.record.model_copy(update={"looks": looks}))
    outcomes = {head.place.data: head.outcome for head in summarize(with_new).headlines}
    return replace(study, looks=(*looks[:-1], looks[-1].model_copy(update={"outcomes": outcomes})))


def extend(study: Study, comparison: Comparison) -> Study | None:
    """Return the study with more seeds or pretrainings; None if all headlines are decided, the maximum is reached, or
    no number of seeds would decide them.

    comparison: what was measured, with the last look in its record.
    """
    c, most = study.comparison, study.max_seeds or 0
    heads = [head for head in summarize(comparison).headlines if head.outcome == "undecided"]
    have = _seeds(study)
    if not heads or have >= most:
        return None
    tests, confidence = len(comparison.record.metrics), comparison.confidence
    wanted = [(head, statistics.plan(head.estimate, c.margin, tests, confidence)[0]) for head in heads]
    wanted = [(head, units) for head, units in wanted if units or head.estimate.half_width is None]
    if not wanted:
        return None
    head, units = max(wanted, key=lambda item: item[1] or 0)
    least = math.ceil((most - study.looks[0].seeds) / (MOST_LOOKS - 1))
    per = have // c.pretrainings
    at_least = math.ceil(least / per)  # pretrainings
    keeps = len(c.seeds) <= have  # otherwise fine-tuned seeds would get other pretrainings
    fits = keeps and at_least * per <= most - have
    if head.unit == "pretraining" and fits and _new_pretrainings_pay(comparison, head, per):
        added_pretrainings = min(max(units or 1, at_least), (most - have) // per)
        added = added_pretrainings * per
        assigned = (*map(study.pretraining_index, range(have)), *(c.pretrainings + n // per for n in range(added)))
        return _more(replace(study, assigned=assigned), added, pretrainings=c.pretrainings + added_pretrainings)
    wanted_seeds = units if head.unit == "seed" else None
    added = min(max(wanted_seeds or 1, least), most - have)
    every = keeps and 1 < c.pretrainings == have  # each seed has its own
    return _more(study, added, pretrainings=c.pretrainings + added * every)


def _new_pretrainings_pay(comparison: Comparison, head: Difference, per: int) -> bool:
    """Whether one more pretraining reduces the variance of the mean by more per second than one more seed for each
    existing pretraining does.

    per: seeds per pretraining.
    """
    seconds: dict[str, list[float]] = {"pretrain": [], "measure": []}
    for task in comparison.record.tasks:
        here = task.kind == "pretrain" or (task.data, task.evaluator) == (head.place.data, head.place.evaluator)
        if here and task.kind in seconds and (done := comparison.tasks.get(task.id)):  # each arm gets what is added
            seconds[task.kind].append(done.run.seconds if done.run else done.seconds)
    count = head.estimate.units
    per_pretraining, per_seed = sum(seconds["pretrain"]) / count, sum(seconds["measure"]) / (count * per)
    within = head.within_variance / per
    between = max(head.estimate.seed_variance - within, 0.0)
    by_pretraining = (between + within) * (1 / count - 1 / (count + 1)) / (per_pretraining + per * per_seed)
    by_seeds = within / count * (1 - per / (per + 1)) / (count * per_seed)
    return by_pretraining > by_seeds


def _seeds(study: Study) -> int:
    """Number of seeds that the headlines use."""
    return len(getattr(study.comparison, _lists(study)[-1]))


def _lists(study: Study) -> tuple[str, ...]:
    """Names of the lists of seeds that grow. The headlines use the last one; `seeds` also numbers the pretrainings."""
    return ("seeds",) if study.headline_trains_encoder else ("seeds", "frozen_seeds")


def _more(study: Study, added: int, pretrainings: int) -> Study:
    """The study with more of the seeds that the headlines use, and with this number of pretrainings."""
    c, changes = study.comparison, dict[str, Any](pretrainings=pretrainings)
    for key, more in {"seeds": pretrainings - len(c.seeds), _lists(study)[-1]: added}.items():
        seeds = getattr(c, key)
        changes[key] = (*seeds, *range(max(seeds) + 1, max(seeds) + 1 + more))
    return _changed(study, **changes)


def _changed(study: Study, **changes: Any) -> Study:
    return replace(study, comparison=study.comparison.model_copy(update=changes))
