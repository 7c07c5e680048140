"""What each arm of a comparison cost."""

from __future__ import annotations

from dataclasses import dataclass

from ssl_vit.records import ArmRecord, Cost, RunSummary
from ssl_vit.report.read import Comparison


@dataclass(frozen=True)
class ArmCost:
    """pretraining: its first run; runs: how many there are. tried: settings in its sweeps. evaluation: all trainings of
    evaluators outside of sweeps. total: all pretrainings, sweeps and evaluations."""

    arm: str
    pretraining: RunSummary | None
    runs: int
    tried: int
    sweep: Cost
    evaluation: Cost
    total: Cost
    device_hours: float


def costs(comparison: Comparison) -> list[ArmCost]:
    """By arm, in the recipe's order."""
    return [_cost(comparison, arm) for arm in comparison.record.arms]


def _cost(comparison: Comparison, arm: ArmRecord) -> ArmCost:
    kinds = {task.id: task.kind for task in comparison.record.tasks if task.arm == arm.name}
    finished = [comparison.tasks[name] for name in kinds if name in comparison.tasks]
    runs = [(task.run, task.run.processes) for task in finished if task.run]
    runs = runs or ([(arm.summary, arm.summary.processes)] if arm.summary else [])
    sweeps = [(task.sweep, task.processes) for task in finished if task.sweep]
    evaluation, device_seconds = Cost(), 0.0
    for row, file in zip(comparison.table.results, comparison.files, strict=True):
        if row.arm == arm.name and kinds.get(file.stem) != "sweep":  # the cost of a sweep's winner is in the sweep's
            evaluation += Cost(images_seen=row.images_seen, flops=row.flops, seconds=row.seconds)
            device_seconds += row.seconds * (comparison.tasks[file.stem].processes if file.stem in kinds else 1)
    device_seconds += sum(run.seconds * processes for run, processes in runs)
    device_seconds += sum(one.cost.seconds * processes for one, processes in sweeps)
    sweep = sum((one.cost for one, _ in sweeps), Cost())
    return ArmCost(
        arm.name,
        runs[0][0] if runs else None,
        len(runs),
        sum(len(one.candidates) for one, _ in sweeps),
        sweep,
        evaluation,
        sum((run.cost for run, _ in runs), sweep + evaluation),
        device_seconds / 3600,
    )
