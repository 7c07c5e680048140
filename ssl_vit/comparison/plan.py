"""The tasks of a comparison and their dependencies.

A task (a pretraining, its pictures, a sweep, one fine-tuning, one evaluation of frozen features) leaves a file in
`tasks/`. Its fingerprint hashes everything the result depends on: what is finished and unchanged is not run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from ssl_vit.comparison.config import ONLY
from ssl_vit.comparison.design import Design, Row
from ssl_vit.comparison.fingerprints import fingerprint
from ssl_vit.evaluators import ALL, runner
from ssl_vit.interfaces import Budget, UserError
from ssl_vit.records import TaskKind, TaskRecord


class Plan(Design):
    """The tasks of a study."""

    @cached_property
    def tasks(self) -> tuple[TaskRecord, ...]:
        """Every task, after the ones it needs. Long ones come first, so that all workers are busy to the end: sweeps
        that need no pretraining, pretrainings, the other sweeps, measurements."""
        c = self.study.comparison
        tasks = []
        for arm in self.study.recipes:
            for seed in c.seeds[: c.pretrainings]:
                for fold in self.folds:
                    name = self._pretrained(arm, seed, fold)[0]
                    tasks.append(TaskRecord(id=name, kind="pretrain", arm=arm, seed=seed, fold=fold))
        for data, name in dict.fromkeys(key[:2] for key in self.evaluators):
            rows = [row for row in self.rows.values() if self._is_measured(data, name, row)]
            if not rows:
                raise UserError(f"evaluators.{name}: no arm has the objective classification; remove this evaluator")
            tasks += [t for row in rows for fold in self.folds for t in self._evaluations(data, name, row.name, fold)]
        if c.pictures:
            for row in [row for row in self.rows.values() if row.source == "trained"]:
                fields = {"arm": row.name, "data": next(iter(self.study.sets)), "seed": c.seeds[0]}
                after = self._pretrained(row.name, c.seeds[0], 0)
                tasks.append(TaskRecord(id=f"pictures-{row.name}", kind="pictures", after=after, **fields))
        order = ("pretrain", "sweep", "measure", "pictures")
        # Stable: evaluators that train stay before the others.
        tasks.sort(key=lambda task: (task.kind != "sweep" or bool(task.after), order.index(task.kind)))
        return tuple(task.model_copy(update={"fingerprint": fingerprint(self, task)}) for task in tasks)

    @property
    def levels(self) -> list[int]:
        """Level of each task: 0 where it needs no other task, else one more than the highest level that it needs. Tasks
        of one level are independent."""
        levels: dict[str, int] = {}
        for task in self.tasks:
            levels[task.id] = 1 + max((levels[need] for need in task.after), default=-1)
        return list(levels.values())

    def _is_measured(self, data: str, name: str, row: Row) -> bool:
        evaluator = self.evaluator(data, name, row.name)
        if row.kind == "control":
            repeats_arm = row.repeats in self.study.comparison.arms
            return evaluator.trains_encoder if repeats_arm else name == self.control_evaluator
        if row.kind in ("untrained", "pixels"):
            return row.kind in evaluator.references and not evaluator.trains_encoder
        if evaluator.needs_head:
            recipe = self.recipes.get(row.name)
            return recipe is not None and recipe.objective.name == "classification"
        return row.kind != "scratch" or evaluator.trains_encoder

    def _evaluations(self, data: str, name: str, row: str, fold: int) -> Iterator[TaskRecord]:
        """The sweeps and measurements of a row: a task per budget and seed where the encoder is trained, else one per
        pretraining for all budgets and seeds."""
        c, evaluator = self.study.comparison, self.evaluator(data, name, row)
        label = name.replace(":", ".") + ("" if data == ONLY else f"-{data}")

        def task(
            kind: TaskKind, identifier: str, budget: Budget, seed: int, pretraining_seed: int, *needs: str
        ) -> TaskRecord:
            after = (*needs, *self._pretrained(row, pretraining_seed, fold))
            place: dict[str, Any] = {"arm": row, "data": data, "evaluator": name, "labels_per_class": budget}
            return TaskRecord(id=identifier + self.suffix(fold), kind=kind, seed=seed, fold=fold, after=after, **place)

        if not evaluator.trains_encoder:
            numbers = range(len(self.seeds(evaluator)))
            for pretraining in dict.fromkeys(self.pretraining_seed(row, number) for number in numbers):
                yield task("measure", f"{label}-{row}-{pretraining}", ALL, pretraining, pretraining)
            return
        sweeps: dict[Budget, str] = {}
        swept = self.rows[row].repeats or row  # a repetition uses the settings of what it repeats
        for budget in runner.budgets(evaluator, c.labels_per_class):
            if runner.has_sweep(evaluator) and (at := runner.sweep_budget(evaluator, budget)) not in sweeps:
                sweep = task("sweep", f"sweep_{label}-{swept}-{_word(at)}", at, c.seeds[0], c.seeds[0])
                sweeps[at] = sweep.id
                if swept == row:
                    yield sweep
            needs = [sweeps[at]] if sweeps else []
            for number, seed in enumerate(c.seeds):
                pretraining = self.pretraining_seed(row, number)
                yield task("measure", f"{label}-{row}-{_word(budget)}-{seed}", budget, seed, pretraining, *needs)

    def _pretrained(self, row: str, pretraining_seed: int, fold: int) -> tuple[str, ...]:
        pretrained = self.rows[row].kind == "pretrained"
        return (f"pretrain-{row}-{pretraining_seed}{self.suffix(fold)}",) if pretrained else ()


def _word(budget: int | str) -> str:
    """A budget in a file name."""
    return str(budget).replace("%", "percent")
