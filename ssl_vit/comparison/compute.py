"""Arms from scratch with the total compute of an arm that pretrains (`compute_of`): as many more fine-tuning steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ssl_vit import stage
from ssl_vit.comparison.plan import Plan
from ssl_vit.data.shards import ShardSet
from ssl_vit.evaluators import runner
from ssl_vit.evaluators.labels import labels_of
from ssl_vit.interfaces import UserError
from ssl_vit.models import factory
from ssl_vit.recipe import Recipe
from ssl_vit.training.flops import training_flops


def equalize(plan: Plan, shards: dict[str, ShardSet]) -> Plan:
    """The plan with `extra_steps` in the evaluator settings of every arm with `compute_of`.

    They are the FLOPs of one pretraining of that arm over those of a fine-tuning step, rounded.
    """
    settings = dict(plan.study.evaluators)
    for name, arm in plan.study.comparison.arms.items():
        if arm.compute_of is None:
            continue
        pretraining_recipe = plan.study.recipes[arm.compute_of]
        if pretraining_recipe.init_from:
            raise UserError(
                f"arms.{name}.compute_of: arms.{arm.compute_of} starts from other weights (init_from), whose compute "
                "is not counted; remove compute_of"
            )
        pretraining = shards[plan.part(arm.compute_of, "pretrain", 0)]
        steps = pretraining_recipe.training.total_steps(pretraining_recipe.data.samples or pretraining.samples)
        total = steps * _step_flops(pretraining_recipe, len(pretraining.classes or ()) or None)
        for (data, evaluator, of), built in plan.evaluators.items():
            if of == name and built.trains_encoder:
                train = shards[plan.part(data, "train", 0)]
                like = plan.recipes.get(plan.rows[name].like)
                if like is None:
                    raise UserError(f"arms.{name}.compute_of: arms.{plan.rows[name].like} has no recipe; set like")
                candidates = runner.training_recipes(built, like, train.samples, sweep=True)
                if not candidates or "extra_steps" not in type(built.config).model_fields:
                    raise UserError(
                        f"arms.{name}.compute_of: evaluators.{evaluator} cannot train longer; remove compute_of or the "
                        "evaluator"
                    )
                classes = len(train.classes or ()) or int(np.max(labels_of(train))) + 1
                by_cost = {_step_flops(candidate, classes) for candidate in candidates}
                if len(by_cost) > 1:
                    raise UserError(
                        f"arms.{name}.compute_of: the steps of the candidates of evaluators.{evaluator}.sweep take "
                        "different FLOPs; give this arm one batch size and one image size"
                    )
                settings[data, evaluator, of] = built.config.model_copy(
                    update={"extra_steps": built.config.extra_steps + round(total / by_cost.pop())}
                )
    return replace(plan, study=replace(plan.study, evaluators=settings))


def _step_flops(settings: Recipe, classes: int | None) -> float:
    """Forward and backward pass of a training step."""
    with torch.device("meta"):
        objective = stage.build_objective(settings, factory.build(settings.encoder), classes)
    return settings.training.batch_size * training_flops(objective, settings.data.views)
