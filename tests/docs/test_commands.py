"""What the documents tell a user to type is what works: every line of every shell block is run, or checked as far as a
small machine can, by the first rule below that fits it. A line without a rule fails the suite."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typer.main import get_command

from ssl_vit import cli, plugins, recipe
from ssl_vit.comparison.config import load_comparison, load_suite
from ssl_vit.data.order import check_topology

ROOT = Path(__file__).parent.parent.parent
RESULTS = "recipes/RESULTS.md"
DOCUMENTS = ("README.md", "recipes/README.md", RESULTS, "CONTRIBUTING.md", "tools/README.md")
RUN = "run, with the tiny settings of TINY"
# (pattern, how the line is checked instead of being run, why or where)
ON_A_CLUSTER = "needs GPUs or a cluster; tests/processes starts the launch files"
RULES = [
    (r"(python3 -m venv|\.ci/run|\S*pdoc|\S*pre-commit)\b", "elsewhere", "tests/test_packaging.py"),
    (r"(tools/oldest|tools/test_xla)\.sh\b", "elsewhere", "tests/test_packaging.py"),
    (r"python tools/\w+\.py", "help", "minutes on an idle machine"),
    (r"(accelerate launch|sbatch|(sh )?recipes/launch/\S+\.sh) ", "parsed", ON_A_CLUSTER),
    (r"ssl-vit (import vit_|shards make \w[\w-]+/\w)", "parsed", "needs the hub"),
]
TINY = {
    "train": [
        "encoder.depth=1", "training.epochs=1", "training.batch_size=32", "training.precision=fp32", "data.workers=0",
        "training.picture_every=0",
    ],
    "compare": [
        "seeds=[0,1]", "labels_per_class=[2]", "pictures=false", "evaluators.few_shot.shots=[1,2]",
        "evaluators.fine_tune.steps=[2]", "evaluators.fine_tune.lrs=[0.01]", "evaluators.fine_tune.batch_size=32",
        "evaluators.fine_tune.tune_labels_per_class=2",
        *(
            f"arms.{arm}.overrides=[encoder.image_size=32,encoder.depth=1,training.steps=2,training.batch_size=32,data.workers=0]"
            for arm in ("ssl", "supervised")
        ),
    ],
    "compare own_images": ["evaluators.knn.ks=[1]", "evaluators.linear_probe.cs=[0.1]"],
    "eval fine_tune": ["steps=[2]", "lrs=[0.01]", "batch_size=32", "seeds=[0]"],
}  # fmt: skip


class Line(NamedTuple):
    document: str
    number: int
    text: str

    def rule(self) -> tuple[str, str]:
        """How the line is checked, and why so."""
        if self.document == RESULTS:
            return "parsed", "minutes to hours; the table below it is what it printed"
        for pattern, how, why in RULES:
            if re.match(pattern, self.text):
                return how, why
        return ("run", RUN) if self.text.startswith("ssl-vit ") else ("none", "")


def lines(document: str) -> Iterator[Line]:
    inside, pending, first = False, "", 0
    for number, text in enumerate((ROOT / document).read_text().splitlines(), 1):
        if text.startswith("```"):
            inside = text in ("```bash", "```sh", "```shell", "```console")
        elif inside and text.strip() and not text.startswith("#"):
            first = first or number
            pending += text.removesuffix("\\")
            if not text.endswith("\\"):
                yield Line(document, first, pending)
                pending, first = "", 0


ALL = [line for document in DOCUMENTS for line in lines(document)]
STARTS = (
    r"(?:\w+=\S+ )*(?:ssl-vit [a-z]\w+ [^-A-Z`]|accelerate launch |sbatch |sh recipes/launch/|recipes/launch/\S+\.sh )"
)
INLINE = [
    Line(document, 0, text)
    for document in DOCUMENTS
    for text in re.findall(rf"`({STARTS}[^`\n]+)`", (ROOT / document).read_text())
    if "..." not in text
]
HEADERS = [
    Line(str(path.relative_to(ROOT)), 0, text.removeprefix("# "))
    for path in sorted((ROOT / "recipes").glob("*/*.yaml"))
    for text in path.read_text().split("\nname: ")[0].splitlines()
    if re.match(r"# (ssl-vit|accelerate launch) ", text)
]


def test_the_first_two_commands_install_and_run() -> None:
    first, second = (line.text for line in ALL[:2])
    assert first == "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/ssl-vit demo"
    assert second == "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest"


@pytest.mark.parametrize("line", ALL, ids=lambda line: f"{line.document}:{line.number} {line.rule()[0]}")
def test_every_line_of_every_shell_block_is_checked(line: Line) -> None:
    """`run` lines are run below, document by document; the others here."""
    how, where = line.rule()
    assert how != "none", f"{line.document}:{line.number}: no rule says how to check `{line.text}`"
    if how == "elsewhere":
        assert (ROOT / where).is_file()
    elif how == "help":
        command = [sys.executable, ROOT / shlex.split(line.text)[1], "--help"]
        assert b"usage" in subprocess.run(command, capture_output=True, timeout=240, check=True).stdout
    elif how == "parsed":
        check(line.text)


@pytest.mark.parametrize("line", [*INLINE, *HEADERS], ids=lambda line: f"{line.document} {line.text}")
def test_commands_in_the_text_and_in_recipes_are_right(line: Line) -> None:
    check(line.text)


LAUNCHED = [
    text.removeprefix("# ")
    for path in sorted((ROOT / "recipes/launch").iterdir())
    for text in path.read_text().splitlines()
    if re.match(r"# (accelerate launch|sbatch) ", text)
]


@pytest.mark.parametrize("text", [line.text for line in INLINE] + LAUNCHED)
def test_launch_commands_deal_their_recipes_out_evenly(text: str) -> None:
    """From enough shards, on the processes that the command says, 8 a machine."""
    numbers = {
        r"--num_processes (\d+)": lambda count: [int(count)],
        r"sbatch --nodes=(\d+) recipes/launch/slurm.sh": lambda count: [8 * int(count)],
        r"NODES=(\d+:\d+) ": lambda bounds: [8 * n for n in range(int(bounds[0]), int(bounds[-1]) + 1)],
        r"(two_machines)\.yaml": lambda _: [16],
    }
    counts = [count for known, of in numbers.items() for found in re.findall(known, text) for count in of(found)]
    if not counts:
        return
    _, name, *changed = own_words(shlex.split(text))
    settings: Any = recipe.load_recipe(name, changed)
    for ranks in counts:
        check_topology(
            shards=ranks * max(settings.data.workers, 1),
            samples=10**6,
            lanes=settings.data.lanes,
            batch_size=settings.training.batch_size,
            ranks=ranks,
            workers=settings.data.workers,
            accumulate=settings.training.accumulate,
        )


def check(text: str) -> None:
    """Parse a command as `ssl-vit` would, and validate the recipe and every key that it names; nothing runs."""
    words = own_words(shlex.split(text))
    group: Any = get_command(cli.app)
    name = words[0]
    while hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    with group.make_context("ssl-vit", words) as context:
        given = context.params
    changed = list(given.get("overrides") or [])
    if name == "train" and "runs/" not in given["recipe"] and given["recipe"] not in ("bees.yaml", "RECIPE"):
        recipe.load_recipe(given["recipe"], changed)
    elif name == "compare":
        load_comparison(given["recipe"], changed)
    elif name == "eval" and given["evaluator"] != "class_mean":
        config = plugins.load("evaluators", given["evaluator"]).Config
        recipe.validate(config, recipe.parse_overrides(changed))
        if given["suite"] and given["suite"] != "my_suite.yaml":
            load_suite(given["suite"])


def own_words(words: list[str]) -> list[str]:
    """What follows `ssl-vit`, whichever launcher starts it; the launch file must be there."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    launched = [word for word in words if word.startswith("recipes/launch/")]
    assert all((ROOT / word).is_file() for word in launched)
    if words[0] == "ssl-vit":
        return words[1:]
    if words[0] == "accelerate":
        return words[words.index("ssl_vit") + 1 :]
    script = next(word for word in words if word.endswith(".sh"))
    command = "compare" if "compare" in script else "train"
    return [command, *words[words.index(script) + 1 :]]


