"""Figures of the report as SVG text, by matplotlib's object interface (no pyplot, no state between calls).

The same input gives the same bytes. Text and axes are drawn in `currentColor`, so that an SVG set inline takes the
page's text color (light and dark), and reads as black on its own. Letters stay text (no outlines).
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ssl_vit.analysis.pages import figure_style

# Okabe and Ito's color-blind-safe palette, less its yellow (invisible on white); a mid gray replaces its black, which
# would be invisible on a dark page. An arm keeps its color and its marker in every figure and table.
COLORS = {"ssl": "#0072b2", "scratch": "#d55e00", "supervised": "#009e73", "pixels": "#cc79a7", "untrained": "#808080"}
PALETTE = (*COLORS.values(), "#e69f00", "#56b4e9")
OTHERS = (*PALETTE[-2:], *PALETTE[:-2])
MARKERS = {"ssl": "o", "scratch": "s", "supervised": "^", "pixels": "D", "untrained": "v"}
OTHER_MARKERS = ("P", "X", "<", ">", "h", "p", "d")
# Matplotlib cannot draw in `currentColor`; it draws in this color, which no palette above uses, and we replace it.
INK = "#010203"
STYLE = figure_style(INK) | {"axes.titlelocation": "left"}


@dataclass
class Curve:
    """One line: y over x, with the interval low..high at each x where there is one (equal to y where there is not)."""

    label: str
    color: str
    marker: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def arm_styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """{arm: (color "#rrggbb", matplotlib marker)}: fixed for the known arms, in turn for all other names."""
    others = [name for name in names if name not in COLORS]
    styles = {name: (COLORS[name], MARKERS[name]) for name in names if name in COLORS}
    for place, name in enumerate(others):
        styles[name] = (OTHERS[place % len(OTHERS)], OTHER_MARKERS[place % len(OTHER_MARKERS)])
    return styles


def accuracy_curve(
    curves: Sequence[Curve],
    xlabel: str,
    ylabel: str,
    *,
    chance: float | None = None,
    zero: bool = False,
    levels: Sequence[tuple[str, str, float]] = (),
) -> str:
    """Curves over label budgets or another quantity (log x), labeled at their right end, with intervals as bands.

    chance: y of the dashed line "chance", drawn where it falls into the picture. zero: draw and include y = 0. levels:
    (label, color, y) of horizontal lines.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.8))  # as narrow as that, letters stay readable on a phone
        axes = figure.add_axes((0.12, 0.145, 0.56, 0.82))
        budgets = sorted({x for curve in curves for x in curve.x})
        values = [value for curve in curves for value in (*curve.low, *curve.high)] + ([0.0] if zero else [])
        values += [y for _, _, y in levels]
        margin = 0.06 * (max(values) - min(values)) or 1.0
        bottom, top = min(values) - margin, max(values) + margin
        if not zero:
            bottom, top = max(bottom, 0.0), min(top, 100.0)
        axes.set_ylim(bottom, top)
        axes.set_xscale("log")
        pad = (budgets[-1] / budgets[0]) ** 0.05 if len(budgets) > 1 else 2.0
        axes.set_xlim(budgets[0] / pad, budgets[-1] * pad)
        axes.xaxis.set_major_locator(FixedLocator(_apart(budgets)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        axes.set_xlabel(f"{xlabel} (logarithmic)")
        axes.set_ylabel(ylabel)
        axes.yaxis.grid(True, color=INK, alpha=0.12, linewidth=0.8)
        axes.set_axisbelow(True)
        for curve in curves:
            _draw(axes, curve)
        ends = list(curves)
        for label, color, y in levels:
            axes.axhline(y, color=color, linewidth=1.6, linestyle=(0, (5, 3)))
            ends.append(Curve(label, color, "", budgets[-1:], [y], [y], [y]))
        if zero:
            axes.axhline(0, color=INK, linewidth=1)
        if chance is not None and bottom <= chance <= top:
            axes.axhline(chance, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6)
            axes.annotate("chance", (budgets[0], chance), (0, 3), textcoords="offset points", fontsize=9)
        _label_ends(axes, ends, budgets[-1] * pad)
        return _svg(figure)


def _draw(axes: Axes, curve: Curve) -> None:
    if len(curve.x) > 1:
        axes.fill_between(curve.x, curve.low, curve.high, color=curve.color, alpha=0.16, linewidth=0)
    else:
        errors = [[curve.y[0] - curve.low[0]], [curve.high[0] - curve.y[0]]]
        axes.errorbar(curve.x, curve.y, yerr=errors, color=curve.color, capsize=4, linewidth=1.5)
    (line,) = axes.plot(curve.x, curve.y, color=curve.color, marker=curve.marker, markersize=6.5, linewidth=2.4)
    line.set(clip_on=False, zorder=3)


def _apart(budgets: Sequence[float]) -> list[float]:
    """The budgets to write under the axis: all, less those whose number would run into the one before."""
    least = (math.log(budgets[-1]) - math.log(budgets[0])) / 14
    kept: list[float] = []
    for budget in budgets:
        if not kept or math.log(budget) - math.log(kept[-1]) > least:
            kept.append(budget)
    return kept


def _label_ends(axes: Axes, curves: Sequence[Curve], right: float) -> None:
    """Write each curve's name beside its last point, moved up or down so that no two names touch."""
    bottom, top = axes.get_ylim()
    height = axes.bbox.height / axes.figure.dpi * 72  # points
    line = (top - bottom) * 13.2 / height  # one line of text, in data units
    lines = max(1, min(3, 12 // len(curves)))
    texts = {id(curve): "\n".join(textwrap.wrap(curve.label, 20, max_lines=lines, placeholder="…")) for curve in curves}
    places: list[tuple[Curve, float, float]] = []
    edge = -math.inf
    for curve in sorted(curves, key=lambda curve: curve.y[-1]):
        half = line * (texts[id(curve)].count("\n") + 1.5) / 2
        center = max(curve.y[-1], edge + half)
        edge = center + half
        places.append((curve, center, half))
    edge = max(top, bottom + sum(2 * half for _, _, half in places))
    for curve, wanted, half in reversed(places):
        center = min(wanted, edge - half)
        edge = center - half
        text = axes.annotate(
            texts[id(curve)],
            (curve.x[-1], curve.y[-1]),
            (1.06, (center - bottom) / (top - bottom)),
            textcoords=axes.transAxes,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": curve.color,
                "linewidth": 1.2,
                "relpos": (0, 0.5),
                "shrinkA": 3,
                "shrinkB": 0,
            },
        )
        text.set_parse_math(False)


def loss_curves(runs: Sequence[tuple[str, str, list[dict[str, Any]]]], *, points: int = 300) -> str | None:
    """Training losses of runs (label, color, metrics), over images seen, or over steps where a run did not log them.

    The thin dashed line is the loss of the best constant guess, where the run logged `constant_loss`. Long runs are
    shown as means of at most `points` equal pieces. None when no run logged a finite loss.
    """
    series = [(label, color, _latest(metrics)) for label, color, metrics in runs]
    series = [(label, color, records) for label, color, records in series if records]
    if not series:
        return None
    axis = "images_seen" if all("images_seen" in r for *_, records in series for r in records) else "step"
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 2.9))
        axes = figure.add_axes((0.12, 0.19, 0.56, 0.77))
        ends = []
        for label, color, records in series:
            x, y = (_pieces([float(r[key]) for r in records], points) for key in (axis, "loss"))
            axes.plot(x, y, color=color, linewidth=2, marker="o" if len(x) == 1 else None)
            ends.append(Curve(label, color, "", x, y, y, y))
            guesses = [r for r in records if _finite(r.get("constant_loss"))]
            if guesses:
                x, y = (_pieces([float(r[key]) for r in guesses], points) for key in (axis, "constant_loss"))
                shade = color if len(series) > 1 else INK
                axes.plot(x, y, color=shade, linewidth=1.2, linestyle=(0, (4, 3)), alpha=0.8)
                if len(series) == 1:
                    ends.append(Curve("best constant guess", shade, "", x, y, y, y))
        axes.margins(x=0.01, y=0.08)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        axes.set_xlabel("images seen" if axis == "images_seen" else "step")
        axes.set_ylabel("training loss")
        axes.yaxis.grid(True, color=INK, alpha=0.12, linewidth=0.8)
        _label_ends(axes, ends, max(x for end in ends for x in end.x))
        return _svg(figure)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _latest(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records with a finite loss in step order; of a step that a resumed run did again, the later record."""
    by_step = {record["step"]: record for record in metrics if "step" in record and _finite(record.get("loss"))}
    return [by_step[step] for step in sorted(by_step)]


def _pieces(values: list[float], points: int) -> list[float]:
    pieces = np.array_split(np.asarray(values, dtype=np.float64), min(points, len(values)))
    return [float(piece.mean()) for piece in pieces]


def _short(value: float, _: Any = None) -> str:
    if 1 <= abs(value) < 1e4:
        return f"{value:,.4g}"
    if abs(value) >= 1e9:
        return f"{value:.1e}".replace("e+", "e").replace(".0e", "e")
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        # Names may hold letters that matplotlib's font lacks; the browser draws the text with its own fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def embed(svg: str | None) -> dict[str, Any] | None:
    """An SVG of this file twice: `inline`, to be set into a page that sizes it, and `file`, whole, as a data URI that
    a reader can save for slides. None stays None.
    """
    if svg is None:
        return None
    encoded = svg.encode("utf-8", errors="replace")
    view_box = re.findall(r'viewBox="[^"]*"', svg)[0]
    # Matplotlib numbers its ids anew in each figure: without a prefix they would clash within one page.
    prefix = f"f{hashlib.sha256(encoded).hexdigest()[:8]}-"
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg.split(">", 1)[1])
    return {
        "inline": Markup(f'<svg role="img" {view_box}>{body}'),
        "file": f"data:image/svg+xml;base64,{base64.b64encode(encoded).decode()}",
    }
