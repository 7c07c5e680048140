"""Numbers in the documents are those that `ssl-vit report --format markdown` wrote, kept in recipes/results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "recipes"
DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)")


def sections(document: str) -> list[str]:
    """Without the introduction."""
    return re.split(r"^(?=## )", (RECIPES / document).read_text(), flags=re.MULTILINE)[1:]


def summaries() -> dict[str, str]:
    """Texts that repeat numbers of several kept outputs, in their own words."""
    return {
        "README": (ROOT / "README.md").read_text(),
        "guides": (RECIPES / "README.md").read_text(),
        "summary of RESULTS": next(text for text in sections("RESULTS.md") if text.startswith("## Summary\n")),
    }


def statements(text: str) -> list[str]:
    """The table rows, list items and paragraphs of a text that name kept outputs."""
    parts = re.split(r"\n\n|\n(?=\||- )", text)
    return [part for part in parts if re.search(r"results/[\w-]+\.md", part)]


def split_tables(text: str) -> tuple[list[str], str]:
    """The pipe tables of a text, and the rest of it."""
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return tables, re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)


def is_part(table: str, of: str) -> bool:
    """Whether a table has the head of another one and rows of it, in their order."""
    shown, rows = table.splitlines(), iter(of.splitlines())
    return shown[:2] == of.splitlines()[:2] and all(line in rows for line in shown)


def unknown(text: str, kept: str) -> list[str]:
    """The decimals of a text that kept outputs do not have."""
    return [number for number in DECIMAL.findall(text) if number not in {*DECIMAL.findall(kept)}]


def kept_files(text: str) -> str:
    """The kept outputs that a text names."""
    names = set(re.findall(r"results/[\w-]+\.md", text))
    assert names
    return "\n".join((RECIPES / name).read_text() for name in names)


@pytest.mark.parametrize("section", sections("STUDIES.md"), ids=lambda text: text.splitlines()[0])
def test_a_study_repeats_its_kept_output(section: str) -> None:
    kept = kept_files(section)
    tables, prose = split_tables(section)
    for table in tables:  # with all rows of one there, or some of them
        assert any(is_part(table, of) for of in split_tables(kept)[0]), f"not in the kept output: {table}"
    assert not (missing := unknown(prose, kept)), f"not in the kept output: {missing}"


def test_every_kept_output_has_its_command_in_the_studies() -> None:
    commands = re.findall(r"ssl-vit compare (\w+)", "".join(sections("STUDIES.md")))
    assert {path.stem.split("-")[0] for path in (RECIPES / "results").glob("*.md")} <= set(commands)


@pytest.mark.parametrize("name", summaries())
def test_a_statement_repeats_the_kept_outputs_that_it_names(name: str) -> None:
    found = statements(summaries()[name])
    assert len(found) >= 2
    for statement in found:
        assert len(DECIMAL.findall(statement)) >= 2, statement
        missing = unknown(statement, kept_files(statement))
        assert not missing, f"not in the kept output: {missing} of {statement}"


@pytest.mark.parametrize("name", sorted({path.stem.split("-")[0] for path in (RECIPES / "results").glob("*.md")}))
def test_the_header_of_a_recipe_repeats_its_kept_output(name: str) -> None:
    (recipe,) = RECIPES.glob(f"*/{name}.yaml")
    header = "".join(line for line in recipe.read_text().splitlines(keepends=True) if line.startswith("#"))
    (scores,) = re.findall(r"Score \(measured.*?\n#\n", header, re.DOTALL)
    assert DECIMAL.findall(scores) and not unknown(scores, kept_files(scores))


def test_every_kept_output_is_of_a_finished_comparison_at_a_known_commit() -> None:
    for path in (RECIPES / "results").glob("*.md"):
        text = path.read_text()
        assert re.search(r"^Environment.*git [0-9a-f]{40}", text, re.MULTILINE), path
        assert "are not done" not in text and "quick run" not in text