def tiny(words: list[str]) -> list[str]:
    """The same command, small: keys that the document itself gives stay as they are."""
    kinds = [words[0], " ".join(words[:2]), " ".join(words[::2][:2])]  # "train", "compare own_images", "eval few_shot"
    given = {word.split("=")[0] for word in words}
    lengths = {"training.steps", "training.epochs"}
    more = [key for kind in kinds for key in TINY.get(kind, []) if key.split("=")[0] not in given]
    more = [key for key in more if not (key.split("=")[0] in lengths and given & lengths)]
    more += [f"{word.split('=')[0]}=2" for word in words if word.startswith("training.steps=")]
    return [*words, *more]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new user's directory: class folders, a flat folder, and a list of images with their classes."""
    generator = np.random.default_rng(0)

    def pictures(folder: Path, count: int) -> None:
        folder.mkdir(parents=True)
        for n in range(count):
            Image.fromarray(generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(folder / f"{n}.jpg")

    for name in ("bee", "wasp"):
        pictures(tmp_path / "my_images" / name, 40)
    pictures(tmp_path / "unlabeled", 40)
    files = sorted((tmp_path / "my_images").rglob("*.jpg"))
    rows = [f"{file.relative_to(tmp_path)},{file.parent.name}" for file in files]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shown_files(tmp_path: Path) -> Iterator[list[str]]:
    """The files that recipes/README.md shows whole, put where it says (rooms get a second folder, the source stays as
    it is); their places."""
    text = (ROOT / "recipes/README.md").read_text()
    found = re.findall(
        r"[Ss]ave (?:this one|it) as `ssl_vit/([\w/]+)/(\w+)\.py`.*?```python\n(.*?)```", text, re.DOTALL
    )
    rooms = []
    for room, name, code in found:
        package = importlib.import_module(f"ssl_vit.{room.replace('/', '.')}")
        assert not (Path(package.__path__[0]) / f"{name}.py").exists(), f"{room}/{name}.py exists: show another name"
        folder = tmp_path / "own" / room
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text(code)
        package.__path__.append(str(folder))
        rooms.append((package, str(folder), f"{package.__name__}.{name}"))
    yield [f"{room}/{name}" for room, name, _ in found]
    for package, folder, module in rooms:
        package.__path__.remove(folder)
        sys.modules.pop(module, None)
        vars(package).pop(module.rpartition(".")[2], None)


@pytest.mark.filterwarnings("default::UserWarning")  # `shards make` prints them as notes
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_documents_commands_run_in_their_order(
    document: str,
    workplace: Path,
    shown_files: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    torch.set_num_threads(1)
    for line in lines(document):
        if line.rule()[0] != "run":
            continue
        words = tiny(shlex.split(line.text)[1:])
        monkeypatch.setattr(sys, "argv", ["ssl-vit", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capfd.readouterr()
        assert stop.value.code == 0, f"{document}:{line.number}: {line.text}\n{printed.err}"
    if document == "README.md":
        assert (workplace / "runs/mine/report.html").stat().st_size > 10_000
        assert (workplace / "exported/README.md").is_file()


def test_the_shown_files_are_of_every_kind(shown_files: list[str]) -> None:
    assert shown_files == ["objectives/rotation", "evaluators/class_mean", "data/sources/listed"]
    assert "rotation" in plugins.names("objectives")
    assert "class_mean" in plugins.names("evaluators")
    assert "listed" in plugins.names("sources")


def test_the_shown_recipe_is_one(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "recipes/README.md").read_text(), re.DOTALL)
    (tmp_path / "bees.yaml").write_text(shown)
    found = recipe.load_recipe(tmp_path / "bees.yaml")
    assert found.name == yaml.safe_load(shown)["name"]
    assert found.objective.model_dump()["mask_ratio"] == 0.15
    assert found.encoder.image_size == recipe.load_recipe("pretrain_vit_tiny").encoder.image_size


def test_every_launch_file_has_its_place_in_the_table() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| I have ... | run |") :].split("\n\n")[0]
    files = {path.name for path in (ROOT / "recipes" / "launch").iterdir()}
    assert set(re.findall(r"recipes/launch/([\w.]+)", table)) == files


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text):
            assert ((ROOT / document).parent / target).exists(), f"{document}: {target}"
        for target, anchor in re.findall(r"\]\(((?!https?:)[^)#]*)#([^)]*)\)", text):
            place = (ROOT / document).parent / target if target else ROOT / document
            headings = re.findall(r"^#+ (.*)$", place.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{document}: #{anchor}"
