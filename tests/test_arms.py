"""Arms of a derived comparison: keys for all arms, overrides that add up, removed arms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ssl_vit.arms import derived
from ssl_vit.comparison.config import load_comparison
from ssl_vit.interfaces import UserError

KEYS = ("training", "encoder", "data", "optim")
BEFORE: dict[str, Any] = {
    "ssl": {"label": "SSL", "recipe": "a", "overrides": ["encoder.depth=4", "training.steps=900"]},
    "scratch": {"label": "scratch"},
}


def test_overrides_add_to_the_inherited_ones() -> None:
    found = derived(BEFORE, {"ssl": {"overrides": ["data.train=X", "encoder.depth=5"]}}, KEYS)
    assert found["ssl"]["overrides"] == ["training.steps=900", "data.train=X", "encoder.depth=5"]
    assert BEFORE["ssl"]["overrides"] == ["encoder.depth=4", "training.steps=900"], "the input was changed"


def test_keys_of_a_recipe_reach_every_arm_with_one() -> None:
    given = {"*": {"training": {"epochs": 3}, "label": "x"}, "ssl": {"optim": {"lr": 0.1}, "label": "own"}}
    found = derived(BEFORE, given, KEYS)
    assert found["ssl"]["overrides"] == ["encoder.depth=4", "training.epochs=3", "optim.lr=0.1"], "epochs replace steps"
    assert found["ssl"]["label"] == "own", "what is given for one arm alone comes last"
    assert found["scratch"] == {"label": "x"}


def test_null_removes_an_arm_and_a_new_arm_is_called_by_its_name() -> None:
    found = derived(BEFORE, {"scratch": None, "own_run": {"weights": "runs/own"}}, KEYS)
    assert list(found) == ["ssl", "own_run"]
    assert found["own_run"] == {"label": "own run", "weights": "runs/own"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nobody": None}, "arms.nobody=null: there is no such arm; arms: ssl, scratch"),
        ({"*": 3}, r"arms\.\*: give keys for all arms"),
        ({"*": None}, r"arms\.\*: give keys for all arms"),
        ({"*": {"trainng": {"steps": 1}}}, r"arms\.ssl\.trainng: unknown key; did you mean 'training'"),
        ({"ssl": {"overrides": "a=1"}}, r"arms\.ssl\.overrides: give a list"),
    ],
)
def test_wrong_arms_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        derived(BEFORE, given, KEYS)


def test_the_command_line_reaches_the_arms_of_a_shipped_comparison() -> None:
    own = ["data.train=a", "data.test=b", "arms.*.training.steps=10", "arms.supervised.overrides=[data.train=X]"]
    study = load_comparison("own_images_cpu", own)
    steps = {name: (one.training.steps, one.encoder.depth, one.data.train) for name, one in study.recipes.items()}
    assert steps == {"ssl": (10, 4, "a"), "supervised": (10, 4, "X")}


def test_a_recipe_derives_from_a_comparison(tmp_path: Path) -> None:
    content = {"base": "own_images_cpu", "name": "own", "arms": {"supervised": None, "*": {"encoder": {"depth": 2}}}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(content))
    study = load_comparison(tmp_path / "own.yaml", ["arms.ssl.training.epochs=1"])
    assert list(study.comparison.arms) == ["ssl", "scratch"]
    ssl = study.recipes["ssl"]
    assert (ssl.encoder.depth, ssl.training.steps, ssl.training.epochs) == (2, None, 1)
