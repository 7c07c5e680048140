"""One self-contained HTML page from run and comparison directories: no script, no request to anywhere."""

from __future__ import annotations

import base64
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from markupsafe import Markup

from ssl_vit.analysis.pages import template
from ssl_vit.evaluators import budget_words
from ssl_vit.files import write_text
from ssl_vit.interfaces import RunError, UserError, without_credentials
from ssl_vit.records import DataRecord
from ssl_vit.report import export, tables
from ssl_vit.report.classes import Classes, classes
from ssl_vit.report.gallery import Gallery, gallery
from ssl_vit.report.intervals import interval, several_budgets
from ssl_vit.report.plots import (
    Curve,
    Style,
    accuracy_curve,
    confusion_matrix,
    loss_curves,
    reliability,
    styles_of,
    visible,
)
from ssl_vit.report.read import Comparison, read
from ssl_vit.report.runs import flat, metric_name, objective_name, pictures, used
from ssl_vit.report.summary import Accuracy, EvaluationKey, Summary, summarize
from ssl_vit.report.tables import Shown
from ssl_vit.report.verdict import notes, verdict

_DETAILED = 6  # sections with pictures and classes: the page stays small
_CONFUSIONS = 6  # arms with a confusion matrix
_STUDY = {"samples": "images in the pretraining set", "flops": "pretraining compute, FLOPs"}
Styles = Mapping[str, Style]
Row = TypeVar("Row", bound=Accuracy)


@dataclass(frozen=True)
class Section:
    """One dataset under one evaluator. figures: each with its caption. classes: None, and no pictures, of the later
    sections. confusions: by arm."""

    title: str
    settings: Mapping[str, str]
    figures: Sequence[tuple[Markup, str]]
    tables: Sequence[Shown]
    classes: Classes | None
    confusions: Mapping[str, Markup]
    reliability: Markup | None
    galleries: Sequence[Gallery]


def write_report(paths: Sequence[Path], out: Path, form: str = "html") -> Path:
    """Write the report of one comparison, or of one or several run directories side by side, to the file `out`.

    An existing file is replaced; the same input gives the same bytes. Raises UserError for directories that cannot be
    read and where `out` is a directory, RunError when the file cannot be written.

    paths: one comparison directory, or run directories.
    out: its folders are made.
    form: `html`, or tables as `markdown` or `latex`, or every row as `csv` or `json`.
    """
    if out.is_dir():
        raise UserError(f"{out} is a directory; name a file")
    comparison = read(paths)
    content = page(comparison) if form == "html" else export.export(comparison, form)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, content.encode(errors="replace").decode())
    except OSError as error:
        how = "free space, or write it elsewhere with `ssl-vit report DIRECTORY --out FILE`"
        raise RunError(f"{out}: the report could not be written ({error.strerror}); {how}") from error
    return out


def page(comparison: Comparison) -> str:
    """The HTML page."""
    record, runs, styles = comparison.record, comparison.runs, styles_of(comparison.arms)
    summary = summarize(comparison)
    first = [head.place for head in summary.headlines]
    environments = export.environments(comparison)
    environments |= {arm: dict(run.environment) for arm, run in runs.items() if run.environment}
    text = template(Path(__file__).with_name("page.html.j2")).render(
        comparison=comparison,
        title=record.title or record.name,
        colors={arm: style.color for arm, style in styles.items()},
        verdict=verdict(comparison, summary),
        interval=interval(comparison, summary),
        notes=notes(comparison),
        words=budget_words,
        tables=tables,
        times=sorted(filter(None, comparison.saved)),
        sections=[
            _section(comparison, summary, styles, place, detailed=number < _DETAILED)
            for number, place in enumerate(sorted(summary.places, key=lambda place: place not in first))
        ],
        studies=list(_studies(comparison, summary)),
        self_test=tables.self_test_table(comparison),
        costs=tables.cost_table(comparison),
        losses=list(_losses(comparison, styles)),
        seeds=export.seeds(comparison),
        pictures=list(_pictures(comparison)),
        sweeps=tables.sweep_table(comparison),
        data=tables.columns("Data", {name: _data(one) for name, one in record.data.items()}),
        environment=tables.columns("Environment", environments),
        commands=[*filter(None, [record.command]), shlex.join(["ssl-vit", "report", *map(str, comparison.paths)])],
        encoded=lambda path: base64.b64encode(path.read_bytes()).decode(),
        csv=base64.b64encode(export.export(comparison, "csv").encode(errors="replace")).decode(),
    )
    return without_credentials(text)


def _section(
    comparison: Comparison, summary: Summary, styles: Styles, place: EvaluationKey, *, detailed: bool
) -> Section:
    by_class = classes(comparison, place) if detailed else None
    confusion, calibration = (by_class.confusion, by_class.calibration) if by_class else ({}, {})
    arms = [arm.name for arm in comparison.record.arms if arm.name in confusion][:_CONFUSIONS]
    curves = {comparison.label(arm): (styles[arm], one) for arm, one in calibration.items()}
    return Section(
        title=tables.place_title(comparison, place),
        settings=flat(used(comparison.record.evaluators[place.evaluator].settings.get(place.data, {}))),
        figures=list(_figures(comparison, summary, styles, place)),
        tables=tables.place_tables(comparison, summary, place),
        classes=by_class,
        confusions={arm: confusion_matrix(confusion[arm], by_class.names) for arm in arms if by_class},
        reliability=reliability(curves) if curves else None,
        galleries=[gallery(comparison, head) for head in summary.headlines if by_class and head.place == place],
    )


