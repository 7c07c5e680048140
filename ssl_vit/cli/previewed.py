"""What `train --dry-run` and `compare --dry-run` print."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ssl_vit.comparison.dry_run import ComparisonDryRun
    from ssl_vit.dry_run import DryRun


def stage(preview: DryRun, as_json: bool) -> None:
    """A training run: its data, model, memory and time."""
    if as_json:
        print(_json(preview))
        return
    for name, value in asdict(preview).items():
        if name not in ("run", "recipe"):
            print(f"{name.replace('_', ' '):20} {_number(value)}")
    print(f"{'hours':20} {_hours(preview.hours)}")
    print(f"nothing was trained; the run would go to {preview.run}")


def comparison(preview: ComparisonDryRun, as_json: bool) -> None:
    """A comparison: for each arm its pretraining and hours; then the whole."""
    if as_json:
        print(_json(preview))
        return
    table = Table(title="Hours on this machine, one task after the other", title_justify="left")
    for header in ("", "parameters", "GFLOP", "steps", "pretrain", "fine-tune", "features"):
        table.add_column(header, justify="right" if header else "left", overflow="fold")
    for arm, cost in preview.arms.items():
        run, hours = cost.pretraining, (cost.pretraining_hours, cost.fine_tuning_hours, cost.features_hours)
        sizes = (run.parameters, run.gflop_per_image, run.steps) if run else ("", "", "")
        table.add_row(arm, *map(_number, sizes), *map(_hours, hours))
    Console().print(table)
    missing = ", ".join(f"{count} {kind}" for kind, count in preview.missing.items()) or "none"
    print(f"data     {', '.join(f'{name} {_number(count)}' for name, count in preview.data.items())} images")
    print(f"tasks    {preview.tasks}, {preview.done} of them done; missing: {missing}")
    print(f"memory   up to {_number(round(preview.memory_mib, 1))} MiB for weights and activations")
    print(f"time     {_hours(preview.hours)} hours, the sum over all tasks (jobs={preview.jobs})")
    print("         not included: classifiers on frozen features (except linear_probe with method=lars), and pictures")
    for arm in preview.not_estimated:
        print(f"note: {arm}: its weights have no recipe, so its time is not estimated")
    for arm in preview.differing:
        print(f"caution: another architecture, image preparation or precision: {arm}")
    print(f"nothing was trained; the comparison would go to {preview.run}")


def _json(preview: DryRun | ComparisonDryRun) -> str:
    return json.dumps({**asdict(preview), "hours": round(preview.hours, 3)}, indent=1)


def _hours(hours: float) -> str:
    return f"{hours:.2f}" if hours >= 0.01 or not hours else "< 0.01"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
