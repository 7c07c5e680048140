"""Statistics of a comparison and the tables that show them (terminal and HTML alike)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text
from scipy.special import stdtrit

from ssl_vit.report.verdict import (
    EVALUATORS,
    Row,
    arm_label,
    arm_names,
    baseline,
    ordered,
    signed_points,
    subjects,
    verdict,
)

MISSING = "–"
INTERVAL = (
    "± after a difference is the half-width of its 95% interval: Student's t over seeds, the arms paired by seed, not "
    "corrected for the number of budgets. It covers what the seeds vary and nothing else."
)


@dataclass
class Table:
    """Cells as text. `arms[i]` is the arm whose colour marks row i, or, `across`, the column i + 1 (None: no mark)."""

    title: str
    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    arms: list[str | None] = field(default_factory=list)
    across: bool = False

    def add(self, arm: str | None, *cells: str) -> None:
        self.arms.append(arm)
        self.rows.append(list(cells))


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """Statistics over seeds of a comparison's `results.json`; a pure function, accuracies as fractions 0..1.

    Returns {"accuracy": rows, "differences": rows, "sentences": [...], "verdict": the sentences as one text}.
    An accuracy row: evaluator, labels_per_class, arm, n (seeds), mean, std (ddof=1), half_width (of the 95% interval of
    the mean, Student t); std and half_width are None for n=1. A difference row has the same statistics of
    `arm` minus `against`, paired by seed (n: seeds that both have), and arm_mean and against_mean over those seeds.
    Where a measurement was made twice, the later one counts; without a finite accuracy it counts as missing.
    The verdict is about the smallest label budget measured, a rule fixed before any number is seen.
    """
    scores: dict[tuple[str, int, str], dict[int, float]] = {}
    for found in results.get("measurements") or []:
        if isinstance(found.get("accuracy"), (int, float)) and math.isfinite(found["accuracy"]):
            key = (found["evaluator"], found["labels_per_class"], found["arm"])
            scores.setdefault(key, {})[found["seed"]] = float(found["accuracy"])
    budgets = sorted({budget for _, budget, _ in scores})
    accuracy: list[Row] = []
    differences: list[Row] = []
    for evaluator in ordered(EVALUATORS, [key[0] for key in scores]):
        for budget in budgets:
            place = {"evaluator": evaluator, "labels_per_class": budget}
            cells = {arm: scores.get((evaluator, budget, arm), {}) for arm in arm_names(results)}
            accuracy += [place | {"arm": arm} | _spread(list(cell.values())) for arm, cell in cells.items() if cell]
            for subject in subjects(results):
                for against in (baseline(evaluator, results), "supervised", "pixels"):
                    ours, theirs = cells.get(subject, {}), cells.get(against, {})
                    seeds = [seed for seed in ours if seed in theirs]
                    if seeds and subject != against:
                        row = place | {"arm": subject, "against": against}
                        row |= _spread([ours[seed] - theirs[seed] for seed in seeds])
                        row["arm_mean"] = statistics.fmean(ours[seed] for seed in seeds)
                        row["against_mean"] = statistics.fmean(theirs[seed] for seed in seeds)
                        differences.append(row)
    sentences = verdict(results, differences)
    return {"accuracy": accuracy, "differences": differences, "sentences": sentences, "verdict": " ".join(sentences)}


def _spread(values: list[float]) -> Row:
    count = len(values)
    std = statistics.stdev(values) if count > 1 else None
    half_width = None if std is None else float(stdtrit(count - 1, 0.975)) * std / math.sqrt(count)
    return {"n": count, "mean": statistics.fmean(values), "std": std, "half_width": half_width}


def accuracy_table(results: dict[str, Any], summary: dict[str, Any], evaluator: str) -> Table:
    """Rows arms, columns label budgets, cells mean ± standard deviation over seeds, in percent."""
    rows = [row for row in summary["accuracy"] if row["evaluator"] == evaluator]
    return _by_budget(results, rows, "Accuracy, % (mean ± standard deviation over seeds)", ("arm",), _percent)


def difference_table(results: dict[str, Any], summary: dict[str, Any], evaluator: str) -> Table:
    """Rows pairs of arms, columns label budgets, cells paired difference ± half-width of its 95% interval (points)."""
    rows = [row for row in summary["differences"] if row["evaluator"] == evaluator]
    title = "Paired difference, points (mean ± half-width of the 95% interval)"
    return _by_budget(results, rows, title, ("arm", "against"), signed_points)


def _by_budget(
    results: dict[str, Any], rows: list[Row], title: str, names: tuple[str, ...], text: Callable[[Row], str]
) -> Table:
    budgets = sorted({row["labels_per_class"] for row in rows})
    table = Table(f"{title} by labels a class", ["Arm", *map(str, budgets)])
    cells: dict[tuple[str, ...], dict[int, str]] = {}
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
    title = "Pretraining: one run; sweep: every setting tried; fine-tuning: all seeds and label budgets"
    jobs = results.get("jobs") or 1
    if jobs > 1:
        title += f". Seconds were measured with {jobs} pieces running side by side, which slow each other down"
    labels = [arm_label(results, arm["name"]) for arm in arms]
    table = Table(title, ["Cost", *labels], arms=[arm["name"] for arm in arms], across=True)
    trained = [arm.get("pretraining") or {} for arm in arms]
    used = [_number(arm.get("labels_used")) if spent else "none" for arm, spent in zip(arms, trained, strict=True)]
    table.rows.append(["Pretraining labels", *used])
    table.rows.append(["Parameters", *(_number(spent.get("parameters")) for spent in trained)])
    stages = {
        "Pretraining": trained,
        "Sweep": [arm.get("tuning") or {} for arm in arms],
        "Fine-tuning": [_fine_tuning(results, arm["name"]) for arm in arms],
    }
    for stage, costs in stages.items():
        for unit, key in (("images", "images_seen"), ("seconds", "seconds")):
            table.rows.append([f"{stage} {unit}", *(_number(cost.get(key)) for cost in costs)])
    return table


def _fine_tuning(results: dict[str, Any], arm: str) -> dict[str, Any]:
    """The cost of an arm's fine-tunings, without its sweep."""
    found = [row for row in results.get("measurements") or [] if (row["arm"], row["evaluator"]) == (arm, "fine_tune")]
    return {key: sum(row.get(key) or 0 for row in found) or None for key in ("images_seen", "seconds")}


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


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def terminal_table(results: dict[str, Any]) -> Group:
    """A rich renderable of a comparison: verdict, accuracies and paired differences per
    evaluator, costs per arm, samples left out."""
    summary = summarise(results)
    parts: list[Any] = [Text(summary["verdict"], style="bold"), Text(INTERVAL, style="dim"), Text()]
    for evaluator in dict.fromkeys(row["evaluator"] for row in summary["accuracy"]):
        parts.append(Text(EVALUATORS.get(evaluator, evaluator), style="bold underline"))
        parts.append(_rich(accuracy_table(results, summary, evaluator)))
        differences = difference_table(results, summary, evaluator)
        parts += [_rich(differences)] if differences.rows else []
    parts.append(_rich(cost_table(results)))
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
