"""The same tables for a paper: Markdown, LaTeX (booktabs), and every measurement as CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from ssl_vit.report import page, tables
from ssl_vit.report.tables import Table

SUFFIXES = {"html": ".html", "markdown": ".md", "latex": ".tex", "csv": ".csv"}
_COLUMNS = (
    *("run", "data", "evaluator", "arm", "labels_per_class", "labels", "seed", "accuracy", "mean_per_class"),
    *("images_seen", "flops", "seconds", "chosen"),
)
# In the order of replacement: the backslash first.
_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    tables.MISSING: "--",
}


def write_tables(paths: list[Path], out: Path, form: str) -> Path:
    """Write the tables of a report to `out` as `markdown`, `latex` or `csv`; returns `out`. Raises UserError as
    `page.read_all` does."""
    found = page.read_all(paths)
    if form == "csv":
        text = _csv(found)
    else:
        shown = {"markdown": markdown, "latex": latex}[form]
        text = "\n".join(shown(table) for table in _tables(found)) + _notes(found, "" if form == "markdown" else "% ")
    return page.write(out, text)


def _notes(found: list[dict[str, Any]], mark: str) -> str:
    """What a reader of the tables must know, a line each."""
    if found[0]["kind"] != "comparison":
        return ""
    results = found[0]["results"]
    notes = [
        tables.INTERVAL,
        results.get("seeds_vary"),
        *(results.get("notes") or []),
        *tables.measurement_notes(results),
    ]
    return "".join(f"\n{mark}{' '.join(note.split())}\n" for note in [*notes, tables.skipped_note(results)] if note)


def _tables(found: list[dict[str, Any]]) -> list[Table]:
    if found[0]["kind"] != "comparison":
        return page.run_tables(found)
    results = found[0]["results"]
    summary = tables.summarize(results)
    shown = []
    for data, evaluator in tables.sections(summary):
        for table in (
            tables.accuracy_table(results, summary, data, evaluator),
            tables.difference_table(results, summary, data, evaluator),
        ):
            table.title = f"{tables.section_title(results, data, evaluator)}. {table.title}"
            shown.append(table)
    return [table for table in [*shown, tables.cost_table(results)] if table.rows]


def markdown(table: Table) -> str:
    """A caption and a pipe table."""

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join(
        [f"{table.title}\n", line(table.headers), line(["---"] * len(table.headers)), *map(line, table.rows), ""]
    )


def latex(table: Table) -> str:
    """A `table` with `tabular` inside, for \\usepackage{booktabs}."""

    def line(cells: list[str]) -> str:
        return " & ".join(map(escaped, cells)) + r" \\"

    rules = [line(table.headers), r"\midrule", *map(line, table.rows)]
    body = "\n".join([r"\toprule", *rules, r"\bottomrule"])
    columns = "l" + "r" * (len(table.headers) - 1)
    return (
        f"\\begin{{table}}\n\\centering\n\\caption{{{escaped(table.title)}}}\n"
        f"\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}\n\\end{{table}}\n"
    )


def escaped(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_LATEX.get(character, character) for character in text.replace("\n", " "))


def _csv(found: list[dict[str, Any]]) -> str:
    """One line a measurement; of runs, the reference rows too (arm: trained, untrained or pixels)."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for item in found:
        results = item["results"] or {}
        rows = results.get("measurements") or []
        for evaluation in results.get("evaluations") or []:
            place = {"evaluator": evaluation["evaluator"], "data": evaluation["data"]["test"]}
            rows = [*rows, *(place | row | {"arm": row["source"]} for row in evaluation.get("measurements") or [])]
        for row in rows:
            chosen = ", ".join(f"{key}={value}" for key, value in (row.get("chosen") or {}).items())
            writer.writerow(row | {"run": str(item["path"]), "chosen": chosen})
    return buffer.getvalue()
