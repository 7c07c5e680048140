"""What is shipped: the wheel in an environment of its own, the versions, and the commands of CONTRIBUTING.md."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import ssl_vit

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "recipes").glob("*.md"))]


def test_the_version_is_semantic_and_everywhere_the_same() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    assert ssl_vit.__version__ == PROJECT["version"]
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


def test_extras_that_the_documents_name_exist() -> None:
    named = {extra for file in DOCUMENTS for extra in re.findall(r"(?:\.|ssl-vit)\[(\w+)\]'", file.read_text())}
    assert {"test", "dev", "export"} <= named <= set(PROJECT["optional-dependencies"])


def test_every_dependency_has_a_floor_that_tools_oldest_can_pick() -> None:
    wanted = [
        *PROJECT["dependencies"],
        *(line for lines in PROJECT["optional-dependencies"].values() for line in lines),
    ]
    floorless = [line for line in wanted if ">=" not in line and not line.startswith(("ssl-vit[", "types-"))]
    assert not floorless


@pytest.mark.parametrize(
    "script", [".ci/run", *(f"tools/{path.name}" for path in sorted((ROOT / "tools").glob("*.sh")))]
)
def test_scripts_are_shell_and_can_be_started(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    shell = path.read_text().splitlines()[0].rpartition("/")[2].removeprefix("env ")
    subprocess.run([shell, "-n", str(path)], check=True, timeout=60)


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own_from_another_directory(tmp_path: Path) -> None:
    """Built by pip as anyone builds it; the dependencies are lent by this environment, the package is not."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=600)
    (wheel,) = tmp_path.glob("ssl_vit-*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    for wanted in ("py.typed", "report/page.html.j2", "recipes/digits/digits_ssl.yaml", "recipes/suites/transfer.yaml"):
        assert f"ssl_vit/{wanted}" in names
    assert {name.partition("/")[0] for name in names} == {"ssl_vit", wheel.name.split("-py3")[0] + ".dist-info"}

    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=600)
    programs = tmp_path / "venv" / "bin"
    subprocess.run([programs / "pip", "install", "--quiet", "--no-deps", wheel], check=True, timeout=600)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")

    home = tmp_path / "home"
    home.mkdir()
    kept = ("PATH", "LANG", "LD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(home)}

    def ssl_vit_says(*arguments: str) -> str:
        command = [str(programs / "ssl-vit"), *arguments]
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = [str(programs / "python"), "-c", "import ssl_vit; print(ssl_vit.__file__)"]
    assert (
        str(site) in subprocess.run(where, cwd=home, env=environment, capture_output=True, text=True, check=True).stdout
    )
    assert "Usage: ssl-vit" in ssl_vit_says("--help")
    assert str(site / "ssl_vit" / "recipes") in ssl_vit_says("recipes")
    ssl_vit_says("shards", "make", "digits", "shards", "--split", "test", "--shards", "4")
    trained = ssl_vit_says("train", "digits_ssl", "data.train=shards", "run=run", "training.steps=2")
    assert "ssl-vit eval run few_shot" in trained


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pdoc") is None, reason="pdoc is in the dev extra")
def test_the_documentation_of_every_module_builds(tmp_path: Path) -> None:
    (command,) = re.findall(r"^\.venv/bin/pdoc (.*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    words = [str(tmp_path) if word == "build/api" else word for word in command.split()]
    subprocess.run([sys.executable, "-m", "pdoc", *words], cwd=ROOT, check=True, timeout=900, capture_output=True)
    modules = [path for path in (ROOT / "ssl_vit").rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    for module in modules:
        page = tmp_path / module.relative_to(ROOT).with_suffix(".html")
        assert page.is_file(), f"{module} is not in the documentation"
