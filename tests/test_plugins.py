"""Plugins: what they must define, and their keys."""

from __future__ import annotations

import importlib
import sys
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
    with pytest.raises(UserError, match=r"not a subclass of .*ObjectiveConfig"):
        load_recipe("digits_ssl", ["objective.name=another_one:Objective"])


def test_the_configuration_of_a_module_comes_before_an_inherited_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_pack").mkdir()
    base = "from ssl_vit.evaluators.base import LabeledConfig\n"
    inherited = "class Base:\n    title = ''\n    class Config(LabeledConfig): ...\nclass Evaluator(Base): ...\n"
    (tmp_path / "a_pack" / "one.py").write_text(f"{base}class Config(LabeledConfig): ...\n{inherited}")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("a_pack.one")
    assert plugins.load("evaluators", "a_pack.one").Config is module.Config
    assert plugins.load("evaluators", "a_pack.one:Evaluator").Config is module.Base.Config


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("class Evaluator(base.Evaluator):\n    title = 'Own'", "defines no Evaluator; its Evaluator lacks fit"),
        (
            "class Config(base.Config): ...\nclass Evaluator: ...",
            r"Config has no seeds; derive it from .*LabeledConfig",
        ),
        ("class Config(base.LabeledConfig): ...\nclass Evaluator: ...", "has no title"),
    ],
)
def test_what_an_evaluator_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    (tmp_path / "a_lacking_one.py").write_text(f"from ssl_vit.evaluators import base\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_lacking_one", raising=False)
    with pytest.raises(UserError, match=words):
        plugins.load("evaluators", "a_lacking_one:Evaluator")


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("", r"derive it from .*Objective"),
        ("(torch.nn.Module): needs_labels = True #", r"derive it from .*Objective"),
        ("(Base)", "its Objective lacks forward"),
    ],
)
def test_what_an_objective_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, words: str
) -> None:
    (tmp_path / "a_lacking_objective.py").write_text(
        "import torch\nfrom ssl_vit.interfaces import ObjectiveConfig as Config\n"
        f"from ssl_vit.models.objective import Objective as Base\nclass Objective{base}: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_lacking_objective", raising=False)
    with pytest.raises(UserError, match=words):
        plugins.load("objectives", "a_lacking_objective:Objective")


def test_a_changed_plugin_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "a_changing_one.py"
    code = "from ssl_vit.evaluators.base import LabeledConfig as Config\nclass Evaluator:\n    title = ''\n"
    file.write_text(code)
    before = plugins.checksum("evaluators", "a_changing_one:Evaluator")
    file.write_text(f"{code}# other\n")
    assert len({before, plugins.checksum("evaluators", "a_changing_one:Evaluator"), ""}) == 3
    assert not any(plugins.checksum("evaluators", name) for name in plugins.shipped("evaluators"))
    assert not any(plugins.checksum("objectives", name) for name in plugins.shipped("objectives"))


def test_an_objective_that_allows_any_key_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_open_one.py").write_text(
        "from pydantic import ConfigDict\nfrom ssl_vit.interfaces import ObjectiveConfig\n"
        "from ssl_vit.objectives import masked_patch\nclass Objective(masked_patch.Objective): ...\n"
        "class Config(ObjectiveConfig):\n    model_config = ConfigDict(extra='allow')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    keys = ["objective.name=an_open_one:Objective", "objective.anything=3"]
    assert load_recipe("digits_ssl", keys).objective.model_dump()["anything"] == 3


def test_a_module_of_its_own_is_named_with_its_class() -> None:
    with pytest.raises(UserError, match=r"unknown objective 'rot'.*a module of your own is rot:Objective"):
        plugins.load("objectives", "rot")


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("self.again = self.head", "one of its parameters has two names"),
        ("self.encoder.more = self.head; del self.head", r"checkpoints would not store encoder\.more\.weight"),
        ("self.needs_labels = True", "needs_labels must be an attribute of the class"),
    ],
)
def test_what_checkpoints_or_comparisons_would_miss_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, words: str
) -> None:
    (tmp_path / "a_wrong_one.py").write_text(
        "from ssl_vit.objectives import masked_patch\nclass Config(masked_patch.Config):\n    name: str\n"
        "class Objective(masked_patch.Objective):\n"
        f"    def __init__(self, *arguments):\n        super().__init__(*arguments)\n        {statement}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_wrong_one", raising=False)
    settings = load_recipe("digits_ssl", ["objective.name=a_wrong_one:Objective"])
    with pytest.raises(UserError, match=f"a_wrong_one:Objective: {words}"):
        stage.build_objective(settings, factory.build(settings.encoder), None)
