"""The keys of objectives are known without running their modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ssl_vit import plugins
from ssl_vit.recipe import load_recipe


@pytest.mark.parametrize("name", plugins.shipped("objectives"))
def test_the_declared_keys_are_those_of_the_configuration(name: str) -> None:
    assert plugins.objective_keys(name) == [*plugins.load("objectives", name).Config.model_fields]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class Config(ObjectiveConfig):\n    weight: float = 1\n    size: int", ["weight", "size"]),
        ("class Config(ObjectiveConfig): ...", []),
        ("class Config(Mine):\n    weight: float = 1", None),
        ("class Config(ObjectiveConfig):\n    model_config = ConfigDict(extra='allow')", None),
        ("from elsewhere import Config", None),
    ],
)
def test_a_module_is_read_and_not_run(
    source: str, expected: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "an_objective").mkdir()
    (tmp_path / "an_objective" / "inside.py").write_text(f"{source}\nraise RuntimeError('run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.objective_keys("an_objective.inside") == expected
    monkeypatch.delitem(sys.modules, "an_objective")
    assert plugins.objective_keys("nowhere.inside") is None
    assert plugins.objective_keys("an_objective.inside:Class") is None


def test_an_objective_that_allows_any_key_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_open_one.py").write_text(
        "from pydantic import ConfigDict\nfrom ssl_vit.interfaces import ObjectiveConfig\n"
        "class Config(ObjectiveConfig):\n    model_config = ConfigDict(extra='allow')\nclass Objective: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    keys = ["objective.name=an_open_one:Objective", "objective.anything=3"]
    assert load_recipe("digits_ssl", keys).objective.model_dump()["anything"] == 3
