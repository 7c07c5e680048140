"""Shared by the page of pictures and the report: templates that reject unknown names, and the style of figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template


def template(path: Path, *, html: bool = True) -> Template:
    """The Jinja template in a file; html: whether values are escaped. A name without a value raises UndefinedError."""
    environment = Environment(
        loader=FileSystemLoader(path.parent),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not html,
    )
    return environment.get_template(path.name)


def figure_style(ink: str) -> dict[Any, Any]:
    """matplotlib's settings: text and axes in the color `ink`, letters as text, the same bytes every time."""
    return {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "svg.hashsalt": "ssl_vit",
        "font.size": 10.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        **{key: ink for key in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")},
    }
