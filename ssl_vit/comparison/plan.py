"""The independent pieces of a comparison: which there are, what each depends on, and what its result depends on.

A piece (a pretraining, its pictures, a sweep, one fine-tuning, one evaluation of frozen features) becomes a file under
`pieces/`, named by what it is and fingerprinted by everything its result depends on.
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
from ssl_vit.api import run_recipe
from ssl_vit.comparison.config import ONLY, DataSet, Study
from ssl_vit.evaluators import ALL, runner
from ssl_vit.evaluators.base import Evaluator
from ssl_vit.files import sha256
from ssl_vit.interfaces import UserError
from ssl_vit.models import factory
from ssl_vit.recipe import Recipe
from ssl_vit.training import checkpoint

_FORMAT = 3  # of the results that pieces write
# Of a recipe, what training from scratch and features of an untrained encoder depend on.
_PREPARATION: Any = {"data": {"evaluation_resize"}, "training": {"precision"}}
_LIKE: Any = {"encoder": True, **_PREPARATION}


@dataclass(frozen=True)
class Piece:
    """One independent unit of work. after: ids of the pieces whose results it needs."""

    id: str
    kind: str  # pretrain, pictures, choose or measure
    arm: str
    data: str = ""
    evaluator: str = ""
    budget: int | str = 0
    seed: int = 0
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A study, where it lives, and what its data sets are. sets: with their shards' paths.

    shards: fingerprints by "SET train", "SET test" and "ARM pretrain".
    """

    study: Study
    run: Path
    sets: dict[str, DataSet]
    shards: dict[str, str] = field(default_factory=dict)
    _sums: dict[Path, str] = field(default_factory=dict)

    @cached_property
    def evaluators(self) -> dict[str, dict[str, Evaluator]]:
        """By data set, then name: those that train the encoder first, so that the verdict is about them."""
        built = {
            name: {key: plugins.load("evaluators", key).Evaluator(config) for key, config in configs.items()}
            for name, configs in self.study.evaluators.items()
        }
        return {
            name: dict(sorted(judges.items(), key=lambda item: not item[1].trains_encoder))
            for name, judges in built.items()
        }

    @cached_property
    def settings(self) -> dict[str, Recipe]:
        """The recipe of each arm that has an encoder of its own, where there is one (weights may come without)."""
        arms = self.study.comparison.arms
        found = {name: run_recipe(Path(arm.weights)) for name, arm in arms.items() if arm.weights}
        return self.study.recipes | {name: settings for name, settings in found.items() if settings}

    def prepared_by(self, arm: str) -> Recipe | None:
        """The recipe that says how an arm's images are prepared, and its precision: its own; of weights that come
        without one, the first arm's that has any, so that all see the same images."""
        return self.settings.get(arm) or next(iter(self.settings.values()), None)

    @property
    def with_encoder(self) -> list[str]:
        return [name for name, arm in self.study.comparison.arms.items() if arm.recipe or arm.weights]

    def like(self, arm: str) -> str:
        """The arm whose architecture and image preparation an arm or reference has: itself where it has an encoder."""
        if arm in self.with_encoder:
            return arm
        if arm in self.study.comparison.arms:
            return self.study.comparison.arms[arm].like or self.with_encoder[0]
        return arm.partition("untrained_")[2] or self.with_encoder[0]

    @cached_property
    def references(self) -> tuple[str, ...]:
        """Rows beside the arms on frozen features: `untrained` (and `untrained_ARM` for each further architecture that
        an arm has), and `pixels`."""
        seen = {self.architecture(self.with_encoder[0])}
        others = []
        for arm in self.with_encoder[1:]:
            if (found := self.architecture(arm)) not in seen:
                seen.add(found)
                others.append(f"untrained_{arm}")
        return ("untrained", *others, "pixels")

    def architecture(self, arm: str) -> str:
        """A hash of the encoder's sizes and the image preparation, as the recipe or the weights say them. Dropout is
        none of it: an untrained encoder is the same with and without."""
        return self._made_like(arm, dropout=False)

    def _made_like(self, arm: str, *, dropout: bool) -> str:
        like = self.like(arm)
        if like not in self.settings:
            config = factory.find_weights(self.study.comparison.arms[like].weights or "") / factory.CONFIG
            other = self.prepared_by(like)
            preparation = other.model_dump(mode="json", include=_PREPARATION) if other else {}
            return _hash([self._sum(config), preparation])
        content = self.settings[like].model_dump(mode="json", include=_LIKE)
        if not dropout:
            content["encoder"] = {key: value for key, value in content["encoder"].items() if "drop" not in key}
        return _hash(content)

    def weights(self, arm: str, seed: int) -> Path | None:
        """Where an arm's trained encoder is, or will be; None for training from scratch and the references."""
        arms = self.study.comparison.arms
        if arm not in self.with_encoder:
            return None
        if given := arms[arm].weights:
            return Path(given)
        return self.run / (f"{arm}_seed{seed}" if self.study.comparison.pretrain_per_seed else arm)

    def pretraining_seed(self, arm: str, seed: int) -> int:
        """The seed whose pretraining serves `seed`; of an untrained encoder, whose initialization."""
        drawn = arm in self.study.recipes or arm.partition("_")[0] == "untrained"
        return seed if self.study.comparison.pretrain_per_seed and drawn else self.study.comparison.seeds[0]

    @cached_property
    def pieces(self) -> list[Piece]:
        """Every piece, each after the ones it needs."""
        c = self.study.comparison
        found = []
        for arm in self.study.recipes:
            for seed in dict.fromkeys(self.pretraining_seed(arm, seed) for seed in c.seeds):
                found.append(Piece(f"pretrain-{arm}-{seed}", "pretrain", arm, seed=seed))
        if c.pictures:
            for arm in self.with_encoder:
                after = self._pretrained(arm, c.seeds[0])
                found.append(
                    Piece(f"pictures-{arm}", "pictures", arm, next(iter(self.sets)), seed=c.seeds[0], after=after)
                )
        for data, judges in self.evaluators.items():
            for name, judge in judges.items():
                for arm in self.subjects(judge):
                    found += self._tuned(data, name, arm) if runner.has_sweep(judge) else self._untuned(data, name, arm)
        return found

    def subjects(self, judge: Evaluator) -> tuple[str, ...]:
        """The rows of an evaluator: every arm where it trains the encoder, else those that have one (and a head, where
        that is judged) and references. Raises UserError where no arm has a head."""
        if judge.trains_encoder:
            return tuple(self.study.comparison.arms)
        if judge.needs_head:
            found = [n for n in self.with_encoder if n in self.settings and _has_head(self.settings[n])]
            if not found:
                raise UserError(f"{judge.title}: no arm's recipe trains a classifier: leave this evaluator out")
            return tuple(found)
        return (*self.with_encoder, *(name for name in self.references if name.split("_")[0] in judge.references))

    def _tuned(self, data: str, evaluator: str, arm: str) -> Iterator[Piece]:
        """A sweep for each tuning budget, then one piece for each budget and seed."""
        c, judge = self.study.comparison, self.evaluators[data][evaluator]
        place, first = self._place(evaluator, data), c.seeds[0]
        budgets = runner.budgets(judge, c.labels_per_class)
        for budget in dict.fromkeys(runner.sweep_budget(judge, budget) for budget in budgets):
            after = self._pretrained(arm, first)
            name = f"choose_{place}-{arm}-{_word(budget)}"
            yield Piece(name, "choose", arm, data, evaluator, budget, first, after)
        for budget in budgets:
            choice = f"choose_{place}-{arm}-{_word(runner.sweep_budget(judge, budget))}"
            for seed in c.seeds:
                after = (choice, *self._pretrained(arm, seed))
                name = f"{place}-{arm}-{_word(budget)}-{seed}"
                yield Piece(name, "measure", arm, data, evaluator, budget, seed, after)

    def _untuned(self, data: str, evaluator: str, arm: str) -> Iterator[Piece]:
        """One piece for each pretraining: all budgets and all of its seeds."""
        place = self._place(evaluator, data)
        for seed in dict.fromkeys(self.pretraining_seed(arm, seed) for seed in self.study.comparison.seeds):
            after = self._pretrained(arm, seed)
            yield Piece(f"{place}-{arm}-{seed}", "measure", arm, data, evaluator, ALL, seed, after)

    def _place(self, evaluator: str, data: str) -> str:
        return evaluator if data == ONLY else f"{evaluator}-{data}"

    def _pretrained(self, arm: str, seed: int) -> tuple[str, ...]:
        return (f"pretrain-{arm}-{self.pretraining_seed(arm, seed)}",) if arm in self.study.recipes else ()

    def seeds_of(self, piece: Piece) -> tuple[int, ...]:
        """The seeds that a piece of measurements covers."""
        seeds = self.study.comparison.seeds
        if runner.has_sweep(self.evaluators[piece.data][piece.evaluator]):
            return (piece.seed,)
        return tuple(seed for seed in seeds if self.pretraining_seed(piece.arm, seed) == piece.seed)

    def fingerprint(self, piece: Piece) -> str:
        """A hash of everything a piece's result depends on, and of nothing else, so that what is finished is reused."""
        content: dict[str, Any] = {
            "format": _FORMAT,
            "kind": piece.kind,
            "seed": piece.seed,
            "arm": self._origin(piece),
        }
        if piece.data:
            content["data"] = [self.shards.get(f"{piece.data} {part}") for part in ("train", "test")]
        if piece.evaluator:
            judge = self.evaluators[piece.data][piece.evaluator]
            content["evaluator"] = [piece.evaluator, judge.config.model_dump(mode="json")]
            budgets = runner.budgets(judge, self.study.comparison.labels_per_class)
            content["budgets"] = piece.budget if runner.has_sweep(judge) else list(budgets)
            content["seeds"] = list(self.seeds_of(piece)) if piece.kind == "measure" else []
            content["sweep"] = self.study.comparison.seeds[0]
            if runner.has_sweep(judge) and (metric := self.sets[piece.data].metric) != "accuracy":
                content["metric"] = metric
        return _hash(content)[:16]

    def _sum(self, path: Path) -> str:
        """A file's checksum; weights are many pieces' matter and read once."""
        if path not in self._sums:
            self._sums[path] = sha256(path)
        return self._sums[path]

    def _origin(self, piece: Piece) -> list[Any]:
        """What the encoder that a piece trains or judges was made from."""
        arm = piece.arm
        if arm in self.study.recipes:
            made = self.study.recipes[arm].model_dump(mode="json", exclude={"run", "name"})
            for key in runs.MAY_CHANGE:
                room, _, name = key.partition(".")
                if name:
                    made.get(room, {}).pop(name, None)
            if made["init_from"]:
                made["init_from"] = self._sum(factory.find_weights(made["init_from"]) / factory.WEIGHTS)
            seed = self.pretraining_seed(arm, piece.seed) if self.study.comparison.pretrain_per_seed else None
            return [made, self.shards.get(f"{arm} pretrain"), seed]
        if given := self.study.comparison.arms[arm].weights if arm in self.with_encoder else None:
            files = [factory.find_weights(given) / name for name in (factory.WEIGHTS, factory.CONFIG)]
            if piece.kind == "pictures" or self.evaluators[piece.data][piece.evaluator].needs_head:
                head = checkpoint.newest_of(Path(given))
                files += [head / checkpoint.OBJECTIVE] if head else []
            return [*map(self._sum, files), self._made_like(arm, dropout=True)]
        return [arm == "pixels", self._made_like(arm, dropout=True)]


def _has_head(settings: Recipe) -> bool:
    return settings.objective.name == "classification"  # type: ignore[attr-defined]


def _word(budget: int | str) -> str:
    """A budget in a file's name."""
    return str(budget).replace("%", "percent")


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
