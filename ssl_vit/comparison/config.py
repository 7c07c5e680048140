"""Configuration of a comparison, read from YAML."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import AfterValidator, Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from ssl_vit import plugins, recipe
from ssl_vit.comparison.quick import tenth
from ssl_vit.comparison.sets import ComparisonData, DataSet, check_names, load_suite
from ssl_vit.data import RemoteConfig, mixture
from ssl_vit.evaluators import SAME_IMAGES, Budgets, Seeds, protocol_settings
from ssl_vit.files import expanded
from ssl_vit.interfaces import Config, LocalPath, UserError, errors_about
from ssl_vit.overrides import merge
from ssl_vit.recipe import Recipe
from ssl_vit.records import ArmKind, Look

ONLY = "data"  # name of the dataset of a comparison that has one
REFERENCES = ("untrained", "pixels", "control", "control_repeated", "scratch_repeated")
_FOLDERS = ("tasks", "features", "pictures", "weights")
_KEYS = {
    "scratch": ("like", "compute_of"),
    "pretrained": ("recipe", "overrides"),
    "weights": ("weights", "architecture", "optional"),
}


class Arm(Config):
    """One way to get an encoder.

    label: displayed name (default: the name).
    recipe: for an arm that is pretrained: its training recipe.
    overrides: `key=value` strings that change the recipe.
    weights: for an arm with given weights: a run, checkpoint or weights folder; or anything that `ssl-vit import`
        takes, such as `timm:vit_small_patch16_224.augreg_in21k` or a file, which is imported into the run directory.
    architecture: timm's name of the architecture, for a weights file that does not state it.
    optional: skip the arm if its weights cannot be downloaded.
    like: for an arm from scratch (neither recipe nor weights): the arm whose architecture and image preparation it uses
        (default: the arm `compute_of`, else the first with an encoder).
    compute_of: for an arm from scratch: name of a pretrained arm. Its fine-tuning is extended by the
        steps that cost the FLOPs of one pretraining of that arm.
    series: arms of one series are joined by a line in a study's figure (default: arms of one architecture).
    evaluators: settings by evaluator, for this arm only; not those that choose images, which all arms share.
    """

    label: str
    recipe: Annotated[str, Field(min_length=1)] | None = None
    overrides: tuple[str, ...] = ()
    weights: Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)] | None = None
    architecture: str | None = None
    optional: bool = False
    like: str | None = None
    compute_of: str | None = None
    series: str | None = None
    evaluators: dict[str, dict[str, Any]] = Field({})

    @property
    def kind(self) -> ArmKind:
        return "pretrained" if self.recipe else "weights" if self.weights else "scratch"

    @model_validator(mode="after")
    def _has_keys_of_its_kind(self) -> Arm:
        for kind, keys in _KEYS.items():
            for key in keys:
                if kind != self.kind and getattr(self, key):
                    raise ValueError(f"{key} is for arms of kind {kind}; this one is of kind {self.kind}")
        return self


class ComparisonConfig(Config):
    """Arms x seeds x label budgets x datasets.

    name: the default run directory is runs/NAME.
    title: title of the report.
    notes: notes shown in the report.
    run: directory (default: runs/NAME).
    arms: arms by name. `arms.NAME.KEY=VALUE` also sets keys of the arm's training recipe (`ssl-vit keys train`);
        `arms.*` stands for all arms, and `arms.NAME=null` removes one.
    seeds: seeds for evaluators that train the encoder: [0, 1, 2] are three seeds, 3 is seed 3 alone. A seed
        determines the labeled images, the initial head and the data order.
    frozen_seeds: seeds for evaluators on frozen features, which cost little.
    pretrainings: how often each pretrained arm is pretrained (with folds: in each fold), at most once per seed. Seed n
        of its list uses pretraining i = n modulo `pretrainings`, trained with the seed of its recipe plus `seeds[i]`.
    labels_per_class: label budgets of the evaluators that set none: images per class, fractions such as '10%', or all.
    margin: differences within it count as equivalent (0.01: one percentage point).
    baseline: the arm that the headline compares with (None: training from scratch, else the untrained encoder).
    evaluators: evaluators by name, with their keys (`ssl-vit keys NAME`); `evaluators.NAME=null` removes one.
    jobs: local processes that run tasks (1: this process). They share the loader processes of `data.workers`.
    scheduler: address of a dask scheduler, such as tcp://host:8786, whose workers run the tasks. They share the
        directory that the command runs in, and are started there.
    study: plot accuracy over pretraining `samples` or `flops`, one line per series. Arms are compared only with
        baselines and arms of the same number of samples or FLOPs; arms under test also with supervised arms and
        references.
    controls: repeats with other random seeds, where no difference is expected: `frozen`, two untrained encoders under
        the first evaluator of frozen features, which costs little; true: also the first arm from scratch; false: none.
    pictures: attention, filters and reconstructions of every encoder (`ssl-vit inspect`).
    quick: a tenth of all steps and epochs, two seeds and one pretraining, for a trial.
    """

    name: str
    title: str = ""
    run: LocalPath = ""
    seeds: Seeds = tuple(range(8))
    frozen_seeds: Seeds = tuple(range(20))
    pretrainings: int = Field(1, ge=1)
    labels_per_class: Budgets = (5, 10, 25)
    margin: float = Field(0.01, gt=0, lt=1)
    data: ComparisonData
    baseline: str | None = None
    arms: dict[str, Arm]
    evaluators: dict[str, SerializeAsAny[Config]] = Field(min_length=1)
    jobs: int = Field(1, ge=1)
    scheduler: str | None = None
    study: Literal["samples", "flops"] | None = None
    controls: Literal[True, False, "frozen"] = "frozen"
    pictures: bool = True
    quick: bool = False
    notes: tuple[str, ...] = ()

    @field_validator("pretrainings")
    @classmethod
    def _each_is_used(cls, pretrainings: int, info: ValidationInfo) -> int:
        for name in ("seeds", "frozen_seeds"):
            seeds = info.data.get(name)
            if seeds and len(seeds) < pretrainings:
                raise ValueError(f"{pretrainings} pretrainings need at least as many {name}; there are {len(seeds)}")
        return pretrainings

    @field_validator("arms")
    @classmethod
    def _check_arms(cls, arms: dict[str, Arm], info: ValidationInfo) -> dict[str, Arm]:
        reserved = {*_FOLDERS, *REFERENCES, *(f"untrained_{name}" for name in arms)}
        if taken := sorted(reserved.intersection(check_names(arms))):
            raise ValueError(f"'{taken[0]}': this name is reserved for a reference or a folder; rename the arm")
        labels = [arm.label for arm in arms.values()]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"two arms have the label '{twice[0]}'; give each its own")
        from ssl_vit.report import runs  # not for --help: it imports pandas

        if taken := [label for label in labels if label in runs.REFERENCES.values()]:
            raise ValueError(f"the label '{taken[0]}' is that of a reference; give the arm another one")
        with_encoder = [name for name, arm in arms.items() if arm.kind != "scratch"]
        if not with_encoder:
            raise ValueError("no arm has a recipe or weights; add one to compare with training from scratch")
        if (baseline := info.data.get("baseline")) and (baseline not in arms or with_encoder == [baseline]):
            raise ValueError(f"baseline={baseline}: no arm has this name, or no other one has a recipe or weights")
        for name, arm in arms.items():
            if arm.like and arm.like not in with_encoder:
                raise ValueError(f"{name}.like={arm.like}: no arm with a recipe or weights has this name")
            if arm.compute_of and (arm.compute_of not in arms or arms[arm.compute_of].recipe is None):
                raise ValueError(f"{name}.compute_of={arm.compute_of}: no arm with a recipe has this name")
        return arms

    @property
    def run_directory(self) -> Path:
        return expanded(self.run or f"runs/{self.name}")


@dataclass(frozen=True)
class Study:
    """A comparison with everything it refers to.

    recipes: recipes of the pretrained arms; in a cross-validation those of the first fold.
    sets: datasets by name; those given by `source` are packed into `folder`. In a cross-validation the first fold.
    folds: train and test of each fold; empty without cross-validation.
    evaluators: settings by (dataset, evaluator, arm); the arm "" stands for the references.
    given: the recipe, saved as `comparison.yaml`. Its evaluator settings are only those that were given: the defaults
        of the others depend on what an arm or dataset sets.
    max_seeds, looks: set where seeds are added until the headlines are decided; see `looks.py`.
    assigned: index of the pretraining of seed n, where it is not n modulo `pretrainings`; set by `looks.py`.
    """

    comparison: ComparisonConfig
    recipes: dict[str, Recipe]
    sets: dict[str, DataSet]
    evaluators: dict[tuple[str, str, str], Config]
    given: dict[str, Any]
    folder: Path
    folds: tuple[DataSet, ...] = ()
    max_seeds: int | None = None
    looks: tuple[Look, ...] = ()
    assigned: tuple[int, ...] = ()

    def pretraining_index(self, seed_index: int) -> int:
        """Index of the pretraining used by the seed at `seed_index` of its list."""
        assigned, count = self.assigned, self.comparison.pretrainings
        return assigned[seed_index] if seed_index < len(assigned) else seed_index % count

    @property
    def remote(self) -> RemoteConfig:
        """How labeled data behind URLs is read: as the comparison says, else as the first recipe that says it does."""
        given = [self.comparison.data.remote, *(settings.data.remote for settings in self.recipes.values())]
        return next((remote for remote in given if remote not in (None, RemoteConfig())), None) or RemoteConfig()

    @property
    def headline_trains_encoder(self) -> bool:
        """Whether the headlines are about an evaluator that trains the encoder."""
        c = self.comparison
        trains = any(plugins.load("evaluators", name).Evaluator.trains_encoder for name in c.evaluators)
        from ssl_vit.report.sequential import headline_trains_encoder  # scipy takes a while to import

        return headline_trains_encoder(trains, [arm.kind for arm in c.arms.values()], c.baseline)


def load_comparison(name: str | Path, overrides: recipe.Overrides = ()) -> Study:
    """Read and validate a comparison and its arms' recipes. Raises UserError naming each wrong key."""
    path = recipe.find(str(name))
    content = recipe.read(path, overrides)
    if "arms" not in content:
        raise UserError(f"{path} is a training recipe; run it with `ssl-vit train {name}`")
    elsewhere = {"run", "name", "quick"} & recipe.parse_overrides(overrides).keys()
    if path == expanded(name) / "comparison.yaml" and not elsewhere:
        content["run"] = str(name)  # the directory may have been moved or renamed since
    given = content.get("evaluators", {})
    unread = {key: Config() for key in given} if isinstance(given, dict) else given
    recipe.validate(ComparisonConfig, content | {"evaluators": unread}, f"{path}: ", given=overrides)
    configured = partial(_settings, path, overrides)
    content["evaluators"] = {key: configured(key, value) for key, value in given.items()}
    c = recipe.validate(ComparisonConfig, content, f"{path}: ", given=overrides)
    suite = load_suite(c.data.suite, near=path) if c.data.suite else None
    sets = suite.sets if suite else c.data.sets or {ONLY: c.data.splits[0]}
    recipes: dict[str, Recipe] = {}
    for key, arm in c.arms.items():
        if arm.recipe:
            with errors_about(f"arms.{key}"):
                recipes[key] = recipe.load_recipe(arm.recipe, [*c.data.recipe_overrides, *arm.overrides], path)
    for key, settings in recipes.items():
        if any(one.probe and one.probe.patience for one in recipe.stages(settings)):
            raise UserError(f"{path}: arms.{key}: probe.patience uses labels to stop pretraining; remove it")
        if c.data.folds and settings.data.train != mixture(c.data.folds[1:]):
            raise UserError(f"{path}: arms.{key}: with folds, the arms pretrain on the folds; remove data.train")
    for name, arm in c.arms.items():
        if {"run", "name"} & {override.partition("=")[0] for override in arm.overrides}:
            raise UserError(f"{path}: arms.{name}: remove run and name; use a trained run by arms.{name}.weights=PATH")
        for evaluator, own in arm.evaluators.items():
            if chosen := [key for key in SAME_IMAGES if key in own]:
                raise UserError(
                    f"{path}: arms.{name}.evaluators.{evaluator}.{chosen[0]}: all arms must have the same images; "
                    f"remove it, or set evaluators.{evaluator}.{chosen[0]} for all arms"
                )
    own_settings = {f"arms.{name}": arm.evaluators for name, arm in c.arms.items()}
    own_settings |= {f"data.sets.{name}": chosen.evaluators for name, chosen in c.data.sets.items()}
    for place, by_evaluator in own_settings.items():  # those of evaluators that this comparison does not have, too
        for evaluator in by_evaluator.keys() - given.keys():
            configured(evaluator, {}, by_evaluator, place=f"{place}.")

    def settings_of(chosen: DataSet, evaluator: str, arm: str, of_arm: dict[str, Any]) -> Config:
        of_set, own = chosen.evaluators.get(evaluator) or {}, of_arm.get(evaluator) or {}
        if suite:
            of_set = protocol_settings(plugins.load("evaluators", evaluator).Config, of_set, given[evaluator] | own)
        place = f"arms.{arm}." if own else ""
        return configured(evaluator, given[evaluator], {evaluator: of_set}, of_arm, place=place)

    evaluators = {
        (data, evaluator, arm): settings_of(chosen, evaluator, arm, of_arm)  # first of no arm: its errors are shared
        for data, chosen in sets.items()
        for evaluator in given
        for arm, of_arm in {"": {}, **{name: arm.evaluators for name, arm in c.arms.items()}}.items()
    }
    folder = expanded(c.data.folder or (suite.folder if suite else "shards"))
    if c.quick:  # with another name, so that it never shares a directory with the whole comparison
        c = tenth(c).model_copy(update={"name": f"{c.name.removesuffix('_quick')}_quick"})
        recipes = {key: tenth(settings) for key, settings in recipes.items()}
        evaluators = {key: tenth(config) for key, config in evaluators.items()}
    saved = c.model_dump(mode="json", exclude={"evaluators"}) | {"evaluators": given}
    return Study(c, recipes, sets, evaluators, saved, folder, tuple(c.data.splits) if c.data.folds else ())


def _settings(
    path: Path,
    overrides: recipe.Overrides,
    evaluator: str,
    values: dict[str, Any],
    *more: dict[str, dict[str, Any]],
    place: str = "",
) -> Config:
    """An evaluator's settings.

    overrides: of the comparison, for messages.
    more: settings by evaluator that are merged on top, such as a dataset's.
    place: of the evaluators in the recipe, for messages.
    """
    if not isinstance(values, dict):
        raise UserError(f"{path}: evaluators.{evaluator}={values}: give settings, or {{}} for the defaults")
    layers = [values, *(over.get(evaluator) or {} for over in more)]
    merged = dict(OmegaConf.to_container(merge(f"{path}: evaluators.{evaluator}", *layers)))
    if "seeds" in merged:
        raise UserError(f"{path}: evaluators.{evaluator}.seeds: set seeds of the comparison instead")
    try:
        config: type[Config] = plugins.load("evaluators", evaluator).Config
    except UserError as error:
        raise UserError(f"{path}: {place}evaluators: {error}") from None
    return recipe.validate(config, merged, f"{path}: ", f"{place}evaluators.{evaluator}.", overrides)
