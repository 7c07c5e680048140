"""What an evaluator is: settings, and one method that fits a classifier to labeled images.

An evaluator is a file with a `Config` and an `Evaluator`. `runner.py` does everything else: label budgets, seeds,
sources, selection of settings on held-out images, scores, cost.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from ssl_vit import recipe
from ssl_vit.data import DataConfig
from ssl_vit.evaluators import ALL, SAME_IMAGES, Budgets, Seeds, several
from ssl_vit.evaluators.features import ImageSet
from ssl_vit.interfaces import Config
from ssl_vit.models import EncoderConfig
from ssl_vit.models.encoder import Encoder
from ssl_vit.recipe import Recipe
from ssl_vit.records import Cost
from ssl_vit.results import Prediction, Settings


class LabeledConfig(Config):
    """labels_per_class: label budgets: images per class, fractions such as '10%', or all.

    seeds: seeds for the choice of the labeled images and for everything else that an evaluator draws.
    """

    labels_per_class: Budgets = (ALL,)
    seeds: Seeds = (0,)


class SweepConfig(Config):
    """sweep: values to try by key of this evaluator, `sweep.KEY=[VALUE,VALUE]`; all combinations are scored on held-out
        labeled images. null may be among the values, before all numbers. A sweep replaces the evaluator's default
        sweep; in a comparison, it is merged key by key with that of the recipe. `KEY=VALUE` sets a key and removes it
        from the sweep; if the sweep is then empty, the other keys of the default sweep apply. `sweep={}` turns the
        sweep off.

    held_out: fraction of each class's images that the selection is scored on.
    held_out_repeats: random held-out parts that the selection averages over; use more if few images are held out.
        After each part, only the better half of the candidates (at least two) is tried on the next one.
    """

    sweep: dict[str, tuple[Any, ...]] = Field({})
    held_out: float = Field(0.2, gt=0, lt=1)
    held_out_repeats: int = Field(1, ge=1, le=100)

    @model_validator(mode="before")
    @classmethod
    def _unswept(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "sweep" in given:
            return given
        return given | {"sweep": not_given(cls.model_fields["sweep"].default, given)}

    @field_validator("sweep", mode="before")
    @classmethod
    def _dotted(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = {key: values for key, values in recipe.flatten(value).items() if key}
        swept = {key: several(values) for key, values in given.items()}
        for key, values in swept.items():
            if given[key] is None or not all(isinstance(value, int | float | str | None) for value in values):
                raise ValueError(f"sweep.{key}: give numbers or strings to try, such as [0.1, 0.2] or [null, 0.1]")
        return {key: tuple(sorted(values, key=_null_then_numbers)) for key, values in swept.items()}

    @model_validator(mode="after")
    def _check_candidates(self) -> Self:
        for key, values in self.sweep.items():
            if key in (*SAME_IMAGES, "extra_steps"):  # the last one is what `compute_of` sets
                raise ValueError(f"sweep.{key}: all candidates must have the same images and compute; remove it")
            if len(set(values)) < len(values) or not values:
                raise ValueError(f"sweep.{key}: give different values")
            for value in values:
                try:
                    self.with_settings({key: value})
                except ValidationError as error:
                    shown = "null" if value is None else value
                    raise ValueError(f"sweep.{key}={shown}: {error.errors()[0]['msg']}") from None
        return self

    @property
    def candidates(self) -> list[Settings]:
        """All combinations. The lengths of training (`training.*`) vary slowest, so that shorter ones come first."""
        keys = sorted(self.sweep, key=lambda key: (key.startswith("training."), key), reverse=True)
        values = itertools.product(*(self.sweep[key] for key in keys))
        return [dict(reversed(list(zip(keys, chosen, strict=True)))) for chosen in values]

    def with_settings(self, settings: Settings) -> Self:
        """The same configuration with these values and without a sweep."""
        content = _content(self) | {"sweep": {}}
        for key, value in settings.items():
            section: Any = content
            *path, last = key.split(".")
            for name in path:
                section = section.get(name) if isinstance(section, dict) else None
            if not isinstance(section, dict) or last not in section:
                raise ValueError(f"sweep.{key}: this evaluator has no such key")
            section[last] = value
        return self.model_validate(content)


def _content(model: BaseModel) -> dict[str, Any]:
    """All fields as nested mappings, also those that a dump leaves out while they are null."""
    return {key: _content(value) if isinstance(value, BaseModel) else value for key, value in model}


def _null_then_numbers(value: float | str | None) -> tuple[bool, bool, float | str]:
    return value is not None, isinstance(value, str), 0 if value is None else value


def not_given(sweep: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A default sweep without the keys that are given one value."""
    return {key: values for key, values in sweep.items() if key not in recipe.flatten(given)}


@dataclass(frozen=True)
class Scored:
    """What a fitted classifier predicts for some images; see `results.Result` for the fields of the same name.

    labels: how many labeled images it was fitted to, where some could not be read (None: all that were given).
    """

    prediction: Prediction
    variant: str = ""
    primary: bool = True
    notes: tuple[str, ...] = ()
    cost: Cost = field(default_factory=Cost)
    labels: int | None = None


Classifier = Callable[[ImageSet], Sequence[Scored]]
"""Predicts images: one `Scored` per variant, such as each k of the nearest neighbors."""


class Evaluator(ABC):
    """Base of the evaluators: a subclass named `Evaluator` in its own file needs `title` and `fit`.

    title: heading in reports. references: sources measured beside the trained encoder: `untrained` (the same
    architecture, freshly initialized; where the evaluator trains the encoder, that is training from scratch) and
    `pixels`. trains_encoder: whether `fit` trains the whole encoder: a comparison then measures arms from scratch
    with it, and its sweep runs once per arm and label budget. needs_head: whether it reads the classifier that a run
    trained: a comparison measures only arms that have one, and the label budget is "all".
    """

    title: ClassVar[str]
    references: tuple[str, ...] = ("untrained", "pixels")
    trains_encoder: ClassVar[bool] = False
    needs_head: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def fit(self, train: ImageSet, seed: int) -> Classifier:
        """Fit a classifier to labeled images; it then predicts any images of the same source.

        train: with `train.source`, one of `trained`, `untrained` and `pixels`; `train.features(...)` are its features.
        seed: seed of everything that is drawn.
        """

    def for_source(self, source: str) -> Evaluator:
        """This evaluator with the settings and the sweep that it uses for a source."""
        return self

    def check(self, encoder: Encoder, images: int) -> None:  # noqa: B027
        """Raises UserError where `fit` would, for an encoder and a number of labeled and test images; cheap."""

    def stage(self, data: DataConfig, encoder: EncoderConfig, images: int, seed: int) -> Recipe | None:
        """The training that `fit` does with this many labeled images, as a recipe (None: it trains nothing by gradient
        descent). data: how images are prepared. encoder: sizes of the encoder that is evaluated."""
        return None
