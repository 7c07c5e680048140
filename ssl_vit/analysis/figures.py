"""The figures of a trained ViT, drawn as the paper's figures 6 and 7, by matplotlib's object interface (no pyplot)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image
from scipy.ndimage import zoom

from ssl_vit.analysis.pages import figure_style

_BLUE, _INK, _SOFT, _FRAME = "#0072b2", "#1b1f23", "#6b737b", "#b5bcc3"
_STYLE = figure_style(_INK)
_DPI = 160
_WIDTH = 8.0  # inches: the width of every figure that fills the page
_TILES = 14  # most tiles of the position grid on a side; the paper's ViT-B/16 has 14


def filters(components: np.ndarray) -> Figure:
    """Filters (K, C, P, P) as patches, 7 in a row; each scaled alone so that zero is mid gray."""
    peak = np.abs(components).max(axis=(1, 2, 3), keepdims=True)
    tiles = _color((components / np.maximum(peak, 1e-12) + 1) / 2)
    columns, side, gap = min(7, len(tiles)), 0.68, 0.06  # inches
    step = side + gap
    with mpl.rc_context(_STYLE):
        figure, axes = _inches(columns * step - gap, -(-len(tiles) // columns) * step - gap)
        for place, tile in enumerate(tiles):
            row, column = divmod(place, columns)
            x, y = column * step, row * step
            axes.imshow(tile, extent=(x, x + side, y + side, y), aspect="auto", interpolation="nearest")
            axes.add_patch(Rectangle((x, y), side, side, fill=False, color=_FRAME, linewidth=0.8))
        return figure


def _inches(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure all of axes without lines, whose units are inches from the upper left corner."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def position_similarity(similarity: np.ndarray) -> Figure:
    """A grid of grids: at each patch's place, its similarity (-1..1) with all patches. Of more than 14 rows or columns
    of patches, evenly spaced ones have a tile."""
    rows, columns, *_ = similarity.shape
    shown_rows, shown_columns = (np.arange(0, n, -(-n // _TILES)) for n in (rows, columns))
    gap = max(1, round(min(rows, columns) / 7))
    high, wide = rows + gap, columns + gap
    canvas = np.full((len(shown_rows) * high - gap, len(shown_columns) * wide - gap), np.nan)
    for y, row in enumerate(shown_rows):
        for x, column in enumerate(shown_columns):
            canvas[y * high : y * high + rows, x * wide : x * wide + columns] = similarity[row, column]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 0.6 + 4.4 * min(2.0, canvas.shape[0] / canvas.shape[1])), layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(canvas, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
        axes.spines[:].set_visible(False)
        axes.set_xticks(
            _every(len(shown_columns)) * wide + (columns - 1) / 2, shown_columns[_every(len(shown_columns))] + 1
        )
        axes.set_yticks(_every(len(shown_rows)) * high + (rows - 1) / 2, shown_rows[_every(len(shown_rows))] + 1)
        axes.tick_params(length=0)
        axes.set_xlabel("input patch column")
        axes.set_ylabel("input patch row")
        bar = figure.colorbar(image, ax=axes, ticks=(-1, 0, 1), shrink=0.8, aspect=24, pad=0.02)
        bar.set_label("cosine similarity")
        bar.outline.set_visible(False)
        return figure


def _every(count: int) -> np.ndarray:
    """The tiles to number: all of up to 8, every second of more."""
    return np.arange(0, count, 1 if count <= 8 else 2)


def attention_distance(distances: np.ndarray, layers: Sequence[int], uniform: float) -> Figure:
    """Distances in pixels (layers, heads) over the network's depth, one dot a head; dashed: evenly spread attention."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.8))
        axes = figure.add_axes((0.11, 0.13, 0.86, 0.79))
        axes.axhline(uniform, color=_SOFT, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_title("dashed: attention spread evenly over the image", loc="right", fontsize=9, color=_SOFT)
        axes.plot(layers, distances.mean(1), color=_BLUE, linewidth=1.5, alpha=0.35, zorder=1)
        depth = np.repeat(np.asarray(layers), distances.shape[1])
        axes.scatter(depth, distances.ravel(), s=34, color=_BLUE, alpha=0.75, linewidths=0, zorder=2)
        axes.set_ylim(0, 1.12 * max(uniform, float(distances.max())))
        axes.set_xlim(min(layers) - 0.5, max(layers) + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.grid(True, color=_INK, alpha=0.12, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("network depth (layer)")
        axes.set_ylabel("mean attention distance (pixels)")
        return figure


def sheet(columns: dict[str, np.ndarray], across: int) -> Figure:
    """Pictures under headings: each column (N, H, W, C) is uint8 or 0..1; `across` groups of all columns in a row."""
    pictures = [_color(np.moveaxis(column, -1, 1)) for column in columns.values()]
    number, height, width = len(pictures[0]), *pictures[0].shape[1:3]
    across = min(across, number)
    gap, between, top = 0.05, 0.22, 0.24  # inches
    side = (_WIDTH - between * (across - 1) - gap * across * (len(pictures) - 1)) / (across * len(pictures))
    side = min(side, 2.0)
    tall = side * height / width
    group = len(pictures) * (side + gap) - gap + between
    with mpl.rc_context(_STYLE):
        figure, axes = _inches(across * group - between, top + -(-number // across) * (tall + gap) - gap)
        for place in range(number):
            for column, (heading, shown) in enumerate(zip(columns, pictures, strict=True)):
                x = place % across * group + column * (side + gap)
                y = top + place // across * (tall + gap)
                axes.imshow(shown[place], extent=(x, x + side, y + tall, y), aspect="auto")
                if place < across:
                    axes.text(x + side / 2, top / 2, heading, ha="center", va="center", fontsize=9.5)
        return figure


def attention(images: np.ndarray, weights: np.ndarray) -> Figure:
    """Images (N, H, W, C) uint8, as bright as the attention there, and its weights (N, rows, columns) by patch; each
    image's largest weight is full brightness."""
    peak = np.maximum(weights.max(axis=(1, 2), keepdims=True), 1e-12)
    shares = weights / peak
    factors = (1, images.shape[1] / weights.shape[1], images.shape[2] / weights.shape[2])
    bright = zoom(shares, factors, order=1, mode="nearest", grid_mode=True).clip(0, 1)
    heat = mpl.colormaps["inferno"](shares)[..., :3]
    return sheet({"input": images, "attention": images / 255 * bright[..., None], "by patch": heat}, 2)


def _color(pictures_NCHW: np.ndarray) -> np.ndarray:
    """(N, C, H, W) uint8 or 0..1 -> (N, H, W, 3) in 0..1: the first three channels, or the first as gray."""
    chosen = pictures_NCHW[:, :3] if pictures_NCHW.shape[1] >= 3 else pictures_NCHW[:, :1].repeat(3, axis=1)
    return np.moveaxis(chosen / 255 if chosen.dtype == np.uint8 else chosen, 1, -1)


def save_png(figure: Figure, path: Path) -> np.ndarray:
    """Write the figure as PNG (its folder is made); returns the pixels, uint8 (H, W, 3)."""
    figure.set_dpi(_DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, optimize=True)
    return pixels


def save_svg(figure: Figure, path: Path) -> None:
    """Write the figure as SVG, letters as text; the same figure gives the same bytes."""
    with mpl.rc_context(_STYLE):
        figure.savefig(path, dpi=_DPI, metadata=dict.fromkeys(("Date", "Creator")))
