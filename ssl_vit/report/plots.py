"""Figures of the report as SVG, by matplotlib's object interface (no pyplot, no state between calls).

The same input gives the same bytes. Text and axes are drawn in `currentColor`, so that an SVG set inline takes the
page's text color (light and dark), and reads as black on its own. Letters stay text (no outlines).
"""

from __future__ import annotations

import hashlib
import io
import itertools
import re
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

from ssl_vit.analysis.pages import figure_style
from ssl_vit.report.classes import Calibration
from ssl_vit.report.statistics import Estimate

# Okabe and Ito's color-blind-safe palette, less its yellow (invisible on white); a mid gray replaces its black, which
# would be invisible on a dark page. An arm keeps its color and its marker in every figure and table.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#808080", "#e69f00", "#56b4e9")
# Matplotlib cannot draw in `currentColor`; it draws in this color, which no palette above uses, and we replace it.
INK = "#010203"
STYLE = figure_style(INK) | {"axes.titlelocation": "left", "legend.handlelength": 1.2, "legend.borderaxespad": 0}


class Style(NamedTuple):
    """color: "#rrggbb". marker: matplotlib's."""

    color: str
    marker: str


class Curve(NamedTuple):
    """One line: estimates (fractions, drawn as percent) over x."""

    label: str
    style: Style
    x: Sequence[float]
    estimates: Sequence[Estimate]


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """Colors and markers of arms or series, by name, assigned in order."""
    numbered = enumerate(dict.fromkeys(names))
    return {name: Style(PALETTE[number % 7], "os^DvPX<>hpd"[number % 12]) for number, name in numbered}


def accuracy_curve(curves: Sequence[Curve], xlabel: str, ylabel: str, levels: Mapping[str, float]) -> Markup:
    """Curves over label budgets or another quantity (log x), with intervals as bands.

    levels: y of dashed horizontal lines by label; one that begins with "_" is not named.

    At a single x the curves are bars, without levels.
    """
    if len({x for curve in curves for x in curve.x}) == 1:
        return _bars(curves, ylabel)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.8))  # as narrow as that, letters stay readable on a phone
        axes = figure.add_axes((0.12, 0.145, 0.55, 0.82))
        axes.set_xscale("log")
        places = sorted({x for curve in curves for x in curve.x})
        margin = (places[-1] / places[0]) ** 0.05
        axes.set_xlim(places[0] / margin, places[-1] * margin)
        for label, (color, marker), x, estimates in curves:
            y = np.array([100 * estimate.mean for estimate in estimates])
            half = np.array([100 * (estimate.half_width or np.nan) for estimate in estimates])
            if len(x) > 1:
                axes.fill_between(x, y - half, y + half, color=color, alpha=0.16, linewidth=0)
            else:  # measured at this one place only
                axes.errorbar(x, y, yerr=half, color=color, capsize=4, linewidth=1.5)
            axes.plot(x, y, color=color, marker=marker, markersize=6.5, linewidth=2.4, label=visible(label), zorder=3)
        for number, (label, height) in enumerate(levels.items()):
            color = INK if label.startswith("_") else PALETTE[-1 - number % 7]
            axes.axhline(height, color=color, linewidth=1.6, linestyle=(0, (5, 3)), label=label)
        least = np.log(places[-1] / places[0]) / 14  # numbers closer than that would overlap
        ticks = places[:1]
        ticks += [x for before, x in itertools.pairwise(places) if np.log(x / before) > least]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        return _embed(figure, axes, f"{xlabel} (logarithmic)", ylabel)


def _bars(curves: Sequence[Curve], ylabel: str) -> Markup:
    """A horizontal bar per estimate, with its interval."""
    with mpl.rc_context(STYLE):
        shown = [(curve, estimate) for curve in curves for estimate in curve.estimates]
        names = [_wrapped(curve.label) for curve, _ in shown]
        each = 0.2 * max(2, 1 + max(name.count("\n") + 1 for name in names)) + 0.02  # inches
        figure = Figure(figsize=(5.6, 0.8 + each * len(shown)))
        axes = figure.add_axes((0.33, 0.55 / figure.get_figheight(), 0.63, 1 - 0.65 / figure.get_figheight()))
        means = [100 * estimate.mean for _, estimate in shown]
        half = [100 * (estimate.half_width or np.nan) for _, estimate in shown]
        colors = [curve.style.color for curve, _ in shown]
        axes.barh(range(len(shown)), means, xerr=half, color=colors, ecolor=INK, capsize=4)
        axes.set_yticks(range(len(shown)), names)
        axes.invert_yaxis()
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.xaxis.grid(True, color=INK, alpha=0.12, linewidth=0.8)
        axes.set(xlabel=ylabel, axisbelow=True)
        return _svg(figure)


