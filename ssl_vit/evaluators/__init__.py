"""Judges of a frozen or fine-tuned encoder; one file = one evaluator, its file name is its name. Torch-free.

Here is what they and the recipes share: label budgets, and the probe of a run that trains.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ssl_vit.interfaces import Config

ALL = "all"
Metric = Literal["accuracy", "mean_per_class"]
"""The number that counts on a data set: the share of right answers, or the mean of the classes' shares."""


def _budget(value: Any) -> int | str:
    if value is None or value in (ALL, "100%"):
        return ALL
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value) and 0 < float(value[:-1]) < 100:
        return f"{float(value[:-1]):g}%"
    raise ValueError("a label budget is a number of images a class (10), a share of them ('1%'), or all")


def _several(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value} is named twice")
    return values


Budget = Annotated[int | str, BeforeValidator(_budget)]
"""How many training images are labeled: so many a class, a share of every class such as "10%", or "all"."""

_Several = (BeforeValidator(_several), AfterValidator(_distinct))
Budgets = Annotated[tuple[Budget, ...], *_Several, Field(min_length=1)]
Numbers = Annotated[tuple[float, ...], *_Several]
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], *_Several]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], *_Several, Field(min_length=1)]
"""Lists of different values; one alone needs no brackets."""


class ProbeConfig(Config):
    """A few-shot probe of the representation while a run trains; its accuracy goes to metrics.jsonl, the trackers and
    the display.

    every: steps between probes (and one at the end). data: labeled shards (None: the run's own training shards).
    shots: labeled images a class to fit on; images: how many others of these shards are scored, at most. pooling, l2:
        see few_shot.
    patience: probes in a row without a new best after which training ends (None: never). It looks at held-out training
        images, never at test; but a run that ends so has used their labels, and its learning rate has not come down.
    """

    every: int = Field(ge=1)
    data: str | None = None
    shots: int = Field(5, ge=1)
    images: int = Field(1000, ge=1)
    pooling: Literal["token", "mean", "both", "patches"] = "mean"
    l2: float = Field(2.0**10, gt=0)
    patience: int | None = Field(None, ge=1)


def budget_words(budget: int | str) -> str:
    """A budget for a person: "10 labels a class", "1 label a class", "10% of the labels", "all labels"."""
    if isinstance(budget, int):
        return f"{budget} label{'s' * (budget != 1)} a class"
    return "all labels" if budget == ALL else f"{budget} of the labels"
