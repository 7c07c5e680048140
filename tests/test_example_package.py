"""A package with an objective, an evaluator and a data source: installed, used, and uninstalled again."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from ssl_vit import cli, plugins
from ssl_vit.interfaces import UserError
from ssl_vit.report.read import read

PACKAGE = Path(__file__).parent / "example_package"
NAME = "ssl_vit_example"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip has installed the package into."""
    folder = tmp_path_factory.mktemp("example")
    source = shutil.copytree(PACKAGE, folder / "source")  # a build writes beside its sources
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(source)], check=True, timeout=200)
    return folder / "site"


@pytest.fixture
def site(installed: Path) -> Iterator[None]:
    """The package can be imported, until `uninstall`."""
    sys.path.insert(0, str(installed))
    importlib.invalidate_caches()
    yield
    uninstall(installed)


def uninstall(installed: Path) -> None:
    sys.path[:] = [place for place in sys.path if place != str(installed)]
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def ssl_vit(*words: str) -> str:
    found = CliRunner().invoke(cli.app, [*words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def test_the_package_is_what_the_guides_show() -> None:
    guides = (Path(__file__).parent.parent / "recipes" / "README.md").read_text()
    shown = re.findall(r"```python\n(.*?)```", guides, re.DOTALL)
    files = [(PACKAGE / NAME / f"{name}.py").read_text() for name in ("rotation", "class_mean", "listed")]
    assert files == shown[1:]  # after the classification of new images


def test_a_run_outlives_the_package_of_its_objective(
    site: None, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pixels, classes = load_digits(return_X_y=True)
    for n in range(120):
        Image.fromarray((pixels[n].reshape(8, 8) * 15).astype("uint8")).save(f"{n}.png")
    Path("labels.csv").write_text("\n".join(["file,label", *(f"{n}.png,{classes[n]}" for n in range(120))]))
    ssl_vit("shards", "make", "listed:labels.csv", "shards", "--holdout", "0.25", "--shards", "4")
    ssl_vit("shards", "make", f"{NAME}.listed:labels.csv", "again")
    small = ["training.steps=2", "training.batch_size=16", "data.train=shards/train", "data.lanes=4"]
    ssl_vit("train", "digits_ssl", "objective.name=rotation", *small, "run=by_entry_point")
    ssl_vit("train", "digits_ssl", f"objective.name={NAME}.rotation", *small, "run=by_module")
    ssl_vit("eval", "by_module", "class_mean", "--data", "shards")
    content: dict[str, Any] = {
        "name": "mine",
        "data": {"train": "shards/train", "test": "shards/test"},
        "pictures": False,
        "seeds": [0, 1],
        "frozen_seeds": [0, 1],
        "labels_per_class": [2],
        "arms": {
            "one": {"recipe": "digits_ssl", "objective": {"name": f"{NAME}.rotation:Objective"}},
            "given": {"weights": "by_module"},
            "*": {"training": {"steps": 2, "batch_size": 16}, "data": {"lanes": 4}},
        },
        "evaluators": {"class_mean": {}, f"{NAME}.class_mean:Evaluator": {}},
    }
    Path("mine.yaml").write_text(yaml.safe_dump(content))
    assert "Nearest class mean" in ssl_vit("compare", "mine.yaml")
    assert {row.evaluator for row in read([Path("runs/mine")]).table.results} == {*content["evaluators"]}

    uninstall(installed)
    with pytest.raises(UserError, match=r"unknown objective 'rotation'.*available: classification"):
        ssl_vit("train", "digits_ssl", "objective.name=rotation", *small, "run=third")
    with pytest.raises(UserError, match=rf"'{NAME}.rotation' cannot be imported .*PYTHONPATH"):
        ssl_vit("train", "by_module")
    for run in ("by_entry_point", "by_module"):
        ssl_vit("eval", run, "few_shot", "--data", "shards", "labels_per_class=[1]")
        ssl_vit("export", run, f"exported_{run}", "--to", "timm")
    ssl_vit("inspect", "by_module", "--data", "shards/test")
    assert "cannot be imported here" in Path("by_module", "inspect", "index.html").read_text()
    ssl_vit("report", "runs/mine")
    alone = ["arms.one=null", "name=alone"]
    (tmp_path / "alone.yaml").write_text(yaml.safe_dump(content | {"evaluators": {"few_shot": {}}}))
    ssl_vit("compare", "alone.yaml", *alone)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_package.rotation", r"objective 'no_such_package.rotation' cannot be imported .*PYTHONPATH"),
        (f"{NAME}.listed", f"{NAME}.listed defines no Objective"),
        (f"{NAME}.rotation:Rotation", f"{NAME}.rotation defines no Rotation"),
        ("rotatoin", "unknown objective 'rotatoin'; did you mean 'rotation'"),
        ("../rotation", "unknown objective"),
    ],
)
def test_wrong_names_are_explained(site: None, name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        plugins.load("objectives", name)
