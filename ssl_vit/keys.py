"""The keys of a typed configuration, with the meanings that its docstring states."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined, to_jsonable_python


@dataclass(frozen=True)
class Key:
    """name: dotted. kind: its type. default: as JSON; "" where the key must be given. meaning: from the docstring."""

    name: str
    kind: str
    default: str
    meaning: str


def keys(config: type[BaseModel], prefix: str = "", section: object = None) -> Iterator[Key]:
    """All keys of a configuration, those of nested ones after their own.

    section: the default of the configuration, where it is a section of another one.
    """
    described, defaults = meanings(config), dict(section) if isinstance(section, config) else _defaults(config)
    for name, field in config.model_fields.items():
        default = defaults[name]
        below = None if "tuple" in str(field.annotation) else config_in(field.annotation)
        shown = "" if default is PydanticUndefined or below else json.dumps(to_jsonable_python(default))
        yield Key(f"{prefix}{name}", _kind(field.annotation), shown, described.get(name, ""))
        if below:
            named = "NAME." if get_origin(field.annotation) is dict else ""
            yield from keys(below, f"{prefix}{name}.{named}", default)


def nested(config: type[BaseModel], names: Sequence[str]) -> type[BaseModel]:
    """The configuration nested at these keys; numbers of a list and names in a mapping lead no deeper."""
    for name in names:
        if name in config.model_fields:
            config = config_in(config.model_fields[name].annotation) or BaseModel
    return config


def close_key(config: type[BaseModel], unknown: str, others: Mapping[str, type[BaseModel]]) -> str | None:
    """The key that an unknown one probably stands for: of the same name in a nested configuration, else of a similar
    name.

    others: configurations that are searched, too, by the prefix of their keys.
    """
    below = [key.name for key in keys(config)]
    below += [f"{prefix}{key.name}" for prefix, other in others.items() for key in keys(other)]
    same = (name for name in below if name.endswith(f".{unknown}") and ".NAME." not in name)
    return next(same, None) or next(iter(get_close_matches(unknown, config.model_fields, n=1)), None)


def _defaults(config: type[BaseModel]) -> dict[str, Any]:
    """The values of a configuration with no key given, which has the defaults that its validators set; the defaults of
    its fields where keys must be given."""
    try:
        return dict(config.model_validate({}))
    except ValidationError:
        return {name: field.get_default(call_default_factory=True) for name, field in config.model_fields.items()}


def meanings(config: type[BaseModel]) -> dict[str, str]:
    """What the docstrings of a configuration and of its bases say about its fields: `name: text` or `one, two: text`,
    to the next such entry."""
    fields, texts = set(config.model_fields), dict[str, str]()
    for base in reversed(
        [model for model in config.__mro__ if issubclass(model, BaseModel) and model is not BaseModel]
    ):
        text = " ".join((vars(base).get("__doc__") or "").split())
        entries = [
            match
            for match in re.finditer(r"(?:^|(?<=[.;)] ))((?:\w+, )*\w+): ", text)
            if fields.issuperset(match[1].split(", "))
        ]
        for entry, following in zip(entries, [*entries, None][1:], strict=True):
            meaning = text[entry.end() : following.start() if following else None].strip(" ;")
            meaning = re.sub(r"\bNone\b", "null", meaning)  # as YAML has it
            texts |= dict.fromkeys(entry[1].split(", "), meaning)
    return texts


def markdown(title: str, rows: Sequence[Key]) -> str:
    """A section with a table."""
    cells = [(f"`{key.name}`", key.kind, f"`{key.default}`" if key.default else "", key.meaning) for key in rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join([f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|", *lines, ""])


def config_in(annotation: Any) -> type[BaseModel] | None:
    """The configuration in a type such as `X`, `X | None` or `dict[str, X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(config_in, get_args(annotation))), None)


def _kind(annotation: Any) -> str:
    """A type in words, without its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return " | ".join(map(json.dumps, arguments))
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(_kind, arguments)))
    if arguments:
        return f"{origin.__name__}[{', '.join('...' if one is Ellipsis else _kind(one) for one in arguments)}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return "null" if annotation is NoneType else str(getattr(annotation, "__name__", annotation))
