"""What `train --dry-run` and `compare --dry-run` print."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ssl_vit.stage import DryRun


def stage(found: DryRun, as_json: bool) -> None:
    """A training run: its data, model, memory and time."""
    if as_json:
        print(json.dumps({**asdict(found), "hours": round(found.hours, 3)}, indent=1))
        return
    for name, value in asdict(found).items():
        if name not in ("run", "recipe"):
            print(f"{name.replace('_', ' '):20} {_number(value)}")
    print(f"{'hours':20} {_hours(found.hours)}")
    print(f"nothing was written; the run would go to {found.run}")


def comparison(found: dict[str, Any], as_json: bool) -> None:
    """A comparison: of each arm parameters, GFLOP an image and steps of its pretraining, and hours; then the whole."""
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(title="Hours on this machine, one piece after the other", title_justify="left")
    for header in ("", "parameters", "GFLOP", "steps", "pretrain", "fine-tune", "features"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for arm, row in found["arms"].items():
        run = row.get("pretraining", {})
        sizes = (run.get("parameters"), run.get("gflop_per_image"), run.get("steps"))
        hours = (row[f"{part}_hours"] for part in ("pretraining", "fine_tuning", "features"))
        table.add_row(arm, *("" if size is None else _number(size) for size in sizes), *map(_hours, hours))
    Console().print(table)
    pieces, time = found["pieces"], found["time"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in pieces["missing"].items()) or "none"
    print(f"data     {', '.join(f'{name} {_number(count)}' for name, count in found['data'].items())} images")
    print(f"pieces   {pieces['all']}, {pieces['done']} of them done; missing: {kinds}")
    print(
        f"memory   {_number(found['memory']['weights_and_activations_mib'])} MiB for weights and activations, at most"
    )
    print(f"time     {_hours(time['hours_in_all'])} hours in all; jobs={time['jobs']} may share them")
    for arm in time["not_estimated"]:
        print(f"note: {arm}: its weights came without a recipe, so its time is not in this")
    print(f"nothing was written; {found['run']} is where it would go")


def _hours(hours: float) -> str:
    return f"{hours:.2f}" if hours >= 0.01 or not hours else "< 0.01"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
