"""The embedding of every image of a shard set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from ssl_vit.analysis import loaded
from ssl_vit.data.shards import ShardSet, dropped_from, open_shards
from ssl_vit.evaluators.features import EvalContext, ImageSet, extract
from ssl_vit.files import atomic_file
from ssl_vit.interfaces import Batch, printable, without_credentials
from ssl_vit.models import Pooling
from ssl_vit.training.distributed import from_main, gather, others_watched
from ssl_vit.training.memory import out_of_memory


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
    encoder, preparation = loaded_model.encoder, loaded_model.data
    encoder.check_pooling(pooling)
    if workers is not None:
        preparation = preparation.model_copy(update={"workers": workers})
    accelerator = loaded_model.accelerator()
    encoder.to(accelerator.device).eval()
    opened = open_shards(shards, preparation.remote)
    dropped = dropped_from([opened], preparation)
    context = EvalContext(
        encoder, opened, opened, preparation, accelerator, batch_size=batch_size, title="embed", skipped=dropped
    )
    own_keys: dict[int, str] = {}

    def read(batch: Batch) -> torch.Tensor:
        own_keys.update(zip(batch.indices[batch.valid].tolist(), batch.keys, strict=True))
        return encoder.represent(batch.images, pooling)

    with others_watched(lambda: "nothing was written"), out_of_memory(lambda: "lower batch_size"):
        features = extract(ImageSet(context, "trained", "all"), read, what="embeddings", needs_labels=False)
        keys = {image: key for keys_of_rank in gather(own_keys) for image, key in keys_of_rank.items()}
        names = from_main(file_names(opened) if accelerator.is_main_process else None)  # reads remote shards again
    columns = {"key": [printable(keys[image]) for image in features.images.tolist()], "label": features.labels}
    frame = pd.DataFrame(columns | {"embedding": list(features.vectors)})
    if names.any():
        frame.insert(1, "file", names[features.images])
    frame.attrs |= {"grid": list(encoder.grid), "skipped": context.skipped_names()}
    return frame


def write(frame: pd.DataFrame, path: Path) -> None:
    """Write what `embed` returned as a table (`.parquet`) or as NumPy arrays (`.npz`).

    The arrays: `keys` and, if known, `files`, unicode (n,); `labels`, int64 (n,); `embeddings`, float32 (n, d); `grid`,
    int64 (2,), the (rows, columns) of the patches. None of them needs pickle.
    """
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


def file_names(shards: ShardSet) -> np.ndarray:
    """The file that each sample was packed from, object (samples,); "" where the shards do not say."""
    names = np.full(shards.samples, "", dtype=object)
    if not any("json" in sample.members for sample in shards.open(0).samples[:1]):
        return names
    for shard, first in enumerate(shards.first_index[:-1]):
        file = shards.open(shard)
        for position in range(len(file.samples)):
            names[first + position] = file.file_name(position) or ""
    return names
