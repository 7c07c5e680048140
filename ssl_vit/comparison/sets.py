"""Datasets to evaluate on, and suites of them, read from YAML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from ssl_vit import plugins, recipe
from ssl_vit.evaluators import Metric
from ssl_vit.interfaces import Config, UserError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")


def check_names(names: Any) -> Any:
    for name in names:
        if not _NAME.fullmatch(str(name)):
            raise ValueError(f"'{name}': names may contain letters, digits, _ and . (they become file names)")
    return names


class DataSet(Config):
    """A labeled dataset to evaluate on: shards, or a source that is packed into FOLDER/NAME on first use.

    train: shards as in `data.train`; several sets count as one.
    test: shards of test images.
    source: anything `ssl-vit shards make` takes, such as a hub name.
    splits: the source's names of train and test.
    image_column: the source's column of images.
    label_column: the source's column of labels.
    metric: the number that tables show: overall accuracy or the mean of the per-class accuracies.
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
        if (self.source is None) == (self.train is None or self.test is None):
            raise ValueError("give either train and test (existing shards) or source (packed on first use)")
        return self


class Suite(Config):
    """Datasets to evaluate on together. folder: where those given by `source` are packed."""

    name: str
    folder: str = "shards"
    sets: dict[str, DataSet] = Field(min_length=1)

    _names = field_validator("sets")(check_names)


def suites() -> dict[str, Path]:
    """Shipped suites by name."""
    return {path.stem: path for path in sorted((recipe.recipes_folder() / "suites").glob("*.yaml"))}


def load_suite(name: str, near: Path | None = None) -> Suite:
    """Read and validate a suite: a path, one beside the recipe `near`, or a shipped suite's name. Raises UserError."""
    places = [Path(name), *([near.parent / name] if near else []), *([suites()[name]] if name in suites() else [])]
    path = next((candidate for candidate in places if candidate.is_file()), None)
    if path is None:
        raise UserError(f"{name}: no such suite; shipped suites: {', '.join(suites())}")
    content = recipe.read(path)
    for key, chosen in (content.get("sets") or {}).items():
        for evaluator, values in ((chosen or {}).get("evaluators") or {}).items():
            config = plugins.load("evaluators", evaluator).Config
            recipe.validate(config, values or {}, f"{path}: sets.{key}.evaluators.{evaluator}.")
    return recipe.validate(Suite, content, f"{path}: ")
