"""Shards -> evaluation batches: every sample exactly once on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Iterator
from dataclasses import replace

import numpy as np
import torch

from ssl_vit.data import DataConfig
from ssl_vit.data.images import check_channels, evaluation_transform
from ssl_vit.data.loader import loaded
from ssl_vit.data.samples import Chunk, Preprocess, Sample, SampleReader, join, stacked
from ssl_vit.data.shards import ShardSet
from ssl_vit.interfaces import Batch, Size, UserError, pair
from ssl_vit.records import SkippedSample

PREFETCH = 2  # chunks that each loader worker makes ahead


class EvaluationStream:
    """The images of a shard set, prepared as for evaluation: every sample exactly once over all ranks, and the same
    number of equal batches on each. A rank's batches are in index order; with several loader workers those of each
    worker are, and the workers take turns.

    data: how images are prepared, and with how many workers.
    batch_size: most images per rank and batch.
    indices: indices of the images (None: all).
    needs_labels: images without a label are skipped.
    noise: uniform numbers drawn for each image.
    """

    def __init__(
        self,
        shards: ShardSet,
        data: DataConfig,
        image_size: Size,
        channels: int,
        *,
        batch_size: int = 256,
        rank: int = 0,
        ranks: int = 1,
        indices: np.ndarray | None = None,
        needs_labels: bool = False,
        noise: int = 0,
    ) -> None:
        check_channels(channels)
        every = np.arange(shards.samples) if indices is None else np.unique(np.asarray(indices, dtype=np.int64))
        if len(every) == 0:
            raise UserError(f"{shards.spec}: there is no sample to evaluate on")
        self.shards, self.on_bad_sample = shards, data.on_bad_sample
        self.workers, self.worker_timeout = data.workers, data.worker_timeout
        self.preprocess = Preprocess(
            evaluation_transform(image_size, data),
            channels,
            len(shards.classes) if shards.classes else None,
            noise=noise,
            needs_labels=needs_labels,
            reads_labels=True,
            max_pixels=data.max_pixels,
        )
        self.own = every[rank * len(every) // ranks : (rank + 1) * len(every) // ranks]
        self.batch_size = min(batch_size, -(-len(every) // ranks))
        self.batches = math.ceil(math.ceil(len(every) / ranks) / self.batch_size)
        # Identifies the content of the chunks, which `_kept` may hold.
        content = (shards.fingerprint, len(shards.classes or ()), self.batch_size, self.own.tobytes())
        how = (pair(image_size), channels, data.evaluation_resize, data.max_pixels)
        self.key = (*content, *how, needs_labels, noise, data.on_bad_sample)
        self.cache_bytes = data.cache_mb << 20

    def blank(self, worker: int) -> Chunk:
        return stacked([], self.batch_size, self.preprocess)

    def chunks(self, worker: int) -> Iterator[Chunk]:
        # Consecutive batches, so that few shards are read, or downloaded, by several workers.
        first, last = (number * self.batches // max(self.workers, 1) for number in (worker, worker + 1))
        batches = [self.own[n * self.batch_size : (n + 1) * self.batch_size] for n in range(first, last)]
        samples = self.samples(np.concatenate(batches) if batches else np.empty(0, dtype=np.int64))
        for batch in batches:
            items = [next(samples) for _ in batch]
            good = [item for item in items if isinstance(item, Sample)]
            chunk = stacked(good, self.batch_size, self.preprocess)
            chunk.skipped = [item for item in items if isinstance(item, SkippedSample)]
            if chunk.skipped and self.on_bad_sample == "fail":
                raise chunk.skipped[0].error()
            yield chunk

    def samples(self, indices: np.ndarray) -> Iterator[Sample | SkippedSample]:
        """The samples of ascending global indices, one by one."""
        reader = SampleReader(self.shards, self.preprocess, 0)
        wanted = [(shard, members) for shard, members in enumerate(self.shards.members_of(indices)) if len(members)]
        for number, (shard, members) in enumerate(wanted):
            if number + 1 < len(wanted):
                reader.files.ahead(wanted[number + 1][0])
            for member in members.tolist():
                item = reader.sample(shard, member, 0)
                yield item if isinstance(item, SkippedSample) else item[0]


def evaluation_batches(stream: EvaluationStream, device: torch.device) -> Generator[tuple[Batch, Chunk], None, None]:
    """The stream's batches on the device, `stream.batches` of them on every rank; padding is marked by `valid`."""
    for chunk in _chunks(stream):
        yield join([chunk], device, 0, shared=stream.workers > 0)


_kept: dict[Hashable, list[Chunk]] = {}  # oldest first


def _chunks(stream: EvaluationStream) -> Iterator[Chunk]:
    """The stream's chunks. Small sets stay in memory: evaluating many models on one set reads and decodes it once."""
    if stream.cache_bytes and stream.key in _kept:
        yield from _kept[stream.key]
        return
    chunks, size = list[Chunk](), 0
    for chunk in loaded(stream, PREFETCH):
        size += _bytes(chunk)
        if size <= stream.cache_bytes:
            # A worker will overwrite its tensors.
            tensors = {name: tensor.clone() if stream.workers else tensor for name, tensor in chunk.tensors.items()}
            chunks.append(replace(chunk, tensors=tensors))
        else:
            chunks.clear()
        yield chunk
    if size <= stream.cache_bytes:
        while _kept and size + sum(_bytes(chunk) for kept in _kept.values() for chunk in kept) > stream.cache_bytes:
            del _kept[next(iter(_kept))]
        _kept[stream.key] = chunks


def _bytes(chunk: Chunk) -> int:
    return sum(tensor.nbytes for tensor in chunk.tensors.values())
