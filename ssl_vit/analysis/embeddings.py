"""The embedding of every image of a shard set."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ssl_vit.data import DataConfig
from ssl_vit.data.evaluation import evaluation_batches, evaluation_stream
from ssl_vit.data.samples import Skip
from ssl_vit.data.shards import open_shards
from ssl_vit.interfaces import UserError
from ssl_vit.models import factory
from ssl_vit.models.encoder import Pooling
from ssl_vit.recipe import run_recipe
from ssl_vit.training.distributed import gather, make_accelerator


@torch.no_grad()
def embed(
    run: Path | str,
    shards: str,
    *,
    pooling: Pooling = "mean",
    batch_size: int = 256,
    workers: int | None = None,
) -> pd.DataFrame:
    """The embedding of every readable image of the shards: columns `key`, `label` (-1: none) and `embedding`.

    run: a run directory, a checkpoint or a weights folder; images are prepared as its recipe evaluates.
    shards: labels are not needed.
    pooling: the class `token`, the `mean` of the patches, `both` side by side, or all `patches` side by side.
    batch_size: images in a forward pass of one process.
    workers: processes that read images; None: as the recipe says.

    Rows are in the order of the shards, on every process; embeddings are float32 (d,). `frame.attrs["skipped"]` lists
    unreadable samples. Raises UserError for wrong input.
    """
    encoder, settings = factory.load(run), run_recipe(Path(run))
    encoder.check_pooling(pooling)
    preparation = settings.data if settings else DataConfig(train=shards)
    if workers is not None:
        preparation = preparation.model_copy(update={"workers": workers})
    accelerator = make_accelerator(settings.training.precision if settings else "fp32")
    encoder.to(accelerator.device).eval()
    stream = evaluation_stream(
        open_shards(shards, preparation.remote),
        preparation,
        encoder.image_size,
        encoder.channels,
        batch_size=batch_size,
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
    )
    rows, skipped = list[tuple[int, str, int, np.ndarray]](), list[Skip]()
    for batch, chunk in evaluation_batches(stream, accelerator.device):
        with accelerator.autocast():
            vectors = encoder.represent(batch.images, pooling)
        valid = batch.valid.cpu()
        numbers = [tensor.cpu()[valid].tolist() for tensor in (batch.indices, batch.labels)]
        rows += zip(numbers[0], batch.keys, numbers[1], vectors.float().cpu()[valid].numpy(), strict=True)
        skipped += chunk.skipped
    everyone = gather((rows, skipped))
    rows = [row for rank in everyone for row in rank[0]]
    if not rows:
        raise UserError(f"{shards}: none of its {stream.shards.samples} image(s) can be read")
    frame = pd.DataFrame(
        [row[1:] for row in sorted(rows, key=lambda row: row[0])], columns=["key", "label", "embedding"]
    )
    frame.attrs["skipped"] = [asdict(skip) for rank in everyone for skip in rank[1]]
    return frame
