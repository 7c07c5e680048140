"""Frozen features: of the trained encoder, of an untrained one, and raw pixels. Each is extracted once.

A folder keeps those of encoders, by a hash of everything they depend on (weights, shards, images, preparation).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ssl_vit.data.evaluation import EvaluationStream, evaluation_batches
from ssl_vit.data.images import check_channels, evaluation_transform
from ssl_vit.data.samples import Preprocess, Skip
from ssl_vit.data.shards import ShardSet, open_url
from ssl_vit.evaluators.context import EvalContext
from ssl_vit.files import atomic_path
from ssl_vit.interfaces import Diverged, Size, UserError
from ssl_vit.models import Resampling
from ssl_vit.models.encoder import Encoder, Pooling
from ssl_vit.models.factory import at_size
from ssl_vit.training import distributed

_PIXELS = 32  # longest side of the raw-pixel reference: at most 3,072 numbers per image
_FORMAT = "2"


class Representation(NamedTuple):
    """What is read from an encoder: how its tokens are pooled, and after which block (from 1; None: its output).

    image_size: what images are prepared to, the positions resampled to it (None: the encoder's own).
    """

    pooling: Pooling = "mean"
    block: int | None = None
    image_size: Size | None = None
    position_resampling: Resampling = "timm"


@dataclass(frozen=True)
class Features:
    """vectors: float32 (n, d). labels: int64 (n,). images: int64 (n,), their global indices, ascending."""

    vectors: np.ndarray
    labels: np.ndarray
    images: np.ndarray

    def of(self, images: np.ndarray) -> Features:
        """The rows of these images in their order; an image that could not be read has none."""
        rows = np.searchsorted(self.images, images[np.isin(images, self.images)])
        return Features(self.vectors[rows], self.labels[rows], self.images[rows])


@dataclass(frozen=True)
class ImageSet:
    """Labeled images, and where their features come from.

    source: `trained`, `untrained` or `pixels`. split: `train` or `test`.
    images: int64 (n,), their global indices (None: all of the split).
    extract: int64, ascending: the images whose features are extracted together (None: all of the split). Features
        from other batches could differ in the last bit.
    """

    context: EvalContext
    source: str
    split: str
    images: np.ndarray | None = None
    extract: np.ndarray | None = None

    @property
    def shards(self) -> ShardSet:
        return self.context.train if self.split == "train" else self.context.test

    def features(self, representation: Representation) -> Features:
        """Features of these images in their order; an image that could not be read has none.

        Raises UserError where the shards carry no labels, and for a block that the encoder does not have.
        """
        found = read(self.context, self.source, self.split, representation, self.extract)
        return found if self.images is None else found.of(self.images)

    def of(self, rows: np.ndarray) -> ImageSet:
        """Some of these images. rows: int64, places in `images`."""
        assert self.images is not None
        return replace(self, images=self.images[rows])


def read(
    context: EvalContext, source: str, split: str, representation: Representation, images: np.ndarray | None = None
) -> Features:
    """Features of `trained`, `untrained` or `pixels` on `train` or `test`: extracted, or those extracted before.

    images: int64, global indices of those wanted, ascending (None: all). Every process gets all rows.
    """
    what = None if source == "pixels" else representation
    key = (source, split, what, None if images is None else images.tobytes())
    if key not in context.features:
        shards: ShardSet = getattr(context, split)
        if source == "pixels":
            context.features[key] = extract(context, shards, _pixels, None, images)
        else:
            context.features[key] = _cached(context, getattr(context, source), shards, representation, images)
    found = context.features[key]
    assert isinstance(found, Features)
    return found


def evaluation_stream(
    context: EvalContext, shards: ShardSet, indices: np.ndarray | None = None, image_size: Size | None = None
) -> EvaluationStream:
    """This process's part of the labeled shards (each sample once over all processes).

    indices: global indices of the images wanted (None: all). image_size: pixels (None: the trained encoder's).
    """
    check_channels(context.trained.channels)
    preprocess = Preprocess(
        evaluation_transform(image_size or context.trained.image_size, context.data),
        context.trained.channels,
        len(shards.classes) if shards.classes else None,
        needs_labels=True,
    )
    ranks = context.accelerator.num_processes
    samples = shards.samples if indices is None else len(indices)
    return EvaluationStream(
        shards,
        preprocess,
        batch_size=max(1, min(context.batch_size, -(-samples // ranks))),
        rank=context.accelerator.process_index,
        ranks=ranks,
        workers=context.data.workers,
        indices=indices,
        worker_timeout=context.data.worker_timeout,
    )


@torch.no_grad()  # inference mode does not go with XLA
def extract(
    context: EvalContext,
    shards: ShardSet,
    reader: Callable[[torch.Tensor], torch.Tensor],
    image_size: Size | None = None,
    indices: np.ndarray | None = None,
) -> Features:
    """`reader` (uint8 images on the device -> (B, d)) over all images that have a label, in index order, float32.

    The processes share the images; every process gets all rows. image_size, indices: see `evaluation_stream`.
    """
    vectors, labels, places = [], [], []
    stream = evaluation_stream(context, shards, indices, image_size)
    for batch, chunk in evaluation_batches(stream, context.accelerator.device):
        context.skipped += chunk.skipped
        with context.accelerator.autocast():
            outputs = reader(batch.images)
        valid = batch.valid.cpu()
        vectors.append(outputs.float().cpu()[valid])
        labels.append(batch.labels.cpu()[valid])
        places.append(batch.indices.cpu()[valid])
    own = tuple(torch.cat(parts).numpy() for parts in (vectors, labels, places))
    everyone = distributed.gather(own)
    rows, classes, order = (np.concatenate([rank[n] for rank in everyone]) for n in range(3))
    if len(classes) == 0:
        raise UserError(f"{shards.spec}: no sample there has a readable image and a label (.cls)")
    if not (finite := np.isfinite(rows).all(axis=1)).all():
        raise not_finite("features", shards, int(order[~finite].min()))
    ascending = np.argsort(order)
    return Features(rows[ascending], classes[ascending], order[ascending])


def not_finite(what: str, shards: ShardSet, image: int) -> Diverged:
    """The error for a model whose outputs are not finite, raised by every process. image: its global index."""
    error = Diverged(
        f"the {what} of image {image} of {shards.spec} are not finite: the weights hold such numbers, or overflow in "
        "this precision"
    )
    error.everywhere = True
    return error


def _pixels(images: torch.Tensor) -> torch.Tensor:
    """Raw pixels, scaled to [-1, 1]; a side longer than 32 is shrunk to 32 by area."""
    height, width = images.shape[-2:]
    size = (min(height, _PIXELS), min(width, _PIXELS))
    pixels = images.float()
    return (pixels if size == (height, width) else F.adaptive_avg_pool2d(pixels, size)).flatten(1) / 127.5 - 1


def encoder_reader(
    context: EvalContext, encoder: Encoder, representation: Representation
) -> Callable[[torch.Tensor], torch.Tensor]:
    """uint8 images on the device -> their representation (B, d)."""
    if representation.image_size:
        encoder = at_size(encoder, representation.image_size, representation.position_resampling)
    encoder.to(context.accelerator.device).eval()
    return lambda images: encoder.represent(images, representation.pooling, representation.block)


def _cached(
    context: EvalContext, encoder: Encoder, shards: ShardSet, representation: Representation, images: np.ndarray | None
) -> Features:
    """From the cache folder where the same features are there, else extracted (and kept)."""
    key = _content(context, encoder, shards, representation, images) if context.cache else ""
    path = context.cache / f"{key}.safetensors" if context.cache else None
    main = context.accelerator.is_main_process
    found = distributed.gather(_load(path) if path and main else None)[0]
    if found is not None:
        features, skipped = found
        context.skipped += skipped
        return features
    before = len(context.skipped)
    reader = encoder_reader(context, encoder, representation)
    features = extract(context, shards, reader, representation.image_size, images)
    skipped = [skip for rank in distributed.gather(context.skipped[before:]) for skip in rank]
    context.skipped[before:] = skipped
    if path and main:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as unfinished:
            save_file(vars(features), unfinished, {"skipped": json.dumps([asdict(skip) for skip in skipped])})
    return features


def _load(path: Path) -> tuple[Features, list[Skip]] | None:
    try:
        with safe_open(path, "numpy") as file:
            skipped = [Skip(**skip) for skip in json.loads(file.metadata()["skipped"])]
            return Features(*(file.get_tensor(key) for key in ("vectors", "labels", "images"))), skipped
    except (OSError, SafetensorError):  # not there, or cut short by a full disk: extracted again
        return None


def _content(
    context: EvalContext, encoder: Encoder, shards: ShardSet, representation: Representation, images: np.ndarray | None
) -> str:
    """A hash of everything that the features depend on."""
    content = hashlib.sha256()
    for shard, checksum in enumerate(shards.checksums or [""] * len(shards.urls)):
        content.update(f"{shards.counts[shard]} {checksum or _checksum(shards, shard)}\n".encode())
    preparation = [_FORMAT, context.data.evaluation_resize, len(shards.classes or ())]
    settings = [encoder.name, encoder.arguments, encoder.image_size, encoder.mean, encoder.std, encoder.own_settings]
    precision = context.accelerator.precision
    content.update(json.dumps([preparation, settings, encoder.channels, representation, precision]).encode())
    content.update(b"" if images is None else images.tobytes())
    for name, tensor in sorted(encoder.state_dict().items()):
        content.update(name.encode())
        content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()[:32]


def _checksum(shards: ShardSet, shard: int) -> str:
    """The sha256 of a shard whose `info.json` does not name it: reading it costs little beside decoding it."""
    found = hashlib.sha256()
    with open_url(shards.urls[shard], shards.remote) as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return found.hexdigest()
