"""Shards -> training batches: the endless stream that follows `order`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ssl_vit.data import DataConfig
from ssl_vit.data.images import check_channels
from ssl_vit.data.loader import loaded
from ssl_vit.data.order import LanePosition, Members, SampleSet, check_topology, lane_stream, worker_lanes
from ssl_vit.data.samples import Chunk, Preprocess, Sample, SampleReader, join, stacked
from ssl_vit.data.shards import ShardSet
from ssl_vit.interfaces import Batch, UserError
from ssl_vit.records import SkippedSample

PREFETCH = 4  # chunks that each loader worker makes ahead
_SMALL = 10_000  # samples: a smaller set may have lanes without a usable one


def train_source(
    shards: ShardSet,
    preprocess: Preprocess,
    data: DataConfig,
    *,
    batch_size: int,
    rank: int,
    ranks: int,
    device: torch.device,
    accumulate: int = 1,
    keep: Sequence[Members] | None = None,
) -> Callable[[list[LanePosition]], Generator[tuple[Batch, Chunk], None, None]]:
    """From lane positions to one rank's endless training batches.

    batch_size: over all ranks. keep: positions inside each shard to train on (None: all). The second value that comes
    with a batch holds the lanes' positions after it and the samples skipped. Raises UserError, before any sample is
    read, for a topology that does not divide evenly.
    """
    check_channels(preprocess.channels)
    sets = shards.sets(keep)
    check_topology(
        samples=sum(samples.samples for samples in sets),
        lanes=data.lanes,
        batch_size=batch_size,
        ranks=ranks,
        workers=data.workers,
        accumulate=accumulate,
    )

    def batches(positions: list[LanePosition]) -> Generator[tuple[Batch, Chunk], None, None]:
        per_lane = batch_size // data.lanes
        stream = TrainStream(shards, preprocess, data, per_lane, rank, ranks, sets, list(positions))
        chunks = loaded(stream, PREFETCH)
        while True:
            parts = [next(chunks) for _ in range(max(data.workers, 1))]
            yield join(parts, device, per_lane * preprocess.views, views=preprocess.views, shared=data.workers > 0)

    return batches


def training_samples(shards: ShardSet, data: DataConfig) -> np.ndarray | None:
    """Global indices of the `data.samples` images that training draws from, int64, sorted; None for all. Raises
    UserError where there are fewer."""
    if data.samples is None or data.samples == shards.samples:
        return None
    if data.samples > shards.samples:
        raise UserError(f"data.samples={data.samples}: {shards.spec} has {shards.samples} samples")
    return np.sort(np.random.default_rng(0).permutation(shards.samples)[: data.samples])


@dataclass
class TrainStream:
    """The endless training stream of one rank. per_lane: samples per step."""

    shards: ShardSet
    preprocess: Preprocess
    data: DataConfig
    per_lane: int
    rank: int
    ranks: int
    sets: Sequence[SampleSet]
    positions: list[LanePosition]

    def __post_init__(self) -> None:
        self.workers, self.worker_timeout = self.data.workers, self.data.worker_timeout

    def blank(self, worker: int) -> Chunk:
        return stacked([], len(self._lanes(worker)) * self.per_lane * self.preprocess.views, self.preprocess)

    def chunks(self, worker: int) -> Iterator[Chunk]:
        own_lanes = self._lanes(worker)
        reader = SampleReader(self.shards, self.preprocess, self.data.cache_mb << 20, len(own_lanes) * len(self.sets))
        lanes = {lane: self._samples(reader, lane) for lane in own_lanes}
        while True:
            taken = {lane: [next(stream) for _ in range(self.per_lane)] for lane, stream in lanes.items()}
            each = [one for of_lane in taken.values() for one in of_lane]
            samples = [view for views, _, _ in each for view in views]
            chunk = stacked(samples, len(samples), self.preprocess)
            chunk.positions = {lane: of_lane[-1][1] for lane, of_lane in taken.items()}
            chunk.skipped = [skip for _, _, skips in each for skip in skips]
            yield chunk

    def _lanes(self, worker: int) -> list[int]:
        return worker_lanes(self.data.lanes, self.ranks, self.rank, self.workers, worker)

    def _samples(
        self, reader: SampleReader, lane: int
    ) -> Iterator[tuple[list[Sample], LanePosition, list[SkippedSample]]]:
        """Samples of one lane: (views of the sample, position after it, samples skipped before it)."""
        total = sum(samples.samples for samples in self.sets)
        longest = 2 * max(total // self.data.lanes, min(total, _SMALL))
        skipped: list[SkippedSample] = []
        reads = -1
        for segment in lane_stream(self.preprocess.seed, self.sets, self.data.lanes, lane, self.positions[lane]):
            if reader.reads != reads:  # no reads mean that every image is in memory
                reader.files.ahead(segment.upcoming)
            reads = reader.reads
            for offset, member in enumerate(segment.members.tolist()):
                item = reader.sample(segment.shard, member, segment.epoch)
                if not isinstance(item, SkippedSample):
                    yield item, LanePosition(segment.start.epoch, segment.start.position + offset + 1), skipped
                    skipped = []
                    continue
                if self.data.on_bad_sample == "fail":
                    raise item.error()
                skipped.append(item)
                if len(skipped) > longest:
                    raise UserError(
                        f"{len(skipped):,} samples in a row cannot be used; the last one: {item.shard}: {item.reason}"
                    )
