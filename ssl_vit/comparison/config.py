"""What a comparison and a suite of data sets are, and reading them from YAML. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from ssl_vit import plugins, recipe
from ssl_vit.evaluators import Budgets, Metric, Seeds
from ssl_vit.interfaces import Config, UserError
from ssl_vit.recipe import Recipe

ONLY = "data"  # the name of a comparison's data set where it has one
_NAME = re.compile(r"[A-Za-z0-9_.]+")
_FOLDERS = ("pieces", "features", "pictures")
# A comparison sets these itself, by `seeds` and `labels_per_class`.
_SET_BY_COMPARISON = {"labels_per_class", "seeds"}


def _check_names(names: Any) -> Any:
    for name in names:
        if not _NAME.fullmatch(str(name)):
            raise ValueError(f"'{name}': names are made of letters, digits, _ and . (they become file names)")
    return names


class DataSet(Config):
    """A labeled data set to judge on: shards, or a source to be packed into FOLDER/NAME/train and test on first use.

    train, test: shards as in `data.train`. source: anything `ssl-vit shards make` takes, such as a hub name; splits:
    its names of train and test; image_column, label_column: of that source. metric: the number that tables show: the
    share of right answers, or the mean of the classes' shares. evaluators: settings by evaluator, for this set alone.
    """

    train: str | None = None
    test: str | None = None
    source: str | None = None
    splits: tuple[str, str] = ("train", "test")
    image_column: str | None = None
    label_column: str | None = None
    metric: Metric = "accuracy"
    evaluators: dict[str, dict[str, Any]] = Field({})

    @model_validator(mode="after")
    def _one_origin(self) -> DataSet:
        if (self.source is None) == (self.train is None or self.test is None):
            raise ValueError("give train and test (shards), or source (to be packed)")
        return self


class Suite(Config):
    """Data sets to evaluate on together. folder: where those given by `source` are packed."""

    name: str
    folder: str = "shards"
    sets: dict[str, DataSet] = Field(min_length=1)

    _names = field_validator("sets")(_check_names)


class Arm(Config):
    """One way to get an encoder: a training recipe, weights that are there already, or neither (training from scratch).

    recipe: a training recipe; overrides: `key=value` strings for it. weights: a run, checkpoint or weights folder.
    like: of an arm from scratch, the arm whose architecture and image preparation it has (None: the first with any).
    series: arms of one series are joined by a line in a study's figure (None: the arm's architecture).
    """

    label: str
    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    weights: str | None = None
    like: str | None = None
    series: str | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> Arm:
        if self.recipe and self.weights:
            raise ValueError("give recipe or weights, not both")
        if self.overrides and not self.recipe:
            raise ValueError("overrides are of a recipe, and this arm has none")
        if self.like and (self.recipe or self.weights):
            raise ValueError("like is for an arm from scratch, without recipe and weights")
        return self


class ComparisonData(Config):
    """train: labeled shards that every arm may use. test: labeled shards that only the last measurement sees.

    sets, or suite (a file or a shipped suite's name): several data sets in place of the one. folder: where a suite's
        sources are packed (None: the suite's own).
    pretrain: what the arms pretrain on, in place of their recipes' `data.train` (None: `train`, or the recipes' own
        where there are several sets).
    """

    train: str | None = None
    test: str | None = None
    sets: dict[str, DataSet] = Field({})
    suite: str | None = None
    folder: str | None = None
    pretrain: str | None = None

    _names = field_validator("sets")(_check_names)

    @model_validator(mode="after")
    def _one_way(self) -> ComparisonData:
        if (self.train is None) != (self.test is None):
            raise ValueError("train and test go together")
        if [self.train is not None, bool(self.sets), self.suite is not None].count(True) != 1:
            raise ValueError("give train and test, or sets, or suite")
        return self


class Comparison(Config):
    """Arms x seeds x label budgets x data sets.

    run: the comparison's directory (default: runs/NAME). seeds: of the labeled subset, the head and the order.
    pretrain_per_seed: pretrain again for every seed (else one pretraining serves all seeds, and the report says so).
    labels_per_class: label budgets: images a class, shares such as '10%', or all.
    evaluators: settings by evaluator name. jobs: processes that share the pieces (1: in this process).
    study: draw accuracy over what the arms' pretraining differs in: `samples` (images in the pretraining set) or
        `flops` (pretraining compute), a line for each series of arms.
    pictures: attention, filters and reconstructions of every arm that pretrains (`ssl-vit inspect`).
    """

    name: str
    title: str = ""
    run: str = ""
    seeds: Seeds = Field((0, 1, 2), min_length=1)
    pretrain_per_seed: bool = False
    labels_per_class: Budgets = Field((5, 10, 25), min_length=1)
    data: ComparisonData
    arms: dict[str, Arm]
    evaluators: dict[str, SerializeAsAny[Config]]
    jobs: int = Field(1, ge=1)
    study: Literal["samples", "flops"] | None = None
    pictures: bool = True
    notes: tuple[str, ...] = ()

    _names = field_validator("arms")(_check_names)

    @field_validator("arms")
    @classmethod
    def _not_a_reference(cls, arms: dict[str, Arm]) -> dict[str, Arm]:
        for name in arms:
            if name == "pixels" or name.partition("_")[0] == "untrained":
                raise ValueError(f"'{name}': raw pixels and untrained encoders have such names in every comparison")
            if name in _FOLDERS:
                raise ValueError(f"'{name}': a comparison keeps something else in its folder of this name")
        return arms

    @property
    def run_directory(self) -> Path:
        return Path(self.run or f"runs/{self.name}")


@dataclass(frozen=True)
class Study:
    """A comparison as read: with its arms' recipes, its data sets, and the evaluators' settings for each set.

    folder: where sets given by `source` are packed.
    """

    comparison: Comparison
    recipes: dict[str, Recipe]
    sets: dict[str, DataSet]
    evaluators: dict[str, dict[str, Config]]
    folder: Path


def load_comparison(name: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read and validate a comparison and its arms' recipes. Raises UserError naming each wrong key."""
    path = recipe.find(str(name))
    content = recipe.read(path, overrides)
    if "arms" not in content:
        raise UserError(f"{path} is a training recipe: run it with `ssl-vit train {name}`")
    named = content.get("evaluators")
    if not isinstance(named, dict) or not named:
        raise UserError(f"{path}: evaluators: name at least one, such as few_shot: {{}}")
    given = {key: value or {} for key, value in named.items()}
    content["evaluators"] = {key: _settings(path, key, value) for key, value in given.items()}
    comparison = recipe.validate(Comparison, content, f"{path}: ")
    for key, arm in comparison.arms.items():
        if arm.like and not _has_encoder(comparison.arms.get(arm.like)):
            raise UserError(f"{path}: arms.{key}.like={arm.like}: that is no arm with a recipe or weights")
    if not any(map(_has_encoder, comparison.arms.values())):
        raise UserError(f"{path}: no arm has a recipe or weights, so there is nothing to compare with scratch")
    data = comparison.data
    suite = load_suite(data.suite, near=path) if data.suite else None
    sets = suite.sets if suite else data.sets or {ONLY: DataSet(train=data.train, test=data.test)}
    pretrain = data.pretrain or data.train
    recipes = {
        key: recipe.load_recipe(arm.recipe, [*([f"data.train={pretrain}"] if pretrain else []), *arm.overrides], path)
        for key, arm in comparison.arms.items()
        if arm.recipe
    }
    for key, settings in recipes.items():
        if settings.probe and settings.probe.patience:
            raise UserError(f"{path}: arms.{key}: probe.patience would end this pretraining by labels: leave it out")
    evaluators = {
        name: {key: _settings(path, key, _merged(value, chosen.evaluators.get(key))) for key, value in given.items()}
        for name, chosen in sets.items()
    }
    return Study(comparison, recipes, sets, evaluators, Path(data.folder or (suite.folder if suite else "shards")))


def _merged(under: dict[str, Any], over: dict[str, Any] | None) -> dict[str, Any]:
    return dict(OmegaConf.to_container(OmegaConf.merge(under, over or {})))


def _has_encoder(arm: Arm | None) -> bool:
    return arm is not None and bool(arm.recipe or arm.weights)


def _settings(path: Path, evaluator: str, values: dict[str, Any]) -> Config:
    for key in sorted(_SET_BY_COMPARISON.intersection(values)):
        raise UserError(
            f"{path}: evaluators.{evaluator}.{key}: a comparison sets this itself, by seeds and labels_per_class"
        )
    config: type[Config] = plugins.load("evaluators", evaluator).Config
    return recipe.validate(config, values, f"{path}: evaluators.{evaluator}.")


def suites() -> dict[str, Path]:
    """Shipped suites by name."""
    return {path.stem: path for path in sorted((recipe.recipes_folder() / "suites").glob("*.yaml"))}


def load_suite(name: str, near: Path | None = None, overrides: Sequence[str] = ()) -> Suite:
    """Read and validate a suite: a path, one beside the recipe `near`, or a shipped suite's name. Raises UserError."""
    places = [Path(name), *([near.parent / name] if near else []), *([suites()[name]] if name in suites() else [])]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise UserError(f"{name}: no such suite; shipped ones: {', '.join(suites())}")
    content = recipe.read(path, overrides)
    for key, chosen in (content.get("sets") or {}).items():
        for evaluator, values in ((chosen or {}).get("evaluators") or {}).items():
            config = plugins.load("evaluators", evaluator).Config
            recipe.validate(config, values or {}, f"{path}: sets.{key}.evaluators.{evaluator}.")
    return recipe.validate(Suite, content, f"{path}: ")
