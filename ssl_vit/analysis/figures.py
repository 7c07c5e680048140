"""The figures of a trained ViT, drawn as the paper's figures 6 and 7, by matplotlib's object interface (no pyplot)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from scipy.ndimage import zoom

from ssl_vit.analysis.pages import figure_style
from ssl_vit.results import class_name

_BLUE, _INK, _SOFT = "#0072b2", "#1b1f23", "#6b737b"
_STYLE = figure_style(_INK)
_DPI = 160
_WIDTH = 8.0  # inches: the width of every figure that fills the page
_TILES = 14  # most tiles of the position grid on a side; the paper's ViT-B/16 has 14


def filters(components: np.ndarray) -> Figure:
    """Filters (K, C, P, P) as patches, 7 per row; each scaled by itself so that zero is mid gray."""
    peak = np.abs(components).max(axis=(1, 2, 3), keepdims=True)
    tiles = (components / np.maximum(peak, 1e-12) + 1) / 2
    return sheet({"": np.moveaxis(tiles, 1, -1)}, 7)


def sheet(columns: dict[str, np.ndarray], across: int) -> Figure:
    """Pictures under headings: each column (N, H, W, C) is uint8 or 0..1; `across` groups of all columns per row.

    Columns of smaller pictures, such as one value per patch, are enlarged to the first column's size.
    """
    pictures = [_color(column) for column in columns.values()]
    number, height, width, _ = pictures[0].shape
    across, gap = min(across, number), max(1, width // 12)
    step_y, step_x, group = height + gap, width + gap, len(pictures) * (width + gap) + gap
    canvas = np.ones((-(-number // across) * step_y - gap, across * group - 2 * gap, 3))
    inches = min(_WIDTH, 2.0 * across * len(pictures))
    top = 0.25 if any(columns) else 0.0  # inches, for the headings
    tall = inches * canvas.shape[0] / canvas.shape[1] + top
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(inches, tall))
        axes = figure.add_axes((0, 0, 1, 1 - top / tall))
        axes.set_axis_off()
        for column, (heading, shown) in enumerate(zip(columns, pictures, strict=True)):
            shown = shown.repeat(height // shown.shape[1], axis=1).repeat(width // shown.shape[2], axis=2)
            missing = height - shown.shape[1], width - shown.shape[2]  # pixels that are in no patch
            shown = np.pad(shown, ((0, 0), (0, missing[0]), (0, missing[1]), (0, 0)), mode="edge")
            for n, picture in enumerate(shown):
                y, x = n // across * step_y, n % across * group + column * step_x
                canvas[y : y + height, x : x + width] = picture
                if n < across:
                    axes.text(x + width / 2, -gap, heading, ha="center", va="bottom", fontsize=9.5)
        axes.imshow(canvas, aspect="auto", interpolation="nearest")
        return figure


def _color(pictures: np.ndarray) -> np.ndarray:
    """(N, H, W, C) uint8 or 0..1 -> (N, H, W, 3) in 0..1: the first three channels, or the first as gray."""
    chosen = pictures[..., :3] if pictures.shape[-1] >= 3 else pictures[..., :1].repeat(3, axis=-1)
    return np.asarray(chosen / 255 if chosen.dtype == np.uint8 else chosen)


def attention(images: np.ndarray, weights: np.ndarray) -> Figure:
    """Images (N, H, W, C) uint8, as bright as the attention there, and its weights (N, rows, columns) by patch; each
    image's largest weight is full brightness."""
    shares = weights / np.maximum(weights.max(axis=(1, 2), keepdims=True), 1e-12)
    factors = (1, images.shape[1] / weights.shape[1], images.shape[2] / weights.shape[2])
    bright = zoom(shares, factors, order=1, mode="nearest", grid_mode=True).clip(0, 1)
    heat = mpl.colormaps["inferno"](shares)[..., :3]
    return sheet({"input": images, "attention": images / 255 * bright[..., None], "by patch": heat}, 2)


