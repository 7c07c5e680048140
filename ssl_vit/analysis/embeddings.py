"""The embedding of every image of a shard set."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pandas as pd
import torch
from accelerate import Accelerator

from ssl_vit.data import DataConfig
from ssl_vit.data.evaluation import EvaluationStream, evaluation_batches
from ssl_vit.data.images import check_channels, evaluation_transform
from ssl_vit.data.samples import Preprocess, Skip
from ssl_vit.data.shards import ShardSet
from ssl_vit.interfaces import UserError
from ssl_vit.models.encoder import Encoder, Pooling
from ssl_vit.training import distributed


@torch.no_grad()
def embed(
    encoder: Encoder,
    shards: ShardSet,
    preparation: DataConfig,
    accelerator: Accelerator,
    *,
    pooling: Pooling = "mean",
    batch_size: int = 256,
) -> pd.DataFrame:
    """Columns `key`, `label` (-1: none) and `embedding` (float32 (d,)) in the order of the shards, on every process.

    preparation: how images are prepared, and with how many workers. batch_size: images per process and forward pass.
    Raises UserError for a pooling that the encoder does not have and for shards without a readable image.
    """
    check_channels(encoder.channels)
    encoder.check_pooling(pooling)
    encoder.to(accelerator.device).eval()
    transform = evaluation_transform(encoder.image_size, preparation)
    ranks, classes = accelerator.num_processes, len(shards.classes) if shards.classes else None
    stream = EvaluationStream(
        shards,
        Preprocess(transform, encoder.channels, classes, reads_labels=True),
        batch_size=max(1, min(batch_size, -(-shards.samples // ranks))),
        rank=accelerator.process_index,
        ranks=ranks,
        workers=preparation.workers,
        worker_timeout=preparation.worker_timeout,
    )
    rows, skipped = list[tuple[int, str, int, np.ndarray]](), list[Skip]()
    for batch, chunk in evaluation_batches(stream, accelerator.device):
        with accelerator.autocast():
            vectors = encoder.represent(batch.images, pooling)
        valid = batch.valid.cpu()
        numbers = [tensor.cpu()[valid].tolist() for tensor in (batch.indices, batch.labels)]
        rows += zip(numbers[0], batch.keys, numbers[1], vectors.float().cpu()[valid].numpy(), strict=True)
        skipped += chunk.skipped
    everyone = distributed.gather((rows, skipped))
    rows = [row for rank in everyone for row in rank[0]]
    if not rows:
        raise UserError(f"{shards.spec}: none of its {shards.samples} image(s) can be read")
    frame = pd.DataFrame(
        [row[1:] for row in sorted(rows, key=lambda row: row[0])], columns=["key", "label", "embedding"]
    )
    frame.attrs["skipped"] = [asdict(skip) for rank in everyone for skip in rank[1]]
    return frame
