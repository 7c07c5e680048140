"""Shards -> training batches: the endless stream that follows the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ssl_vit.data import DataConfig
from ssl_vit.data.images import check_channels
from ssl_vit.data.loader import loaded
from ssl_vit.data.order import LanePosition, Members, Piece, SampleSet, check_topology, lane_stream, worker_lanes
from ssl_vit.data.samples import Chunk, Preprocess, Sample, SampleReader, Skip, bookkeeping, join, stacked
from ssl_vit.data.shards import ShardSet
from ssl_vit.interfaces import Batch, RunError, UserError


class _Lane:
    """One lane's endless samples from a position on."""

    def __init__(
        self, reader: SampleReader, seed: int, sets: Sequence[SampleSet], lanes: int, lane: int, start: LanePosition
    ) -> None:
        self.reader, self.position = reader, start
        self.samples = self._samples(lane_stream(seed, sets, lanes, lane, start))
        self.share = max(sum(samples.samples for samples in sets) // lanes, 1)
        self.unread = 0

    def _samples(self, pieces: Iterator[Piece]) -> Iterator[Sample | Skip]:
        reads = -1
        for piece in pieces:
            if self.reader.reads != reads:  # not where every image is remembered by now
                self.reader.files.ahead(piece.upcoming)
            reads = self.reader.reads
            for offset, member in enumerate(piece.members.tolist()):
                self.position = LanePosition(piece.start.epoch, piece.start.position + offset + 1)
                yield self.reader.sample(piece.shard, member, piece.epoch)

    def take(self, count: int, skipped: list[Skip]) -> list[Sample]:
        samples: list[Sample] = []
        while len(samples) < count:
            item = next(self.samples)
            if isinstance(item, Sample):
                self.unread = 0
                samples.append(item)
                continue
            skipped.append(item)
            self.unread += 1
            if self.unread > 2 * self.share:
                raise UserError(f"no readable sample in a whole lane; the last one: {item.shard}: {item.reason}")
        return samples


class TrainStream(IterableDataset[Chunk]):
    """The endless training stream of one rank; iterate it through `train_batches`."""

    def __init__(
        self,
        shards: ShardSet,
        preprocess: Preprocess,
        *,
        batch_size: int,
        lanes: int,
        workers: int,
        rank: int,
        ranks: int,
        positions: Sequence[LanePosition],
        sets: Sequence[SampleSet],
        cache_mb: int,
        strict: bool,
        worker_timeout: int = 600,
    ) -> None:
        self.shards, self.preprocess, self.per_lane, self.lanes = shards, preprocess, batch_size // lanes, lanes
        self.workers, self.rank, self.ranks, self.positions = workers, rank, ranks, list(positions)
        self.sets, self.cache_bytes, self.strict = sets, cache_mb << 20, strict
        self.worker_timeout = worker_timeout

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        own = worker_lanes(self.lanes, self.ranks, self.rank, self.workers, worker.id if worker else 0)
        reader = SampleReader(self.shards, self.preprocess, self.cache_bytes, len(own) * len(self.sets))
        streams = [_Lane(reader, self.preprocess.seed, self.sets, self.lanes, n, self.positions[n]) for n in own]
        while True:
            # Without workers this runs in the training process: its generator must not notice.
            state = torch.get_rng_state()
            try:
                chunk = self._chunk(reader, own, streams)
            except (UserError, RunError) as error:  # raised, it would cross the process border as a wall of text
                chunk = Chunk(error=error)
            torch.set_rng_state(state)
            yield chunk
            if chunk.error:
                return

    def _chunk(self, reader: SampleReader, own: list[int], streams: list[_Lane]) -> Chunk:
        skipped: list[Skip] = []
        samples = [sample for lane in streams for sample in lane.take(self.per_lane, skipped)]
        if self.strict and skipped:
            bad = skipped[0]
            raise UserError(f"{bad.shard}: sample {bad.key}: {bad.reason} (data.on_bad_sample=fail)")
        chunk = stacked(samples, len(samples))
        chunk.positions = {n: lane.position for n, lane in zip(own, streams, strict=True)}
        chunk.skipped = skipped
        return chunk


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
) -> Callable[[list[LanePosition]], Iterator[tuple[Batch, Chunk]]]:
    """From lane positions to one rank's endless training batches.

    batch_size: over all ranks. keep: positions inside each shard to train on (None: all). Raises UserError, before any
    sample is read, for a topology that cannot be dealt out evenly.
    """
    check_channels(preprocess.channels)
    sets = shards.sets(keep)
    check_topology(
        shards=len(shards.urls),
        samples=sum(samples.samples for samples in sets),
        lanes=data.lanes,
        batch_size=batch_size,
        ranks=ranks,
        workers=data.workers,
        accumulate=accumulate,
    )

    def batches(positions: list[LanePosition]) -> Iterator[tuple[Batch, Chunk]]:
        stream = TrainStream(
            shards,
            preprocess,
            batch_size=batch_size,
            lanes=data.lanes,
            workers=data.workers,
            rank=rank,
            ranks=ranks,
            positions=positions,
            sets=sets,
            cache_mb=data.cache_mb,
            strict=data.on_bad_sample == "fail",
            worker_timeout=data.worker_timeout,
        )
        return train_batches(stream, device)

    return batches


def train_batches(stream: TrainStream, device: torch.device) -> Iterator[tuple[Batch, Chunk]]:
    """Batches of one rank for ever: its workers' chunks in worker order, joined on the device.

    The second value carries what is not a tensor: the lanes' positions after this batch and the samples skipped.
    Raises UserError and RunError for what the workers could not get over.
    """
    chunks = loaded(stream, stream.workers, device, prefetch=4, timeout=stream.worker_timeout)
    while True:
        parts = [next(chunks) for _ in range(max(stream.workers, 1))]
        for part in parts:
            if part.error:
                raise part.error
        yield join(parts, device, stream.per_lane), bookkeeping(parts)