def position_similarity(similarity: np.ndarray) -> Figure:
    """A grid of grids: at each patch's place, its similarity (-1..1) with all patches. Of more than 14 rows or columns
    of patches, evenly spaced ones have a tile."""
    rows, columns, *_ = similarity.shape
    shown = [np.arange(0, n, -(-n // _TILES)) for n in (rows, columns)]
    gap = max(1, round(min(rows, columns) / 7))
    tiles = np.full((len(shown[0]), rows + gap, len(shown[1]), columns + gap), np.nan)
    tiles[:, :rows, :, :columns] = similarity[np.ix_(*shown)].transpose(0, 2, 1, 3)
    canvas = tiles.reshape(tiles.shape[0] * tiles.shape[1], -1)[:-gap, :-gap]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 0.6 + 4.4 * min(2.0, canvas.shape[0] / canvas.shape[1])), layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(canvas, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
        axes.spines[:].set_visible(False)
        for axis, places, side in ((axes.yaxis, shown[0], rows), (axes.xaxis, shown[1], columns)):
            numbered = np.arange(0, len(places), 1 if len(places) <= 8 else 2)
            axis.set_ticks(numbered * (side + gap) + (side - 1) / 2, [str(n + 1) for n in places[numbered]])
        axes.tick_params(length=0)
        axes.set(xlabel="input patch column", ylabel="input patch row")
        bar = figure.colorbar(image, ax=axes, ticks=(-1, 0, 1), shrink=0.8, aspect=24, pad=0.02)
        bar.set_label("cosine similarity")
        bar.outline.set_visible(False)
        return figure


def attention_distance(distances: np.ndarray, uniform: float) -> Figure:
    """Distances in pixels (layers, heads) over the network's depth, one dot per head; dashed: uniform attention."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.8), layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(uniform, color=_SOFT, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_title("dashed: attention spread evenly over the image", loc="right", fontsize=9, color=_SOFT)
        layers = np.arange(len(distances))
        axes.plot(layers, distances.mean(1), color=_BLUE, linewidth=1.5, alpha=0.35, zorder=1)
        axes.scatter(
            layers.repeat(distances.shape[1]), distances.ravel(), s=34, color=_BLUE, alpha=0.75, linewidths=0, zorder=2
        )
        axes.set(ylim=(0, 1.12 * max(uniform, float(distances.max()))), xlim=(-0.5, len(layers) - 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.grid(True, color=_INK, alpha=0.12, linewidth=0.8)
        axes.set(xlabel="network depth (layer)", ylabel="mean attention distance (pixels)")
        return figure


def embedding_map(maps: dict[str, np.ndarray], labels: np.ndarray, names: Sequence[str]) -> Figure:
    """Images as points, a panel per method; the ten most frequent classes in colors, others and unlabeled in gray.

    maps: coordinates by method, (N, 2). labels: int64 (N,), -1: none. names: class names in label order; may be empty.
    """
    classes, counts = np.unique(labels[labels >= 0], return_counts=True)
    shown = np.sort(classes[np.argsort(-counts, kind="stable")[:10]])
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 4.6 if len(maps) > 1 else 6.0), layout="constrained")
        handles = {}
        for axes, (method, points) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
            others = ~np.isin(labels, shown)
            if others.any():
                name = "other classes" if len(shown) else "no labels"
                handles[name] = axes.scatter(*points[others].T, s=14, color="#bbbbbb", linewidths=0)
            for label, color in zip(shown.tolist(), mpl.colormaps["tab10"](range(10)), strict=False):
                found = axes.scatter(*points[labels == label].T, s=14, color=color, linewidths=0)
                handles[class_name(names, label)] = found
            axes.set(xticks=(), yticks=(), title=method)
        # Given explicitly: matplotlib's own list omits names that begin with "_".
        figure.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False, markerscale=1.6)
        return figure


def save_png(figure: Figure, path: Path) -> np.ndarray:
    """Write the figure as PNG (its folder is made); returns the pixels, uint8 (H, W, 3)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, pil_kwargs={"optimize": True})
    return np.asarray(Image.open(path).convert("RGB"))
