"""Shards -> evaluation batches: every sample exactly once on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Literal

import numpy as np
import torch

from ssl_vit.data import DataConfig
from ssl_vit.data.images import check_channels, evaluation_transform
from ssl_vit.data.loader import loaded
from ssl_vit.data.samples import Chunk, Preprocess, Sample, SampleReader, Skip, join, stacked
from ssl_vit.data.shards import ShardSet
from ssl_vit.interfaces import Batch, Size, UserError, pair

PREFETCH = 2  # chunks that each loader worker makes ahead


class EvaluationStream:
    """Every sample exactly once over all ranks, in index order; all ranks get the same number of equal batches.

    key: names what the chunks hold, so that they may be kept (None: never). cache_bytes: how much all kept ones take.
    """

    key: Hashable = None
    cache_bytes = 0

    def __init__(
        self,
        shards: ShardSet,
        preprocess: Preprocess,
        *,
        batch_size: int,
        rank: int,
        ranks: int,
        workers: int,
        indices: np.ndarray | None = None,
        epoch: int = 0,
        worker_timeout: int = 600,
        on_bad_sample: Literal["skip", "fail"] = "skip",
    ) -> None:
        self.shards, self.preprocess, self.batch_size = shards, preprocess, batch_size
        self.workers, self.epoch, self.worker_timeout = workers, epoch, worker_timeout
        self.on_bad_sample = on_bad_sample
        every = np.arange(shards.samples) if indices is None else np.unique(np.asarray(indices, dtype=np.int64))
        if len(every) == 0:
            raise UserError(f"{shards.spec}: there is no sample to evaluate on")
        self.own = every[rank * len(every) // ranks : (rank + 1) * len(every) // ranks]
        self.batches = math.ceil(math.ceil(len(every) / ranks) / batch_size)

    def __len__(self) -> int:
        return self.batches

    def blank(self, worker: int) -> Chunk:
        return stacked([], self.batch_size, self.preprocess)

    def chunks(self, worker: int) -> Iterator[Chunk]:
        numbers = range(worker, self.batches, max(self.workers, 1))
        batches = [self.own[n * self.batch_size : (n + 1) * self.batch_size] for n in numbers]
        samples = self.samples(np.concatenate(batches) if batches else np.empty(0, dtype=np.int64))
        for batch in batches:
            items = [next(samples) for _ in batch]
            good = [item for item in items if isinstance(item, Sample)]
            chunk = stacked(good, self.batch_size, self.preprocess)
            chunk.skipped = [item for item in items if isinstance(item, Skip)]
            if chunk.skipped and self.on_bad_sample == "fail":
                raise chunk.skipped[0].error()
            yield chunk

    def samples(self, indices: np.ndarray) -> Iterator[Sample | Skip]:
        """The samples of ascending global indices, one by one."""
        reader = SampleReader(self.shards, self.preprocess, 0)
        wanted = [(shard, members) for shard, members in enumerate(self.shards.members_of(indices)) if len(members)]
        for number, (shard, members) in enumerate(wanted):
            if number + 1 < len(wanted):
                reader.files.ahead(wanted[number + 1][0])
            for member in members.tolist():
                item = reader.sample(shard, member, self.epoch)
                yield item if isinstance(item, Skip) else item[0]


def evaluation_stream(
    shards: ShardSet,
    preparation: DataConfig,
    image_size: Size,
    channels: int,
    *,
    batch_size: int = 256,
    rank: int = 0,
    ranks: int = 1,
    indices: np.ndarray | None = None,
    reads_labels: bool = True,
    needs_labels: bool = False,
    noise: int = 0,
) -> EvaluationStream:
    """The images of a shard set, prepared as for evaluation.

    preparation: how images are prepared, and with how many workers.
    batch_size: at most so many images per rank and batch.
    indices: of the images (None: all).
    reads_labels: labels are read where there are any. needs_labels: images without one are skipped.
    noise: uniform numbers drawn for each image.
    """
    check_channels(channels)
    preprocess = Preprocess(
        evaluation_transform(image_size, preparation),
        channels,
        len(shards.classes) if shards.classes else None,
        noise=noise,
        needs_labels=needs_labels,
        reads_labels=reads_labels,
        max_pixels=preparation.max_pixels,
    )
    samples = shards.samples if indices is None else len(indices)
    stream = EvaluationStream(
        shards,
        preprocess,
        batch_size=max(1, min(batch_size, -(-samples // ranks))),
        rank=rank,
        ranks=ranks,
        workers=preparation.workers,
        indices=indices,
        worker_timeout=preparation.worker_timeout,
        on_bad_sample=preparation.on_bad_sample,
    )
    content = (shards.fingerprint, len(shards.classes or ()), stream.batch_size, stream.own.tobytes())
    how = (pair(image_size), channels, preparation.evaluation_resize, preparation.max_pixels)
    stream.key = (*content, *how, needs_labels, reads_labels, noise)
    stream.cache_bytes = 0 if preparation.workers else preparation.cache_mb << 20
    return stream


def evaluation_batches(stream: EvaluationStream, device: torch.device) -> Iterator[tuple[Batch, Chunk]]:
    """The stream's batches on the device, `len(stream)` of them on every rank; padding is marked by `valid`."""
    for chunk in _chunks(stream):
        yield join([chunk], device, 0, shared=stream.workers > 0)


_kept: dict[Hashable, list[Chunk]] = {}  # oldest first


def _chunks(stream: EvaluationStream) -> Iterator[Chunk]:
    """The stream's chunks. Small sets without loader processes stay in memory: evaluating many models on one set reads
    and decodes it once."""
    if stream.cache_bytes and stream.key in _kept:
        yield from _kept[stream.key]
        return
    chunks, size = list[Chunk](), 0
    for chunk in loaded(stream, PREFETCH):
        size += _bytes(chunk)
        if size <= stream.cache_bytes:
            chunks.append(chunk)
        yield chunk
    if stream.key is not None and size <= stream.cache_bytes:
        while _kept and size + sum(_bytes(chunk) for kept in _kept.values() for chunk in kept) > stream.cache_bytes:
            del _kept[next(iter(_kept))]
        _kept[stream.key] = chunks


def _bytes(chunk: Chunk) -> int:
    return sum(tensor.nbytes for tensor in chunk.tensors.values())
