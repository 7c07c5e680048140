"""Figures of the report as SVG, by matplotlib's object interface (no pyplot, no state between calls).

The same input gives the same bytes. Text and axes are drawn in `currentColor`, so that an SVG set inline takes the
page's text color (light and dark), and reads as black on its own. Letters stay text (no outlines).
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

from ssl_vit.analysis.pages import figure_style
from ssl_vit.report.read import Comparison
from ssl_vit.report.runs import Loss

# Okabe and Ito's color-blind-safe palette, less its yellow (invisible on white); a mid gray replaces its black, which
# would be invisible on a dark page. An arm keeps its color and its marker in every figure and table.
COLORS = {
    "tested": "#0072b2",
    "scratch": "#d55e00",
    "supervised": "#009e73",
    "pixels": "#cc79a7",
    "untrained": "#808080",
}
PALETTE = ("#e69f00", "#56b4e9", *COLORS.values())
# Matplotlib cannot draw in `currentColor`; it draws in this color, which no palette above uses, and we replace it.
INK = "#010203"
STYLE = figure_style(INK) | {"axes.titlelocation": "left", "legend.handlelength": 1.2, "legend.borderaxespad": 0}


class Style(NamedTuple):
    """color: "#rrggbb". marker: matplotlib's."""

    color: str
    marker: str


@dataclass(frozen=True)
class Curve:
    """One line: y over x, with the half-width of the interval at each x (0: none)."""

    label: str
    style: Style
    x: Sequence[float]
    y: Sequence[float]
    half_width: Sequence[float]


@dataclass(frozen=True)
class Embedded:
    """An SVG twice: to be set into a page that sizes it, and whole, as a data URI that a reader can save."""

    inline: Markup
    file: str


def numbered_style(number: int) -> Style:
    """Of one of many, in turn."""
    return Style(PALETTE[number % len(PALETTE)], "PX<>hpd"[number % 7])


def styles_of(comparison: Comparison) -> dict[str, Style]:
    """By arm: fixed for the first of each kind, in turn for all others."""
    kinds = {arm.name: "supervised" if arm.uses_labels else arm.kind for arm in comparison.record.arms}
    kinds |= dict.fromkeys(comparison.tested[:1], "tested")
    free, others, found = dict(zip(COLORS, "os^Dv", strict=True)), itertools.count(), {}
    for arm in comparison.arms:
        kind = kinds.get(arm, arm.partition("_")[0])
        found[arm] = Style(COLORS[kind], free.pop(kind)) if kind in free else numbered_style(next(others))
    return found


