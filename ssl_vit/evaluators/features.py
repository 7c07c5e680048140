"""Frozen features, extracted once: of the trained backbone, of an untrained one, and the raw pixels beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ssl_vit.data import DataConfig
from ssl_vit.data.decode import check_channels
from ssl_vit.data.evaluation import EvaluationStream, evaluation_batches
from ssl_vit.data.samples import Skip, View
from ssl_vit.data.shards import ShardSet
from ssl_vit.data.transforms import evaluation_transform
from ssl_vit.evaluators.labels import choose_shots
from ssl_vit.interfaces import Batch, UserError
from ssl_vit.models.backbone import Backbone, Pooling

REFERENCES = ("untrained", "pixels")


@dataclass(frozen=True)
class Features:
    """vectors: float32 (n, d). labels: int64 (n,). Rows are in the shard set's order."""

    vectors: np.ndarray
    labels: np.ndarray


@dataclass
class Task:
    """What an evaluator judges: one backbone on labelled train and test shards.

    trained: the backbone. untrained: the same architecture, freshly initialised: the reference row.
    data: image preparation (`evaluation_resize`). batch_size: images in a forward pass of one process.
    weights: where the trained backbone came from (None: it is freshly initialised itself).
    """

    trained: Backbone
    untrained: Backbone
    train: ShardSet
    test: ShardSet
    data: DataConfig
    accelerator: Accelerator
    weights: str | None = None
    batch_size: int = 256
    workers: int = 0
    skipped: list[Skip] = field(default_factory=list)
    _features: dict[tuple[str, str, str], Features] = field(default_factory=dict)

    def features(self, source: str, split: str, pooling: Pooling) -> Features:
        """Features of `trained`, `untrained` or `pixels` on `train` or `test`; each is extracted once.

        Raises UserError where the shards carry no labels.
        """
        key = (source, split, "" if source == "pixels" else pooling)
        if key not in self._features:
            shards: ShardSet = getattr(self, split)
            if source == "pixels":
                parts = pixels(self, shards)
            else:
                parts = backbone_features(self, getattr(self, source), shards, pooling)
            self._features[key] = _gathered(self, parts, shards)
        return self._features[key]

    def labelled_features(self, source: str, pooling: Pooling, labels_per_class: int | None, seed: int) -> Features:
        """Training features of `labels_per_class` images a class, chosen by `seed` as few_shot does (None: all)."""
        train = self.features(source, "train", pooling)
        if labels_per_class is None:
            return train
        chosen = choose_shots(train.labels, labels_per_class, seed)
        return Features(train.vectors[chosen], train.labels[chosen])

    def skipped_names(self) -> list[dict[str, str]]:
        """The samples left out so far, each once, as plain JSON."""
        once = {(skip.shard, skip.key): skip.reason for skip in self.skipped}
        return [{"shard": shard, "key": key, "reason": reason} for (shard, key), reason in once.items()]

    def sources(self) -> tuple[str, ...]:
        """The rows of every evaluator on features: the judged backbone, then the two references."""
        return ("trained", *REFERENCES)


Part = tuple[torch.Tensor, Batch]


def evaluation_stream(
    task: Task, shards: ShardSet, indices: np.ndarray | None = None, image_size: int | None = None
) -> EvaluationStream:
    """This rank's part of the labelled shards, prepared as the task says (each sample once over all ranks).

    indices: global indices of the images wanted (None: all). image_size: pixels (None: the trained backbone's).
    """
    channels = task.trained.channels
    check_channels(channels)
    view = View(
        evaluation_transform(image_size or task.trained.image_size, task.data),
        channels,
        len(shards.classes) if shards.classes else None,
        needs_labels=True,
    )
    ranks = task.accelerator.num_processes
    return EvaluationStream(
        shards,
        view,
        batch_size=max(1, min(task.batch_size, -(-shards.samples // ranks))),
        rank=task.accelerator.process_index,
        ranks=ranks,
        workers=task.workers,
        indices=indices,
    )


def _batches(task: Task, shards: ShardSet) -> Iterator[Batch]:
    for batch, chunk in evaluation_batches(evaluation_stream(task, shards), task.accelerator.device):
        task.skipped += chunk.skipped
        yield batch


@torch.inference_mode()
def backbone_features(task: Task, backbone: Backbone, shards: ShardSet, pooling: Pooling) -> list[Part]:
    """This rank's pooled outputs, float32 (B, d) a batch, from the backbone in evaluation mode."""
    backbone.to(task.accelerator.device).eval()
    parts = []
    for batch in _batches(task, shards):
        with task.accelerator.autocast():
            outputs = backbone.pool(backbone(batch.images), pooling)
        parts.append((outputs.float().cpu(), batch))
    return parts


def pixels(task: Task, shards: ShardSet) -> list[Part]:
    """This rank's raw pixels, scaled to [-1, 1], float32 (B, C * H * W) a batch."""
    return [(batch.images.flatten(1).float().cpu() / 127.5 - 1, batch) for batch in _batches(task, shards)]


def _gathered(task: Task, parts: list[Part], shards: ShardSet) -> Features:
    """All ranks' rows, padding dropped, in index order: the same arrays on every rank."""
    valid = torch.cat([batch.valid.cpu() for _, batch in parts])
    own = (
        torch.cat([vectors for vectors, _ in parts])[valid].numpy(),
        torch.cat([batch.labels.cpu() for _, batch in parts])[valid].numpy(),
        torch.cat([batch.indices.cpu() for _, batch in parts])[valid].numpy(),
    )
    everyone = gather_object([own])
    vectors, labels, indices = (np.concatenate([rank[n] for rank in everyone]) for n in range(3))
    if len(labels) == 0:
        raise UserError(f"{shards.spec}: no sample there has a readable image and a label (.cls)")
    order = np.argsort(indices)
    return Features(vectors[order], labels[order])
