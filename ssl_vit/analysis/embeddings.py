"""The embedding of every image of a shard set, and how one image is prepared for it."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict
from os import PathLike
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image

from ssl_vit.data import DataConfig
from ssl_vit.data.evaluation import evaluation_batches, evaluation_stream
from ssl_vit.data.images import evaluation_transform, open_picture
from ssl_vit.data.packing.images import to_stored
from ssl_vit.data.packing.sources.base import BrokenImageError
from ssl_vit.data.samples import Skip
from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.data.shards.reading import BadSample
from ssl_vit.interfaces import UserError
from ssl_vit.models import factory
from ssl_vit.models.encoder import Encoder, Pooling
from ssl_vit.recipe import Recipe, run_recipe
from ssl_vit.training.distributed import gather, make_accelerator

AnyImage = str | PathLike[str] | bytes | Image.Image


@torch.no_grad()
def embed(
    run: Path | str,
    shards: str,
    *,
    pooling: Pooling = "mean",
    batch_size: int = 256,
    workers: int | None = None,
) -> pd.DataFrame:
    """See `ssl_vit.embed`."""
    encoder, settings = factory.load(run), run_recipe(Path(run))
    encoder.check_pooling(pooling)
    preparation = settings.data if settings else DataConfig(train=shards)
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
        raise UserError(f"{shards}: none of its {opened.samples} image(s) can be read")
    rows.sort(key=lambda row: row[0])
    frame = pd.DataFrame([row[1:] for row in rows], columns=["key", "label", "embedding"])
    if (names := file_names(opened)).any():
        frame.insert(1, "file", names[[row[0] for row in rows]])
    frame.attrs["grid"] = list(encoder.grid)
    frame.attrs["skipped"] = [asdict(skip) for rank in everyone for skip in rank[1]]
    return frame


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


def preprocessing(encoder: Encoder, settings: Recipe | None) -> Callable[[AnyImage], torch.Tensor]:
    """A function from an image to what timm's network expects, float32 (C, H, W): the pixels that an evaluation sees.

    settings: the recipe that says how images are resized; None: its defaults. The function raises UserError for a file
    that is not an image.
    """
    preparation = settings.data if settings else DataConfig(train="")
    transform = evaluation_transform(encoder.image_size, preparation)

    def preprocess(image: AnyImage) -> torch.Tensor:
        if isinstance(image, Image.Image):
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            name, data = "image", buffer.getvalue()
        else:
            name, data = ("image", image) if isinstance(image, bytes) else (str(image), Path(image).read_bytes())
        try:
            stored = to_stored(data, name, None, 95)
            picture = open_picture({stored.extension: stored.data}, encoder.channels, preparation.max_pixels)
            pixels = transform(picture)
        except (BrokenImageError, BadSample) as error:
            raise UserError(f"{name}: not a readable image: {error}") from None
        return encoder.normalized(pixels.to(encoder.scale.device)[None])[0]

    return preprocess
