"""What the Tab key offers: names of shipped recipes, comparisons, suites and evaluators. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from ssl_vit import recipe


def stages(incomplete: str) -> list[str]:
    """Recipes for `train`."""
    return _recipes(incomplete, comparisons=False)


def comparisons(incomplete: str) -> list[str]:
    """Recipes for `compare`."""
    return _recipes(incomplete, comparisons=True)


def suites(incomplete: str) -> list[str]:
    return [path.stem for path in sorted((recipe.recipes_folder() / "suites").glob(f"{incomplete}*.yaml"))]


def evaluators(incomplete: str) -> list[str]:
    """Read as text: importing them takes seconds."""
    files = sorted((Path(__file__).parent.parent / "evaluators").glob(f"{incomplete}*.py"))
    return [file.stem for file in files if re.search(r"^class Evaluator\((?!ABC)", file.read_text(), re.MULTILINE)]


def _recipes(incomplete: str, *, comparisons: bool) -> list[str]:
    found = [(name, path) for name, path in recipe.shipped().items() if name.startswith(incomplete)]
    return [name for name, path in found if ("arms" in recipe.read(path)) == comparisons]
