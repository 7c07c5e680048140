"""What `ssl-vit eval` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Results = dict[str, dict[str, Any]]  # by data set


def show(results: Results, run: Path, per_class: bool) -> None:
    """One table of all data sets, what was left out, and where the numbers are."""
    console, first = Console(), next(iter(results.values()))
    names = [
        name for name in dict.fromkeys(name for r in results.values() for name in r["values"]) if name.endswith("/mean")
    ]
    table = Table(title=Text(f"{first['title']} (% ± standard deviation over seeds)"), title_justify="left")
    for header in ("", *results):
        table.add_column(Text(header), justify="right" if header else "left")
    for name in names:
        base = name.removesuffix("/mean")
        table.add_row(Text(base), *(_cell(result["values"], base) for result in results.values()))
    console.print(table)
    if per_class:
        for name, result in results.items():
            console.print(_classes(name, result))
    for name, result in results.items():
        metric = "" if result["metric"] == "accuracy" else "mean of the classes' accuracies"
        chosen = dict.fromkeys(f"{m['source']} {_settings(m['chosen'])}" for m in result["measurements"] if m["chosen"])
        notes = dict.fromkeys(note for m in result["measurements"] for note in m["notes"])
        for text in [metric, f"chosen on held-out images: {'; '.join(chosen)}" if chosen else "", *notes]:
            if text:
                print(f"{name}: {text}")
        if result["skipped"]:
            print(
                f"{name}: {len(result['skipped'])} unreadable sample(s) left out; they are listed in {run}/results.json"
            )
    seconds = sum(result["seconds"] for result in results.values())
    print(f"\n{first['evaluator']} took {seconds:.2f} s; saved in {run}/results.json")


def _cell(values: dict[str, float], name: str) -> str:
    if f"{name}/mean" not in values:
        return "–"
    several = sum(key.startswith(f"{name}/seed") for key in values) > 1
    spread = f" ± {100 * values[f'{name}/std']:.1f}" if several else ""
    return f"{100 * values[f'{name}/mean']:.1f}{spread}"


def _settings(chosen: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value:g}" for key, value in chosen.items())


def _classes(name: str, result: dict[str, Any]) -> Table:
    """Accuracy of every class: the judged encoder's, mean over seeds, a column a measured name."""
    groups: dict[str, list[list[float | None]]] = {}
    for found in result["measurements"]:
        if found["source"] == "trained":
            groups.setdefault(found["name"], []).append(found["per_class"])
    table = Table(title=Text(f"{name}: accuracy of each class, %"), title_justify="left")
    for header in ("class", *groups):
        table.add_column(Text(header), justify="right")
    for label in range(len(next(iter(groups.values()))[0])):
        cells = []
        for seeds in groups.values():
            values = [seed[label] for seed in seeds]
            known = [value for value in values if value is not None]
            cells.append(f"{100 * sum(known) / len(known):.1f}" if known else "–")
        table.add_row(Text(result["classes"][label] if label < len(result["classes"]) else str(label)), *cells)
    return table
