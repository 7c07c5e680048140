"""The embedding of every image of a shard set."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from ssl_vit.analysis import loaded
from ssl_vit.data.evaluation import evaluation_batches, evaluation_stream
from ssl_vit.data.samples import Skip
from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.files import atomic_file
from ssl_vit.interfaces import UserError
from ssl_vit.models.encoder import Pooling
from ssl_vit.progress import progress_bar
from ssl_vit.training.distributed import gather, make_accelerator


@torch.no_grad()
def embed(
    model: Path | nn.Module,
    shards: str,
    *,
    pooling: Pooling = "mean",
    batch_size: int = 256,
    workers: int | None = None,
) -> pd.DataFrame:
    """See `ssl_vit.embed`."""
    found = loaded.load(model)
    encoder, preparation, settings = found.encoder, found.data, found.settings
    encoder.check_pooling(pooling)
    if workers is not None:
        preparation = preparation.model_copy(update={"workers": workers})
    accelerator = make_accelerator(settings.training.precision if settings else "fp32")
    encoder.to(accelerator.device).eval()
    opened = open_shards(shards, preparation.remote)
    stream = evaluation_stream(
        opened,
        preparation,
        encoder.image_size,
        encoder.channels,
        batch_size=batch_size,
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
    )
    rows, skipped = list[tuple[int, str, int, np.ndarray]](), list[Skip]()
    with progress_bar("embedding", opened.samples) as advance:
        for batch, chunk in evaluation_batches(stream, accelerator.device):
            with accelerator.autocast():
                vectors = encoder.represent(batch.images, pooling)
            valid = batch.valid.cpu()
            numbers = [tensor.cpu()[valid].tolist() for tensor in (batch.indices, batch.labels)]
            rows += zip(numbers[0], batch.keys, numbers[1], vectors.float().cpu()[valid].numpy(), strict=True)
            skipped += chunk.skipped
            advance(len(numbers[0]) * accelerator.num_processes)
    everyone = gather((rows, skipped))
    rows = [row for rank in everyone for row in rank[0]]
    if not rows:
        raise UserError(f"{shards}: none of its {opened.samples} image(s) can be read")
    rows.sort(key=lambda row: row[0])
    frame = pd.DataFrame([row[1:] for row in rows], columns=["key", "label", "embedding"])
    if (names := file_names(opened)).any():
        frame.insert(1, "file", names[[row[0] for row in rows]])
    frame.attrs["grid"] = list(encoder.grid)
    frame.attrs["skipped"] = [asdict(skip) for rank in everyone for skip in rank[1]]
    return frame


def write(frame: pd.DataFrame, path: Path) -> None:
    """Write what `embed` returned as a table (`.parquet`) or as NumPy arrays (`.npz`).

    The arrays: `keys` and, if known, `files`, unicode (n,); `labels`, int64 (n,); `embeddings`, float32 (n, d); `grid`,
    int64 (2,), the (rows, columns) of the patches. None of them needs pickle.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        if path.suffix == ".parquet":
            frame.to_parquet(file, index=False)
            return
        names = {"files": frame["file"].to_numpy(str)} if "file" in frame else {}
        np.savez(
            file,
            keys=frame["key"].to_numpy(str),
            labels=frame["label"].to_numpy(np.int64),
            embeddings=np.stack([*frame["embedding"]]),
            grid=np.array(frame.attrs["grid"]),
            **names,
        )


def file_names(shards: ShardSet) -> np.ndarray:
    """The file that each sample was packed from, object (samples,); "" where the shards do not say."""
    names = np.full(shards.samples, "", dtype=object)
    if not any("json" in sample.members for sample in shards.open(0).samples[:1]):
        return names
    for shard, first in enumerate(shards.first_index[:-1]):
        file = shards.open(shard)
        for position in range(min(len(file.samples), shards.counts[shard])):
            names[first + position] = file.file_name(position) or ""
    return names
