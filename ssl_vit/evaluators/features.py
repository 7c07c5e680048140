"""The input of evaluators: an encoder, labeled shards, and their frozen features, each extracted once.

Features come from the trained encoder, from an untrained one, or are raw pixels. Those of encoders are cached in a
folder under a hash of everything they depend on (weights, shards, images, preparation).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ssl_vit.data import DataConfig
from ssl_vit.data.evaluation import EvaluationStream, evaluation_batches
from ssl_vit.data.shards import ShardSet
from ssl_vit.evaluators.labels import check_classes, labels_of
from ssl_vit.files import atomic_path
from ssl_vit.interfaces import Batch, Config, Diverged, Metric, ObjectiveConfig, RunError, Size, UserError
from ssl_vit.models import ImageSize, Pooling, Resampling
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.factory import at_size, fresh
from ssl_vit.progress import Say, progress_bar, silent
from ssl_vit.records import SkippedSample
from ssl_vit.training import distributed
from ssl_vit.training.distributed import Engine

_PIXELS = 32  # longest side of the raw-pixel reference: at most 3,072 numbers per image
_FORMAT = 3
_MOST_CACHED = 2**32  # bytes of one file: ViT-B's features of ImageNet fit; many images' patch tokens fill a disk


@dataclass
class EvalContext:
    """An encoder to evaluate, with labeled train and test shards.

    trained: the encoder; on the meta device, without weights, if only untrained encoders or pixels are evaluated.
    seed: of the initialization of `untrained`. title: shown in front of the progress (None: no progress is shown).
    data: image preparation (`evaluation_resize`) and loader workers. batch_size: images per forward pass and process.
    weights: path of the trained encoder's weights (None: in memory or freshly initialized).
    cache: folder for extracted features (None: no cache); it may be deleted at any time.
    objective: the objective that trained the weights (None: unknown). say: prints progress.
    metric: the metric that tables show, and that settings are selected by.
    skipped: samples that could not be used, of all processes. features: features that were extracted.
    """

    trained: Encoder
    train: ShardSet
    test: ShardSet
    data: DataConfig
    accelerator: Engine
    weights: str | None = None
    batch_size: int = 256
    cache: Path | None = None
    objective: ObjectiveConfig | None = None
    say: Say = silent
    title: str | None = None
    metric: Metric = "accuracy"
    seed: int = 0
    skipped: list[SkippedSample] = field(default_factory=list)
    features: dict[object, Features] = field(default_factory=dict)

    @cached_property
    def untrained(self) -> Encoder:
        """The same architecture as the trained encoder's, freshly initialized."""
        return fresh(self.trained, self.seed)

    @cached_property
    def train_labels(self) -> np.ndarray:
        """Every training image's class, int64 (samples,); -1: no label. Raises UserError where there is one class."""
        check_classes(self.train)
        return labels_of(self.train)

    @property
    def classes(self) -> int:
        """How many classes the shards name; where neither set names any, as many as the training labels say."""
        return max(len(self.train.classes or ()), len(self.test.classes or ())) or int(self.train_labels.max()) + 1

    def progress(self, what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """See `progress_bar`."""
        return progress_bar(what, total, self.title is not None)

    def skipped_names(self) -> list[dict[str, str]]:
        """All skipped samples, each once, as plain JSON."""
        return [skip.model_dump() for skip in {(skip.shard, skip.key): skip for skip in self.skipped}.values()]


class FeatureConfig(Config):
    """What an evaluator reads from a frozen encoder.

    pooling: the class `token`, the `mean` of the patches, `both` concatenated, or all `patches` concatenated. For the
        features before a supervised run's head, give the one that it reads (in the paper's runs `token`).
    block: block whose output is read (1 is the first), with the model's final norm applied; None: the model's output.
    image_size: a side or [height, width] in pixels; None: the encoder's own, which raw pixels always have.
    position_resampling: how the positions are resampled to another size: as in `timm` or as in `google`.
    """

    pooling: Pooling = "mean"
    block: int | None = Field(None, ge=1)
    image_size: ImageSize | None = None
    position_resampling: Resampling = "timm"

    @property
    def representation(self) -> tuple[object, ...]:
        """The values of these keys alone."""
        return tuple(getattr(self, name) for name in FeatureConfig.model_fields)


def check_features(encoder: Encoder, wanted: FeatureConfig) -> None:
    """Raises UserError where this encoder has no such features; no weights are made."""
    with torch.device("meta"):
        model = encoder.outline(wanted.image_size).eval()
        image = torch.zeros(1, model.channels, *model.image_size, dtype=torch.uint8)
        model.represent(image, wanted.pooling, wanted.block)


@dataclass(frozen=True)
class Features:
    """vectors: float32 (n, d). labels: int64 (n,). images: int64 (n,), their global indices, ascending."""

    vectors: np.ndarray
    labels: np.ndarray
    images: np.ndarray

    def of(self, images: np.ndarray) -> Features:
        """The rows of these images in their order; an image that could not be read has none."""
        if np.array_equal(images, self.images):  # no copy of gigabytes
            return self
        rows = np.searchsorted(self.images, images[np.isin(images, self.images)])
        return Features(self.vectors[rows], self.labels[rows], self.images[rows])


@dataclass(frozen=True)
class ImageSet:
    """Labeled images, and where their features come from.

    source: `trained`, `untrained` or `pixels`. split: `train`, `test`, or `all` where both are the same set.
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

    def of(self, rows: np.ndarray) -> ImageSet:
        """Some of these images. rows: int64, indices into `images`."""
        assert self.images is not None
        return replace(self, images=self.images[rows])

    def features(self, wanted: FeatureConfig) -> Features:
        """Features of these images in their order; an image that could not be read has none. Extracted once.

        Raises UserError where the shards carry no labels, no image can be read, or the encoder has no such block.
        """
        context, pixels = self.context, self.source == "pixels"
        indices = None if self.extract is None else self.extract.tobytes()
        key = (self.source, self.split, None if pixels else wanted.representation, indices)
        if key not in context.features:
            whole = replace(self, images=self.extract)
            context.features[key] = extract(whole, _pixels) if pixels else _cached(whole, wanted)
        found = context.features[key] if self.images is None else context.features[key].of(self.images)
        if not len(found.images):
            raise UserError(f"{self.shards.spec}: none of the chosen images could be read; replace some of them")
        return found


@torch.no_grad()  # XLA does not support inference mode
def extract(
    images: ImageSet,
    reader: Callable[[Batch], torch.Tensor],
    image_size: Size | None = None,
    what: str = "features",
    *,
    needs_labels: bool = True,
) -> Features:
    """`reader` (a batch on the device -> (B, d)) over all images, in index order; every process gets all rows.

    image_size: pixels (None: the trained encoder's). what: name of the outputs in errors.
    needs_labels: skip images without a label.

    Raises UserError where no image can be read; where outputs are not finite RunError for features, else Diverged.
    """
    context, shards = images.context, images.shards
    stream = EvaluationStream(
        shards,
        context.data,
        image_size or context.trained.image_size,
        context.trained.channels,
        batch_size=context.batch_size,
        rank=context.accelerator.process_index,
        ranks=context.accelerator.num_processes,
        indices=images.images,
        needs_labels=needs_labels,
    )
    own, skipped = stream.own, list[SkippedSample]()
    rows, labels, found = np.empty((0, 0)), np.empty(len(own), np.int64), np.zeros(len(own), bool)
    progress = context.progress(f"{what} of {images.split} images", len(own) * context.accelerator.num_processes)
    with progress as advance, closing(evaluation_batches(stream, context.accelerator.device)) as loader:
        for batch, chunk in loader:
            skipped += chunk.skipped
            with context.accelerator.autocast():
                outputs = reader(batch)
            valid = batch.valid.cpu()  # selected on the host: on XLA, each count would compile another program
            if not rows.size:  # one array for all, which may take gigabytes
                rows = np.empty((len(own), outputs.shape[1]), np.float32)
            at = np.searchsorted(own, batch.indices.cpu()[valid].numpy())
            rows[at], labels[at], found[at] = outputs.float().cpu()[valid], batch.labels.cpu()[valid], True
            distributed.largest(0)  # waits for all: one that is a whole extraction ahead would reach its timeout
            advance(len(at) * context.accelerator.num_processes)
    own_arrays = (rows, labels, own) if found.all() else (rows[found], labels[found], own[found])
    arrays, skips = zip(*distributed.gather((own_arrays, skipped)), strict=True)
    context.skipped += chain.from_iterable(skips)
    rows, labels, order = arrays[0] if len(arrays) == 1 else map(np.concatenate, zip(*arrays, strict=True))
    if len(labels) == 0:
        raise UserError(f"{shards.spec}: no sample there has a readable image{' and a label (.cls)' * needs_labels}")
    if not (finite := np.isfinite(rows).all(axis=1)).all():
        error = (RunError if what == "features" else Diverged)(
            f"the {what} of image {order[~finite].min()} of {shards.spec} are not finite: the weights are not, "
            "or the forward pass overflows in this precision"
        )
        error.everywhere = True
        raise error
    return Features(rows, labels, order)


def _pixels(batch: Batch) -> torch.Tensor:
    """Raw pixels, scaled to [-1, 1]; a side longer than 32 is shrunk to 32 by area."""
    pixels = batch.images.cpu().float()  # MPS pools only to sides that divide its input's
    height, width = (min(side, _PIXELS) for side in pixels.shape[-2:])
    return F.adaptive_avg_pool2d(pixels, (height, width)).flatten(1) / 127.5 - 1


def _cached(images: ImageSet, wanted: FeatureConfig) -> Features:
    """Features of an encoder: read from the cache folder if they are there, else extracted and cached."""
    context = images.context
    encoder: Encoder = getattr(context, images.source)
    path = context.cache / f"{_content(images, encoder, wanted)}.safetensors" if context.cache else None
    main, before = context.accelerator.is_main_process, len(context.skipped)
    cached = distributed.from_main(_load(path) if path and main else None)
    if cached is None:
        if wanted.image_size:
            encoder = at_size(encoder, wanted.image_size, wanted.position_resampling)
        encoder.to(context.accelerator.device).eval()
        pooling, block = wanted.pooling, wanted.block
        features = extract(images, lambda batch: encoder.represent(batch.images, pooling, block), wanted.image_size)
        cached = features, context.skipped[before:]
        if path and main and features.vectors.nbytes <= _MOST_CACHED:
            about = {"skipped": json.dumps([skip.model_dump() for skip in cached[1]])}
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_path(path) as unfinished:
                    save_file(vars(features), unfinished, about)
            except (OSError, SafetensorError) as error:  # the cache is optional
                context.say(f"{path.parent}: features cannot be cached ({error})")
    context.skipped[before:] = cached[1]
    if cached[1] and context.data.on_bad_sample == "fail":  # extracted when they were skipped
        raise cached[1][0].error()
    return cached[0]


def _load(path: Path) -> tuple[Features, list[SkippedSample]] | None:
    try:
        with safe_open(path, "numpy") as file:
            skipped = [SkippedSample(**skip) for skip in json.loads(file.metadata()["skipped"])]
            return Features(*(file.get_tensor(key) for key in ("vectors", "labels", "images"))), skipped
    except (OSError, SafetensorError):  # not there, or cut short by a full disk: extracted again
        return None


def _content(images: ImageSet, encoder: Encoder, wanted: FeatureConfig) -> str:
    """A hash of everything that the features depend on."""
    shards, data, precision = images.shards, images.context.data, images.context.accelerator.precision
    settings = [encoder.name, encoder.arguments, encoder.image_size, encoder.mean, encoder.std, encoder.own_settings]
    inputs = [shards.fingerprint, len(shards.classes or ()), encoder.channels, data.evaluation_resize, data.max_pixels]
    written = [_FORMAT, settings, inputs, wanted.representation, precision]
    content = hashlib.sha256(json.dumps(written).encode())
    content.update(b"" if images.images is None else images.images.tobytes())
    for name, tensor in sorted(encoder.state_dict().items()):
        content.update(name.encode())
        content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()[:32]
