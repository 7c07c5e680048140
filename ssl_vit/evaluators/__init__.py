"""Evaluators of a frozen or fine-tuned encoder: one file per evaluator. Here: label budgets (torch-free)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from ssl_vit.interfaces import Config

ALL = "all"
# Keys of `training` that have no effect in an evaluation.
UNUSED = ("timeout", "trackers", "log_every", "checkpoint_every", "picture_every", "keep_last")
# Keys that decide which images an evaluation has.
SAME_IMAGES = ("labels_per_class", "seeds", "held_out", "held_out_repeats", "sweep_labels_per_class")


def _budget(value: Any) -> int | str:
    if value is None or value in (ALL, "100%"):
        return ALL
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value) and 0 < float(value[:-1]) < 100:
        return f"{float(value[:-1]):g}%"
    raise ValueError("a label budget is a number of images per class (10), a share of them ('1%'), or all")


def several(value: Any) -> Any:
    """A single value as a tuple of one: a list of one needs no brackets."""
    return value if isinstance(value, (list, tuple)) else (value,)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value} is named twice")
    return values


Budget = Annotated[int | str, BeforeValidator(_budget)]
"""Labeled training images: per class, a share of every class such as "10%", or "all"."""

_Several = (BeforeValidator(several), AfterValidator(_distinct), Field(min_length=1))
Budgets = Annotated[tuple[Budget, ...], *_Several]
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], *_Several]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], *_Several]


def protocol_settings(config: type[Config], under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings `under`, of a dataset, for an evaluator with settings `over`, which may choose another protocol
    (`CHOICE` of its configuration). Of another one only the choice of images applies."""
    choice = getattr(config, "CHOICE", "")
    protocol = under.get(choice) or next(iter(getattr(config, "DEFAULTS", {})), None)
    same = over.get(choice, protocol) == protocol
    return {key: value for key, value in under.items() if same or key in SAME_IMAGES}


def budget_words(budget: int | str) -> str:
    """A budget as readable text: "10 labels per class", "1 label per class", "10% of the labels", "all labels"."""
    if isinstance(budget, int):
        return f"{budget} label{'s' * (budget != 1)} per class"
    return "all labels" if budget == ALL else f"{budget} of the labels"
