"""`quick=true`: the same comparison at a tenth of its length, to see whether everything works."""

from __future__ import annotations

from math import ceil
from typing import Any, TypeVar

from ssl_vit.interfaces import Config

T = TypeVar("T", bound=Config)
_NOTE = "The following notes of the recipe describe the whole comparison."


def tenth(config: T) -> T:
    """A comparison, a recipe or an evaluator's settings with a tenth of all steps, epochs and warmup, also among the
    values of a sweep, two seeds and one pretraining; a note says that the others describe the whole comparison."""
    updates: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Config):
            new: Any = tenth(value)
        elif name == "sweep":
            shorter = {key: [_less(key.split(".")[-1], one) for one in values] for key, values in value.items()}
            new = {key: tuple(dict.fromkeys(values)) for key, values in shorter.items()}
        else:
            new = _less(name, value)
        if new != value:  # `model_copy` counts its keys as set, and label budgets that are set are not inherited
            updates[name] = new
    return config.model_copy(update=updates)


def _less(name: str, value: Any) -> Any:
    if name in ("steps", "warmup_steps") and value:
        return ceil(value / 10)
    if name in ("epochs", "warmup_epochs") and value:
        return value / 10
    if name in ("seeds", "frozen_seeds"):  # the saved recipe is shortened again
        return value[:2]
    if name == "notes" and value:
        return tuple(dict.fromkeys((_NOTE, *value)))
    return 1 if name == "pretrainings" else value
