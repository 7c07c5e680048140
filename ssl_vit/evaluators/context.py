"""What an evaluator works on: an encoder, and labeled shards to train and test on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from ssl_vit.data import DataConfig
from ssl_vit.data.samples import Skip
from ssl_vit.data.shards import ShardSet
from ssl_vit.evaluators import Metric
from ssl_vit.evaluators.labels import labels_of
from ssl_vit.interfaces import Config, UserError
from ssl_vit.models.encoder import Encoder
from ssl_vit.training.distributed import Engine


def silent(text: str) -> None:
    """`say` of a process that is not the main one."""


@dataclass
class EvalContext:
    """An encoder to evaluate, with labeled train and test shards.

    trained: the encoder. untrained: the same architecture, freshly initialized: the reference row.
    data: image preparation (`evaluation_resize`) and loader workers. batch_size: images in a forward pass of a process.
    weights: where the trained encoder came from (None: it is freshly initialized itself).
    cache: folder that keeps extracted features (None: none is kept); it may be deleted at any time.
    objective: what the weights' run trained them with (None: unknown). say: prints progress.
    metric: the number that counts on these sets, and that settings are selected by.
    skipped: samples that this process could not use. features: those extracted so far, see `features.read`.
    """

    trained: Encoder
    untrained: Encoder
    train: ShardSet
    test: ShardSet
    data: DataConfig
    accelerator: Engine
    weights: str | None = None
    batch_size: int = 256
    cache: Path | None = None
    objective: Config | None = None
    say: Callable[[str], None] = silent
    metric: Metric = "accuracy"
    skipped: list[Skip] = field(default_factory=list)
    features: dict[object, object] = field(default_factory=dict)

    @cached_property
    def train_labels(self) -> np.ndarray:
        """Every training image's class, int64 (samples,); -1: no label. Raises UserError where there is one class."""
        labels = labels_of(self.train)
        if len(np.unique(labels[labels >= 0])) < 2:
            raise UserError(f"{self.train.spec}: all labeled images there are of one class")
        return labels

    @property
    def classes(self) -> int:
        """How many classes the shards name; where neither set names any, as many as the training labels say."""
        named = max(len(self.train.classes or ()), len(self.test.classes or ()))
        return named or int(self.train_labels.max()) + 1

    def skipped_names(self) -> list[dict[str, str]]:
        """The samples skipped so far, each once, as plain JSON."""
        once = {(skip.shard, skip.key): skip.reason for skip in self.skipped}
        return [{"shard": shard, "key": key, "reason": reason} for (shard, key), reason in once.items()]
