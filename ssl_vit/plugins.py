"""Objectives, evaluators and sources by name: a module of the package, an entry point of another one, or any module.

A module is `objectives/<name>.py`, `evaluators/<name>.py` or `data/packing/sources/<name>.py`. Another package offers
one as an entry point of the group `ssl_vit.objectives`, `ssl_vit.evaluators` or `ssl_vit.sources`:

    [project.entry-points."ssl_vit.objectives"]
    rotation = "my_package.rotation"

Any other module goes by its dotted name, such as `objective.name: my_package.rotation`, and one class of a module by
`module:Class`, where the module or the class has the `Config`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from ssl_vit.interfaces import ObjectiveConfig, UserError

Kind = Literal["objectives", "evaluators", "sources"]
# The package of each kind, what a module there must define, and its name in messages.
_KINDS = {
    "objectives": ("ssl_vit.objectives", "Objective", "objective"),
    "evaluators": ("ssl_vit.evaluators", "Evaluator", "evaluator"),
    "sources": ("ssl_vit.data.packing.sources", "open_images", "source"),
}
_OF_OBJECTIVES = ("needs_labels", "least_views", "whole_batch", "noise_per_sample", "summarize")  # of the base class
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?")


def names(kind: Kind) -> list[str]:
    """All names of a kind; imports the package's modules."""
    own = shipped(kind)
    return own + sorted(entry_points(group=f"ssl_vit.{kind}").names - {*own})


def shipped(kind: Kind) -> list[str]:
    """The names of this package's own."""
    package, member, _ = _KINDS[kind]
    modules = [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    return [name for name in modules if _defines(importlib.import_module(f"{package}.{name}"), member)]


def exists(kind: Kind, name: str) -> bool:
    """Whether `load` would look for it as a module; finds out without importing the modules of this package."""
    if importlib.util.find_spec(f"{_KINDS[kind][0]}.{name}") if name.isidentifier() else _MODULE.fullmatch(name):
        return True
    return any(entry_points(group=f"ssl_vit.{kind}", name=name))


def load(kind: Kind, name: str) -> Any:
    """The module of an objective (`Config`, `Objective`), an evaluator (`Config`, `Evaluator`) or a source
    (`open_images`).

    name: a module of this package, an entry point, `package.module` or `module:Class`.
    Raises UserError naming what exists, or what cannot be imported.
    """
    package, member, word = _KINDS[kind]
    try:
        if name.isidentifier():
            module = importlib.import_module(f"{package}.{name}")
            own = getattr(getattr(module, member, None), "__module__", "") == module.__name__ and name != "base"
            if own or _defines(module, member):  # not one that imports a base class
                _check(module, "", member, f"{word} '{name}'")
                return module
    except ModuleNotFoundError as error:
        if error.name != f"{package}.{name}":
            raise
    for entry in entry_points(group=f"ssl_vit.{kind}", name=name):
        return _import(entry.value, member, f"{word} '{name}'")
    if not name.isidentifier() and _MODULE.fullmatch(name):
        return _import(name, member, f"{word} '{name}'")
    available = names(kind)
    near = get_close_matches(name, available, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    own = ""
    if name.isidentifier():
        own = f"; a module of your own is {'package.module:PLACE' if kind == 'sources' else f'{name}:{member}'}"
    raise UserError(f"unknown {word} '{name}'; {hint}available: {', '.join(available)}{own}")


def checksum(kind: Kind, name: str) -> str:
    """sha256 of the file that defines a module of another package; "" for those of this one. Files that it imports do
    not count."""
    defined = inspect.getmodule(getattr(load(kind, name), _KINDS[kind][1]))
    file = getattr(defined, "__file__", None)  # none in a notebook
    if not defined or not file or defined.__name__.startswith(f"{_KINDS[kind][0]}."):
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _import(place: str, member: str, what: str) -> Any:
    """The module, or the class of one, that `place` names."""
    name, _, attribute = place.partition(":")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{what} cannot be imported ({error}); install its package, or add its folder to PYTHONPATH"
        ) from None
    config = _check(module, attribute, member, what)
    defined = getattr(module, attribute or member)
    return SimpleNamespace(**vars(module) | {member: defined, "Config": config})


def _check(module: Any, attribute: str, member: str, what: str) -> Any:
    """The `Config` of a plugin. Raises UserError where it or the class lacks something.

    attribute: the name of the class, where it is not `member`.
    """
    if not _defines(module, attribute or member):
        missing = sorted(getattr(getattr(module, attribute or member, None), "__abstractmethods__", ()))
        abstract = f"; its {attribute or member} lacks {', '.join(missing)}" if missing else ""
        raise UserError(f"{what}: {module.__name__} defines no {attribute or member}{abstract}")
    defined = getattr(module, attribute or member)
    of_class, of_module = getattr(defined, "Config", None), getattr(module, "Config", None)
    config = of_class or of_module if attribute else of_module or of_class  # a class may inherit one
    if member != "open_images" and config is None:
        raise UserError(f"{what}: neither the class nor its module defines a Config")
    if member == "Objective" and not (isinstance(config, type) and issubclass(config, ObjectiveConfig)):
        raise UserError(f"{what}: its Config is not a subclass of ssl_vit.interfaces.ObjectiveConfig")
    if member == "Objective" and not all(hasattr(defined, name) for name in _OF_OBJECTIVES):
        raise UserError(f"{what}: derive it from ssl_vit.models.objective.Objective")
    if member == "Evaluator" and "seeds" not in getattr(config, "model_fields", {}):
        raise UserError(f"{what}: its Config has no seeds; derive it from ssl_vit.evaluators.base.LabeledConfig")
    if member == "Evaluator" and not hasattr(defined, "title"):
        raise UserError(f"{what}: its Evaluator has no title")
    return config


def _defines(module: Any, member: str) -> bool:
    """Whether a module has one to use; a base class is none."""
    return hasattr(module, member) and not inspect.isabstract(getattr(module, member))
