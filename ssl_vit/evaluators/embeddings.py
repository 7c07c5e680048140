"""The embedding of every image of a shard set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from torch import nn

from ssl_vit.analysis import loaded
from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.evaluators.features import EvalContext, ImageSet, extract
from ssl_vit.files import atomic_file
from ssl_vit.interfaces import without_credentials
from ssl_vit.models import Pooling
from ssl_vit.training.distributed import make_accelerator


def embed(
    model: Path | nn.Module,
    shards: str,
    *,
    pooling: Pooling = "mean",
    batch_size: int = 256,
    workers: int | None = None,
) -> pd.DataFrame:
    """See `ssl_vit.embed`."""
    loaded_model = loaded.load(model)
    encoder, preparation, settings = loaded_model.encoder, loaded_model.data, loaded_model.settings
    encoder.check_pooling(pooling)
    if workers is not None:
        preparation = preparation.model_copy(update={"workers": workers})
    accelerator = make_accelerator(settings.training.precision if settings else "fp32", or_fp32=True)
    encoder.to(accelerator.device).eval()
    opened = open_shards(shards, preparation.remote)
    context = EvalContext(encoder, opened, opened, preparation, accelerator, batch_size=batch_size, title="embed")
    features = extract(
        ImageSet(context, "trained", "all"),
        lambda batch: encoder.represent(batch.images, pooling),
        what="embeddings",
        needs_labels=False,
    )
    keys, files = (names[features.images] for names in sample_names(opened))
    frame = pd.DataFrame({"key": keys, "label": features.labels, "embedding": list(features.vectors)})
    if files.any():
        frame.insert(1, "file", files)
    frame.attrs |= {"grid": list(encoder.grid), "skipped": context.skipped_names()}
    return frame


def write(frame: pd.DataFrame, path: Path) -> None:
    """Write what `embed` returned as a table (`.parquet`) or as NumPy arrays (`.npz`).

    The arrays: `keys` and, if known, `files`, unicode (n,); `labels`, int64 (n,); `embeddings`, float32 (n, d); `grid`,
    int64 (2,), the (rows, columns) of the patches. None of them needs pickle.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        if path.suffix == ".parquet":
            shared = frame.copy(deep=False)
            shared.attrs = without_credentials(frame.attrs)  # pandas stores them in the file
            shared.to_parquet(file, index=False)
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


def sample_names(shards: ShardSet) -> tuple[np.ndarray, np.ndarray]:
    """The key of every sample, and the file that it was packed from ("": the shards do not say); both object
    (samples,)."""
    keys, files = (np.full(shards.samples, "", dtype=object) for _ in range(2))
    for shard, first in enumerate(shards.first_index[:-1]):
        file = shards.open(shard)
        for position, sample in enumerate(file.samples):
            keys[first + position], files[first + position] = sample.key, file.file_name(position) or ""
    return keys, files
