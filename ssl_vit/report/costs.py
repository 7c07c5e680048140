"""What each arm cost, by stage."""

from __future__ import annotations

import pandas as pd

from ssl_vit.records import Cost
from ssl_vit.report.read import Comparison
from ssl_vit.report.summary import EvaluationKey

STAGES = ("Pretraining", "Sweeps", "Evaluation", "Total")
UNITS = {"images_seen": "images", "flops": "FLOPs", "seconds": "seconds", "device_hours": "device-hours"}


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
        {"stage": name, "arm": arm} | cost.model_dump() | {"device_hours": cost.seconds * processes / 3600}
        for stage, arm, cost, processes in spent
        for name in (stage, "Total")
    ]
    frame = pd.DataFrame(rows, columns=["stage", "arm", *UNITS]).groupby(["stage", "arm"]).sum()
    return frame[(frame != 0).any(axis=1)]
