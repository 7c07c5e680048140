"""The tables of a comparison (terminal, page and paper alike)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from ssl_vit.evaluators import budget_words
from ssl_vit.report.names import arm_label, arm_names, evaluator_names, evaluator_title, trains_encoder
from ssl_vit.report.statistics import Row, summarize
from ssl_vit.report.verdict import signed_points

MISSING = "–"
_ARMS = 4  # of the costs in a terminal
INTERVAL = (
    "± after a difference is the half-width of its 95% interval: Student's t over seeds, the arms paired by seed, not "
    "corrected for the number of budgets. It covers what the seeds vary and nothing else."
)
METRICS = {"accuracy": "Accuracy, %", "mean_per_class": "Mean of the classes' accuracies, %"}


@dataclass
class Table:
    """Cells as text. `arms[i]` is the arm whose color marks row i, or, `across`, the column i + 1 (None: no mark)."""

    title: str
    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    arms: list[str | None] = field(default_factory=list)
    across: bool = False

    def add(self, arm: str | None, *cells: str) -> None:
        self.arms.append(arm)
        self.rows.append(list(cells))


def sections(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(data set, evaluator) of every pair of tables, in order."""
    return list(dict.fromkeys((row["data"], row["evaluator"]) for row in summary["accuracy"]))


def budget_title(results: dict[str, Any], data: str, evaluator: str, budget: int | str) -> str:
    """A section's title for one label budget."""
    return f"{section_title(results, data, evaluator)}, {budget_words(budget)}"


def section_title(results: dict[str, Any], data: str, evaluator: str) -> str:
    title = evaluator_title(results, evaluator)
    return f"{data}: {title}" if len(results.get("sets") or ()) > 1 else title


def accuracy_table(results: dict[str, Any], summary: dict[str, Any], data: str, evaluator: str) -> Table:
    """Rows arms, columns label budgets, cells mean ± standard deviation over seeds, in percent."""
    rows = [row for row in summary["accuracy"] if (row["data"], row["evaluator"]) == (data, evaluator)]
    metric = ((results.get("sets") or {}).get(data) or {}).get("metric", "accuracy")
    return _by_budget(results, rows, f"{METRICS[metric]} (mean ± standard deviation over seeds)", ("arm",), _percent)


def difference_table(results: dict[str, Any], summary: dict[str, Any], data: str, evaluator: str) -> Table:
    """Rows pairs of arms, columns label budgets, cells paired difference ± half-width of its 95% interval (points)."""
    rows = [row for row in summary["differences"] if (row["data"], row["evaluator"]) == (data, evaluator)]
    title = "Paired difference, points (mean ± half-width of the 95% interval)"
    return _by_budget(results, rows, title, ("arm", "against"), signed_points)


def _by_budget(
    results: dict[str, Any], rows: list[Row], title: str, names: tuple[str, ...], text: Callable[[Row], str]
) -> Table:
    budgets = list(dict.fromkeys(row["labels_per_class"] for row in sorted(rows, key=lambda row: row["x"])))
    table = Table(f"{title} by labels a class", ["Arm", *map(str, budgets)])
    cells: dict[tuple[str, ...], dict[int | str, str]] = {}
    for row in rows:
        arms = tuple(row[name] for name in names)
        cells.setdefault(arms, {})[row["labels_per_class"]] = text(row) + _seeds(row, results)
    order = arm_names(results)
    for arms in sorted(cells, key=lambda arms: order.index(arms[0])):
        label = " minus ".join(arm_label(results, arm) for arm in arms)
        table.add(arms[0], label, *(cells[arms].get(budget, MISSING) for budget in budgets))
    return table


def _percent(row: Row) -> str:
    return f"{100 * row['mean']:.1f}" + ("" if row["std"] is None else f" ± {100 * row['std']:.1f}")


def _seeds(row: Row, results: dict[str, Any]) -> str:
    """Marks a cell that rests on fewer seeds than planned, and every cell that rests on one."""
    full = row["n"] >= max(len(results.get("seeds") or []), 2)
    return "" if full else f" ({row['n']} seed{'s' * (row['n'] != 1)})"


