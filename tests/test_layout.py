"""Rules about the text of the code base that a program can check: size, public APIs, typed reports, plain words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "ssl_vit").rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))
TEXTS = [
    path
    for folder in ("ssl_vit", "recipes", "tools")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".yaml", ".sh", ".j2")
] + sorted(ROOT.glob("*.md"))
# Public by the documentation of os and of named tuples, in spite of the underscore.
DOCUMENTED = {"_exit", "_replace", "_asdict", "_fields"}
WORDS = (
    r"\bmend(s|ed|ing)?\b|put up with|put aside|dealt out|taken up again|left alone|\bgoes on (where|from)\b|\btwin\b"
    r"|\b(labels?|images?|seconds|GFLOP|steps?|shots?|numbers?|file|pair) an? (class|image|step|channel|process|lane)\b"
    r"|\bjudg(e|es|ed|ing)\b|\brooms\b|\bpatience (is|at)\b|\bcolour|\bcentre\b|\bneighbour|\blabelled\b|\blicence\b"
)


@pytest.mark.parametrize("path", [*SOURCES, *TOOLS], ids=lambda path: str(path.relative_to(ROOT)))
def test_source_files_have_at_most_300_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


def test_no_private_api_of_other_libraries_is_used() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    own = {node.name for _, node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for _, node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.id for _, node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = [(path, node.lineno, node.attr) for path, node in nodes if isinstance(node, ast.Attribute)]
    for path, node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("ssl_vit"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            used += [(path, node.lineno, name) for name in names]
    private = re.compile(r"_(?!_)\w+")
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, line, name in used
        if private.fullmatch(name) and name not in own | DOCUMENTED
    ]
    assert not wrong


def test_functions_of_the_report_take_typed_values() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}({argument.arg}: {ast.unparse(argument.annotation)})"
        for path in sorted((ROOT / "ssl_vit" / "report").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if argument.annotation and "dict[str, Any]" in ast.unparse(argument.annotation)
    ]
    assert not wrong


def test_texts_use_the_terms_of_the_field() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in re.finditer(WORDS, line, re.IGNORECASE)
    ]
    assert not found
