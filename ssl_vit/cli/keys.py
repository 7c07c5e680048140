"""`ssl-vit keys`, and the keys at the end of the help of commands that take them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ssl_vit.interfaces import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Recipe keys to change, as key=value.", metavar="key=value")
]

_WORDS, _NAMES = "ssl_vit.words", 34  # columns of names in a help


def keys(
    topic: Annotated[
        str, typer.Argument(help="`train`, `compare`, or the name of an evaluator or an objective.")
    ] = "train",
    every: Annotated[bool, typer.Option("--all", help="Print the reference of all topics in Markdown.")] = False,
) -> None:
    """List the keys of recipes, comparisons, evaluators and objectives: type, default and meaning.

    Example: `ssl-vit keys fine_tune`
    """
    from ssl_vit import keys as found

    if every:
        print(reference(), end="")
        return
    indent = " " * 4
    for key in found.keys(_config(topic)):
        print(f"{key.name}{f'={key.default}' if key.default else ''}  ({key.kind})")
        print(textwrap.fill(key.meaning, _width(), initial_indent=indent, subsequent_indent=indent))


class CommandWithKeys(TyperCommand):
    """A command whose `--help` ends with the keys that it takes: those of the topic of its name, or of an evaluator
    that is named on the command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = [word for word in args if not word.startswith("-") and "=" not in word]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from ssl_vit import plugins

        topics = [word for word in ctx.meta[_WORDS] if not Path(word).exists() and plugins.exists("evaluators", word)]
        for topic in [ctx.info_name] if ctx.info_name in ("train", "compare") else topics:
            with suppress(UserError):  # another word, such as the name of a run that does not exist
                lines = list(brief(topic))
                print(f" Keys of {topic}, as key=value; `ssl-vit keys {topic}` prints types and full descriptions:\n")
                print("\n".join(lines), end="\n\n")


def brief(topic: str) -> Iterator[str]:
    """The keys of a topic with their defaults and the first words of their meanings, at most two lines each."""
    from ssl_vit import keys as found

    width = _width()
    for key in found.keys(_config(topic)):
        if key.kind == "section" and not key.default:
            continue
        name = f"  {key.name}{f'={key.default}' if key.default else ''}"
        name = name if len(name) <= width else name[: width - 4] + " ..."
        start = [name] if len(name) >= _NAMES else []
        lines = textwrap.wrap(key.meaning, width - _NAMES, max_lines=2 - len(start), placeholder=" ...")
        padded = [" " * _NAMES + line for line in lines] or [""]
        yield from start or [name.ljust(_NAMES) + padded.pop(0).strip()]
        yield from padded


def _width() -> int:
    return max(shutil.get_terminal_size().columns, 60)


def reference() -> str:
    """The page with the keys of everything that is shipped."""
    from ssl_vit import keys as found
    from ssl_vit import plugins

    topics = ["train", "compare", *plugins.shipped("objectives"), *plugins.shipped("evaluators")]
    start = "# Keys\n\nWritten by `ssl-vit keys --all`: every key of recipes, comparisons, objectives and evaluators.\n"
    return "\n".join([start, *(found.markdown(topic, list(found.keys(_config(topic)))) for topic in topics)])


def _config(topic: str) -> type[BaseModel]:
    from ssl_vit import plugins
    from ssl_vit.recipe import Recipe

    if topic == "train":
        return Recipe
    if topic == "compare":
        from ssl_vit.comparison.config import ComparisonConfig

        return ComparisonConfig
    if topic.isidentifier() and topic not in plugins.names("evaluators") + plugins.names("objectives"):
        topics = ", ".join(["train", "compare", *plugins.names("evaluators"), *plugins.names("objectives")])
        raise UserError(f"{topic}: no such topic; known: {topics}")
    try:
        found = plugins.load("evaluators", topic)
    except UserError as error:
        try:
            found = plugins.load("objectives", topic)
        except UserError as problem:
            is_objective = topic in plugins.names("objectives") or topic.endswith(":Objective")
            raise (problem if is_objective else error) from None
    config: type[BaseModel] = found.Config
    return config
