"""The arms of a comparison that is derived from another one, by a recipe's `base` or by overrides."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ssl_vit.interfaces import UserError
from ssl_vit.overrides import LENGTHS, merge

EVERY = "*"
_LENGTHS = {f"training.{key}" for key in LENGTHS}


def derived(before: Mapping[str, Any], given: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The arms `before` with the arms `given` merged onto them.

    `null` removes an arm. The arm `*` is merged onto every arm, below what is given for that arm alone. Keys of a
    training recipe become the last `overrides` of the arm; those of `*` reach only the arms with a recipe. `overrides`
    are added to those before. An arm without a label is called by its name.

    keys: keys of a training recipe.
    Raises UserError for an arm to remove that does not exist, and for a misspelled key of a training recipe.
    """
    every = given.get(EVERY, {})
    if not isinstance(every, Mapping):
        raise UserError(f"arms.{EVERY}: give keys for all arms, such as arms.{EVERY}.training.steps=100")
    arms: dict[str, Any] = dict(before)
    for name in dict.fromkeys([*before, *given]):
        changes = given.get(name, {})
        if name == EVERY:
            continue
        if changes is None:
            if name not in before:
                raise UserError(f"arms.{name}=null: there is no such arm; arms: {', '.join(before)}")
            del arms[name]
        elif isinstance(changes, Mapping) and isinstance(arms.get(name, {}), Mapping):
            arms[name] = _merged(name, arms.get(name, {}), every, changes, keys)
        else:
            arms[name] = changes  # no mapping: an error that names the arm follows
    return arms


def with_absolute_paths(content: DictConfig, near: Path, shipped: Path) -> DictConfig:
    """Names of arms' recipes and of a suite beside the file `near` as whole paths: a comparison based on it, and the
    saved one, lie in other folders. Recipes in the folder `shipped` are found by their names."""
    arms = content.get("arms")
    keys = [(arm, "recipe") for arm in arms.values()] if isinstance(arms, DictConfig) else []
    for section, key in [*keys, (content.get("data"), "suite")]:
        name = section.get(key) if isinstance(section, DictConfig) else None
        with suppress(OSError):  # a name that is too long
            file = next((file for end in ("", ".yaml") if (file := near.parent / f"{name}{end}").is_file()), None)
            if name and file and shipped.resolve() not in file.resolve().parents:
                section[key] = str(file.resolve())
    return content


def _merged(
    name: str, before: Mapping[str, Any], every: Mapping[str, Any], own: Mapping[str, Any], keys: Collection[str]
) -> dict[str, Any]:
    layers = [before, *({k: v for k, v in layer.items() if k not in (*keys, "overrides")} for layer in (every, own))]
    arm = {"label": name.replace("_", " "), **dict(OmegaConf.to_container(merge(f"arms.{name}", *layers)))}
    for key in arm:
        if key not in keys and (close := get_close_matches(key, keys, n=1, cutoff=0.8)):
            raise UserError(f"arms.{name}.{key}: unknown key; did you mean '{close[0]}'?")
    for layer in (every, own) if arm.get("recipe") else (own,):
        added = layer.get("overrides", [])
        if isinstance(added, str) or not isinstance(added, Sequence):
            raise UserError(f"arms.{name}.overrides: give a list, such as [training.steps=100]")
        added = [*map(str, added), *_overrides({key: layer[key] for key in keys if key in layer})]
        if added:
            arm["overrides"] = _onto(arm.get("overrides", []), added)
    return arm


def _overrides(content: Mapping[str, Any], prefix: str = "") -> list[str]:
    """A nested mapping as `key=value` strings."""
    overrides = []
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            overrides += _overrides(value, f"{prefix}{key}.")
        else:
            overrides.append(f"{prefix}{key}={json.dumps(value, ensure_ascii=False, default=str)}")
    return overrides


def _onto(before: Sequence[str], added: Sequence[str]) -> list[str]:
    """`added` after those of `before` that set other keys."""
    replaced = {override.partition("=")[0] for override in added}
    replaced |= _LENGTHS if replaced & _LENGTHS else set()
    return [*(override for override in before if override.partition("=")[0] not in replaced), *added]
