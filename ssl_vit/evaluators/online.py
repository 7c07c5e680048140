"""The few-shot probe that runs during training: does the representation still get better?"""

from __future__ import annotations

import numpy as np
from torch import nn

from ssl_vit.data import DataConfig
from ssl_vit.data.shards import ShardSet
from ssl_vit.evaluators.features import EvalContext, Features, ImageSet, extract
from ssl_vit.evaluators.few_shot import Ridge
from ssl_vit.evaluators.labels import choose_labeled, labeled_classes, labels_of
from ssl_vit.interfaces import UserError
from ssl_vit.models.encoder import Encoder
from ssl_vit.records import SkippedSample
from ssl_vit.training import ProbeConfig
from ssl_vit.training.distributed import Engine


class OnlineProbe:
    """Few-shot accuracy on held-out images of the same shards: `labels_per_class` images to fit to, others to score."""

    def __init__(
        self, config: ProbeConfig, shards: ShardSet, data: DataConfig, encoder: Encoder, accelerator: Engine
    ) -> None:
        """Raises UserError where the shards have too few labeled images, and for a pooling that the encoder lacks."""
        encoder.check_pooling(config.pooling)
        self.config = config
        self.context = EvalContext(encoder, shards, shards, data, accelerator)
        self.reported: set[tuple[str, str]] = set()
        labels = labels_of(shards)
        classes = labeled_classes(shards)
        held_out = max(1, config.images // classes)
        self.labeled = choose_labeled(labels, config.labels_per_class, 0)
        self.scored = np.setdiff1d(choose_labeled(labels, config.labels_per_class + held_out, 0), self.labeled)
        if not len(self.scored) or classes < 2:
            raise UserError(
                f"probe: {shards.spec} has {classes} class(es) and no labeled image beyond "
                f"labels_per_class={config.labels_per_class} of each: lower it, or name other shards by probe.data"
            )

    def __call__(self, objective: nn.Module) -> float:
        """Accuracy, 0..1; the objective is left in evaluation mode. Every process must call it."""
        objective.eval()
        few = self._features(objective, self.labeled).of(self.labeled)
        scored = self._features(objective, self.scored)
        predicted = Ridge(few.vectors, few.labels).predict(scored.vectors, self.config.l2)
        return float((predicted == scored.labels).mean())

    def skipped(self) -> list[SkippedSample]:
        """The samples that could not be used, each reported once and by the main process."""
        fresh = [skip for skip in self.context.skipped if (skip.shard, skip.key) not in self.reported]
        self.reported |= {(skip.shard, skip.key) for skip in fresh}
        self.context.skipped.clear()
        return fresh if self.context.accelerator.is_main_process else []

    def _features(self, objective: nn.Module, images: np.ndarray) -> Features:
        encoder, pooling = objective.encoder, self.config.pooling
        assert isinstance(encoder, Encoder)
        wanted = ImageSet(self.context, "trained", "train", images)
        return extract(wanted, lambda batch: encoder.represent(batch.images, pooling))
