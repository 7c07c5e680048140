"""The commands, recipes, files and links in the documents work.

Every line of a shell block is run with small settings, or checked by the first of RULES that matches.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from typer.main import get_command

from ssl_vit import cli, plugins, recipe
from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.sets import load_suite

ROOT = Path(__file__).parent.parent.parent
GUIDES, RESULTS, STUDIES = "recipes/README.md", "recipes/RESULTS.md", "recipes/STUDIES.md"
DOCUMENTS = ("README.md", GUIDES, RESULTS, STUDIES, "CONTRIBUTING.md", "tools/README.md", "ssl_vit/README.md")
RULES = [  # (pattern, how a line is checked instead of being run)
    (r"(python3 -m venv|\.ci/run|\S*pdoc|\S*pre-commit|tools/\w+\.sh)\b", "elsewhere"),  # tests/test_packaging.py
    (r"(\w+=\S+ )?python tools/\w+\.py", "begun"),  # runs for minutes
    (r"(accelerate launch|sbatch|(sh )?recipes/launch/\S+\.sh) ", "parsed"),  # tests/processes runs the launch files
    (r"ssl-vit (import vit_|shards make \w[\w-]+/\w)", "parsed"),  # needs the hub
    (r"ssl-vit ", "run"),
]
TINY = {  # settings added to a command that starts with these words
    "train": [
        "encoder.depth=1", "training.epochs=1", "training.batch_size=32", "training.precision=fp32", "data.workers=0",
        "training.picture_every=0",
    ],
    "compare": [
        "seeds=[0]", "frozen_seeds=[0]", "pretrainings=1", "labels_per_class=[2]", "pictures=false", "controls=false",
        "evaluators.fine_tune.held_out_repeats=1",
        "evaluators.few_shot.labels_per_class=[1,2]",
        "evaluators.fine_tune.sweep.training.steps=[2]", "evaluators.fine_tune.sweep.optim.lr=[0.01]",
        "evaluators.fine_tune.training.batch_size=32", "evaluators.fine_tune.sweep_labels_per_class=2",
        *(
            f"arms.{arm}.overrides=[encoder.image_size=32,encoder.depth=1,training.steps=2,training.batch_size=32,data.workers=0]"
            for arm in ("ssl", "supervised")
        ),
    ],
    "compare own_images": [
        "arms.downloaded=null", "evaluators.knn.ks=[1]", "evaluators.linear_probe.sweep.c=[0.1]",
        "evaluators.attentive_probe.steps=2",
    ],
    "eval fine_tune": ["training.steps=2", "sweep.optim.lr=[0.01]", "training.batch_size=32", "seeds=[0]"],
}  # fmt: skip


class Line(NamedTuple):
    document: str
    text: str

    def rule(self) -> str:
        if self.document == STUDIES:
            return "parsed"  # minutes to hours
        return next((how for pattern, how in RULES if re.match(pattern, self.text)), "none")


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


LINES = [
    Line(document, text)
    for document in DOCUMENTS
    for block in blocks(document, "bash")
    for text in block.splitlines()
    if text and not text.startswith("#")
]
START = (
    r"(?:\w+=\S+ )*(?:ssl-vit [a-z]\w+ [^-A-Z`]|accelerate launch |sbatch |(?:sh )?recipes/launch/\S+\.sh "
    r"|python tools/)"
)
INLINE = [
    Line(document, text)
    for document in DOCUMENTS
    for text in re.findall(rf"`({START}[^`]*)`", (ROOT / document).read_text())
    if "..." not in text
]
HEADERS = {  # by text: recipes share their first commands
    text: Line(str(path.relative_to(ROOT)), text)
    for path in sorted((ROOT / "recipes").glob("*/*.*"))
    if path.suffix in (".yaml", ".sh")
    for text in re.findall(rf"^# ({START}.*)", path.read_text(), re.MULTILINE)
}
COMMANDS: Any = get_command(cli.app)


@functools.cache
def parse(text: str) -> None:
    """Parse a command as `ssl-vit` would, and validate the recipe and every key that it names; nothing runs."""
    words = shlex.split(text)
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    assert all((ROOT / word).is_file() for word in words if word.startswith("recipes/launch/"))
    if "ssl_vit" in words:
        words = words[words.index("ssl_vit") + 1 :]
    elif script := next((word for word in words if word.endswith(".sh")), None):
        words = ["compare" if "compare" in script else "train", *words[words.index(script) + 1 :]]
    else:
        words = words[1:]
    group = COMMANDS
    name = words[0]
    while hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    with group.make_context("ssl-vit", words) as context:
        given = context.params
    changed = list(given.get("overrides") or [])
    if name == "train" and "runs/" not in given["recipe"] and given["recipe"] not in ("bees.yaml", "RECIPE"):
        settings = recipe.load_recipe(given["recipe"], changed)
        for processes in re.findall(r"--num_processes (\d+)", text):
            lanes, rest = divmod(settings.data.lanes, int(processes))
            assert not rest and settings.data.workers <= lanes
    elif name == "compare":
        load_comparison(given["recipe"], changed)
    elif name == "eval" and given["evaluator"] != "class_mean":
        recipe.validate(plugins.load("evaluators", given["evaluator"]).Config, recipe.parse_overrides(changed))
        if given["suite"] and given["suite"] != "my_suite.yaml":
            load_suite(given["suite"])


def tiny(words: list[str]) -> list[str]:
    """The same command with small settings in one process; its other keys are kept, except the number of steps."""
    words = [word for word in words if not word.startswith("jobs=")]
    kinds = [words[0], " ".join(words[:2]), " ".join(words[::2][:2])]  # "train", "compare own_images", "eval fine_tune"
    given = {word.split("=")[0] for word in words}
    if "training.steps" in given:
        given.add("training.epochs")
    more = [key for kind in kinds for key in TINY.get(kind, []) if key.split("=")[0] not in given]
    return [*words, *more, *["training.steps=2" for key in given if key == "training.steps"]]


def test_the_first_two_commands_install_and_run() -> None:
    assert [line.text for line in LINES[:2]] == [
        "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/ssl-vit demo",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest -n 2",
    ]


class Parsed(Exception):
    pass


def begin(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script until its arguments are parsed; one without a parser is imported. Words in capitals stand for 1."""
    script, *words = shlex.split(text.partition("python ")[2])
    for name in ("parse_args", "parse_intermixed_args"):
        original = getattr(argparse.ArgumentParser, name)

        def parsed(self: Any, *given: Any, parse: Any = original) -> None:
            parse(self, *given)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, parsed)
    monkeypatch.setattr(sys, "argv", [script, *("1" if re.fullmatch(r"[A-Z]+", word) else word for word in words)])
    takes_words = "ArgumentParser(" in (ROOT / script).read_text()
    with pytest.raises(Parsed) if takes_words else nullcontext():
        runpy.run_path(str(ROOT / script), run_name="__main__" if takes_words else "imported")


