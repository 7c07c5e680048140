"""Few labels and many unlabeled images: which arm pretrains on what."""

from __future__ import annotations

from dataclasses import replace

from ssl_vit.comparison.config import Study
from ssl_vit.comparison.design import needs_labels
from ssl_vit.data import RemoteConfig, mixture
from ssl_vit.data.shards import open_shards


def with_labels(study: Study, remote: RemoteConfig) -> Study:
    """Where `data.pretrain` has no labels: the arms that need labels train on `data.train`, the others on both."""
    data, found = study.comparison.data, dict(study.recipes)
    if data.pretrain is None or data.train is None or open_shards(data.pretrain, remote).labeled:
        return study
    both = mixture([data.pretrain, data.train])
    for arm, settings in study.recipes.items():
        if settings.data.train == data.pretrain:  # no override of the arm says otherwise
            train = data.train if needs_labels(settings) else both
            found[arm] = settings.model_copy(update={"data": settings.data.model_copy(update={"train": train})})
    return replace(study, recipes=found)
