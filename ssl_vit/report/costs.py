"""What each arm cost, by stage."""

from __future__ import annotations

from dataclasses import astuple
from statistics import fmean

import pandas as pd

from ssl_vit.records import Cost
from ssl_vit.report.read import Comparison
from ssl_vit.report.runs import joined
from ssl_vit.report.summary import Difference, EvaluationKey

_MORE = 1.1  # times the compute of its baseline, from which on a better arm should be compared at equal compute
STAGES = ("Pretraining", "Sweeps", "Evaluation", "Total")
UNITS = {"images_seen": "images", "flops": "FLOPs", "seconds": "seconds", "process_hours": "process-hours"}


def costs(comparison: Comparison, place: EvaluationKey | None = None) -> pd.DataFrame:
    """Costs of each arm: columns `UNITS`, index (stage, arm). Arms and stages that cost nothing have no row.

    place: dataset and evaluator whose sweeps and trainings are counted, with all pretrainings; None for all.
    The stages are all pretrainings, all sweeps, all other trainings of evaluators, and their sum.
    """
    tasks, kinds = comparison.tasks, {task.id: task.kind for task in comparison.record.tasks}
    spent: list[tuple[str, str, Cost, int]] = []
    for arm in comparison.record.arms:
        if arm.summary:
            spent.append(("Pretraining", arm.name, arm.summary.cost, arm.summary.processes))
    for task in comparison.record.tasks:
        if (done := tasks.get(task.id)) and done.run:
            spent.append(("Pretraining", task.arm, done.run.cost, done.run.processes))
        if done and done.sweep and place in (None, EvaluationKey(task.data, task.evaluator)):
            spent.append(("Sweeps", task.arm, done.sweep.cost, done.processes))
    for row, file in zip(comparison.measured.results, comparison.measured.files, strict=True):
        of_sweep = kinds.get(file.stem) == "sweep"  # whose cost includes its winner's
        if place in (None, EvaluationKey(row.data, row.evaluator)) and not of_sweep:
            spent.append(("Evaluation", row.arm, row.cost, comparison.written[file].processes))
    rows = [
        {"stage": name, "arm": arm} | cost.model_dump() | {"process_hours": cost.seconds * processes / 3600}
        for stage, arm, cost, processes in spent
        for name in (stage, "Total")
    ]
    frame = pd.DataFrame(rows, columns=["stage", "arm", *UNITS]).groupby(["stage", "arm"]).sum()
    return frame[(frame != 0).any(axis=1)]


def compute(comparison: Comparison, head: Difference) -> list[str]:
    """The compute and time of a headline's arm relative to its baseline, in all, and their compute per run."""
    spent, arms = costs(comparison, head.place), (head.arm, head.against)
    if begun := [comparison.spoken(one.name) for one in comparison.record.arms if one.starts_from and one.name in arms]:
        return [f"Compute: unknown; {joined(begun)} started from pretrained weights."]
    ours, theirs = (spent["flops"].get(("Total", arm), 0.0) for arm in arms)
    if not ours:
        return []
    baseline = comparison.spoken(head.against)
    ratio = f", {_times(ours / theirs)} times as many as {baseline}" if theirs else f"; {baseline} used none"
    hours, other_hours = (spent["process_hours"].get(("Total", arm), 0.0) for arm in arms)
    if theirs and hours and other_hours:
        ratio += f", in {_times(hours / other_hours)} times the process-hours"
    said = f"Compute: with all seeds and sweeps, {comparison.spoken(head.arm)} used {ours:.3g} training FLOPs{ratio}."
    if theirs and comparison.record.evaluators[head.place.evaluator].trains_encoder:
        one, other = (_one_run(comparison, head.place, arm) for arm in arms)
        if other:
            per_run = "a fine-tuning and, for pretrained arms, a pretraining"
            said += f" Per run ({per_run}), {_times(one / other)} times as many."
        equal = head.arm in (arm.compute_of for arm in comparison.record.arms)
        kinds = {arm.name: arm.kind for arm in comparison.record.arms}
        trained = (kinds.get(head.arm), kinds.get(head.against)) == ("pretrained", "scratch")
        if head.outcome == "better" and one > _MORE * other and trained and not equal:
            said += f" With as much compute, {baseline} may be as accurate: add an arm with compute_of: {head.arm}."
    return [said]


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.1 <= ratio < 10 else f"{ratio:.3g}"


def _one_run(comparison: Comparison, place: EvaluationKey, arm: str) -> float:
    """FLOPs of one pretraining, where the arm has one, and one fine-tuning (the mean over label budgets and seeds)."""
    rows = [row for row in comparison.measured.results if (row.data, row.evaluator, row.arm) == (*astuple(place), arm)]
    pretraining = comparison.pretraining(arm)
    return fmean(row.flops for row in rows) + (pretraining.flops if pretraining else 0)