@pytest.mark.parametrize("line", [*LINES, *INLINE, *HEADERS.values()], ids=" ".join)
def test_a_command_has_a_rule_and_valid_words(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    how = line.rule() if line in LINES or "tools/" in line.text else "parsed"
    assert how != "none", f"{line.document}: no rule for `{line.text}`"
    if how == "begun":
        begin(line.text, monkeypatch)
    elif how == "parsed":
        parse(line.text)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new user's directory: class folders, a flat folder, and a list of images with their classes."""
    generator = np.random.default_rng(0)
    for name in ("my_images/bee", "my_images/wasp", "unlabeled"):
        (tmp_path / name).mkdir(parents=True)
        for n in range(40):
            pixels = generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{n}.jpg")
    files = sorted((tmp_path / "my_images").rglob("*.jpg"))
    rows = [f"{file.relative_to(tmp_path)},{file.parent.name}" for file in files]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shown_files(tmp_path: Path) -> Iterator[list[str]]:
    """Modules shown in the guides, importable from where the guides say: each package gets a second folder."""
    found = re.findall(r"ave\s+(?:this one|it) as `ssl_vit/([\w/]+)/(\w+)\.py`", (ROOT / GUIDES).read_text())
    added = []
    for (folder, name), code in zip(found, blocks(GUIDES, "python")[1:], strict=True):
        package = importlib.import_module(f"ssl_vit.{folder.replace('/', '.')}")
        assert not (Path(package.__path__[0]) / f"{name}.py").exists()
        own = tmp_path / "own" / folder
        own.mkdir(parents=True)
        (own / f"{name}.py").write_text(code)
        package.__path__.append(str(own))
        added.append((package, str(own), name))
    yield [name for _, name in found]
    for package, own, name in added:
        package.__path__.remove(own)
        sys.modules.pop(f"{package.__name__}.{name}", None)
        vars(package).pop(name, None)


@pytest.mark.filterwarnings("default::UserWarning")  # `shards make` prints them as notes
@pytest.mark.parametrize("document", ["README.md", pytest.param(GUIDES, marks=pytest.mark.slow)])
def test_the_commands_of_a_document_run_in_order(
    document: str,
    workplace: Path,
    shown_files: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert shown_files == ["rotation", "class_mean", "listed"]
    torch.set_num_threads(1)
    for line in LINES:
        if line.document == document and line.rule() == "run":
            monkeypatch.setattr(sys, "argv", ["ssl-vit", *tiny(shlex.split(line.text)[1:])])
            with pytest.raises(SystemExit) as stop:
                cli.main()
            assert stop.value.code == 0, f"{line.text}\n{capfd.readouterr().err}"
    assert (workplace / "runs/mine/report.html").is_file()
    if document == GUIDES:
        (workplace / "unlabeled").rename("new_images")
        classified: dict[str, Any] = {}
        exec(blocks(GUIDES, "python")[0], classified)
        assert len(classified["new"]) == 40 and set(classified["new"]["class"]) <= {"bee", "wasp"}


def test_the_shown_recipes_are_valid(tmp_path: Path) -> None:
    shown, mine, arms = blocks(GUIDES, "yaml")
    (tmp_path / "bees.yaml").write_text(shown)
    assert recipe.load_recipe(tmp_path / "bees.yaml").encoder.patch_size == 8
    (tmp_path / "mine.yaml").write_text(mine)
    large = load_comparison(tmp_path / "mine.yaml", ["data.train=a", "data.test=b"])
    assert large.recipes["ssl"].training.epochs == 50 and large.recipes["supervised"].training.epochs == 25
    assert {one.encoder.image_size for one in large.recipes.values()} == {128}
    (tmp_path / "own.yaml").write_text(f"base: own_images_cpu\nname: own\n{arms}")
    own = load_comparison(tmp_path / "own.yaml", ["data.train=a", "data.test=b"])
    assert {"timm", "mine", "ssl"} <= own.comparison.arms.keys()


def test_every_launch_file_is_in_the_table() -> None:
    files = {path.name for path in (ROOT / "recipes" / "launch").iterdir()}
    assert set(re.findall(r"recipes/launch/([\w.]+)", (ROOT / "README.md").read_text())) == files


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", (ROOT / document).read_text()):
        place = (ROOT / document).parent / target if target else ROOT / document
        assert place.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", place.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings], anchor
