"""One self-contained HTML page from run and comparison directories: no script, no request to anywhere."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ssl_vit.analysis.pages import template
from ssl_vit.files import write_text
from ssl_vit.interfaces import RunError
from ssl_vit.report import export, tables
from ssl_vit.report.plots import Curve, Embedded, Style, accuracy_curve, loss_curves, numbered_style, styles_of
from ssl_vit.report.read import Comparison, read
from ssl_vit.report.runs import flat
from ssl_vit.report.statistics import Estimate
from ssl_vit.report.summary import Place, Summary, summarize
from ssl_vit.report.verdict import INTERVAL, notes, verdict

_STUDY = {"samples": "images in the pretraining set", "flops": "pretraining compute, FLOPs"}
Styles = Mapping[str, Style]


def write_report(paths: Sequence[Path], out: Path, form: str = "html") -> Path:
    """Write the report of one comparison, or of one or several run directories side by side, to the file `out`.

    An existing file is replaced; the same input gives the same bytes. Raises UserError for directories that cannot be
    read, RunError when the file cannot be written.

    paths: one comparison directory (or several with parts of it), or run directories.
    out: its folders are made.
    form: `html`, or tables as `markdown` or `latex`, or every row as `csv` or `json`.
    """
    comparison = read(paths)
    content = page(comparison) if form == "html" else export.export(comparison, form)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, content.encode(errors="replace").decode())
    except OSError as error:
        raise RunError(f"{out}: the report could not be written ({error.strerror}).") from error
    return out


def page(comparison: Comparison) -> str:
    """The HTML page."""
    record, runs, styles = comparison.record, comparison.runs, styles_of(comparison)
    summary = summarize(comparison)
    environments = {"comparison": flat(record.environment)} if record.environment else {}
    environments |= {arm: dict(run.environment) for arm, run in runs.items() if run.environment}
    return template(Path(__file__).with_name("page.html.j2")).render(
        comparison=comparison,
        title=record.title or record.name,
        colors={arm: style.color for arm, style in styles.items()},
        verdict=verdict(comparison, summary),
        interval=INTERVAL,
        notes=notes(comparison),
        sections=[
            (
                tables.place_title(comparison, place),
                ", ".join(f"{key} {value}" for key, value in flat(_settings(comparison, place)).items()),
                list(_figures(comparison, summary, styles, place)),
                tables.place_tables(comparison, summary, place),
            )
            for place in summary.places
        ],
        studies=list(_studies(comparison, summary)),
        costs=tables.cost_table(comparison),
        losses=list(_losses(comparison, styles)),
        sweeps=tables.sweep_table(comparison),
        data=tables.columns("Data", {name: flat(one.model_dump()) for name, one in record.data.items()}),
        environment=tables.columns("Environment", environments),
        commands=[*filter(None, [record.command]), shlex.join(["ssl-vit", "report", *map(str, comparison.paths)])],
        encoded=lambda path: base64.b64encode(path.read_bytes()).decode(),
        csv=base64.b64encode(export.export(comparison, "csv").encode(errors="replace")).decode(),
    )


def _settings(comparison: Comparison, place: Place) -> object:
    return comparison.record.evaluators[place.evaluator].settings.get(place.data, {})


def _figures(
    comparison: Comparison, summary: Summary, styles: Styles, place: Place
) -> Iterator[tuple[str, Embedded, str]]:
    """(name, figure, caption) of the learning curves, and of the differences of the first arm under test."""
    accuracies = [row for row in summary.accuracies if row.place == place]
    arms = dict.fromkeys(row.arm for row in accuracies)
    points = {arm: [(row.labels, row.estimate) for row in accuracies if row.arm == arm] for arm in arms}
    curves = [_curve(comparison.label(arm), styles[arm], points[arm]) for arm in arms]
    chance = 100 / comparison.classes(place.data)
    yield (
        "accuracy",
        accuracy_curve(curves, "labels per class", "test accuracy, %", chance=chance),
        "Test accuracy by labels per class: mean over seeds; the band is the 95% interval.",
    )
    rows = [row for row in summary.differences if row.place == place and row.arm == comparison.tested[0]]
    others = dict.fromkeys(row.against for row in rows)
    against = {arm: [(row.labels, row.estimate) for row in rows if row.against == arm] for arm in others}
    # In the color of what it is compared with: the arm under test is in all of them.
    curves = [_curve(f"minus {comparison.label(arm)}", styles[arm], against[arm]) for arm in others]
    if curves:
        tested = comparison.label(comparison.tested[0])
        yield (
            "difference",
            accuracy_curve(curves, "labels per class", "difference, points", zero=True),
            f"Test accuracy of {tested} minus that of each other arm; the band is the adjusted 95% interval.",
        )


def _curve(label: str, style: Style, points: Sequence[tuple[float, Estimate]]) -> Curve:
    points = sorted(points, key=lambda point: point[0])
    y = [100 * estimate.mean for _, estimate in points]
    half_width = [100 * (estimate.half_width or 0.0) for _, estimate in points]
    return Curve(label, style, [x for x, _ in points], y, half_width)


def _studies(comparison: Comparison, summary: Summary) -> Iterator[tuple[str, Embedded, str]]:
    """(title, figure, caption): accuracy over what the arms' pretrainings differ in, a figure per label budget."""
    sizes = comparison.sizes()
    axis = _STUDY[comparison.record.study or "samples"]
    series = {arm.name: arm.series or arm.architecture for arm in comparison.record.arms}
    lines = list(dict.fromkeys(series[arm] for arm in sizes))
    for place, budget in dict.fromkeys((row.place, row.labels_per_class) for row in summary.accuracies if sizes):
        rows = [row for row in summary.accuracies if (row.place, row.labels_per_class) == (place, budget)]
        curves = []
        for number, name in enumerate(lines):
            points = [(sizes[row.arm], row.estimate) for row in rows if row.arm in sizes and series[row.arm] == name]
            curves += [_curve(name, numbered_style(number), points)] if points else []
        levels = [(comparison.label(row.arm), 100 * row.estimate.mean) for row in rows if row.arm not in sizes]
        if curves:
            figure = accuracy_curve(curves, axis, "test accuracy, %", levels=levels)
            title = f"{tables.place_title(comparison, place)}, labels per class: {budget}"
            yield title, figure, f"Test accuracy over {axis}. Dashed: arms and references without such pretraining."


def _losses(comparison: Comparison, styles: Styles) -> Iterator[tuple[str, Embedded]]:
    """(objective, figure): losses of different objectives are different quantities and never share axes."""
    objectives = {arm: run.summary.objective if run.summary else "" for arm, run in comparison.runs.items()}
    for objective in dict.fromkeys(objectives.values()):
        arms = [arm for arm in comparison.runs if objectives[arm] == objective]
        runs = {comparison.label(arm): (styles[arm], comparison.runs[arm].losses) for arm in arms}
        if figure := loss_curves(runs):
            yield objective, figure