def loss_curves(runs: Mapping[str, tuple[Style, pd.DataFrame]]) -> Markup | None:
    """Training losses by run over images seen. None without a loss.

    The thin dashed line is the constant baseline, where the run logged it. Long runs are shown as
    means of at most 300 parts.
    """
    frames = {label: frame for label, (_, frame) in runs.items() if len(frame)}
    if not frames:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 2.9))
        axes = figure.add_axes((0.12, 0.19, 0.55, 0.77))
        for label, frame in frames.items():
            parts = frame.groupby(np.arange(len(frame)) * min(300, len(frame)) // len(frame)).mean()
            color, marker = runs[label][0].color, "o" if len(parts) == 1 else None
            axes.plot(
                parts["images_seen"], parts["loss"], color=color, linewidth=2, marker=marker, label=visible(label)
            )
            if parts["constant_loss"].notna().any():
                name, dashes = f"constant baseline, {label}", (0, (4, 3))
                x, y = parts["images_seen"], parts["constant_loss"]
                axes.plot(x, y, color=color, linewidth=1.2, linestyle=dashes, label=name)
        axes.margins(x=0.01, y=0.08)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        return _embed(figure, axes, "images seen", "training loss")


def confusion_matrix(shares_KK: np.ndarray, names: Sequence[str]) -> Markup:
    """Shares of the images of each class (row) that were predicted as each class (column), in percent.

    shares_KK: 0..1, or nan. names: class names; 30 or fewer are shown. Cells are numbered for up to 12 classes.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2, 4.0))
        axes = figure.add_axes((0.24, 0.24, 0.74, 0.74))
        axes.imshow(100 * shares_KK, cmap="Blues", vmin=0, vmax=100, interpolation="none")
        if len(names) <= 12:
            for (row, column), share in np.ndenumerate(shares_KK):
                if share >= 0.005:
                    color = "white" if share > 0.6 else "black"  # on the cell, on a light and a dark page
                    axes.text(column, row, f"{100 * share:.0f}", color=color, ha="center", va="center", fontsize=8)
        short = [name if len(name) <= 14 else f"{name[:13]}…" for name in names]
        shown = range(len(names)) if len(names) <= 30 else ()
        size = 9.0 if len(names) <= 12 else 5.5
        turned = 90 if max(map(len, short)) > 2 else 0
        axes.set_xticks(shown, [short[n] for n in shown], rotation=turned, fontsize=size)
        axes.set_yticks(shown, [short[n] for n in shown], fontsize=size)
        axes.set(xlabel="predicted class", ylabel="true class")
        return _svg(figure)


def reliability(curves: Mapping[str, tuple[Style, Calibration]]) -> Markup:
    """By name: accuracy over the confidence of bins of predictions; larger points hold more of them. Dashed: a
    calibrated classifier."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.4))
        axes = figure.add_axes((0.12, 0.16, 0.55, 0.8))
        axes.plot([0, 100], [0, 100], color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label="_calibrated")
        for name, ((color, marker), calibration) in curves.items():
            x, y = 100 * calibration.confidence, 100 * calibration.accuracy
            axes.plot(x, y, color=color, linewidth=1.2, alpha=0.6, label=visible(name))
            axes.scatter(x, y, s=12 + 150 * calibration.share, color=color, marker=marker, linewidths=0, zorder=3)
        axes.set(xlim=(0, 101), ylim=(0, 101))
        return _embed(figure, axes, "confidence, %", "test accuracy, %")


def _embed(figure: Figure, axes: Axes, xlabel: str, ylabel: str) -> Markup:
    """Labels, legend (in the order of the curves' ends), and the SVG."""
    axes.set(xlabel=xlabel, ylabel=ylabel, axisbelow=True)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.grid(True, color=INK, alpha=0.12, linewidth=0.8)
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    lines.sort(key=lambda line: -float(np.asarray(line.get_ydata())[-1]))
    names = [_wrapped(str(line.get_label())) for line in lines]
    size = min(10.5, 180 / (1 + sum(name.count("\n") + 1 for name in names)))  # points; many names fit, too
    axes.legend(lines, names, loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False, fontsize=size)
    return _svg(figure)


def visible(name: str) -> str:
    """The name in a form that legends show: matplotlib hides lines whose label begins with `_`."""
    return f"\u200b{name}" if name.startswith("_") else name


def _wrapped(name: str) -> str:
    return "\n".join(textwrap.wrap(name, 17))


def _svg(figure: Figure) -> Markup:
    """The figure without a background, in the color of the page's text."""
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_alpha(0)
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # Names may hold letters that matplotlib's font lacks; the browser draws the text with its own fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue().replace(INK, "currentColor")
    # Matplotlib restarts its ids in each figure: without a prefix they would clash within one page.
    prefix = f"f{hashlib.sha256(svg.encode(errors='replace')).hexdigest()[:8]}-"
    opening, body = svg[svg.index("<svg") :].split(">", 1)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", body)
    (view_box,) = re.findall(r'viewBox="[^"]*"', opening)
    return Markup(f'<svg role="img" {view_box}>{body}')
