"""Overrides of a recipe, as strings or as values by key, and what any YAML of a user must not contain. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ssl_vit.interfaces import UserError, errors_about, first_line

MAX_BYTES, _MAX_DEPTH = 1 << 20, 50  # of a recipe file; deeper nesting crashes YAML's loader
LENGTHS = {"steps", "epochs"}  # a length of training in one unit replaces that in the other
PLACE = "<place>"  # of `data=PLACE`, beside other keys of `data`
Overrides = Sequence[str] | Mapping[str, Any]
"""`key=value` strings, or values by key: dotted keys, or nested mappings, whose inner keys are not split at dots."""


def parsed(overrides: Overrides) -> DictConfig:
    """The overrides, nested. `data=PLACE` is kept as `data` with the key PLACE, beside what others say of `data`.

    Raises UserError naming the override.
    """
    if isinstance(overrides, Mapping):
        given, plain = OmegaConf.create(), _plain(overrides)
        _check_keys(flatten(plain))
        for key, value in plain.items():
            key = f"data.{PLACE}" if key == "data" and isinstance(value, str) else key
            try:
                OmegaConf.update(given, key, value)
            except OmegaConfBaseException as error:
                raise UserError(f"{key}: {first_line(error)}") from None
        return without_references(given, "the arguments")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise UserError(f"'{override}' is not key=value, such as training.steps=100")
        if not value.strip():  # a variable of the shell that is not set, as a rule
            raise UserError(f"{key}=: the value is missing; to unset the key, write {key}=null")
    _check_keys(override.partition("=")[0] for override in overrides)
    place = max((n for n, override in enumerate(overrides) if _is_place(*override.split("=", 1))), default=0)
    before = {"data.train", "data.test"}  # a later data=PLACE replaces them
    overrides = [one for n, one in enumerate(overrides) if n >= place or one.partition("=")[0] not in before]
    try:
        given = (OmegaConf.from_dotlist([_quoted(override)]) for override in overrides)
        each = [without_references(override, "the command line") for override in given]
        return merge("the command line", *each, lengths=False)  # both at once are an error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"the command line: {first_line(error)}") from None


def merge(origin: str, *layers: Any, lengths: bool = True) -> DictConfig:
    """Mappings, each merged onto those before it. What a `sweep` lists is keyed by dotted keys, however it was nested.

    origin: where they are from, for the message.
    lengths: steps and epochs replace each other; empty `sweep` and `trackers` replace others; a value removes its key
        from the sweep of the mappings before it.
    Raises UserError naming a key that is a list in one and a mapping in another.
    """
    merged = OmegaConf.create()
    for layer in layers:
        try:
            with errors_about(origin):
                layer = _dotted(OmegaConf.to_container(layer) if isinstance(layer, DictConfig) else layer)
            if lengths:
                _drop_replaced(merged, layer)
            merged = OmegaConf.unsafe_merge(merged, layer)
        except OmegaConfBaseException as error:
            raise UserError(f"{origin}: {first_line(error)}") from None
        except TypeError:
            key = next(_clashes(OmegaConf.to_container(merged), layer))
            raise UserError(f"{origin}: {key}: a list cannot replace settings, nor settings a list") from None
    assert isinstance(merged, DictConfig)
    return merged


def _check_keys(keys: Iterable[str]) -> None:
    """Raises UserError for the key that only this module sets."""
    if reserved := next((key for key in keys if PLACE in key), None):
        raise UserError(f"{reserved}: unknown key")


def _drop_replaced(under: DictConfig, over: Any) -> None:
    if not isinstance(over, dict):
        return
    for key, value in over.items():
        stem, dot, unit = key.rpartition(".")  # dotted in a sweep
        for other in LENGTHS - {unit} if unit in LENGTHS and value is not None else ():
            if over.get(f"{stem}{dot}{other}") is None:
                under.pop(f"{stem}{dot}{other}", None)
    if over.get("warmup_epochs") is None and isinstance(optim := over.get("optim"), dict) and "warmup_steps" in optim:
        under.pop("warmup_epochs", None)
    for key in ("sweep", "trackers"):
        if over.get(key) == {}:
            under.pop(key, None)
    if isinstance(swept := under.get("sweep"), DictConfig) and swept:
        for key, value in flatten({key: value for key, value in over.items() if key != "sweep"}).items():
            stem, dot, name = key.rpartition(".")
            if name not in LENGTHS:
                swept.pop(key, None)
            elif value is not None:
                for unit in LENGTHS:
                    swept.pop(f"{stem}{dot}{unit}", None)
        if not swept:  # an empty sweep of an arm would replace the sweep that all arms share
            del under["sweep"]
    for key, value in over.items():
        if isinstance(below := under.get(key), DictConfig):
            _drop_replaced(below, value)


def _dotted(content: Any) -> Any:
    """The same settings, with the keys inside of every `sweep` dotted: `{optim: {lr: ...}}` is `{optim.lr: ...}`."""
    if not isinstance(content, dict):
        return content
    return {
        _text(key): flatten(value) if key == "sweep" and isinstance(value, dict) else _dotted(value)
        for key, value in content.items()
    }


def _clashes(under: dict[str, Any], over: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in over.items():
        before = under.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            yield from _clashes(before, value, f"{prefix}{key}.")
        elif isinstance(before, (dict, list)) and isinstance(value, (dict, list)) and type(before) is not type(value):
            yield f"{prefix}{key}"


def without_references(content: DictConfig, origin: str) -> DictConfig:
    """The same content. Raises UserError for `${...}`, by which OmegaConf would read the environment and other keys,
    and for `???`, its mark of a missing value, which a merge would ignore."""
    for key, value in flatten(dict(OmegaConf.to_container(content, resolve=False))).items():
        if "${" in str(value):
            raise UserError(f"{origin}: {key}={value}: references (${{...}}) are not allowed; write the value itself")
        if value == "???":
            raise UserError(f"{origin}: {key}=???: give a value")
    return content


def check_nesting(text: str) -> None:
    """Raises ValueError for a recipe that is too large, or nested too deeply, for YAML's recursive loader."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix[:-1]: value}
    return {k: v for key, part in value.items() for k, v in flatten(part, f"{prefix}{key}.").items()}


def _plain(value: Any) -> Any:
    """Paths as strings, NumPy arrays and scalars as lists and numbers, in containers too. Raises UserError for a key
    that is not a string."""
    if isinstance(value, Mapping):
        return {_text(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(one) for one in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _text(key: Any) -> str:
    if not isinstance(key, str):
        raise UserError(f"key {key!r} is not a string; put it in quotes")
    return key


def _is_place(key: str, value: str) -> bool:
    return key == "data" and value[:1] not in ("{", "[")


def _quoted(override: str) -> str:
    """`key=value` with the value quoted where it is not YAML, or where ` #` would start a comment: paths may be so.

    `data=PLACE` is the key PLACE of `data`, and always text: a folder may be named 2024.
    """
    key, _, value = override.partition("=")
    is_place = _is_place(key, value)
    key = f"data.{PLACE}" if is_place else key
    try:
        check_nesting(value)
        comment = isinstance(yaml.load(value, Loader=yaml.BaseLoader), str) and " #" in value
        is_text = (is_place or comment) and value[:1] not in ("'", '"')
    except yaml.YAMLError:
        is_text = True
    return f"{key}={json.dumps(value, ensure_ascii=False) if is_text else value}"
