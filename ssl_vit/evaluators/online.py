"""The few-shot probe that runs during training: does the representation still get better?"""

from __future__ import annotations

import numpy as np
from accelerate import Accelerator
from torch import nn

from ssl_vit.data import DataConfig
from ssl_vit.data.samples import Skip
from ssl_vit.data.shards import ShardSet
from ssl_vit.evaluators import ProbeConfig
from ssl_vit.evaluators.features import Features, Task, extract
from ssl_vit.evaluators.few_shot import fit_all
from ssl_vit.evaluators.labels import choose_shots, labels_of
from ssl_vit.interfaces import UserError
from ssl_vit.models.encoder import Encoder


class OnlineProbe:
    """Few-shot accuracy on held-out images of the same shards: `shots` images a class to fit on, others to score on."""

    def __init__(
        self, config: ProbeConfig, shards: ShardSet, data: DataConfig, encoder: Encoder, accelerator: Accelerator
    ) -> None:
        """Raises UserError where the shards have too few labeled images."""
        self.config = config
        self.task = Task(encoder, encoder, shards, shards, data, accelerator, workers=data.workers)
        self.told: set[tuple[str, str]] = set()
        labels = labels_of(shards)
        classes = len(np.unique(labels[labels >= 0]))
        held_out = max(1, config.images // classes)
        self.shots = choose_shots(labels, config.shots, seed=0)
        self.scored = np.setdiff1d(choose_shots(labels, config.shots + held_out, seed=0), self.shots)
        if not len(self.scored) or classes < 2:
            raise UserError(
                f"probe: {shards.spec} has {classes} class(es) and no labeled image beyond shots={config.shots} of "
                "each: lower probe.shots, or name other shards by probe.data"
            )

    def __call__(self, objective: nn.Module) -> float:
        """Accuracy, 0..1; the objective is left in evaluation mode. Every process must call it."""
        objective.eval()
        few, scored = self._features(objective, self.shots), self._features(objective, self.scored)
        c = self.config
        few = few.of(self.shots)  # class by class
        (fit,) = fit_all({(c.shots, 0): (few.vectors, few.labels)}, scored.vectors, l2=(c.l2,)).values()
        return float((fit.predicted[c.l2] == scored.labels).mean())

    def skipped(self) -> list[Skip]:
        """This process's samples that could not be used, each told once."""
        fresh = [skip for skip in self.task.skipped if (skip.shard, skip.key) not in self.told]
        self.told |= {(skip.shard, skip.key) for skip in fresh}
        self.task.skipped.clear()
        return fresh

    def _features(self, objective: nn.Module, images: np.ndarray) -> Features:
        encoder, pooling = objective.encoder, self.config.pooling
        assert isinstance(encoder, Encoder)
        return extract(self.task, self.task.train, lambda pixels: encoder.represent(pixels, pooling), None, images)
