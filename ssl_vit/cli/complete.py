"""What the Tab key offers: names of shipped recipes, comparisons, suites and evaluators. Torch-free."""

from __future__ import annotations

from pathlib import Path

from ssl_vit import recipe
from ssl_vit.interfaces import UserError


def stages(incomplete: str) -> list[str]:
    """Recipes for `train`."""
    return [name for name in recipe.shipped() if name.startswith(incomplete) and not _is_comparison(name)]


def comparisons(incomplete: str) -> list[str]:
    """Recipes for `compare`."""
    return [name for name in recipe.shipped() if name.startswith(incomplete) and _is_comparison(name)]


def suites(incomplete: str) -> list[str]:
    return [path.stem for path in sorted((recipe.recipes_folder() / "suites").glob(f"{incomplete}*.yaml"))]


def evaluators(incomplete: str) -> list[str]:
    """Read as text: importing them takes seconds."""
    room = Path(__file__).parent.parent / "evaluators"
    return [file.stem for file in sorted(room.glob(f"{incomplete}*.py")) if "\nclass Evaluator(" in file.read_text()]


def _is_comparison(name: str) -> bool:
    try:
        return "arms" in recipe.read(recipe.shipped()[name])
    except UserError:
        return False
