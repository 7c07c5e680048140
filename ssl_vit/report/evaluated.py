"""How the encoder of a run was evaluated: what its export repeats."""

from __future__ import annotations

from pathlib import Path

from ssl_vit.data import DataConfig
from ssl_vit.models.exchange.exports import Use
from ssl_vit.recipe import run_recipe
from ssl_vit.results import evaluations


def evaluated(run: Path) -> Use:
    """The resize of the run's recipe, and the pooling of its last evaluation, else of its objective.

    run: a run directory, a checkpoint or a weights folder.
    """
    recipe, poolings = run_recipe(run), []
    for one in sorted(evaluations(run)[0].values(), key=lambda one: str(one.about.get("saved"))):
        settings = one.about["settings"]
        poolings.append(settings.get("pooling") or settings.get("head", {}).get("pooling"))
    last = next(filter(None, reversed(poolings)), getattr(recipe.objective, "pooling", None) if recipe else None)
    return Use((recipe.data if recipe else DataConfig(train="")).evaluation_resize, last)
