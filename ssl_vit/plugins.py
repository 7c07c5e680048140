"""Objectives, evaluators and sources by name: `objectives/<name>.py`, `evaluators/<name>.py` and
`data/packing/sources/<name>.py` are the only registry."""

from __future__ import annotations

import importlib
import pkgutil
from difflib import get_close_matches
from typing import Any, Literal

from ssl_vit.interfaces import UserError

Kind = Literal["objectives", "evaluators", "sources"]
# The package of each kind, what a file there must define, and what one is called.
_ROOMS = {
    "objectives": ("ssl_vit.objectives", "Objective", "objective"),
    "evaluators": ("ssl_vit.evaluators", "Evaluator", "evaluator"),
    "sources": ("ssl_vit.data.packing.sources", "open_images", "source"),
}


def names(kind: Kind) -> list[str]:
    """Modules of a room that define what makes one; imports them."""
    room, member, _ = _ROOMS[kind]
    found = [module.name for module in pkgutil.iter_modules(importlib.import_module(room).__path__)]
    return [name for name in found if hasattr(importlib.import_module(f"{room}.{name}"), member)]


def load(kind: Kind, name: str) -> Any:
    """The module of an objective (with `Config`, `Objective`), an evaluator (with `Config`, `Evaluator`) or a source
    (with `open_images`).

    Raises UserError naming what exists.
    """
    room, member, word = _ROOMS[kind]
    try:
        if name.isidentifier() and hasattr(module := importlib.import_module(f"{room}.{name}"), member):
            return module
    except ModuleNotFoundError as error:
        if error.name != f"{room}.{name}":
            raise
    known = names(kind)
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise UserError(f"no {word} is called '{name}'; {hint}there are: {', '.join(known)}")
