"""The tasks of a comparison: which there are, what each needs, and what its result depends on.

A task (a pretraining, its pictures, a sweep, one fine-tuning, one evaluation of frozen features) leaves a file in
`tasks/`. Its fingerprint hashes everything the result depends on: what is finished and unchanged is not run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ssl_vit import plugins, runs
from ssl_vit.comparison.config import ONLY, DataSet, Study
from ssl_vit.evaluators import ALL, runner
from ssl_vit.evaluators.base import Evaluator
from ssl_vit.files import sha256
from ssl_vit.interfaces import UserError
from ssl_vit.models import factory
from ssl_vit.recipe import Recipe, flatten, run_recipe
from ssl_vit.records import ArmKind, ReferenceKind, ReferenceRecord, TaskKind, TaskRecord
from ssl_vit.results import Budget
from ssl_vit.training import checkpoint

_FORMAT = 4  # of the results of tasks
# What training from scratch and an untrained encoder depend on; dropout does not change an untrained encoder.
_PREPARATION: Any = {"data": {"evaluation_resize", "max_pixels"}, "training": {"precision"}}
_DROPOUT = {"dropout", "drop_path"}


@dataclass(frozen=True)
class Row:
    """A row of the tables: an arm, or a reference beside the arms on frozen features.

    like: the arm with an encoder whose architecture and image preparation it has.
    """

    name: str
    kind: ArmKind | ReferenceKind
    like: str

    @property
    def source(self) -> str:
        """What of an `EvalContext` is evaluated."""
        return {"pretrained": "trained", "weights": "trained", "pixels": "pixels"}.get(self.kind, "untrained")


@dataclass(frozen=True)
class Plan:
    """The tasks of a study.

    run: directory of the comparison.
    sets: data sets by name, with their shards' paths.
    shards: fingerprints by "SET train", "SET test" and "ARM pretrain".
    """

    study: Study
    run: Path
    sets: dict[str, DataSet]
    shards: dict[str, str] = field(default_factory=dict)
    _sums: dict[Path, str] = field(default_factory=dict)

    @cached_property
    def evaluators(self) -> dict[tuple[str, str, str], Evaluator]:
        """By (data set, evaluator, arm); arm "": of the references. Those that train the encoder come first: the
        verdict is about them."""
        built = {key: plugins.load("evaluators", key[1]).Evaluator(c) for key, c in self.study.evaluators.items()}
        return dict(sorted(built.items(), key=lambda item: not item[1].trains_encoder))

    def evaluator(self, data: str, name: str, row: str) -> Evaluator:
        return self.evaluators[data, name, row if row in self.study.comparison.arms else ""]

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        """By arm with an encoder, where there is one: weights may come without."""
        arms = self.study.comparison.arms
        found = {name: run_recipe(Path(arm.weights)) for name, arm in arms.items() if arm.weights}
        return self.study.recipes | {name: recipe for name, recipe in found.items() if recipe}

    def preparation(self, arm: str) -> Recipe | None:
        """The recipe with an arm's image preparation and precision: its own; for weights without one the first that
        there is, so that all arms see the same images."""
        return self.recipes.get(arm) or next(iter(self.recipes.values()), None)

    @cached_property
    def rows(self) -> dict[str, Row]:
        """Every arm, then the references."""
        first, arms = self._with_encoder[0], self.study.comparison.arms
        found = [Row(n, arm.kind, n if n in self._with_encoder else arm.like or first) for n, arm in arms.items()]
        return {row.name: row for row in [*found, *(Row(one.name, one.kind, one.like) for one in self.references)]}

    @cached_property
    def references(self) -> tuple[ReferenceRecord, ...]:
        """The rows beside the arms on frozen features: an untrained encoder of each architecture, and pixels."""
        found: dict[str, ReferenceRecord] = {}  # by architecture
        for arm in self._with_encoder:
            name = f"untrained_{arm}" if found else "untrained"
            same = self._architecture(arm)
            found.setdefault(same, ReferenceRecord(name=name, kind="untrained", like=arm, architecture=same))
        first = self._with_encoder[0]
        pixels = ReferenceRecord(name="pixels", kind="pixels", like=first, architecture=self._architecture(first))
        return (*found.values(), pixels)

    @property
    def _with_encoder(self) -> list[str]:
        return [name for name, arm in self.study.comparison.arms.items() if arm.kind != "scratch"]

    def architecture(self, row: str) -> str:
        """Hash of the encoder's sizes and the image preparation of a row."""
        return self._architecture(self.rows[row].like)

    def _architecture(self, arm: str, *, dropout: bool = False) -> str:
        recipe, prepared = self.recipes.get(arm), self.preparation(arm)
        preparation = prepared.model_dump(mode="json", include=_PREPARATION) if prepared else {}
        if recipe:
            sizes = recipe.encoder.model_dump(mode="json", exclude=None if dropout else _DROPOUT)
            return _hash([sizes, preparation])
        config = factory.find_weights(self.study.comparison.arms[arm].weights or "") / factory.CONFIG
        return _hash([sha256(config), preparation])

    def weights(self, row: str, seed: int) -> Path | None:
        """Where a row's trained encoder is, or will be; None for training from scratch and references."""
        match self.rows[row].kind:
            case "weights":
                return Path(self.study.comparison.arms[row].weights or "")
            case "pretrained":
                return self.run / (f"{row}_seed{seed}" if self.study.comparison.pretrain_per_seed else row)
        return None

    def pretraining_seed(self, row: str, seed: int) -> int:
        """The seed whose pretraining (of an untrained encoder: initialization) serves `seed`."""
        c = self.study.comparison
        drawn = c.pretrain_per_seed and self.rows[row].kind in ("pretrained", "untrained")
        return seed if drawn else c.seeds[0]

    def pretraining(self, task: TaskRecord) -> Recipe:
        """The recipe of a `pretrain` task, with its own directory and seed; jobs share the loader processes."""
        recipe, c = self.study.recipes[task.arm], self.study.comparison
        workers = -(-recipe.data.workers // c.jobs)
        seed = task.seed if c.pretrain_per_seed else recipe.seed
        data = recipe.data.model_copy(update={"workers": workers})
        return recipe.model_copy(update={"run": str(self.weights(task.arm, task.seed)), "seed": seed, "data": data})

    @cached_property
    def tasks(self) -> tuple[TaskRecord, ...]:
        """Every task, after the ones it needs. The long ones come first, so that all workers are busy to the end."""
        c = self.study.comparison
        found = []
        for arm in self.study.recipes:
            for seed in dict.fromkeys(self.pretraining_seed(arm, seed) for seed in c.seeds):
                found.append(TaskRecord(id=f"pretrain-{arm}-{seed}", kind="pretrain", arm=arm, seed=seed))
        for data, name in dict.fromkeys(key[:2] for key in self.evaluators):
            rows = [row for row in self.rows.values() if self._is_measured(self.evaluator(data, name, row.name), row)]
            if not rows:
                raise UserError(f"evaluators.{name}: no arm was trained with labels; remove this evaluator")
            found += [task for row in rows for task in self._evaluations(data, name, row.name)]
        if c.pictures:
            for row in [row for row in self.rows.values() if row.source == "trained"]:
                place = {"arm": row.name, "data": next(iter(self.sets)), "seed": c.seeds[0]}
                after = self._pretrained(row.name, c.seeds[0])
                found.append(TaskRecord(id=f"pictures-{row.name}", kind="pictures", after=after, **place))
        order = ("pretrain", "sweep", "measure", "pictures")
        found.sort(key=lambda task: order.index(task.kind))  # stable: evaluators that train stay before the others
        return tuple(task.model_copy(update={"fingerprint": self.fingerprint(task)}) for task in found)

    @property
    def stages(self) -> list[int]:
        """Of each task: 0 where it needs none, else one more than the latest it needs; tasks of one stage are
        independent."""
        found: dict[str, int] = {}
        for task in self.tasks:
            found[task.id] = 1 + max((found[need] for need in task.after), default=-1)
        return list(found.values())

    def _is_measured(self, evaluator: Evaluator, row: Row) -> bool:
        if row.kind in ("untrained", "pixels"):
            return row.kind in evaluator.references and not evaluator.trains_encoder
        if evaluator.needs_head:
            return self.uses_labels(row.name)
        return row.kind != "scratch" or evaluator.trains_encoder

    def uses_labels(self, arm: str) -> bool:
        """Whether an arm's pretraining used labels."""
        recipe = self.recipes.get(arm)
        module = plugins.load("objectives", recipe.objective.name) if recipe else None  # type: ignore[attr-defined]
        return bool(module and getattr(module.Objective, "needs_labels", False))

    def _evaluations(self, data: str, name: str, row: str) -> Iterator[TaskRecord]:
        """The sweeps and measurements of a row: a task per budget and seed where the encoder is trained or settings
        are swept, else one per pretraining for all budgets and seeds."""
        c, evaluator = self.study.comparison, self.evaluator(data, name, row)
        label = name if data == ONLY else f"{name}-{data}"

        def task(kind: TaskKind, identifier: str, budget: Budget, seed: int, *needs: str) -> TaskRecord:
            after = (*needs, *self._pretrained(row, seed))
            place: dict[str, Any] = {"arm": row, "data": data, "evaluator": name, "labels_per_class": budget}
            return TaskRecord(id=identifier, kind=kind, seed=seed, after=after, **place)

        if not _is_split(evaluator):
            for seed in dict.fromkeys(self.pretraining_seed(row, seed) for seed in c.seeds):
                yield task("measure", f"{label}-{row}-{seed}", ALL, seed)
            return
        sweeps: dict[Budget, str] = {}
        for budget in runner.budgets(evaluator, c.labels_per_class):
            if runner.has_sweep(evaluator) and (at := runner.sweep_budget(evaluator, budget)) not in sweeps:
                sweeps[at] = f"sweep_{label}-{row}-{_word(at)}"
                yield task("sweep", sweeps[at], at, c.seeds[0])
            needs = [sweeps[at]] if sweeps else []
            for seed in c.seeds:
                yield task("measure", f"{label}-{row}-{_word(budget)}-{seed}", budget, seed, *needs)

    def _pretrained(self, row: str, seed: int) -> tuple[str, ...]:
        pretrained = self.rows[row].kind == "pretrained"
        return (f"pretrain-{row}-{self.pretraining_seed(row, seed)}",) if pretrained else ()

    def budgets_and_seeds(self, task: TaskRecord) -> tuple[list[Budget], list[int]]:
        """What a `sweep` or `measure` task covers."""
        evaluator = self.evaluator(task.data, task.evaluator, task.arm)
        if _is_split(evaluator):
            return [task.labels_per_class], [task.seed]
        c = self.study.comparison
        seeds = [seed for seed in c.seeds if self.pretraining_seed(task.arm, seed) == task.seed]
        return list(runner.budgets(evaluator, c.labels_per_class)), seeds

    def fingerprint(self, task: TaskRecord) -> str:
        """Hash of everything a task's result depends on, and of nothing else."""
        content: list[Any] = [_FORMAT, task.kind, task.seed, self._origin(task)]
        if task.data:
            content += [self.shards.get(f"{task.data} {part}") for part in ("train", "test")]
        if task.evaluator:
            evaluator = self.evaluator(task.data, task.evaluator, task.arm)
            content += [task.evaluator, evaluator.config.model_dump(mode="json"), *self.budgets_and_seeds(task)]
            content += [self.sets[task.data].metric]  # settings are selected by it
            if runner.has_sweep(evaluator):
                content += [self.study.comparison.seeds[0]]
        return _hash(content)[:16]

    def _origin(self, task: TaskRecord) -> list[Any]:
        """What the encoder that a task trains or evaluates is made from."""
        row = self.rows[task.arm]
        if row.kind == "pretrained":
            recipe, ignored = self.study.recipes[row.name], [f"{key}." for key in ("name", *runs.MAY_CHANGE)]
            learned = flatten(recipe.model_dump(mode="json"))
            learned = {k: v for k, v in learned.items() if not any(f"{k}.".startswith(key) for key in ignored)}
            if recipe.init_from:
                learned["init_from"] = self._sum(factory.find_weights(recipe.init_from) / factory.WEIGHTS)
            seed = task.seed if self.study.comparison.pretrain_per_seed else None
            return [learned, self.shards.get(f"{row.name} pretrain"), seed]
        origin: list[Any] = [row.kind == "pixels", self._architecture(row.like, dropout=True)]
        if row.kind == "weights":
            given = str(self.study.comparison.arms[row.name].weights)
            files = [factory.find_weights(given) / name for name in (factory.WEIGHTS, factory.CONFIG)]
            head = checkpoint.newest_of(Path(given))
            origin += map(self._sum, [*files, *([head / checkpoint.OBJECTIVE] if head else [])])
        return origin

    def _sum(self, path: Path) -> str:
        """A file's checksum; weights matter to many tasks and are read once."""
        if path not in self._sums:
            self._sums[path] = sha256(path)
        return self._sums[path]


def _is_split(evaluator: Evaluator) -> bool:
    """Whether each label budget and seed is a task of its own."""
    return evaluator.trains_encoder or runner.has_sweep(evaluator)


def _word(budget: int | str) -> str:
    """A budget in a file name."""
    return str(budget).replace("%", "percent")


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
