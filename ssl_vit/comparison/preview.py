"""What a comparison would do and cost, before it does it: `ssl-vit compare RECIPE --dry-run`."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ssl_vit import plugins, recipe
from ssl_vit.comparison.config import ONLY, Study
from ssl_vit.comparison.plan import Piece, Plan
from ssl_vit.comparison.run import look
from ssl_vit.comparison.suites import packed
from ssl_vit.comparison.work import is_done
from ssl_vit.data.shards import ShardSet
from ssl_vit.evaluators import runner
from ssl_vit.evaluators.labels import choose_each, choose_labeled, labels_of
from ssl_vit.recipe import Recipe
from ssl_vit.stage import DryRun, dry_run

Shown = dict[str, Any]
_FORWARD = 1 / 3  # of a training step: the backward pass costs twice the forward pass
PARTS = ("pretraining", "fine_tuning", "features")


def preview(study: Study) -> Shown:
    """Wire up every arm's pretraining and fine-tuning, try one micro-batch of each; nothing is written.

    Times are this process's, for the pieces that are not done yet, one after the other; exact solvers and pictures are
    not in them. Raises UserError for whatever would stop the comparison before its first step.
    """
    plan, opened, _ = look(study, packed(study.sets, study.folder))
    missing = [piece for piece in plan.pieces if not is_done(plan, piece)]
    costs = _Costs(plan, opened, {arm: dry_run(settings) for arm, settings in study.recipes.items()})
    for piece in missing:
        costs.add(piece)
    rows = [*study.comparison.arms, *(name for name in plan.references if name != "pixels")]
    return {
        "run": str(plan.run),
        "data": {part if name == ONLY else f"{name} {part}": shards.samples for (name, part), shards in opened.items()},
        "pieces": {
            "all": len(plan.pieces),
            "done": len(plan.pieces) - len(missing),
            "missing": dict(Counter(piece.kind for piece in missing)),
        },
        "arms": {
            arm: {f"{part}_hours": round(costs.hours[arm, part], 3) for part in PARTS}
            | ({"pretraining": asdict(costs.pretraining[arm])} if arm in costs.pretraining else {})
            for arm in rows
        },
        "memory": {
            "weights_and_activations_mib": round(max(map(_memory, costs.tried.values())), 1) if costs.tried else 0
        },
        "time": {
            "hours_in_all": round(sum(costs.hours.values()), 3),
            "jobs": study.comparison.jobs,
            "not_estimated": sorted(costs.unknown),
        },
    }


@dataclass
class _Costs:
    """Hours by (arm, part), from one measured micro-batch of every kind of training.

    tried: what was measured, by what it depends on. unknown: arms whose weights came without a recipe.
    """

    plan: Plan
    opened: dict[tuple[str, str], ShardSet]
    pretraining: dict[str, DryRun]
    tried: dict[str, DryRun] = field(default_factory=dict)
    hours: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    unknown: set[str] = field(default_factory=set)
    read: set[tuple[Any, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tried |= self.pretraining

    def add(self, piece: Piece) -> None:
        if piece.kind == "pretrain":
            self.hours[piece.arm, "pretraining"] += self.pretraining[piece.arm].hours
        elif piece.kind in ("choose", "measure") and piece.arm != "pixels":
            like = self.plan.settings.get(self.plan.like(piece.arm))
            if like is None:
                self.unknown.add(piece.arm)
            elif self.plan.evaluators[piece.data][piece.evaluator].trains_encoder:
                self._fine_tuning(piece, like)
            else:
                self._features(piece, like)

    def _fine_tuning(self, piece: Piece, like: Recipe) -> None:
        labels = labels_of(self.opened[piece.data, "train"])
        images = len(choose_labeled(labels, piece.budget, piece.seed))
        judge, shards = self.plan.evaluators[piece.data][piece.evaluator], self.opened[piece.data, "train"]
        for stage in runner.training_recipes(judge, like, images, sweep=piece.kind == "choose"):
            workers = min(like.data.workers, stage.data.lanes, len(shards.urls))
            data = {"train": str(self.plan.sets[piece.data].train), "workers": workers}
            one: Shown = {"data": stage.data.model_copy(update=data)}
            one["training"] = stage.training.model_copy(update={"steps": 1})
            seconds = self._try(stage.model_copy(update=one)).step_seconds() * (stage.training.steps or 0)
            self.hours[piece.arm, "fine_tuning"] += seconds / 3600

    def _features(self, piece: Piece, like: Recipe) -> None:
        """The images that an evaluator reads once through the encoder; test images once for each representation."""
        judge = self.plan.evaluators[piece.data][piece.evaluator]
        representation = getattr(judge.config, "representation", None)
        budgets = runner.budgets(judge, self.plan.study.comparison.labels_per_class)
        labels = labels_of(self.opened[piece.data, "train"])
        chosen = choose_each(labels, budgets, self.plan.seeds_of(piece)).values()
        few = np.unique(np.concatenate(list(chosen)))
        images = 0
        for part, count in (("test", self.opened[piece.data, "test"].samples), (few.tobytes(), len(few))):
            what = (piece.arm, piece.data, piece.seed, representation, part)
            images += 0 if what in self.read else count
            self.read.add(what)
        size = {"image_size": representation.image_size} if representation and representation.image_size else {}
        batch = like.training.batch_size
        keys = {"encoder": size, "objective": {"name": "classification", "head": "linear", "pooling": "mean"}}
        measured = self._measured(piece, like, keys | {"training": {"steps": 1, "batch_size": batch}})
        self.hours[piece.arm, "features"] += measured.step_seconds(_FORWARD) * images / batch / 3600

    def _measured(self, piece: Piece, like: Recipe, keys: Shown) -> DryRun:
        """A training as an evaluator does it, tried as a recipe on the piece's labeled shards."""
        content = like.model_dump(mode="json", exclude={"objective", "optim", "training", "probe", "init_from"})
        for room, values in keys.items():
            content[room] = content.get(room, {}) | values
        shards = self.opened[piece.data, "train"]
        workers = min(like.data.workers, content["data"]["lanes"], len(shards.urls))
        content["data"] |= {"train": str(self.plan.sets[piece.data].train), "samples": None, "workers": workers}
        content["training"] |= {"steps": 1, "precision": like.training.precision}
        content["objective"] = recipe.validate(
            plugins.load("objectives", content["objective"]["name"]).Config, content["objective"]
        )
        return self._try(recipe.validate(Recipe, content))

    def _try(self, stage: Recipe) -> DryRun:
        key = stage.model_dump_json(exclude={"run", "name", "seed"})
        if key not in self.tried:
            self.tried[key] = dry_run(stage)
        return self.tried[key]


def _memory(found: DryRun) -> float:
    return found.weights_mib + found.activations_mib
