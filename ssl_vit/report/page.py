"""One self-contained HTML page from run and comparison directories: no script, no request to anywhere."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ssl_vit.analysis.pages import template
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.report import cells, compared, plots, separate, tables
from ssl_vit.report.read import read_comparison, read_directory
from ssl_vit.report.tables import Table

FACTS = {
    "objective": "Objective",
    "steps": "Steps",
    "images_seen": "Images seen",
    "flops": "FLOPs",
    "seconds": "Seconds",
    "parameters": "Parameters",
}
LOSSES = {"loss": "Last training loss", "constant_loss": "Best constant guess"}
# What the template reads; a page of runs and a page of a comparison each fill in what they have.
EMPTY: dict[str, Any] = {
    "sentences": [],
    "studies": [],
    "evaluators": [],
    "losses": [],
    "tables": [],
    "choices": [],
    "seeds": [],
    "seeds_vary": "",
    "interval": tables.INTERVAL,
    "notes": [],
    "data": None,
    "recipes": [],
    "skipped": "",
}


def read_all(paths: list[Path]) -> list[dict[str, Any]]:
    """The runs in these directories side by side, or the one comparison that they are (the parts of).

    Raises UserError for no path, a directory that cannot be read as either, or comparisons given with runs.
    """
    if not paths:
        raise UserError("No directory given. Give one comparison directory, or one or several run directories.")
    found = [read_directory(path) for path in paths]
    comparisons = [item for item in found if item["kind"] == "comparison"]
    if comparisons and len(comparisons) < len(found):
        raise UserError(f"{comparisons[0]['path']} is a comparison; report it alone, or give run directories only.")
    return [read_comparison(paths)] if len(comparisons) > 1 else found


def write_report(paths: list[Path], out: Path) -> Path:
    """Write the report of one comparison, or of one or several run directories side by side, to the file `out` (its
    folders are made; an existing file is replaced). Returns `out`. The same input gives the same bytes.

    Raises UserError as `read_all` does; RunError when the file cannot be written.
    """
    found = read_all(paths)
    comparison = found[0]["kind"] == "comparison"
    shown = compared.values(found[0]) if comparison else _side_by_side(found)
    html = template(Path(__file__).with_name("page.html.j2")).render(
        EMPTY | shown | {"commands": _commands(found, paths)}
    )
    return write(Path(out), html)


def write(out: Path, text: str) -> Path:
    """Write a report's text to `out`, whose folders are made; returns `out`. Raises RunError where that fails."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8", errors="replace", newline="")
    except OSError as error:
        raise RunError(f"{out}: the report could not be written ({error.strerror}).") from error
    return out


def _commands(found: list[dict[str, Any]], paths: list[Path]) -> list[str]:
    """What repeats the runs and the page."""
    first, runs = [], found
    if found[0]["kind"] == "comparison":
        command = found[0]["results"].get("command")
        first, runs = [command] if command else [], list(found[0]["runs"].values())
    train = [f"ssl-vit train {shlex.quote(str(run['path'] / 'recipe.yaml'))}" for run in runs if run["recipe"]]
    return [*first, *train, "ssl-vit report " + " ".join(shlex.quote(str(path)) for path in paths)]


def _side_by_side(found: list[dict[str, Any]]) -> dict[str, Any]:
    names = _names(found)
    colors = [color for color, _ in separate.styles(names).values()]
    runs = list(zip(names, colors, found, strict=True))
    groups: dict[str, list[tuple[str, str, list[dict[str, Any]]]]] = {}
    for name, color, run in runs:
        # Losses of different objectives are different quantities: they never share axes.
        objective = str((run["summary"] or {}).get("objective") or "training")
        groups.setdefault(objective, []).append((name, color, run["metrics"]))
    losses = [(objective, plots.embed(plots.loss_curves(group))) for objective, group in groups.items()]
    return {
        "title": names[0] if len(found) == 1 else f"{len(found)} runs side by side",
        "colors": plots.COLORS | dict(zip(names, colors, strict=True)),
        "evaluators": (sections := separate.sections(names, found)),
        "notes": [separate.NOTE] if sections else [],
        "runs": [
            {
                "name": name,
                "color": color,
                "figure": None,
                "pictures": [cells.image(path) for path in run["pictures"]],
                "remarks": cells.remarks(run),
            }
            for name, color, run in runs
        ],
        "losses": [(objective, figure) for objective, figure in losses if figure],
        "tables": [_facts(names, found)],
        "environment": cells.columns("Environment", names, [cells.flat(run["environment"] or {}) for run in found]),
        "recipes": [(name, run["recipe"]) for name, _, run in runs if run["recipe"]],
        "raw": [
            cells.document(f"{name}: {key}.json", run[key])
            for name, _, run in runs
            for key in ("results", "summary")
            if run[key]
        ],
    }


def run_tables(found: list[dict[str, Any]]) -> list[Table]:
    """What the evaluators found for each run, and what the runs were."""
    names = _names(found)
    return [*separate.evaluation_tables(names, found), _facts(names, found)]


def _names(found: list[dict[str, Any]]) -> list[str]:
    """The runs' own names; where two are alike, their paths."""
    names = [str((run["summary"] or {}).get("name") or run["path"].resolve().name) for run in found]
    return [name if names.count(name) == 1 else str(run["path"]) for name, run in zip(names, found, strict=True)]


def _facts(names: list[str], found: list[dict[str, Any]]) -> Table:
    table = Table("Runs", ["Run", *FACTS.values(), *LOSSES.values()])
    for name, run in zip(names, found, strict=True):
        summary = run["summary"] or {}
        last: dict[str, Any] = next((record for record in reversed(run["metrics"]) if "loss" in record), {})
        table.add(name, name, *map(cells.text, [*map(summary.get, FACTS), *map(last.get, LOSSES)]))
    return table
