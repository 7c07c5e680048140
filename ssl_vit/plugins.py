"""Objectives and evaluators by name: `objectives/<name>.py` and `evaluators/<name>.py` are the only registry."""

from __future__ import annotations

import importlib
import pkgutil
from difflib import get_close_matches
from typing import Any, Literal

from ssl_vit.interfaces import UserError

Kind = Literal["objectives", "evaluators"]


def names(kind: Kind, member: str) -> list[str]:
    """Modules of a room that define `member` (`Objective` or `Evaluator`); imports them."""
    package = importlib.import_module(f"ssl_vit.{kind}")
    found = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return [name for name in found if hasattr(importlib.import_module(f"ssl_vit.{kind}.{name}"), member)]


def load(kind: Kind, name: str) -> Any:
    """The module of an objective (with `Config`, `Objective`) or an evaluator (with `Config`, `Evaluator`).

    Raises UserError naming what exists.
    """
    member = "Objective" if kind == "objectives" else "Evaluator"
    try:
        module = importlib.import_module(f"ssl_vit.{kind}.{name}")
        if hasattr(module, member):
            return module
    except ModuleNotFoundError as error:
        if error.name != f"ssl_vit.{kind}.{name}":
            raise
    known = names(kind, member)
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise UserError(f"no {member.lower()} is called '{name}'; {hint}there are: {', '.join(known)}")
