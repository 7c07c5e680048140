"""A supervised run's own head: the accuracy on test of the very classifier that was trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

from ssl_vit.data.shards import check_same_classes
from ssl_vit.evaluators import ALL
from ssl_vit.evaluators.base import Choice, Judge
from ssl_vit.evaluators.features import Task
from ssl_vit.evaluators.tuning import scores
from ssl_vit.files import read_json
from ssl_vit.interfaces import Config as BaseConfig
from ssl_vit.interfaces import Measurement, UserError
from ssl_vit.objectives import classification
from ssl_vit.training import checkpoint


class Config(BaseConfig):
    """seeds: only names the result; nothing is drawn."""

    seeds: tuple[int, ...] = (0,)


class Evaluator(Judge):
    """Nothing is trained or chosen; runs of other objectives and bare weights have no such head and are refused."""

    title = "The run's own head"
    references = ()
    judges_heads = True

    def measure(
        self,
        task: Task,
        source: str,
        budgets: Sequence[int | str],
        seeds: Sequence[int],
        choice: Choice | None = None,
    ) -> Iterator[Measurement]:
        if not isinstance(task.objective, classification.Config) or task.weights is None:
            raise UserError(
                f"{task.weights}: own_head needs a run whose objective is classification; use another evaluator"
            )
        saved = checkpoint.newest_of(Path(task.weights))
        if saved is None:
            raise UserError(f"{task.weights}: no checkpoint with a head is kept there")
        run = saved.resolve().parent.parent
        summary = read_json(run / "summary.json") if (run / "summary.json").is_file() else {}
        check_same_classes(
            summary.get("classes") or checkpoint.classes_of(saved),  # a run that is still trained has no summary
            task.test.classes,
            f"what {task.weights} was trained on and {task.test.spec}",
        )
        objective = classification.Objective(copy.deepcopy(task.trained), task.objective, task.classes)
        checkpoint.load_head(saved, objective)
        objective.to(task.accelerator.device)
        yield Measurement(
            name="own head",
            labels_per_class=ALL,
            labels=summary.get("samples", task.train.samples),
            seed=seeds[0],
            **scores(task, objective, task.test),
        )
