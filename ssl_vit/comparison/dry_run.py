"""Estimates what a comparison would do and cost: `ssl-vit compare RECIPE --dry-run`."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ssl_vit.comparison import looks
from ssl_vit.comparison.checks import check, labeled
from ssl_vit.comparison.config import Study
from ssl_vit.comparison.plan import Plan
from ssl_vit.comparison.record import arm_records
from ssl_vit.comparison.weights import import_arms
from ssl_vit.data.shards import ShardSet
from ssl_vit.dry_run import DryRun, measure
from ssl_vit.evaluators import ALL, Budget, runner
from ssl_vit.evaluators.features import EvalContext, ImageSet, extract
from ssl_vit.evaluators.labels import choose_labeled, labels_of
from ssl_vit.interfaces import Batch
from ssl_vit.models import factory
from ssl_vit.progress import Say, silent
from ssl_vit.recipe import Recipe
from ssl_vit.records import TaskRecord
from ssl_vit.report.cautions import architecture_differences
from ssl_vit.training.distributed import make_accelerator

_TIMED_IMAGES = 256
# Keys that do not change the time of a step.
_NO_MATTER: Any = {
    **dict.fromkeys(("run", "name", "seed"), True),
    "optim": {"lr", "warmup_steps"},
    "training": {"steps", "epochs"},
}


@dataclass
class ArmCost:
    """Cost of an arm. pretraining: dry run of its pretraining, if it has one. Hours count only missing tasks."""

    pretraining: DryRun | None = None
    pretraining_hours: float = 0.0
    fine_tuning_hours: float = 0.0
    features_hours: float = 0.0


@dataclass
class ComparisonDryRun:
    """What a comparison would do and cost.

    data: images per shard set.
    tasks, done: number of all tasks and of finished ones. missing: number of missing tasks by kind.
    arms: costs by arm and untrained reference.
    memory_mib: memory of the largest training: weights, gradients, optimizer and activations.
    not_estimated: rows whose weights come without a recipe.
    differing: arms whose architecture differs from the first arm's, and how it differs.
    """

    run: str
    jobs: int
    data: dict[str, int]
    tasks: int
    done: int
    missing: dict[str, int]
    arms: dict[str, ArmCost]
    memory_mib: float = 0.0
    not_estimated: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    @property
    def hours(self) -> float:
        """Sum over all missing tasks, without exact solvers, attentive probes and pictures."""
        return sum(a.pretraining_hours + a.fine_tuning_hours + a.features_hours for a in self.arms.values())


def dry_run_comparison(study: Study, say: Say = silent) -> ComparisonDryRun:
    """Measure one micro-batch of each arm's pretraining and of every kind of missing fine-tuning and probe.

    Writes nothing but imported weights. Raises UserError for anything that would stop the comparison before its first
    step.
    """
    checked = check(looks.resume(import_arms(study, say)), say, pack=False)
    plan, opened, missing = checked.plan, checked.shards, checked.missing
    rows = [name for name, row in plan.rows.items() if row.kind != "pixels"]
    preview = ComparisonDryRun(
        run=str(plan.run),
        jobs=plan.study.comparison.jobs,
        data={key: shards.samples for key, shards in opened.items()},
        tasks=len(plan.tasks),
        done=len(plan.tasks) - len(missing),
        missing=dict(Counter(task.kind for task in missing)),
        arms={row: ArmCost() for row in rows},
        differing=architecture_differences(arm_records(plan, opened)),
    )
    measured: dict[str, DryRun] = {}
    forward: dict[str, float] = {}  # seconds per image
    for arm, settings in plan.study.recipes.items():
        measured[arm] = preview.arms[arm].pretraining = measure(settings, opened[plan.part(arm, "pretrain", 0)])
    sweeps = {task.id: _trained(task) for task in plan.tasks if task.kind == "sweep" and task.labels_per_class != ALL}
    for task in missing:
        if task.kind == "pretrain":
            preview.arms[task.arm].pretraining_hours += measured[task.arm].hours
        elif any(sweeps.get(need) == _trained(task) for need in task.after):
            continue  # this model is the sweep's winner
        elif task.evaluator and task.arm in preview.arms:
            if plan.rows[task.arm].like in plan.recipes:
                _add(preview.arms[task.arm], plan, task, opened, measured, forward)
            elif task.arm not in preview.not_estimated:
                preview.not_estimated.append(task.arm)
    preview.memory_mib = max(
        (training.weights_mib + training.activations_mib for training in measured.values()), default=0.0
    )
    return preview


def _trained(task: TaskRecord) -> tuple[str, Budget, int]:
    return task.arm, task.labels_per_class, task.seed


def _add(
    cost: ArmCost,
    plan: Plan,
    task: TaskRecord,
    opened: dict[str, ShardSet],
    measured: dict[str, DryRun],
    forward: dict[str, float],
) -> None:
    """Add the hours of a sweep or measurement to its arm's."""
    train, test = (opened[plan.part(task.data, part, task.fold)] for part in ("train", "test"))
    row = plan.rows[task.arm]
    evaluator, (budgets, seeds) = plan.evaluator(task.data, task.evaluator, task.arm), plan.budgets_and_seeds(task)
    labels, encoder_recipe = labels_of(train), plan.recipes[row.like]
    like = labeled(encoder_recipe, train)
    chosen = np.unique(np.concatenate([choose_labeled(labels, budget, seed) for budget in budgets for seed in seeds]))

    def step(stage: Recipe) -> DryRun:
        size = len(str(len(chosen)))  # few images are read from memory, many are not
        key = f"{size} {stage.model_dump_json(exclude=_NO_MATTER)}"
        if key not in measured:
            measured[key] = measure(stage, train, chosen)
        return measured[key]

    if evaluator.trains_encoder:
        for stage in runner.training_recipes(evaluator, like, len(chosen), sweep=task.kind == "sweep"):
            steps = stage.training.total_steps(len(chosen))
            cost.fine_tuning_hours += steps * step(stage).step_seconds / 3600
        return
    for budget in budgets:  # a probe that is trained
        images = len(choose_labeled(labels, budget, next(iter(seeds))))
        for stage in runner.training_recipes(evaluator, like, images, sweep=True):
            hours = stage.training.total_steps(images) * step(stage).step_seconds / 3600
            cost.features_hours += hours * len(seeds)
    key = like.model_dump_json(include={"encoder", "data"})
    if key not in forward:
        forward[key] = _forward_seconds(encoder_recipe, train)
    images = (len(chosen) + test.samples) * (len(seeds) if row.kind == "control" else 1)
    cost.features_hours += forward[key] * images / 3600


def _forward_seconds(recipe: Recipe, shards: ShardSet) -> float:
    """Time per image for reading it and for the forward pass; the first of four batches is not counted."""
    accelerator = make_accelerator(recipe.training.precision, or_fp32=True)
    encoder = factory.build(recipe.encoder).to(accelerator.device).eval()
    images = np.arange(min(shards.samples, _TIMED_IMAGES))
    batch_size = -(-len(images) // (4 * accelerator.num_processes))
    data = recipe.data.model_copy(update={"cache_mb": 0})  # of each encoder with reading
    context = EvalContext(encoder, shards, shards, data, accelerator, batch_size=batch_size)
    times: list[float] = []

    def forward(batch: Batch) -> torch.Tensor:
        times.append(time.perf_counter())
        return encoder.represent(batch.images, "mean", None)

    extract(ImageSet(context, "untrained", "train", images), forward, needs_labels=False)
    if len(times) == 1:  # one batch alone, without its reading
        times.append(time.perf_counter())
    return (times[-1] - times[0]) / (batch_size * accelerator.num_processes * (len(times) - 1))
