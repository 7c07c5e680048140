"""What a comparison measures: rows and their encoders, datasets and folds, seeds and pretrainings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ssl_vit import plugins
from ssl_vit.comparison.config import Study
from ssl_vit.comparison.sets import DataSet
from ssl_vit.data import DataConfig, mixture
from ssl_vit.evaluators import runner
from ssl_vit.evaluators.base import Evaluator
from ssl_vit.files import read_json
from ssl_vit.interfaces import Budget, UnknownObjective
from ssl_vit.models import factory
from ssl_vit.models.encoder import Encoder
from ssl_vit.recipe import Recipe, needs_labels, run_of, run_recipe, stages
from ssl_vit.records import ArmKind, ReferenceKind, ReferenceRecord, TaskRecord
from ssl_vit.runs import SUMMARY

# What training from scratch and an untrained encoder depend on; dropout does not change an untrained encoder.
_PREPARATION: Any = {"data": {"evaluation_resize", "max_pixels"}, "training": {"precision"}}
_DROPOUT = {"dropout", "drop_path"}
_SHIFT = 1_000_000  # between the seeds of a row and those of its repetition
_CONTROL_SEEDS = 8  # most seeds of a control on frozen features: each needs another untrained encoder


@dataclass(frozen=True)
class Row:
    """A row of the tables: an arm, or a reference that is measured beside the arms on frozen features.

    like: the arm with an encoder whose architecture and image preparation this row uses.
    repeats: for a control, the row that it repeats with other random numbers.
    """

    name: str
    kind: ArmKind | ReferenceKind
    like: str
    repeats: str = ""

    @property
    def shift(self) -> int:
        """Offset that is added to every seed except those that draw the labeled images and select settings."""
        return _SHIFT if self.repeats else 0

    @property
    def source(self) -> str:
        """Which source of an `EvalContext` is evaluated: `trained`, `untrained` or `pixels`."""
        return {"pretrained": "trained", "weights": "trained", "pixels": "pixels"}.get(self.kind, "untrained")


@dataclass(frozen=True)
class Design:
    """What the tasks of a study measure.

    shards: fingerprints by "SET train", "SET test" and "ARM pretrain"; see `part`.
    checksums: cache of the checksums of weight files.
    """

    study: Study
    shards: dict[str, str] = field(default_factory=dict)
    checksums: dict[Path, str] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """Directory of the comparison."""
        return self.study.comparison.run_directory

    @cached_property
    def evaluators(self) -> dict[tuple[str, str, str], Evaluator]:
        """Evaluators by (dataset, evaluator, arm); the arm "" stands for the references. Evaluators that train the
        encoder come first, because the verdict is about them."""
        built = {key: plugins.load("evaluators", key[1]).Evaluator(c) for key, c in self.study.evaluators.items()}
        return dict(sorted(built.items(), key=lambda item: not item[1].trains_encoder))

    @property
    def folds(self) -> range:
        """Indices of the folds; without cross-validation fold 0 alone."""
        return range(len(self.study.folds) or 1)

    def part(self, name: str, part: str, fold: int) -> str:
        """Name of a shard set, such as "digits train of fold 0".

        name: a dataset or arm.
        part: `train` or `test` of a dataset, `pretrain` of an arm.
        """
        return f"{name} {part}" + (f" of fold {fold}" if self.study.folds else "")

    def split(self, data: str, fold: int) -> DataSet:
        """The train and test shards of a dataset."""
        return self.study.folds[fold] if self.study.folds else self.study.sets[data]

    def pretraining_data(self, arm: str, fold: int) -> DataConfig:
        """The data that an arm pretrains on: in a cross-validation all folds but the tested one."""
        data = self.study.recipes[arm].data
        train = self.study.folds[fold].train if self.study.folds else None
        return data.model_copy(update={"train": mixture(train)}) if train else data

    def evaluator(self, data: str, name: str, row: str) -> Evaluator:
        arm = self.rows[row].repeats or row
        evaluator = self.evaluators[data, name, arm if arm in self.study.comparison.arms else ""]
        return evaluator.for_source(self.rows[row].source)

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        """Recipes by arm. Arms from scratch, and weights that come without a recipe, have none."""
        arms = self.study.comparison.arms
        of_weights = {name: run_recipe(Path(arm.weights)) for name, arm in arms.items() if arm.weights}
        return self.study.recipes | {name: recipe for name, recipe in of_weights.items() if recipe}

    def preparation(self, arm: str) -> Recipe | None:
        """The recipe that sets an arm's image preparation and precision. Weights without a recipe use the first recipe
        of the comparison, so that all arms see the same images."""
        return self.recipes.get(arm) or next(iter(self.recipes.values()), None)

    @cached_property
    def rows(self) -> dict[str, Row]:
        """Every arm, then the references."""
        first, arms = self._with_encoder[0], self.study.comparison.arms
        rows = [
            Row(name, arm.kind, name if name in self._with_encoder else arm.like or arm.compute_of or first)
            for name, arm in arms.items()
        ]
        rows += [Row(record.name, record.kind, record.like, record.repeats) for record in self.references]
        return {row.name: row for row in rows}

    @cached_property
    def references(self) -> tuple[ReferenceRecord, ...]:
        """The rows that are measured beside the arms: an untrained encoder of each architecture, raw pixels, then the
        controls."""
        untrained: dict[str, ReferenceRecord] = {}  # by architecture
        for arm in self._with_encoder:
            name = f"untrained_{arm}" if untrained else "untrained"
            untrained.setdefault(self.sizes(arm), self._reference(name, "untrained", arm))
        return (*untrained.values(), self._reference("pixels", "pixels", self._with_encoder[0]), *self._controls())

    def _reference(self, name: str, kind: ReferenceKind, like: str, repeats: str = "") -> ReferenceRecord:
        return ReferenceRecord(name=name, kind=kind, like=like, architecture=self.sizes(like), repeats=repeats)

    def _controls(self) -> Iterator[ReferenceRecord]:
        """Rows that repeat another row with other random numbers, so that any difference is chance."""
        c, first = self.study.comparison, self._with_encoder[0]
        if c.controls and self.control_evaluator:
            yield self._reference("control", "control", first)
            yield self._reference("control_repeated", "control", first, "control")
        scratch = [name for name, arm in c.arms.items() if arm.kind == "scratch" and arm.compute_of is None]
        if c.controls is True and scratch and self.study.headline_trains_encoder:
            yield self._reference("scratch_repeated", "control", c.arms[scratch[0]].like or first, scratch[0])

    @property
    def control_evaluator(self) -> str | None:
        """The first evaluator on frozen features that measures untrained encoders; None where there is none."""
        for (_, name, _), evaluator in self.evaluators.items():
            if not evaluator.trains_encoder and "untrained" in evaluator.references:
                return name
        return None

    @property
    def _with_encoder(self) -> list[str]:
        return [name for name, arm in self.study.comparison.arms.items() if arm.kind != "scratch"]

    def encoder(self, row: str) -> dict[str, Any]:
        """The encoder's sizes, with its dropout, and the image preparation of a row; empty for weights without a
        recipe."""
        like = self.rows[row].like
        sizes = self._sizes(like, dropout=True)
        return dict(zip(("encoder", "prepared"), sizes, strict=True)) if like in self.recipes else {}

    def _sizes(self, arm: str, *, dropout: bool = False) -> list[dict[str, Any]]:
        """The encoder's sizes, where there is a recipe, and the image preparation."""
        recipe, prepared = self.recipes.get(arm), self.preparation(arm)
        sizes = recipe.encoder.model_dump(mode="json", exclude=None if dropout else _DROPOUT) if recipe else {}
        return [sizes, prepared.model_dump(mode="json", include=_PREPARATION) if prepared else {}]

    def sizes(self, arm: str, *, dropout: bool = False) -> str:
        sizes, preparation = self._sizes(arm, dropout=dropout)
        if sizes:
            return digest([sizes, preparation])
        config = read_json(factory.find_weights(self.study.comparison.arms[arm].weights or "") / factory.CONFIG)
        return digest([{key: value for key, value in config.items() if key != "imported"}, preparation])

    def outline(self, arm: str) -> Encoder:
        """The encoder of an arm's recipe, without weights, on the meta device."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return factory.build(self.recipes[arm].encoder)

    def weights(self, row: str, pretraining_seed: int, fold: int) -> Path | None:
        """Where a row's trained encoder is, or will be; None for training from scratch and references."""
        match self.rows[row].kind:
            case "weights":
                return Path(self.study.comparison.arms[row].weights or "")
            case "pretrained":
                number = f"-{pretraining_seed}" if pretraining_seed else ""
                return self.run / f"{row}{number}{self.suffix(fold)}"
        return None

    def suffix(self, fold: int) -> str:
        """Suffix of task ids and run directories in a cross-validation, such as `-fold0`. Arm names have no hyphen."""
        return f"-fold{fold}" if self.study.folds else ""

    def seeds(self, evaluator: Evaluator) -> tuple[int, ...]:
        c = self.study.comparison
        return c.seeds if evaluator.trains_encoder else c.frozen_seeds

    def pretraining_seed(self, row: str, seed_index: int) -> int:
        """Seed of the pretraining (untrained encoders: of the initialization) used by the seed at `seed_index`."""
        c = self.study.comparison
        drawn = self.rows[row].kind in ("pretrained", "untrained")
        return c.seeds[self.study.pretraining_index(seed_index) if drawn else 0]

    def pretraining(self, task: TaskRecord) -> Recipe:
        """The recipe of a `pretrain` task, with its own directory, seed and data."""
        recipe, data = self.study.recipes[task.arm], self.pretraining_data(task.arm, task.fold)
        run = str(self.weights(task.arm, task.seed, task.fold))
        data = data.model_copy(update={"workers": self.workers(data)})
        return recipe.model_copy(update={"run": run, "seed": recipe.seed + task.seed, "data": data})

    def workers(self, data: DataConfig) -> int:
        """Loader processes of a task: the jobs share those of the recipe."""
        return -(-data.workers // self.study.comparison.jobs)

    def uses_labels(self, arm: str) -> bool:
        """Whether an arm's pretraining, or a run that it starts from, used labels."""
        recipe = self.recipes.get(arm)
        if recipe and isinstance(recipe.objective, UnknownObjective):  # only runs with labels know the names of classes
            summary = run_of(Path(self.study.comparison.arms[arm].weights or "")) / SUMMARY
            return bool(summary.is_file() and read_json(summary).get("classes"))
        known = [one for one in stages(recipe) if not isinstance(one.objective, UnknownObjective)] if recipe else []
        return any(map(needs_labels, known))

    def budgets_and_seeds(self, task: TaskRecord) -> tuple[list[Budget], dict[int, int]]:
        """(label budgets, pretraining seed by seed) that a `sweep` or `measure` task covers."""
        evaluator = self.evaluator(task.data, task.evaluator, task.arm)
        seeds = {seed: self.pretraining_seed(task.arm, number) for number, seed in enumerate(self.seeds(evaluator))}
        if evaluator.trains_encoder:
            return [task.labels_per_class], {task.seed: seeds[task.seed]}
        budgets = list(runner.budgets(evaluator, self.study.comparison.labels_per_class))
        if self.rows[task.arm].kind == "control":
            return budgets, dict([*seeds.items()][:_CONTROL_SEEDS])
        return budgets, {seed: pretraining for seed, pretraining in seeds.items() if pretraining == task.seed}


def digest(content: Any) -> str:
    """Hash of plain JSON values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
