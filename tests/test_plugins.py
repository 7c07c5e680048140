"""Plugins: what they must define, and their keys."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from ssl_vit import plugins, stage
from ssl_vit.interfaces import UserError
from ssl_vit.models import factory
from ssl_vit.recipe import load_recipe


def test_a_plugin_without_a_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_bare_one.py").write_text("class Objective: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("a_bare_one:Objective", "a_package.a_bare_one"):
        (tmp_path / "a_package").mkdir(exist_ok=True)
        (tmp_path / "a_package" / "a_bare_one.py").write_text("class Objective: ...\n")
        with pytest.raises(UserError, match="defines a Config"):
            load_recipe("digits_ssl", [f"objective.name={name}"])
    (tmp_path / "another_one.py").write_text("class Config: ...\nclass Objective: ...\n")
    with pytest.raises(UserError, match=r"no subclass of .*ObjectiveConfig"):
        load_recipe("digits_ssl", ["objective.name=another_one:Objective"])


def test_the_configuration_of_a_module_comes_before_an_inherited_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_pack").mkdir()
    inherited = "class Base:\n    class Config: ...\nclass Evaluator(Base): ...\n"
    (tmp_path / "a_pack" / "one.py").write_text(f"class Config: ...\n{inherited}")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("a_pack.one")
    assert plugins.load("evaluators", "a_pack.one").Config is module.Config
    assert plugins.load("evaluators", "a_pack.one:Evaluator").Config is module.Base.Config


def test_a_changed_plugin_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "a_changing_one.py"
    file.write_text("class Config: ...\nclass Evaluator: ...\n")
    before = plugins.checksum("evaluators", "a_changing_one:Evaluator")
    file.write_text("class Config: ...\nclass Evaluator: ...  # other\n")
    assert len({before, plugins.checksum("evaluators", "a_changing_one:Evaluator"), ""}) == 3
    assert not any(plugins.checksum("evaluators", name) for name in plugins.shipped("evaluators"))
    assert not any(plugins.checksum("objectives", name) for name in plugins.shipped("objectives"))


def test_an_objective_that_allows_any_key_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_open_one.py").write_text(
        "from pydantic import ConfigDict\nfrom ssl_vit.interfaces import ObjectiveConfig\n"
        "class Config(ObjectiveConfig):\n    model_config = ConfigDict(extra='allow')\nclass Objective: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    keys = ["objective.name=an_open_one:Objective", "objective.anything=3"]
    assert load_recipe("digits_ssl", keys).objective.model_dump()["anything"] == 3


def test_a_module_of_its_own_is_named_with_its_class() -> None:
    with pytest.raises(UserError, match=r"unknown objective 'rot'.*a module of your own is rot:Objective"):
        plugins.load("objectives", "rot")


def test_parameters_with_two_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_tied_one.py").write_text(
        "from ssl_vit.objectives import masked_patch\nclass Config(masked_patch.Config):\n    name: str\n"
        "class Objective(masked_patch.Objective):\n"
        "    def __init__(self, *arguments):\n        super().__init__(*arguments)\n        self.again = self.head\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = load_recipe("digits_ssl", ["objective.name=a_tied_one:Objective"])
    with pytest.raises(UserError, match="a_tied_one:Objective: one of its parameters has two names"):
        stage.build_objective(settings, factory.build(settings.encoder), None)
