"""The reference of keys: types, defaults and meanings of every configuration, and the page made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from pydantic import Field
from typer.testing import CliRunner

from ssl_vit import cli
from ssl_vit.cli.keys import reference
from ssl_vit.interfaces import Config, UserError
from ssl_vit.keys import Key, keys

PLUGIN = '''
from ssl_vit.evaluators.base import LabeledConfig
class Config(LabeledConfig):
    """voters: how many vote."""
    voters: int = 3
class Evaluator:
    title = "Votes"
'''
OBJECTIVE = '''
from ssl_vit.interfaces import ObjectiveConfig
from ssl_vit.objectives import masked_patch
class Config(ObjectiveConfig):
    """angles: how many."""
    angles: int = 4
class Objective(masked_patch.Objective): ...
'''
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
        Key("kind", '"a" | "b" | null', "null", "which."),
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


def test_keys_of_an_objective_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_rotation.py").write_text(OBJECTIVE)
    monkeypatch.syspath_prepend(tmp_path)
    found = CliRunner().invoke(cli.app, ["keys", "a_rotation:Objective"], catch_exceptions=False)
    assert found.exit_code == 0 and "angles" in found.output
    (tmp_path / "a_bare_objective.py").write_text(OBJECTIVE.replace("(masked_patch.Objective)", ""))
    with pytest.raises(UserError, match=r"derive it from ssl_vit\.models\.objective"):
        CliRunner().invoke(cli.app, ["keys", "a_bare_objective:Objective"], catch_exceptions=False)


def test_a_topic_is_listed_and_a_wrong_one_named() -> None:
    found = CliRunner().invoke(cli.app, ["keys", "few_shot"])
    assert found.exit_code == 0 and "labels_per_class" in found.output and "1024.0" in found.output
    with pytest.raises(UserError, match=r"knnn: no such topic; known: train, compare, .*knn"):
        CliRunner().invoke(cli.app, ["keys", "knnn"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["eval", "few_shot"], "labels_per_class=[1, 5, 10, 25]"),
        (["eval", "runs/x", "fine_tune", "training.steps=1"], "optim.weight_decay=0.0"),
        (["eval", "runs/x", "a_majority.votes"], "voters=3"),
        (["train"], "training.batch_size=256"),
        (["compare", "own_images"], "labels_per_class"),
    ],
)
def test_help_ends_with_the_keys_in_two_lines_each(
    words: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_majority").mkdir()
    (tmp_path / "a_majority" / "votes.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    found = CliRunner().invoke(cli.app, [*words, "--help"], catch_exceptions=False)
    assert found.exit_code == 0
    options, _, listed = found.output.partition(" Keys of ")
    assert "--help" in options
    lines = [line for line in listed.splitlines()[1:] if line]
    assert [line for line in lines if line.startswith(f"  {key}")]
    assert max(map(len, lines)) <= 80
    starts = [number for number, line in enumerate(lines) if line[2] != " "] + [len(lines)]
    assert max(np.diff(starts)) <= 2 and len(starts) > 1


def test_the_keys_of_a_directory_named_like_a_module_are_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs.today").mkdir()
    found = CliRunner().invoke(cli.app, ["eval", "runs.today", "--help"], catch_exceptions=False)
    assert found.exit_code == 0 and " Keys of " not in found.output
