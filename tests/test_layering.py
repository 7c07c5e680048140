"""Layering: imports point down without a cycle, and light modules do not import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "ssl_vit"

# A package may import packages of lower rank, and its own modules.
RANKS = {
    "__main__": 15, "cli": 14, "api": 13, "comparison": 12, "outcomes": 12, "execution": 11, "report": 10, "health": 10,
    "evaluators": 9, "precision": 9, "dry_run": 9, "stage": 8, "analysis": 7, "runs": 7, "environment": 6, "recipe": 6,
    "objectives": 5, "training": 5, "models": 4, "data": 4, "results": 4, "records": 3, "arms": 3, "files": 2,
    "plugins": 2, "overrides": 2, "keys": 2, "progress": 2, "interfaces": 1, "__init__": 0,
}  # fmt: skip


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [n if n in known else node.module for n in names]
        else:
            assert not isinstance(node, ast.ImportFrom), f"{name}: relative import"
            continue
        found |= {n for n in names if n in known and n != name}
    return found


def package(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def graph() -> dict[str, set[str]]:
    known = modules()
    found = {name: imports(name, path, known) for name, path in known.items()}
    return found | {"ssl_vit": set()}  # the Python API: imported on first use, from the layers on top


def test_every_module_has_a_rank() -> None:
    assert {package(name) for name in modules()} == set(RANKS)


def test_arrows_point_down() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if package(name) != package(other) and RANKS[package(name)] <= RANKS[package(other)]
        if not (name == "ssl_vit.recipe" and other == f"ssl_vit.{package(other)}")  # a package's own configuration
    ]
    assert not wrong


def test_the_loop_knows_no_objective_and_no_evaluator() -> None:
    reached = graph()["ssl_vit.training.loop"] - {"ssl_vit.models.objective"}  # their base class
    assert {package(other) for other in reached} <= {"training", "data", "records", "interfaces"}


def test_there_is_no_cycle() -> None:
    assert list(TopologicalSorter(graph()).static_order())


def test_light_modules_do_not_import_torch() -> None:
    code = [
        "import ssl_vit",
        "assert 'embed' in dir(ssl_vit)",
        "import ssl_vit.recipe",
        "import ssl_vit.api",
        "import ssl_vit.comparison.executor",
        "import ssl_vit.cli, typer.testing",
        "typer.testing.CliRunner().invoke(ssl_vit.cli.app, ['eval', 'x', '-h'])",
        "import ssl_vit.report.page, ssl_vit.report.tables",
    ]
    lines = ["import sys", *(f"{line}; assert 'torch' not in sys.modules, {line!r}" for line in code)]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
