"""What the report must know of a comparison: its arms, data, settings and tasks, written to `plan.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssl_vit import recipe, records, runs
from ssl_vit.comparison.config import Arm
from ssl_vit.comparison.plan import Plan
from ssl_vit.data.overlap import overlaps
from ssl_vit.data.shards import ShardSet
from ssl_vit.evaluators.labels import labeled_classes
from ssl_vit.models import factory
from ssl_vit.recipe import Recipe, training_places
from ssl_vit.records import ArmRecord, ComparisonRecord, DataRecord, EvaluatorRecord, RunSummary


def record_of(plan: Plan, shards: Mapping[str, ShardSet], command: str) -> ComparisonRecord:
    """What the report must know of a comparison besides the results of its tasks.

    shards: as `Plan.part` calls them.
    """
    c = plan.study.comparison
    parts = [
        plan.part(name, part, fold) for name in plan.study.sets for fold in plan.folds for part in ("train", "test")
    ]
    data, used, arms = {key: shards[key] for key in parts}, dict[str, int](), arm_records(plan, shards)
    for one in arms:
        if one.kind == "pretrained" and not one.trained_on:
            found = shards[plan.part(one.name, "pretrain", 0)]
            data[f"pretraining of {one.name}"] = found
            used[f"pretraining of {one.name}"] = plan.study.recipes[one.name].data.samples or found.samples
    evaluators: dict[str, EvaluatorRecord] = {}
    for (name, key, arm), built in plan.evaluators.items():
        if not arm:
            record = evaluators.setdefault(key, EvaluatorRecord(title=built.title, trains_encoder=built.trains_encoder))
            # The tables show the budgets, and this record has the seeds.
            record.settings[name] = built.config.model_dump(mode="json", exclude={"labels_per_class", "seeds"})
    return ComparisonRecord(
        name=c.name,
        title=(c.title or c.name) + (" (quick run)" if c.quick else ""),
        quick=c.quick,
        command=command,
        seeds=c.seeds,
        frozen_seeds=c.frozen_seeds,
        pretrainings=c.pretrainings,
        assigned=plan.study.assigned,
        max_seeds=plan.study.max_seeds,
        looks=plan.study.looks,
        folds=len(plan.folds),
        margin=c.margin,
        baseline=c.baseline,
        notes=c.notes,
        jobs=c.jobs,
        study=c.study,
        metrics={name: chosen.metric for name, chosen in plan.study.sets.items()},
        data={
            key: DataRecord(
                path=one.spec,
                samples=used.get(key, one.samples),
                classes=one.classes,
                labeled_classes=labeled_classes(one) if key in parts[::2] else None,
                source=one.source,
            )
            for key, one in data.items()
        },
        arms=arms,
        references=plan.references,
        evaluators=evaluators,
        tasks=plan.tasks,
    )


def arm_records(plan: Plan, shards: Mapping[str, ShardSet]) -> tuple[ArmRecord, ...]:
    """What the report must know of the arms. shards: as `record_of` has."""
    return tuple(_arm(plan, shards, arm) for arm in plan.study.comparison.arms)


def _arm(plan: Plan, shards: Mapping[str, ShardSet], arm: str) -> ArmRecord:
    given, settings = plan.study.comparison.arms[arm], plan.recipes.get(arm)
    weights = plan.weights(arm, plan.study.comparison.seeds[0], 0)
    path = Path(given.weights or "") / runs.SUMMARY
    summary = records.read(path, RunSummary) if given.weights and path.is_file() else None
    return ArmRecord(
        name=arm,
        label=given.label,
        kind=given.kind,
        run=os.path.relpath(weights.resolve(), plan.run.resolve()) if weights else None,
        objective=settings.objective.name if settings else None,
        architecture=plan.sizes(plan.rows[arm].like),
        encoder=plan.encoder(arm),
        uses_labels=plan.uses_labels(arm),
        evaluators=_own_settings(plan, arm),
        series=given.series,
        starts_from=_starts_from(given, weights, settings, summary),
        trained_on=_trained_on(plan, arm),
        saw=_saw(plan, shards, arm),
        compute_of=given.compute_of,
        summary=summary,
    )


def _trained_on(plan: Plan, arm: str) -> str | None:
    """The dataset whose whole training set (of the first fold) an arm is pretrained on."""
    ours = plan.shards.get(plan.part(arm, "pretrain", 0))
    if ours is None or plan.study.recipes[arm].data.samples:
        return None
    return next((name for name in plan.study.sets if plan.shards[plan.part(name, "train", 0)] == ours), None)


def _saw(plan: Plan, shards: Mapping[str, ShardSet], arm: str) -> tuple[str, ...]:
    """The datasets of whose training sets an arm's pretraining may have seen images."""
    ours, settings = shards.get(plan.part(arm, "pretrain", 0)), plan.recipes.get(arm)
    places = training_places(settings) if settings else ()
    train = {name: shards[plan.part(name, "train", 0)] for name in plan.study.sets}
    return tuple(name for name, of in train.items() if overlaps(places, of, ours))


def _starts_from(given: Arm, weights: Path | None, settings: Recipe | None, summary: RunSummary | None) -> str | None:
    """Weights whose training is unknown: those given without a run, or what a training started from."""
    if weights and given.weights and not summary:
        return factory.origin(weights) or given.weights
    return settings.init_from if settings else None


def _own_settings(plan: Plan, arm: str) -> dict[str, dict[str, Any]]:
    """Evaluator settings by dotted key where they differ from those of the other arms; by evaluator, or "SET EVALUATOR"
    where there are several datasets."""
    found = {}
    for (data, evaluator, of), built in plan.evaluators.items():
        if of != arm:
            continue
        common = recipe.flatten(plan.evaluators[data, evaluator, ""].config.model_dump(mode="json"))
        own = recipe.flatten(built.config.model_dump(mode="json"))
        if differing := {key: own.get(key) for key in common | own if common.get(key) != own.get(key)}:
            found[evaluator if len(plan.study.sets) == 1 else f"{data} {evaluator}"] = differing
    return found
