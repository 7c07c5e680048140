"""Tables of a report as data frames of text, for a page, a terminal, Markdown and LaTeX; and every row as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from ssl_vit.evaluators import budget_words
from ssl_vit.interfaces import printable
from ssl_vit.report.classes import BINS, Classes
from ssl_vit.report.read import STAGES, UNITS, Comparison, costs
from ssl_vit.report.runs import text
from ssl_vit.report.self_test import self_tests
from ssl_vit.report.summary import EvaluationKey, Summary, summarize
from ssl_vit.report.verdict import interval, needed, notes, points, verdict

CLASSES = 40  # most rows of a table of classes


@dataclass(frozen=True)
class Shown:
    """frame: cells as text, the first column names the rows. arms: whose color marks each row, where there are any."""

    title: str
    frame: pd.DataFrame
    arms: tuple[str, ...] = ()


def place_title(comparison: Comparison, place: EvaluationKey) -> str:
    """Title of the section of one dataset under one evaluator."""
    title = comparison.record.evaluators[place.evaluator].title
    return f"{place.data}: {title}" if len(comparison.record.metrics) > 1 or comparison.separate else title


def place_tables(comparison: Comparison, summary: Summary, place: EvaluationKey) -> list[Shown]:
    """Accuracies, differences and label efficiency of one dataset under one evaluator; those that have rows."""
    record = comparison.record
    weighted, trains = record.metrics[place.data] == "mean_per_class", record.evaluators[place.evaluator].trains_encoder
    seeds = len(record.seeds if trains else record.frozen_seeds)
    accuracies: dict[str, dict[str, str]] = {}
    for row in (row for row in summary.accuracies if row.place == place):
        few = f" ({row.seeds} of {seeds} seeds)" if row.seeds < seeds else ""
        accuracies.setdefault(row.arm, {})[str(row.labels_per_class)] = points(row.estimate, "") + few
    differences: dict[tuple[str, str], dict[str, str]] = {}
    for one in (one for one in (*summary.means, *summary.differences) if one.place == place):
        differences.setdefault((one.arm, one.against), {})[str(one.labels_per_class)] = points(one.estimate)
    label = comparison.label
    scores = {label(arm): cells for arm, cells in accuracies.items()}
    gains = {f"{label(arm)} minus {label(against)}": cells for (arm, against), cells in differences.items()}
    name = "mean of the per-class accuracies" if weighted else "accuracy"
    tables = [
        _table(f"Test {name}, %, by labels per class", scores, arms=accuracies),
        _table("Difference in points, by labels per class", gains, arms=[against for _, against in differences]),
    ]
    found = [one for one in tables if one.arms]
    equal = {str(row.labels_per_class): row for row in summary.efficiencies if row.place == place}
    for first in [*equal.values()][:1]:
        with_arm, with_other = (f"Labels per class with {comparison.label(arm)}" for arm in (first.arm, first.against))
        cells = {budget: {with_other: needed(one)} for budget, one in equal.items()}
        found.append(_table("Label efficiency: labels per class for the same accuracy", cells, with_arm))
    return found


def _table(title: str, rows: Mapping[str, Mapping[str, str]], head: str = "Arm", arms: Iterable[str] = ()) -> Shown:
    frame = pd.DataFrame.from_dict(dict(rows), orient="index").fillna("–").rename_axis(head).reset_index()
    return Shown(title, frame, tuple(arms))


def self_test_table(comparison: Comparison) -> Shown:
    """Differences whose outcome is known."""
    rows = [
        {
            "Self-test": f"{comparison.label(row.arm)} minus {comparison.label(row.against)}",
            "Data and evaluator": place_title(comparison, row.place),
            "Difference in points": points(row.estimate),
            "Outcome": row.outcome,
            "Expected": " or ".join(test.expected),
            "Result": "pass" if test.passed else "fail",
        }
        for test in self_tests(comparison)
        for row in [test.difference]
    ]
    return Shown("Self-test", pd.DataFrame(rows))


def class_table(comparison: Comparison, found: Classes) -> Shown:
    """Test accuracy of every arm by class; of more than 40 classes, those that differ most between arms."""
    means = np.array([[np.nan if one is None else one.mean for one in own] for own in found.accuracies.values()])
    rows = np.flatnonzero(found.images)
    kept = np.sort(rows[np.argsort(-np.ptp(means[:, rows], axis=0), kind="stable")[:CLASSES]])
    cells = {"Class": [found.names[n] for n in kept], "Test images": [text(int(found.images[n])) for n in kept]}
    for arm, own in found.accuracies.items():
        cells[comparison.label(arm)] = [points(one, "") if (one := own[n]) else "–" for n in kept]
    title = f"Test accuracy by class, %, with {budget_words(found.budget)}"
    if len(kept) < len(rows):
        title += f": the {len(kept)} of {len(rows):,} classes that differ most between arms"
    return Shown(title, pd.DataFrame(cells))


def calibration_table(comparison: Comparison, found: Classes) -> Shown:
    """Expected calibration error of every arm whose classifier gives probabilities."""
    errors = {comparison.label(arm): {"ECE, %": f"{100 * one.error:.1f}"} for arm, one in found.calibration.items()}
    title = f"Expected calibration error ({BINS} bins), mean over seeds, with {budget_words(found.budget)}"
    return _table(title, errors, arms=found.calibration)


def cost_table(comparison: Comparison) -> Shown:
    """What each arm cost, an arm per column."""
    spent, cells = costs(comparison).astype(object), {}
    for arm in comparison.record.arms:
        made, tried = comparison.pretraining(arm.name), comparison.tried(arm.name)
        labels: object = made.samples if made and arm.uses_labels else 0
        if arm.starts_from:
            labels = _with_unknown(labels)
        column: dict[str, object] = {"Pretraining labels": labels, "Parameters": made.parameters if made else None}
        column["Settings tried"] = tried or None
        for stage in STAGES:
            for unit, name in UNITS.items():
                known = spent[unit].get((stage, arm.name))
                if arm.starts_from and stage in ("Pretraining", "In all"):
                    known = _with_unknown(known)
                column[f"{stage}, {name}"] = known
        cells[arm.label] = {name: text(value) for name, value in column.items()}
    others = spent.drop(index=[arm.name for arm in comparison.record.arms], level="arm", errors="ignore")
    if len(others):  # references and the repetitions of the self-test
        total = others.groupby("stage").sum()
        column = {f"{stage}, {name}": total[unit].get(stage) for stage in STAGES for unit, name in UNITS.items()}
        cells["Not an arm"] = {name: text(column.get(name)) for name in cells[arm.label]}
    title = "Cost: all pretrainings; all sweeps; all other trainings of evaluators"
    if comparison.record.jobs > 1:
        title += f". Seconds were measured with {comparison.record.jobs} tasks side by side"
    if begun := [f"{arm.label} ({arm.starts_from})" for arm in comparison.record.arms if arm.starts_from]:
        title += f". Not counted: what made the weights that these started from: {', '.join(begun)}"
    return Shown(title, pd.DataFrame(cells).rename_axis("Cost").reset_index())


def _with_unknown(known: object) -> str:
    """What an arm with imported weights cost."""
    return f"{text(known)} + unknown" if known else "unknown: imported weights"


def sweep_table(comparison: Comparison) -> Shown:
    """Every setting that a sweep tried on held-out training images."""
    rows = []
    for task in comparison.record.tasks:
        sweep = comparison.tasks[task.id].sweep if task.id in comparison.tasks else None
        for tried in sweep.candidates if sweep else ():
            settings = {key: value for key, value in tried.items() if key != "held_out_accuracy"}
            best = settings.items() <= sweep.best.items() if sweep else False
            rows.append(
                {
                    "Arm": comparison.label(task.arm),
                    "Data and evaluator": place_title(comparison, EvaluationKey(task.data, task.evaluator)),
                    **({"Fold": str(task.fold)} if comparison.record.folds > 1 else {}),
                    "Labels per class": str(task.labels_per_class),
                    "Setting": ", ".join(f"{key} {value}" for key, value in settings.items()),
                    "Held-out accuracy, %": f"{100 * float(tried['held_out_accuracy']):.1f}" + " (best)" * best,
                }
            )
    return Shown("Settings tried on held-out training images", pd.DataFrame(rows))


def columns(title: str, values: Mapping[str, Mapping[str, str]]) -> Shown:
    """Flat settings, a column each."""
    return Shown(
        title, pd.DataFrame({name: dict(one) for name, one in values.items()}).fillna("–").reset_index(names="")
    )


def all_tables(comparison: Comparison, summary: Summary) -> list[Shown]:
    found = [shown for shown in (self_test_table(comparison), cost_table(comparison)) if len(shown.frame)]
    for place in reversed(summary.places):
        title = place_title(comparison, place)
        shown = place_tables(comparison, summary, place)
        found = [Shown(f"{title}. {one.title}", one.frame, one.arms) for one in shown] + found
    return found


def terminal(comparison: Comparison) -> Group:
    """Verdict and tables for rich's console."""
    summary = summarize(comparison)
    said = [*verdict(comparison, summary), interval(comparison, summary), *notes(comparison)]
    return Group(*map(Text, said), *map(rich_table, all_tables(comparison, summary)))


def rich_table(shown: Shown) -> RichTable:
    """The first column on the left. Text, not str: rich would read square brackets in a name as markup."""
    table = RichTable(title=Text(shown.title), title_justify="left")
    for number, header in enumerate(shown.frame.columns):
        table.add_column(Text(str(header)), justify="right" if number else "left")
    for row in shown.frame.itertuples(index=False):
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    return table
