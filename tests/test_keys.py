"""The reference of keys: types, defaults and meanings of every configuration, and the page made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field
from typer.testing import CliRunner

from ssl_vit import cli
from ssl_vit.cli.keys import reference
from ssl_vit.interfaces import Config, UserError
from ssl_vit.keys import Key, keys

PAGE = Path(__file__).parent.parent / "recipes" / "KEYS.md"


class Below(Config):
    """depth: of it: in blocks."""

    depth: int = 3


class Example(Config):
    """One line first.

    size: pixels; see Note: this is no key.
    first, last: both
        of them. kind: which.
    """

    size: int
    first: float = 0.5
    last: tuple[int, ...] = (1, 2)
    kind: Literal["a", "b"] | None = None
    below: Below = Below()
    many: dict[str, Below] = Field({})


def test_keys_have_types_defaults_and_the_meanings_of_the_docstring() -> None:
    assert list(keys(Example)) == [
        Key("size", "int", "", "pixels; see Note: this is no key."),
        Key("first", "float", "0.5", "both of them."),
        Key("last", "tuple[int, ...]", "[1, 2]", "both of them."),
        Key("kind", '"a" | "b" | None', "null", "which."),
        Key("below", "section", "", ""),
        Key("below.depth", "int", "3", "of it: in blocks."),
        Key("many", "dict[str, section]", "", ""),
        Key("many.NAME.depth", "int", "3", "of it: in blocks."),
    ]


def test_the_page_is_current_and_explains_every_key() -> None:
    page = reference()
    assert PAGE.read_text() == page, "run: ssl-vit keys --all > recipes/KEYS.md"
    unexplained = [line for line in page.splitlines() if line.endswith("|  |") and "| section |" not in line]
    assert not unexplained


def test_a_topic_is_listed_and_a_wrong_one_named() -> None:
    found = CliRunner().invoke(cli.app, ["keys", "few_shot"])
    assert found.exit_code == 0 and "labels_per_class" in found.output and "1024.0" in found.output
    with pytest.raises(UserError, match=r"knnn: no such topic; known: train, compare, .*knn"):
        CliRunner().invoke(cli.app, ["keys", "knnn"], catch_exceptions=False)