def _data(data: DataRecord) -> dict[str, str]:
    return flat(data.model_dump(exclude={"classes"}) | {"classes": len(data.classes) if data.classes else None})


def _curves(rows: Sequence[Row], name: Callable[[Row], str], x: Callable[[Row], float], styles: Styles) -> list[Curve]:
    """A curve per name."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=x):
        groups.setdefault(name(row), []).append(row)
    return [
        Curve(key, styles[key], [x(row) for row in group], [row.estimate for row in group])
        for key, group in groups.items()
    ]


def _figures(
    comparison: Comparison, summary: Summary, styles: Styles, place: EvaluationKey
) -> Iterator[tuple[Markup, str]]:
    """(figure, caption) of the learning curves, and of the differences of the first arm under test."""
    label, axis, tested = comparison.label, "labels per class", comparison.tested[0]
    chance, rows = 1 / comparison.classes(place.data), [row for row in summary.accuracies if row.place == place]
    levels = f"chance is {100 * chance:.3g}%"
    results = (row for row in comparison.table.results if row.data == place.data)
    counts = Counter(next(results).prediction.labels.tolist())
    most = max(counts.values()) / counts.total()
    if comparison.record.metrics[place.data] == "accuracy" and most > 1.1 * chance:
        levels += f", always the most frequent class {100 * most:.3g}%"
    curves = _curves(rows, lambda row: row.arm, lambda row: row.labels, styles)
    metric = metric_name(comparison.record.metrics[place.data])
    curves = [curve._replace(label=label(curve.label)) for curve in curves]
    figure = accuracy_curve(curves, axis, f"{metric}, %", {})
    yield figure, f"Mean over seeds of the {metric} by labels per class; band or bar: 95% interval; {levels}."
    differences = [row for row in summary.differences if (row.place, row.arm) == (place, tested)]
    # In the color of what it is compared with: the arm under test is in all of them.
    if curves := _curves(differences, lambda row: row.against, lambda row: row.labels, styles):
        curves = [curve._replace(label=f"minus {label(curve.label)}") for curve in curves]
        figure = accuracy_curve(curves, axis, "difference, points", {"_zero": 0.0})
        confidence = f"{100 * comparison.confidence:.3g}%"
        adjusted = "adjusted " * several_budgets(differences)
        yield figure, f"{label(tested)} minus each other arm; band or bar: {adjusted}{confidence} interval."


def _studies(comparison: Comparison, summary: Summary) -> Iterator[tuple[str, Markup, str]]:
    """(title, figure, caption): accuracy over what the arms' pretrainings differ in, a figure per label budget."""
    sizes, axis = comparison.sizes(), _STUDY[comparison.record.study or "samples"]
    first = {arm.architecture: arm.label for arm in reversed(comparison.record.arms)}
    series = {arm.name: arm.series or first[arm.architecture] for arm in comparison.record.arms}
    styles = styles_of(series.values())
    for place, budget in dict.fromkeys((row.place, row.labels_per_class) for row in summary.accuracies if sizes):
        rows = [row for row in summary.accuracies if (row.place, row.labels_per_class) == (place, budget)]
        sized = [row for row in rows if row.arm in sizes]
        levels = {visible(comparison.label(row.arm)): 100 * row.estimate.mean for row in rows if row not in sized}
        if curves := _curves(sized, lambda row: series[row.arm], lambda row: sizes[row.arm], styles):
            title = f"{tables.place_title(comparison, place)}, labels per class: {budget}"
            metric = metric_name(comparison.record.metrics[place.data])
            figure = accuracy_curve(curves, axis, f"{metric}, %", levels)
            yield (
                title,
                figure,
                f"{metric.capitalize()} over {axis}. Dashed: arms and references without such pretraining.",
            )


def _losses(comparison: Comparison, styles: Styles) -> Iterator[tuple[str, Markup, str]]:
    """(objective, figure, caption): losses of different objectives are different quantities and never share axes."""
    objectives = {arm: run.objective for arm, run in comparison.runs.items()}
    for objective in dict.fromkeys(objectives.values()):
        arms = [arm for arm in comparison.runs if objectives[arm] == objective]
        runs = {comparison.label(arm): (styles[arm], comparison.runs[arm].losses) for arm in arms}
        if figure := loss_curves(runs):
            constant = any(frame["constant_loss"].notna().any() for _, frame in runs.values())
            dashed = " Dashed: the constant baseline, the best prediction that is the same for every patch." * constant
            yield objective_name(objective), figure, f"Training loss.{dashed}"


def _pictures(comparison: Comparison) -> Iterator[tuple[str, tuple[Path, ...], tuple[str, ...]]]:
    """(arm, pictures, remarks): the pictures that the comparison made of the arm, else those of its run."""
    made = {task.arm: comparison.tasks.get(task.id) for task in comparison.record.tasks if task.kind == "pictures"}
    for arm in comparison.arms:
        run, task = comparison.runs.get(arm), made.get(arm)
        shown = pictures(comparison.paths[0] / task.pictures) if task and task.pictures else run.pictures if run else ()
        remarks = run.remarks if run else ()
        if shown or remarks:
            yield arm, shown, remarks