def cost_table(results: dict[str, Any]) -> Table:
    """What each arm spent, an arm a column: three stages' costs in a row would be too wide for a terminal."""
    arms = results.get("arms") or []
    title = (
        "Pretraining: one run; sweep: every setting tried; fine-tuning: all seeds and label budgets; in all: every "
        "pretraining, sweep and fine-tuning, each trained model once"
    )
    jobs = results.get("jobs") or 1
    if jobs > 1:
        title += f". Seconds were measured with {jobs} pieces running side by side, which slow each other down"
    if begun := [f"{arm['name']} ({arm['starts_from']})" for arm in arms if arm.get("starts_from")]:
        title += f". Not counted: what made the weights that these started from: {', '.join(begun)}"
    labels = [arm_label(results, arm["name"]) for arm in arms]
    table = Table(title, ["Cost", *labels], arms=[arm["name"] for arm in arms], across=True)
    trained = [arm.get("pretraining") or {} for arm in arms]
    used = [
        _number(arm.get("labels_used")) if spent else "unknown" if arm.get("starts_from") else "none"
        for arm, spent in zip(arms, trained, strict=True)
    ]
    table.rows.append(["Pretraining labels", *used])
    table.rows.append(["Parameters", *(_number(spent.get("parameters")) for spent in trained)])
    tried = [sum(len(choice["tried"]) for choice in arm.get("choices") or []) or None for arm in arms]
    table.rows.append(["Settings tried", *map(_number, tried)])
    trainers = [name for name in evaluator_names(results) if trains_encoder(results, name)]
    stages = {
        "Pretraining": trained,
        "Sweep": [arm.get("tuning") or {} for arm in arms],
        **{
            evaluator_title(results, name): [_training(results, name, arm["name"]) for arm in arms] for name in trainers
        },
    }
    units: dict[str, Callable[[float | None], str]] = {"images": _number, "FLOPs": _flops, "seconds": _number}
    for stage, costs in stages.items():
        if not any(costs):
            continue
        for (unit, text), key in zip(units.items(), ("images_seen", "flops", "seconds"), strict=True):
            table.rows.append([f"{stage} {unit}", *(text(cost.get(key)) for cost in costs)])
    hours = [spent.get("device_hours") for spent in trained]
    table.rows.append(["Pretraining device-hours", *map(_hours, hours)])
    totals = [arm.get("total") or {} for arm in arms]
    if any(total.get("seconds") for total in totals):
        for (unit, text), key in zip(units.items(), ("images_seen", "flops", "seconds"), strict=True):
            table.rows.append([f"In all, {unit}", *(text(total.get(key)) for total in totals)])
        table.rows.append(["In all, device-hours", *(_hours(total.get("device_hours")) for total in totals)])
    return table


def _training(results: dict[str, Any], evaluator: str, arm: str) -> dict[str, Any]:
    """The cost of an arm's training by an evaluator, all seeds and label budgets, without its sweep."""
    rows = results.get("measurements") or []
    found = [row for row in rows if (row["arm"], row["evaluator"]) == (arm, evaluator)]
    if not found:
        return {}
    return {key: sum(row.get(key) or 0 for row in found) or None for key in ("images_seen", "flops", "seconds")}


def skipped_names(samples: list[dict[str, Any]]) -> str:
    """Up to five of the samples that could not be read, each once, with the reason."""
    names = list(dict.fromkeys(f"{sample['shard']}: {sample['key']} ({sample['reason']})" for sample in samples))
    more = [f"and {len(names) - 5} more"] if len(names) > 5 else []
    return "; ".join(names[:5] + more)


def skipped_note(results: dict[str, Any]) -> str:
    """One sentence on the samples that the evaluations left out; "" where there are none."""
    samples = results.get("skipped") or []
    if not samples:
        return ""
    return f"Caution: the evaluations left out {len(samples)} unreadable sample(s): {skipped_names(samples)}."


def measurement_notes(results: dict[str, Any]) -> list[str]:
    """What measurements say about themselves, each once."""
    return list(dict.fromkeys(note for row in results.get("measurements") or [] for note in row.get("notes") or []))


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _hours(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3g}"


def _flops(value: float | None) -> str:
    return MISSING if not value else f"{value:.3g}".replace("e+", "e")


def terminal_table(results: dict[str, Any]) -> Group:
    """A rich renderable of a comparison: verdict, accuracies and paired differences per data set and
    evaluator, costs per arm, samples left out."""
    summary = summarize(results)
    parts: list[Any] = [Text(summary["verdict"], style="bold"), Text(INTERVAL, style="dim"), Text()]
    for data, evaluator in sections(summary):
        parts.append(Text(section_title(results, data, evaluator), style="bold underline"))
        parts.append(_rich(accuracy_table(results, summary, data, evaluator)))
        differences = difference_table(results, summary, data, evaluator)
        parts += [_rich(differences)] if differences.rows else []
    arms = results.get("arms") or []
    for first in range(0, len(arms), _ARMS):  # more of them side by side would be too wide
        costs = cost_table(results | {"arms": arms[first : first + _ARMS]})
        costs.title = "" if first else costs.title
        parts.append(_rich(costs))
    parts += [Text(note, style="dim") for note in measurement_notes(results)]
    note = skipped_note(results)
    return Group(*parts, *([Text(note, style="bold")] if note else []))


def _rich(table: Table) -> RichTable:
    # Text, not str: rich would read square brackets in a name as markup.
    rendered = RichTable(title=Text(table.title), title_justify="left")
    for column, header in enumerate(table.headers):
        # Where narrow columns must wrap, let it be the arms' long labels, not the names of the costs.
        no_wrap = table.across and not column
        rendered.add_column(Text(header), justify="right" if column else "left", no_wrap=no_wrap)
    for row in table.rows:
        rendered.add_row(*(Text(cell) for cell in row))
    return rendered
