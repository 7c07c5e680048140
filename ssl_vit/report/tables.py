"""Statistics of a comparison, the verdict they allow, and the tables that show them (terminal and HTML alike)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text
from scipy.special import stdtrit

EVALUATORS = {
    "fine_tune": "Fine-tuning",
    "linear_probe": "Linear probe on frozen features",
    "few_shot": "Few-shot linear classifier on frozen features",
    "knn": "Nearest neighbours on frozen features",
}
LABELS = {
    "ssl": "SSL pretraining",
    "scratch": "training from scratch",
    "supervised": "supervised pretraining",
    "untrained": "the untrained backbone",
    "pixels": "raw pixels",
}
MISSING = "–"
INTERVAL = (
    "± after a difference is the half-width of its 95% interval: Student's t over seeds, the arms paired by seed, not "
    "corrected for the number of budgets. It covers what the seeds vary and nothing else."
)

Row = dict[str, Any]


@dataclass
class Table:
    """Cells as text. `arms[i]` is the arm whose colour marks row i (None: no mark)."""

    title: str
    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    arms: list[str | None] = field(default_factory=list)

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
    for evaluator in _ordered(EVALUATORS, [key[0] for key in scores]):
        for budget in budgets:
            place = {"evaluator": evaluator, "labels_per_class": budget}
            cells = {arm: scores.get((evaluator, budget, arm), {}) for arm in arm_names(results)}
            accuracy += [place | {"arm": arm} | _spread(list(cell.values())) for arm, cell in cells.items() if cell]
            for subject in _subjects(results):
                for against in (_baseline(evaluator, results), "supervised", "pixels"):
                    ours, theirs = cells.get(subject, {}), cells.get(against, {})
                    seeds = [seed for seed in ours if seed in theirs]
                    if seeds and subject != against:
                        row = place | {"arm": subject, "against": against}
                        row |= _spread([ours[seed] - theirs[seed] for seed in seeds])
                        row["arm_mean"] = statistics.fmean(ours[seed] for seed in seeds)
                        row["against_mean"] = statistics.fmean(theirs[seed] for seed in seeds)
                        differences.append(row)
    sentences = _verdict(results, differences)
    verdict = " ".join(sentences)
    return {"accuracy": accuracy, "differences": differences, "sentences": sentences, "verdict": verdict}


def _spread(values: list[float]) -> Row:
    count = len(values)
    std = statistics.stdev(values) if count > 1 else None
    half_width = None if std is None else float(stdtrit(count - 1, 0.975)) * std / math.sqrt(count)
    return {"n": count, "mean": statistics.fmean(values), "std": std, "half_width": half_width}


def _ordered(first: Any, names: list[str]) -> list[str]:
    """The distinct names: those of `first` in its order, then the others as they come."""
    distinct = list(dict.fromkeys(names))
    return [name for name in first if name in distinct] + [name for name in distinct if name not in first]


def arm_names(results: dict[str, Any]) -> list[str]:
    """The arms in the order of `results["arms"]`, then the reference rows that only measurements name."""
    listed = [arm["name"] for arm in results.get("arms") or []]
    measured = [found["arm"] for found in results.get("measurements") or []]
    return listed + [name for name in _ordered(LABELS, measured) if name not in listed]


def arm_label(results: dict[str, Any], name: str) -> str:
    """What a person reads for an arm: its own label, or a plain word for the reference rows."""
    labels = {arm["name"]: arm.get("label") for arm in results.get("arms") or []}
    return labels.get(name) or LABELS.get(name) or name


def _subjects(results: dict[str, Any]) -> list[str]:
    """The arms under test: `ssl`, and any other arm that pretrained without labels."""
    arms = results.get("arms") or []
    unlabelled = [arm["name"] for arm in arms if arm.get("pretraining") and arm.get("labels_used") == 0]
    return [name for name in arm_names(results) if name == "ssl" or name in unlabelled]


def _baseline(evaluator: str, results: dict[str, Any]) -> str:
    """What "no pretraining" means: training from scratch, or the untrained backbone where features are frozen."""
    measured = {found["arm"] for found in results.get("measurements") or [] if found["evaluator"] == evaluator}
    first, second = ("scratch", "untrained") if evaluator == "fine_tune" else ("untrained", "scratch")
    return first if first in measured or second not in measured else second


def _outcome(row: Row) -> str:
    if row["half_width"] is None:
        return "one"
    if abs(row["mean"]) <= row["half_width"]:
        return "none"
    return "gain" if row["mean"] > 0 else "loss"


def signed_points(row: Row) -> str:
    """A difference row as text: signed points and the half-width of its 95% interval (none for one seed)."""
    mean = f"{round(100 * row['mean'], 1) + 0.0:+.1f}"  # adding 0.0 turns -0.0 into 0.0
    return mean if row["half_width"] is None else f"{mean} ± {100 * row['half_width']:.1f}"


def _claim(row: Row, subject: str, other: str) -> str:
    means = f"{100 * row['arm_mean']:.1f}% against {100 * row['against_mean']:.1f}%"
    size = signed_points(row)
    return {
        "gain": f"{subject} gains {size} points over {other} ({means}, {row['n']} seeds).",
        "loss": f"{subject} loses {size.lstrip('+-')} points against {other} ({means}, {row['n']} seeds).",
        "none": f"there is no difference between {subject} and {other} that these seeds can show "
        f"({size} points; {means}, {row['n']} seeds).",
        "one": f"{subject} is at {means} for {other} ({size} points) on one seed: there is no interval, "
        "so this may be chance.",
    }[_outcome(row)]


def _budgets(numbers: list[int]) -> str:
    unit = "label a class" if numbers == [1] else "labels a class"
    return f"with {_listed([str(number) for number in numbers])} {unit}"


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _verdict(results: dict[str, Any], differences: list[Row]) -> list[str]:
    subjects = _subjects(results)
    ours = [row for row in differences if row["arm"] in subjects[:1]]
    curve = [row for row in ours if row["against"] == _baseline(row["evaluator"], results)]
    curve = [row for row in curve if row["evaluator"] == curve[0]["evaluator"]]
    sentences = []
    if curve:
        head = curve[0]
        name = LABELS["ssl"] if subjects == ["ssl"] else arm_label(results, subjects[0])
        where = _budgets([head["labels_per_class"]])
        kind = "" if head["evaluator"] == "fine_tune" else f"{EVALUATORS.get(head['evaluator'], head['evaluator'])}: "
        sentences.append(_capital(f"{kind}{where}, {_claim(head, name, LABELS[head['against']])}"))
        sentences.append(_over_budgets(curve, name))
        used = {arm["name"]: arm.get("labels_used") for arm in results.get("arms") or []}.get("supervised")
        other = LABELS["supervised"] + (f" on {used:,} labels" if used else "")
        same = [row for row in ours if all(row[key] == head[key] for key in ("evaluator", "labels_per_class"))]
        sentences += [_capital(f"{where}, {_claim(r, name, other)}") for r in same if r["against"] == "supervised"]
    else:
        sentences.append("No verdict yet: no seed has been measured both with SSL pretraining and without it.")
    beaten = [row for row in ours if row not in curve and row["against"] != "supervised" and _outcome(row) == "loss"]
    beaten.sort(key=itemgetter("evaluator", "against"))
    for (evaluator, against), rows in groupby(beaten, key=itemgetter("evaluator", "against")):
        where = _budgets([row["labels_per_class"] for row in rows])
        kind = EVALUATORS.get(evaluator, evaluator)
        sentences.append(f"Caution: {kind}, {where}: better with {LABELS[against]} than with SSL pretraining.")
    if results.get("finished") is False:
        sentences.append("The comparison has not finished: the numbers may still change.")
    return sentences


def _over_budgets(curve: list[Row], name: str) -> str:
    """Where the gain stops, or how it goes on, over the budgets after the first."""
    if len(curve) == 1:
        return "No other label budget was measured, so this says nothing about more labels."
    parts = []
    for outcome, group in groupby(curve[1:], key=_outcome):
        rows = list(group)
        where = _budgets([row["labels_per_class"] for row in rows])
        sizes = _listed([signed_points(row) for row in rows])
        words = {
            "gain": f"{where} {name} gains {sizes} points",
            "loss": f"{where} {name} loses ({sizes} points)",
            "none": f"{where} these seeds show no difference ({sizes} points)",
            "one": f"{where} the difference on one seed is {sizes} points",
        }
        parts.append(words[outcome])
    outcomes = [_outcome(row) for row in curve]
    gains = len(list(takewhile("gain".__eq__, outcomes)))
    first, last = curve[0], curve[-1]
    lead = ""
    if gains == len(curve):
        # "Shrinks" is a claim of its own: it is made only where the first and the last interval do not touch.
        apart = first["mean"] - first["half_width"] > last["mean"] + last["half_width"]
        lead = "The gain shrinks with more labels but holds" if apart else "The gain holds"
        lead += " at every budget measured: "
    elif gains and not {"gain", "one"} & set(outcomes[gains:]):
        lead = f"The gain is last seen {_budgets([curve[gains - 1]['labels_per_class']])}: "
    return _capital(lead + "; ".join(parts) + ".")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


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
    """What each arm spent: pretraining once, fine-tuning summed over all its measured seeds and budgets."""
    headers = [f"{stage} {unit}" for stage in ("Pretraining", "Fine-tuning") for unit in ("images", "seconds")]
    table = Table(
        "Pretraining once; fine-tuning summed over all seeds and label budgets",
        ["Arm", "Pretraining labels", *headers[:2], "Parameters", *headers[2:]],
    )
    tuned = [found for found in results.get("measurements") or [] if found["evaluator"] == "fine_tune"]
    for arm in results.get("arms") or []:
        spent = arm.get("pretraining") or {}
        cells = [_number(arm.get("labels_used"))] if spent else ["none"]
        cells += [_number(spent.get(key)) for key in ("images_seen", "seconds", "parameters")]
        own = [found for found in tuned if found["arm"] == arm["name"]]
        cells += [_number(sum(found.get(key) or 0 for found in own) or None) for key in ("images_seen", "seconds")]
        table.add(arm["name"], arm_label(results, arm["name"]), *cells)
    return table


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def terminal_table(results: dict[str, Any]) -> Group:
    """A rich renderable of a comparison: verdict, accuracies and paired differences per evaluator, costs per arm."""
    summary = summarise(results)
    parts: list[Any] = [Text(summary["verdict"], style="bold"), Text(INTERVAL, style="dim"), Text()]
    for evaluator in dict.fromkeys(row["evaluator"] for row in summary["accuracy"]):
        parts.append(Text(EVALUATORS.get(evaluator, evaluator), style="bold underline"))
        parts.append(_rich(accuracy_table(results, summary, evaluator)))
        differences = difference_table(results, summary, evaluator)
        parts += [_rich(differences)] if differences.rows else []
    return Group(*parts, _rich(cost_table(results)))


def _rich(table: Table) -> RichTable:
    # Text, not str: rich would read square brackets in a name as markup.
    rendered = RichTable(title=Text(table.title), title_justify="left")
    for column, header in enumerate(table.headers):
        rendered.add_column(Text(header), justify="right" if column else "left")
    for row in table.rows:
        rendered.add_row(*(Text(cell) for cell in row))
    return rendered
