"""Tables of a report as data frames of text, for a page, a terminal, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from ssl_vit.evaluators import budget_words
from ssl_vit.interfaces import printable, printable_lines
from ssl_vit.report.classes import BINS, Classes
from ssl_vit.report.costs import STAGES, UNITS, costs
from ssl_vit.report.intervals import interval
from ssl_vit.report.read import Comparison
from ssl_vit.report.runs import text
from ssl_vit.report.self_test import self_tests
from ssl_vit.report.statistics import points
from ssl_vit.report.summary import EvaluationKey, Summary, summarize
from ssl_vit.report.verdict import needed, notes, verdict

CLASSES = 40  # most rows of a table of classes


@dataclass(frozen=True)
class Shown:
    """A table. frame: cells as text; the first column names the rows. arms: the arm of each row, for its color."""

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
    if comparison.separate:  # each evaluation has its own
        seeds = max((row.seeds for row in summary.accuracies if row.place == place), default=0)
    accuracies: dict[str, dict[str, str]] = {}
    for row in (row for row in summary.accuracies if row.place == place):
        few = f" ({row.seeds} of {seeds} seeds)" if row.seeds < seeds else ""
        accuracies.setdefault(row.arm, {})[str(row.labels_per_class)] = points(row.estimate, "") + few
    differences: dict[tuple[str, str], dict[str, str]] = {}
    adjusted_last = (*summary.means, *summary.differences, *summary.headlines)
    for difference in (row for row in adjusted_last if row.place == place):
        cells = differences.setdefault((difference.arm, difference.against), {})
        cells[str(difference.labels_per_class)] = points(difference.estimate)
    label = comparison.label
    scores = [(label(arm), cells) for arm, cells in accuracies.items()]
    gains = [(f"{label(arm)} minus {label(against)}", cells) for (arm, against), cells in differences.items()]
    name = "mean of the per-class accuracies" if weighted else "accuracy"
    tables = [
        _table(f"Test {name}, %, by labels per class", scores, arms=accuracies),
        _table("Difference in points, by labels per class", gains, arms=[against for _, against in differences]),
    ]
    tables = [table for table in tables if table.arms]
    equal = {str(row.labels_per_class): row for row in summary.efficiencies if row.place == place}
    for first in [*equal.values()][:1]:
        with_arm, with_other = (f"Labels per class with {comparison.label(arm)}" for arm in (first.arm, first.against))
        rows = [(budget, {with_other: needed(efficiency)}) for budget, efficiency in equal.items()]
        tables.append(_table("Label efficiency: labels per class for the same accuracy", rows, with_arm))
    return tables


def _table(
    title: str, rows: Sequence[tuple[str, Mapping[str, str]]], head: str = "Arm", arms: Iterable[str] = ()
) -> Shown:
    """rows: the first cell, which several rows may share, and the others by column."""
    names, cells = [name for name, _ in rows], [cells for _, cells in rows]
    frame = pd.DataFrame(cells, index=names).fillna("–").reset_index(names=head)
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
            "Result": test.result,
        }
        for test in self_tests(comparison)
        for row in [test.difference]
    ]
    return Shown("Self-test", pd.DataFrame(rows))


def class_table(comparison: Comparison, by_class: Classes) -> Shown:
    """Test accuracy of every arm by class. Of more than 40 classes, only those that differ most between arms."""
    accuracies = by_class.accuracies
    means = np.array([[e.mean if e else np.nan for e in estimates] for estimates in accuracies.values()])
    rows = np.flatnonzero(by_class.images)
    shown = np.sort(rows[np.argsort(-np.ptp(means[:, rows], axis=0), kind="stable")[:CLASSES]])
    cells = {
        comparison.label(arm): [points(estimate, "") if (estimate := estimates[n]) else "–" for n in shown]
        for arm, estimates in accuracies.items()
    }
    frame = pd.DataFrame(cells)
    images = [text(int(by_class.images[n])) for n in shown]
    frame.insert(0, "Test images", images, allow_duplicates=True)  # an arm may have this label
    frame.insert(0, "Class", [by_class.names[n] for n in shown], allow_duplicates=True)
    title = f"Test accuracy by class, %, with {budget_words(by_class.budget)}"
    if len(shown) < len(rows):
        title += (
            f": the {len(shown)} of {len(rows):,} classes whose accuracies differ most between arms, so that their "
            "differences are partly chance"
        )
    return Shown(title, frame)


def calibration_table(comparison: Comparison, by_class: Classes) -> Shown:
    """Expected calibration error of every arm whose classifier gives probabilities."""
    calibration = by_class.calibration
    errors = [(comparison.label(arm), {"ECE, %": f"{100 * bins.error:.1f}"}) for arm, bins in calibration.items()]
    title = f"Expected calibration error ({BINS} bins), mean over seeds, with {budget_words(by_class.budget)}"
    return _table(title, errors, arms=calibration)


def cost_table(comparison: Comparison) -> Shown:
    """Costs, with a column for each arm."""
    spent, cells = costs(comparison).astype(object), {}
    for arm in comparison.record.arms:
        pretraining, tried = comparison.pretraining(arm.name), comparison.tried(arm.name)
        labels: object = pretraining.samples if pretraining and arm.uses_labels else 0
        if arm.starts_from:
            labels = _with_unknown(labels)
        column: dict[str, object] = {
            "Pretraining labels": labels,
            "Parameters, with head or decoder": pretraining.parameters if pretraining else None,
        }
        column["Settings tried in sweeps"] = tried or None
        for stage in STAGES:
            for unit, name in UNITS.items():
                cost = spent[unit].get((stage, arm.name))
                if arm.starts_from and stage in ("Pretraining", "Total"):
                    cost = _with_unknown(cost)
                column[f"{stage}, {name}"] = cost
        cells[arm.label] = {name: text(value) for name, value in column.items()}
    frame = pd.DataFrame(cells)
    frame.insert(0, "Cost", frame.index, allow_duplicates=True)  # an arm may have such a label
    others = spent.drop(index=[arm.name for arm in comparison.record.arms], level="arm", errors="ignore")
    if len(others):  # also the repetitions of the self-test
        total = others.groupby("stage").sum()
        column = {f"{stage}, {name}": total[unit].get(stage) for stage in STAGES for unit, name in UNITS.items()}
        spent_there = [text(column.get(name)) for name in frame.index]
        frame.insert(len(frame.columns), "References, self-test", spent_there, allow_duplicates=True)
    title = "Cost: all pretrainings; all sweeps; all other trainings of evaluators"
    swept = {task.id for task in comparison.record.tasks if task.kind == "sweep"}
    if any(file.stem in swept for file in comparison.measured.files):
        title += ". The run that wins a sweep is the first seed's result, and counted under Sweeps"
    if comparison.record.jobs > 1:
        title += f". Seconds were measured with {comparison.record.jobs} tasks in parallel"
    if begun := [f"{arm.label} ({arm.starts_from})" for arm in comparison.record.arms if arm.starts_from]:
        title += f". Not counted: training of the weights that these arms start from: {', '.join(begun)}"
    return Shown(title, frame)


def _with_unknown(known: object) -> str:
    """What an arm that starts from pretrained weights cost."""
    return f"{text(known)} + unknown" if known else "unknown: pretrained weights"


def sweep_table(comparison: Comparison) -> Shown:
    """Every setting that a sweep tried on held-out training images."""
    rows = []
    for task, sweep in comparison.sweeps:
        for tried in sweep.candidates:
            settings = {key: value for key, value in tried.items() if not key.startswith("held_out_")}
            best, parts = settings.items() <= sweep.best.items(), tried.get("held_out_parts")
            shown = {key: "null" if value is None else value for key, value in settings.items()}
            accuracy = "diverged" if parts == 0 else f"{100 * float(tried['held_out_accuracy'] or 0):.1f}"
            rows.append(
                {
                    "Arm": comparison.label(task.arm),
                    "Data and evaluator": place_title(comparison, EvaluationKey(task.data, task.evaluator)),
                    **({"Fold": str(task.fold)} if comparison.record.folds > 1 else {}),
                    "Labels per class": str(task.labels_per_class),
                    "Setting": ", ".join(f"{key} {value}" for key, value in shown.items()),
                    "Held-out accuracy, %": accuracy + " (best)" * best,
                    "Held-out parts": text(parts),
                }
            )
    title = "Settings tried on held-out training images, with the first seed and pretraining"
    return Shown(title, pd.DataFrame(rows))


def columns(title: str, values: Mapping[str, Mapping[str, str]]) -> Shown:
    """A table with a column for each set of flat settings."""
    frame = pd.DataFrame({name: dict(column) for name, column in values.items()}).fillna("–")
    return Shown(title, frame.reset_index(names="", allow_duplicates=True))


def all_tables(comparison: Comparison, summary: Summary) -> list[Shown]:
    shown = [
        Shown(f"{place_title(comparison, place)}. {table.title}", table.frame, table.arms)
        for place in summary.places
        for table in place_tables(comparison, summary, place)
    ]
    return shown + [table for table in (self_test_table(comparison), cost_table(comparison)) if len(table.frame)]


def terminal(comparison: Comparison) -> Group:
    """Verdict and tables for rich's console."""
    summary = summarize(comparison)
    sentences = [*verdict(comparison, summary), interval(comparison, summary), *notes(comparison)]
    shown = [Text(printable_lines(sentence)) for sentence in sentences]
    return Group(*shown, *map(rich_table, all_tables(comparison, summary)))


def rich_table(shown: Shown) -> RichTable:
    """A table for rich, first column aligned left. Cells are Text: rich would read square brackets in str as markup."""
    table = RichTable(title=Text(printable(shown.title)), title_justify="left")
    for number, header in enumerate(shown.frame.columns):
        table.add_column(Text(printable(str(header))), justify="right" if number else "left", overflow="fold")
    for row in shown.frame.itertuples(index=False):
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    return table
