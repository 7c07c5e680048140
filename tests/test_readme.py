"""What the documents tell a user to type is what works."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from PIL import Image
from typer.main import get_command

from ssl_vit import cli
from ssl_vit.recipe import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
CODE = re.findall(r"`([^`\n]+)`", README)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]


def unlaunched(command: str) -> str:
    """A command as this program gets it, whatever launches it."""
    command = re.sub(r"^(\w+=\S+ )+", "", command)
    command = re.sub(r"^accelerate launch .* -m ssl_vit ", "ssl-vit ", command)
    command = re.sub(r"^recipes/launch/compare_slurm.sh ", "ssl-vit compare ", command)
    return re.sub(r"^(sh|sbatch) (-\S+ )*recipes/launch/\w+\.sh ", "ssl-vit train ", command)


SSL_VIT = [text for text in map(unlaunched, [*COMMANDS, *CODE]) if re.match(r"ssl-vit \w", text)]


def test_the_first_two_commands_install_and_run() -> None:
    first, second = COMMANDS[:2]
    assert first == "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/ssl-vit demo"
    assert second == "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest"
    assert all("\n" not in command for command in (first, second))


@pytest.mark.parametrize("command", SSL_VIT)
def test_every_command_in_the_readme_parses(command: str) -> None:
    group: click.Command = get_command(cli.app)
    words = shlex.split(command)[1:]
    while isinstance(group, click.Group) or hasattr(group, "commands"):
        group = group.commands[words.pop(0)]  # type: ignore[attr-defined]
    given = group.make_context("ssl-vit", words).params
    if group.name == "train" and not given["recipe"].endswith(".yaml"):
        load_recipe(given["recipe"], given["overrides"] or [])


def test_every_launch_file_has_its_place_in_the_table() -> None:
    table = README[README.index("| I have ... | run |") :].split("\n\n")[0]
    files = {path.name for path in (ROOT / "recipes" / "launch").iterdir()}
    assert set(re.findall(r"recipes/launch/([\w.]+)", table)) == files - {"one_gpu.yaml"}  # it needs no launcher


def test_own_images_to_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's commands for one's own images, in order, on images made here and with runs cut short."""
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "my_images" / name).mkdir(parents=True)
        for n in range(20):
            pixels = generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "my_images" / name / f"{n}.jpg")
    short = [
        "seeds=[0,1]", "labels_per_class=[2]", "evaluators.few_shot.shots=[1,2]", "evaluators.fine_tune.steps=[2]",
        "evaluators.fine_tune.lrs=[0.01]", "evaluators.fine_tune.batch_size=32", "evaluators.knn.ks=[1]",
        "evaluators.fine_tune.tune_labels_per_class=2", "evaluators.linear_probe.cs=[0.1]",
    ]  # fmt: skip
    size = "backbone.image_size=32,backbone.depth=1,training.epochs=1,training.batch_size=32,data.workers=1"
    short += [f"arms.{arm}.overrides=[{size}]" for arm in ("ssl", "supervised")]
    monkeypatch.chdir(tmp_path)
    block = next(block for block in BLOCKS if "my_images" in block)
    for line in block.splitlines():
        words = shlex.split(line)
        monkeypatch.setattr(sys, "argv", [*words, *(short if words[1] == "compare" else [])])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0, line
    assert (tmp_path / "runs/mine/report.html").stat().st_size > 10_000
