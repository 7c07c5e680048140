"""Frozen features, extracted once: of the trained encoder, of an untrained one, and the raw pixels beside them.

They are kept in a folder by what they are made from (weights, shards, images, preparation, representation), so that
whoever asks for the same reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ssl_vit.data import DataConfig
from ssl_vit.data.evaluation import EvaluationStream, evaluation_batches
from ssl_vit.data.images import check_channels, evaluation_transform
from ssl_vit.data.samples import Preprocess, Skip
from ssl_vit.data.shards import ShardSet, open_url
from ssl_vit.evaluators import Metric
from ssl_vit.evaluators.labels import choose_each, labels_of
from ssl_vit.files import atomic_path
from ssl_vit.interfaces import Config, Diverged, Size, UserError
from ssl_vit.models import Resampling
from ssl_vit.models.encoder import Encoder, Pooling
from ssl_vit.models.factory import at_size
from ssl_vit.training import distributed

REFERENCES = ("untrained", "pixels")
_PIXELS = 32  # a side of the raw-pixel reference, at most: 3,072 numbers an image, whatever the images' size
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
    """vectors: float32 (n, d). labels: int64 (n,). images: int64 (n,), their global indices, rising."""

    vectors: np.ndarray
    labels: np.ndarray
    images: np.ndarray

    def of(self, images: np.ndarray) -> Features:
        """The rows of these images in their order; an image that could not be read has none."""
        rows = np.searchsorted(self.images, images[np.isin(images, self.images)])
        return Features(self.vectors[rows], self.labels[rows], self.images[rows])


def silent(text: str) -> None:
    """What a process says that is not the main one."""


@dataclass
class Task:
    """What an evaluator judges: one encoder on labeled train and test shards.

    trained: the encoder. untrained: the same architecture, freshly initialized: the reference row.
    data: image preparation (`evaluation_resize`). batch_size: images in a forward pass of one process.
    weights: where the trained encoder came from (None: it is freshly initialized itself).
    cache: folder that keeps extracted features (None: none is kept); it may be deleted at any time.
    objective: what the weights' run trained them with (None: unknown). say: told what is done, where that takes long.
    metric: the number that counts on these sets, and that a sweep chooses by.
    """

    trained: Encoder
    untrained: Encoder
    train: ShardSet
    test: ShardSet
    data: DataConfig
    accelerator: Accelerator
    weights: str | None = None
    batch_size: int = 256
    workers: int = 0
    cache: Path | None = None
    objective: Config | None = None
    say: Callable[[str], None] = silent
    metric: Metric = "accuracy"
    skipped: list[Skip] = field(default_factory=list)
    _features: dict[tuple[Any, ...], Features] = field(default_factory=dict)

    def features(
        self, source: str, split: str, representation: Representation, images: np.ndarray | None = None
    ) -> Features:
        """Features of `trained`, `untrained` or `pixels` on `train` or `test`; each is extracted once.

        images: int64, global indices of those wanted, rising (None: all). What is asked for is extracted whole or taken
        from the same question before: parts of other answers could differ in the last bit.
        Raises UserError where the shards carry no labels, and for a block that the encoder does not have.
        """
        what = None if source == "pixels" else representation
        key = (source, split, what, None if images is None else images.tobytes())
        if key not in self._features:
            self._features[key] = _cached(self, source, getattr(self, split), representation, images)
        return self._features[key]

    def labeled_features(
        self, source: str, representation: Representation, budgets: Sequence[int | str], seeds: Sequence[int]
    ) -> Iterator[tuple[tuple[int | str, int], Features]]:
        """((label budget, seed), training features of the images that they allow, in the order of `choose_labeled`).

        Only images that one of them allows are read.
        """
        chosen = choose_each(self.train_labels, budgets, seeds)
        wanted = np.unique(np.concatenate(list(chosen.values())))
        everything = len(wanted) == (self.train_labels >= 0).sum()
        read = self.features(source, "train", representation, None if everything else wanted)
        for place, images in chosen.items():
            yield place, read.of(images)

    @property
    def train_labels(self) -> np.ndarray:
        """Every training image's class, int64 (samples,); -1 where there is none. Raises UserError where all are of one
        class."""
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
        """The samples left out so far, each once, as plain JSON."""
        once = {(skip.shard, skip.key): skip.reason for skip in self.skipped}
        return [{"shard": shard, "key": key, "reason": reason} for (shard, key), reason in once.items()]


def evaluation_stream(
    task: Task, shards: ShardSet, indices: np.ndarray | None = None, image_size: Size | None = None
) -> EvaluationStream:
    """This rank's part of the labeled shards, prepared as the task says (each sample once over all ranks).

    indices: global indices of the images wanted (None: all). image_size: pixels (None: the trained encoder's).
    """
    channels = task.trained.channels
    check_channels(channels)
    preprocess = Preprocess(
        evaluation_transform(image_size or task.trained.image_size, task.data),
        channels,
        len(shards.classes) if shards.classes else None,
        needs_labels=True,
    )
    ranks = task.accelerator.num_processes
    samples = shards.samples if indices is None else len(indices)
    return EvaluationStream(
        shards,
        preprocess,
        batch_size=max(1, min(task.batch_size, -(-samples // ranks))),
        rank=task.accelerator.process_index,
        ranks=ranks,
        workers=task.workers,
        indices=indices,
        worker_timeout=task.data.worker_timeout,
    )


@torch.no_grad()  # inference mode does not go with XLA
def extract(
    task: Task,
    shards: ShardSet,
    read: Callable[[torch.Tensor], torch.Tensor],
    image_size: Size | None = None,
    indices: np.ndarray | None = None,
) -> Features:
    """`read` (uint8 images on the device -> (B, d)) over all images that have a label, in index order, float32.

    The ranks share the images; every rank gets all rows. image_size, indices: see `evaluation_stream`.
    """
    vectors, labels, places = [], [], []
    stream = evaluation_stream(task, shards, indices, image_size)
    for batch, chunk in evaluation_batches(stream, task.accelerator.device):
        task.skipped += chunk.skipped
        with task.accelerator.autocast():
            outputs = read(batch.images)
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
    rising = np.argsort(order)
    return Features(rows[rising], classes[rising], order[rising])


def not_finite(what: str, shards: ShardSet, image: int) -> Diverged:
    """The error, raised by every process, for a model that gives no numbers; image: global index of the first one."""
    error = Diverged(
        f"the {what} of image {image} of {shards.spec} are not finite: the weights hold such numbers, or overflow in "
        "this precision"
    )
    error.everywhere = True
    return error


def _reader(task: Task, source: str, representation: Representation) -> Callable[[torch.Tensor], torch.Tensor]:
    if source == "pixels":
        return _pixels
    encoder: Encoder = getattr(task, source)
    if representation.image_size:
        encoder = at_size(encoder, representation.image_size, representation.position_resampling)
    encoder.to(task.accelerator.device).eval()
    return lambda images: encoder.represent(images, representation.pooling, representation.block)


def _pixels(images: torch.Tensor) -> torch.Tensor:
    """Raw pixels, scaled to [-1, 1]; a side longer than 32 is shrunk to 32 by area."""
    height, width = images.shape[-2:]
    size = (min(height, _PIXELS), min(width, _PIXELS))
    pixels = images.float()
    return (pixels if size == (height, width) else F.adaptive_avg_pool2d(pixels, size)).flatten(1) / 127.5 - 1


def _cached(
    task: Task, source: str, shards: ShardSet, representation: Representation, images: np.ndarray | None
) -> Features:
    """From the cache where the same features are there, else extracted (and kept). Every rank gets the same."""
    path = task.cache / f"{_content(task, source, shards, representation, images)}.safetensors" if task.cache else None
    main = task.accelerator.is_main_process
    found = distributed.gather(_read(path) if path and main else None)[0]
    if found is not None:
        features, skipped = found
        task.skipped += skipped
        return features
    before = len(task.skipped)
    image_size = None if source == "pixels" else representation.image_size
    features = extract(task, shards, _reader(task, source, representation), image_size, images)
    skipped = [skip for rank in distributed.gather(task.skipped[before:]) for skip in rank]
    task.skipped[before:] = skipped
    if path and main:
        _write(path, features, skipped)
    return features


def _read(path: Path) -> tuple[Features, list[Skip]] | None:
    try:
        with safe_open(path, "numpy") as file:
            skipped = [Skip(**skip) for skip in json.loads(file.metadata()["skipped"])]
            return Features(*(file.get_tensor(key) for key in ("vectors", "labels", "images"))), skipped
    except (OSError, SafetensorError):  # not there, or cut short by a full disk: extracted again
        return None


def _write(path: Path, features: Features, skipped: list[Skip]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as unfinished:
        save_file(vars(features), unfinished, {"skipped": json.dumps([asdict(skip) for skip in skipped])})


def _content(
    task: Task, source: str, shards: ShardSet, representation: Representation, images: np.ndarray | None
) -> str:
    """A hash of everything that the features depend on."""
    content = hashlib.sha256()
    for shard, checksum in enumerate(shards.checksums or [""] * len(shards.urls)):
        content.update(f"{shards.counts[shard]} {checksum or _checksum(shards, shard)}\n".encode())
    what = [_FORMAT, source == "pixels", task.trained.channels, task.trained.image_size, task.data.evaluation_resize]
    content.update(json.dumps([*what, len(shards.classes or ())]).encode())
    if images is not None:
        content.update(images.tobytes())
    if source != "pixels":
        encoder: Encoder = getattr(task, source)
        settings = [encoder.name, encoder.arguments, encoder.mean, encoder.std, encoder.own_settings]
        content.update(json.dumps([settings, representation, task.accelerator.mixed_precision]).encode())
        for name, tensor in sorted(encoder.state_dict().items()):
            content.update(name.encode())
            content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()[:32]


def _checksum(shards: ShardSet, shard: int) -> str:
    """The sha256 of a shard whose `info.json` does not tell it: reading it costs little beside decoding it."""
    found = hashlib.sha256()
    with open_url(shards.urls[shard], shards.remote) as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return found.hexdigest()
