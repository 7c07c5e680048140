"""What is shipped: the version, extras and scripts, the wheel in a separate environment, the API documentation."""

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
EXTRAS = PROJECT["optional-dependencies"]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "recipes").glob("*.md"))]


def test_the_version_is_semantic_and_in_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    assert ssl_vit.__version__ == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_extras_that_the_documents_name_exist() -> None:
    named = {extra for file in DOCUMENTS for extra in re.findall(r"(?:\.|ssl-vit)\[(\w+)\][`']", file.read_text())}
    assert {"test", "dev", "export", "s3"} <= named <= set(EXTRAS)


def test_every_dependency_has_a_lower_bound_for_tools_oldest() -> None:
    wanted = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    assert not [line for line in wanted if ">=" not in line and not line.startswith(("ssl-vit[", "types-"))]


@pytest.mark.parametrize(
    "script", [ROOT / ".ci/run", *sorted((ROOT / "tools").glob("*.sh"))], ids=lambda path: path.name
)
def test_scripts_are_valid_shell_and_executable(script: Path) -> None:
    assert os.access(script, os.X_OK)
    shell = script.read_text().splitlines()[0].rpartition("/")[2].removeprefix("env ")
    subprocess.run([shell, "-n", str(script)], check=True, timeout=60)


@pytest.mark.slow
def test_the_wheel_works_in_a_separate_environment(tmp_path: Path) -> None:
    """The dependencies come from this environment, the package from the wheel, the working directory is another."""
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
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    home = tmp_path / "home"
    home.mkdir()
    kept = ("PATH", "LANG", "LD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(home)}

    def output(*command: str) -> str:
        words = [str(programs / command[0]), *command[1:]]
        done = subprocess.run(words, cwd=home, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(site) in output("python", "-c", "import ssl_vit; print(ssl_vit.__file__)")
    assert "Usage: ssl-vit" in output("ssl-vit", "--help")
    assert str(site / "ssl_vit" / "recipes") in output("ssl-vit", "recipes")
    output("ssl-vit", "shards", "make", "digits", "shards", "--split", "test", "--shards", "4")
    output("ssl-vit", "train", "digits_ssl", "data.train=shards", "run=run", "training.steps=2")
    assert (home / "run" / "encoder.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pdoc") is None, reason="pdoc is in the dev extra")
def test_the_api_documentation_has_every_module(tmp_path: Path) -> None:
    (command,) = re.findall(r"^\.venv/bin/pdoc (.*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    words = [str(tmp_path) if word == "build/api" else word for word in command.split()]
    subprocess.run([sys.executable, "-m", "pdoc", *words], cwd=ROOT, check=True, timeout=900, capture_output=True)
    modules = [path for path in (ROOT / "ssl_vit").rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert not [path for path in modules if not (tmp_path / path.relative_to(ROOT).with_suffix(".html")).is_file()]