def accuracy_curve(
    curves: Sequence[Curve],
    xlabel: str,
    ylabel: str,
    *,
    chance: float | None = None,
    zero: bool = False,
    levels: Sequence[tuple[str, float]] = (),
) -> Embedded:
    """Curves over label budgets or another quantity (log x), with intervals as bands.

    chance: y of the dashed line "chance", drawn where it falls into the picture. zero: draw and include y = 0. levels:
    (label, y) of dashed horizontal lines.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.8))  # as narrow as that, letters stay readable on a phone
        axes = figure.add_axes((0.12, 0.145, 0.55, 0.82))
        axes.set_xscale("log")
        places = sorted({x for curve in curves for x in curve.x})
        margin = (places[-1] / places[0]) ** 0.05 if len(places) > 1 else 2.0
        axes.set_xlim(places[0] / margin, places[-1] * margin)
        for curve in curves:
            _draw(axes, curve)
        for number, (label, y) in enumerate(levels):
            axes.axhline(y, color=PALETTE[-1 - number % 7], linewidth=1.6, linestyle=(0, (5, 3)), label=label)
        if zero:
            axes.axhline(0, color=INK, linewidth=1)
        else:
            bottom, top = axes.get_ylim()
            axes.set_ylim(max(bottom, 0), min(top, 100))
        if chance is not None and axes.get_ylim()[0] <= chance <= axes.get_ylim()[1]:
            axes.axhline(chance, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6)
            axes.annotate("chance", (places[0], chance), (0, 3), textcoords="offset points", fontsize=9)
        least = np.log(places[-1] / places[0]) / 14  # numbers closer than that would overlap
        kept = places[:1]
        kept += [x for before, x in itertools.pairwise(places) if np.log(x / before) > least]
        axes.xaxis.set_major_locator(FixedLocator(kept))
        axes.xaxis.set_minor_locator(NullLocator())
        return _embed(figure, axes, f"{xlabel} (logarithmic)", ylabel)


def _draw(axes: Axes, curve: Curve) -> None:
    color = curve.style.color
    y, half = np.asarray(curve.y), np.asarray(curve.half_width)
    if len(curve.x) > 1:
        axes.fill_between(curve.x, y - half, y + half, color=color, alpha=0.16, linewidth=0)
    else:
        axes.errorbar(curve.x, y, yerr=half, color=color, capsize=4, linewidth=1.5)
    axes.plot(
        curve.x, y, color=color, marker=curve.style.marker, markersize=6.5, linewidth=2.4, label=curve.label, zorder=3
    )


def loss_curves(runs: Mapping[str, tuple[Style, Sequence[Loss]]], *, points: int = 300) -> Embedded | None:
    """Training losses by run, over images seen, or over steps where a run did not log them. None without a loss.

    The thin dashed line is the constant baseline, where the run logged it. Long runs are shown as
    means of at most `points` parts.
    """
    frames = {label: pd.DataFrame([vars(one) for one in losses], dtype=float) for label, (_, losses) in runs.items()}
    frames = {label: frame for label, frame in frames.items() if len(frame)}
    if not frames:
        return None
    axis = "images_seen" if all(frame["images_seen"].notna().all() for frame in frames.values()) else "step"
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 2.9))
        axes = figure.add_axes((0.12, 0.19, 0.55, 0.77))
        for label, frame in frames.items():
            parts = frame.groupby(np.arange(len(frame)) * min(points, len(frame)) // len(frame)).mean()
            color, marker = runs[label][0].color, "o" if len(parts) == 1 else None
            axes.plot(parts[axis], parts["loss"], color=color, linewidth=2, marker=marker, label=label)
            if parts["constant"].notna().any():
                name, dashes = f"constant baseline, {label}", (0, (4, 3))
                axes.plot(parts[axis], parts["constant"], color=color, linewidth=1.2, linestyle=dashes, label=name)
        axes.margins(x=0.01, y=0.08)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        return _embed(figure, axes, axis.replace("_", " "), "training loss")


def _embed(figure: Figure, axes: Axes, xlabel: str, ylabel: str) -> Embedded:
    """Labels, legend (in the order of the curves' ends), and the SVG."""
    axes.set(xlabel=xlabel, ylabel=ylabel, axisbelow=True)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.grid(True, color=INK, alpha=0.12, linewidth=0.8)
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    lines.sort(key=lambda line: -float(np.asarray(line.get_ydata())[-1]))
    names = ["\n".join(textwrap.wrap(str(line.get_label()), 17)) for line in lines]
    size = min(10.5, 180 / (1 + sum(name.count("\n") + 1 for name in names)))  # points; many names fit, too
    legend = axes.legend(lines, names, loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False, fontsize=size)
    for text in legend.get_texts():
        text.set_parse_math(False)
    for patch in (figure.patch, axes.patch):
        patch.set_alpha(0)
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # Names may hold letters that matplotlib's font lacks; the browser draws the text with its own fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    encoded = svg.encode("utf-8", errors="replace")
    # Matplotlib numbers its ids anew in each figure: without a prefix they would clash within one page.
    prefix = f"f{hashlib.sha256(encoded).hexdigest()[:8]}-"
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg.split(">", 1)[1])
    view_box = re.findall(r'viewBox="[^"]*"', svg)[0]
    return Embedded(
        Markup(f'<svg role="img" {view_box}>{body}'),
        f"data:image/svg+xml;base64,{base64.b64encode(encoded).decode()}",
    )
