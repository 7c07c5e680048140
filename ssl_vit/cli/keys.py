"""`ssl-vit keys`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ssl_vit.interfaces import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

app = typer.Typer()


@app.command()
def keys(
    topic: Annotated[
        str, typer.Argument(help="`train`, `compare`, or the name of an evaluator or an objective.")
    ] = "train",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Print the reference of all topics in Markdown.")] = False,
) -> None:
    """List the keys of recipes, comparisons, evaluators and objectives: type, default and meaning.

    Example: `ssl-vit keys fine_tune`
    """
    from ssl_vit import keys as found

    if every:
        print(reference(), end="")
        return
    listed = list(found.keys(_config(topic)))
    if markdown:
        print(found.markdown(topic, listed), end="")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("key", "type", "default", "meaning", show_lines=False)
    for key in listed:
        table.add_row(*map(Text, (key.name, key.kind, key.default, key.meaning)))
    Console().print(table)


def reference() -> str:
    """The page with the keys of everything that is shipped."""
    from ssl_vit import keys as found
    from ssl_vit import plugins

    topics = ["train", "compare", *plugins.shipped("objectives"), *plugins.shipped("evaluators")]
    start = "# Keys\n\nWritten by `ssl-vit keys --all`: every key of recipes, comparisons, objectives and evaluators.\n"
    return "\n".join([start, *(found.markdown(topic, list(found.keys(_config(topic)))) for topic in topics)])


def _config(topic: str) -> type[BaseModel]:
    from ssl_vit import plugins
    from ssl_vit.comparison.config import ComparisonConfig
    from ssl_vit.recipe import Recipe

    if topic in ("train", "compare"):
        return Recipe if topic == "train" else ComparisonConfig
    if "." not in topic and topic not in plugins.names("evaluators") + plugins.names("objectives"):
        known = ", ".join(["train", "compare", *plugins.names("evaluators"), *plugins.names("objectives")])
        raise UserError(f"{topic}: no such topic; known: {known}")
    kind: plugins.Kind = "objectives" if topic in plugins.names("objectives") else "evaluators"
    config: type[BaseModel] = plugins.load(kind, topic).Config
    return config
