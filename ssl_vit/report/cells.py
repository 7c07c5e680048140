"""Values as the text of a cell, and nested settings as flat columns."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from ssl_vit.report import tables
from ssl_vit.report.tables import MISSING, Table


def text(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested keys joined by dots; dictionaries in a list are numbered from 1."""
    found: dict[str, str] = {}
    for key, part in value.items():
        if isinstance(part, list) and part and isinstance(part[0], dict):
            part = {str(number): one for number, one in enumerate(part, 1)}
        found |= flat(part, f"{prefix}{key}.") if isinstance(part, dict) else {f"{prefix}{key}": text(part)}
    return found


def settings(values: dict[str, Any]) -> str:
    """Settings in a line, without the score that they got."""
    listed = [f"{key} {value}" for key, value in flat(values).items() if key != "held_out_accuracy"]
    return ", ".join(listed) or MISSING


def percent(fraction: float | None) -> str:
    return MISSING if fraction is None else f"{100 * fraction:.1f}"


def columns(title: str, names: list[str], values: list[dict[str, str]]) -> Table | None:
    """Flat dicts as the columns of one table; None when all are empty."""
    table = Table(title, ["", *names])
    for key in dict.fromkeys(key for column in values for key in column):
        table.add(None, key, *(column.get(key, MISSING) for column in values))
    return table if table.rows else None


def document(name: str, value: Any) -> dict[str, str]:
    """A JSON document as a page keeps it: its text, and as a data URI that a reader can save."""
    content = json.dumps(value, indent=1, ensure_ascii=False)
    encoded = base64.b64encode(content.encode("utf-8", errors="replace")).decode()
    return {"name": name, "text": content, "href": f"data:application/json;base64,{encoded}"}


def image(path: Path) -> dict[str, str]:
    """A picture inside the page, with its title."""
    encoded = base64.b64encode(path.read_bytes()).decode()
    return {"title": path.stem.replace("_", " "), "src": f"data:image/png;base64,{encoded}", "file": path.name}


def remarks(run: dict[str, Any]) -> list[str]:
    """What a reader must know about a run's data and files."""
    found = []
    events = [record for record in run["metrics"] if record.get("event") == "skipped_samples"]
    skipped = [sample for record in events for sample in record.get("samples") or []]
    if skipped:
        # A sample is skipped again in each epoch, so there may be fewer names than times.
        times = f"{len(skipped):,} time(s), first by step {events[0].get('step')}"
        found.append(f"Training skipped unreadable samples {times}: {tables.skipped_names(skipped)}.")
    notes = [tables.skipped_note(evaluation) for evaluation in (run["results"] or {}).get("evaluations") or []]
    found += [note for note in dict.fromkeys(notes) if note]
    if outdated := (run["results"] or {}).get("outdated"):
        found.append(
            f"{outdated} result(s) of weights that are no longer there are left out: run `ssl-vit eval` again."
        )
    if run["broken_lines"]:
        found.append(f"{run['broken_lines']} broken line(s) of metrics.jsonl were left out (a killed run leaves one)")
    return found
