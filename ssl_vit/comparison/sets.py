"""Datasets to evaluate on: those of a comparison, and suites, read from YAML."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ssl_vit import plugins, recipe
from ssl_vit.data import RemoteConfig, train_and_test
from ssl_vit.files import expanded
from ssl_vit.interfaces import Config, LocalPath, Metric, UserError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")


def check_names(names: Any) -> Any:
    for name in names:
        if not _NAME.fullmatch(str(name)):
            raise ValueError(f"'{name}': names may contain letters, digits, _ and . (they become file names)")
    return names


class DataSet(Config):
    """A labeled dataset to evaluate on: shards, or a source that is packed into FOLDER/NAME on first use.

    train: shards as in `data.train`; a list is concatenated.
    test: shards of test images.
    source: anything `ssl-vit shards make` takes, such as a hub name.
    splits: the source's names of train and test.
    image_column: the source's column of images.
    label_column: the source's column of labels.
    metric: the number that tables show, and that settings are selected by: overall accuracy, or the mean of the
        per-class accuracies.
    evaluators: settings by evaluator, for this set alone.
    """

    train: str | tuple[str, ...] | None = None
    test: str | None = None
    source: str | None = None
    splits: tuple[str, str] = ("train", "test")
    image_column: str | None = None
    label_column: str | None = None
    metric: Metric = "accuracy"
    evaluators: dict[str, dict[str, Any]] = Field({})

    @model_validator(mode="after")
    def _one_origin(self) -> DataSet:
        given = [self.source is not None, self.train is not None, self.test is not None]
        if given not in ([True, False, False], [False, True, True]):
            raise ValueError("give either train and test (existing shards) or source (packed on first use)")
        return self


class ComparisonData(Config):
    """The data that arms are evaluated on, and the data that they pretrain on.

    train: labeled training data. `data=PLACE` sets train and test to `PLACE#train` and `PLACE#test`, and so does this
        key without `test`.
    test: labeled test data, read only to measure, never to select settings.
    folds: labeled data to cross-validate on, in place of train and test: each is the test set once, and the arms
        pretrain and fit on the other ones together.
    sets: several datasets, in place of train and test.
    suite: a file or a shipped suite of datasets, in place of train and test. Its settings of evaluators override
        those of the comparison.
    folder: where sources are packed (default: the suite's own).
    metric: the number that tables show, and that settings are selected by: overall accuracy, or the mean of the
        per-class accuracies. With `sets` or `suite`, each dataset has its own.
    pretrain: what the arms' recipes train on (default: `train`; with `sets` or `suite` the recipes' own). If it has no
        labels, arms that need labels train on `train`, and the others on both.
    remote: how data behind URLs is read, also in the arms' recipes unless an arm overrides it (default: as each recipe
        says; for train and test, as the first recipe that sets it).
    """

    train: str | None = None
    test: str | None = None
    folds: tuple[str, ...] = ()
    sets: dict[str, DataSet] = Field({})
    suite: str | None = None
    folder: LocalPath | None = None
    metric: Metric = "accuracy"
    pretrain: str | None = None
    remote: RemoteConfig | None = None

    _names = field_validator("sets")(check_names)

    @field_validator("folds", "sets", mode="before")
    @classmethod
    def _none(cls, given: Any, info: ValidationInfo) -> Any:
        return cls.model_fields[str(info.field_name)].default if given is None else given

    @model_validator(mode="before")
    @classmethod
    def _derive_test(cls, given: Any) -> Any:
        given = {"train": given} if isinstance(given, str) else given
        if isinstance(given, dict) and isinstance(given.get("train"), str) and given.get("test") is None:
            given = given | dict(zip(("train", "test"), train_and_test(given["train"]), strict=True))
        return given

    @model_validator(mode="after")
    def _one_way(self) -> ComparisonData:
        ways = [self.train is not None, bool(self.folds), bool(self.sets), self.suite is not None]
        if (self.train is None) != (self.test is None) or ways.count(True) != 1:
            given = [key for key in ("train", "test", "folds", "sets", "suite") if getattr(self, key)]
            raise ValueError(
                "give train and test, or folds, or sets, or suite, and set the others to null "
                f"(given: {', '.join(given) or 'none'})"
            )
        if (self.sets or self.suite) and self.metric != "accuracy":
            raise ValueError("metric: with sets or suite, set the metric of each dataset there")
        if self.folds and len(set(self.folds)) < max(2, len(self.folds)):
            raise ValueError("folds: give at least two different sets of shards")
        if self.folds and self.pretrain:
            raise ValueError("pretrain: with folds, the arms pretrain on the folds that are not tested; remove it")
        return self

    @property
    def recipe_overrides(self) -> list[str]:
        """The overrides of the arms' recipes that say what they train on."""
        remote = self.remote and self.remote.model_dump(exclude_defaults=True)
        given = {"train": self.pretrain or [*self.folds[1:]] or self.train, "remote": remote}
        return [f"data.{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items() if value]

    @property
    def splits(self) -> list[DataSet]:
        """Train and test of each fold; without folds, of the one dataset."""
        if not self.folds:
            return [DataSet(train=self.train, test=self.test, metric=self.metric)]
        others = {test: tuple(other for other in self.folds if other != test) for test in self.folds}
        return [DataSet(train=train, test=test, metric=self.metric) for test, train in others.items()]


class Suite(Config):
    """Datasets to evaluate on together. folder: where those given by `source` are packed."""

    folder: LocalPath = "shards"
    sets: dict[str, DataSet] = Field(min_length=1)

    _names = field_validator("sets")(check_names)


def suites() -> dict[str, Path]:
    """Shipped suites by name."""
    return {path.stem: path for path in sorted((recipe.recipes_folder() / "suites").glob("*.yaml"))}


def load_suite(name: str, near: Path | None = None) -> Suite:
    """Read and validate a suite: a path, one beside the recipe `near`, or a shipped suite's name. Raises UserError."""
    places = [expanded(name), *([near.parent / name] if near else []), *([suites()[name]] if name in suites() else [])]
    path = next((candidate for candidate in places if candidate.is_file()), None)
    if path is None:
        raise UserError(f"{name}: no such suite; shipped suites: {', '.join(suites())}")
    content = recipe.read(path)
    suite = recipe.validate(Suite, content, f"{path}: ")
    for key, chosen in suite.sets.items():
        for evaluator, values in chosen.evaluators.items():
            config = plugins.load("evaluators", evaluator).Config
            recipe.validate(config, values, f"{path}: sets.{key}.evaluators.{evaluator}.")
    return suite
