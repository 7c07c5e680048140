"""Shards -> batches: the endless training stream and the exact-once evaluation stream."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ssl_vit.data import DataConfig
from ssl_vit.data.decode import BadSample, check_channels, decode_label, decode_pixels
from ssl_vit.data.plan import LanePosition, Members, check_topology, lane_stream, worker_lanes
from ssl_vit.data.shards import ShardSet, read_members
from ssl_vit.data.transforms import Transform
from ssl_vit.interfaces import Batch, UserError

Raw = Mapping[str, bytes | str] | BadSample


@dataclass(frozen=True)
class View:
    """How samples become tensors: the same for a training and an evaluation stream.

    noise: uniform numbers drawn for each sample. classes: upper bound of valid labels (None: unknown).
    """

    transform: Transform
    channels: int
    classes: int | None
    noise: int = 0
    flip: bool = False
    seed: int = 0
    needs_labels: bool = False


@dataclass
class Skip:
    """A sample that could not be used."""

    shard: str
    key: str
    reason: str


@dataclass
class Chunk:
    """One loader worker's part of a step: the tensors of `Batch` by name, and what is not a tensor.

    positions: where the worker's lanes stand after this chunk, by lane. error: why the stream ends here.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    positions: dict[int, LanePosition] = field(default_factory=dict)
    skipped: list[Skip] = field(default_factory=list)
    error: str = ""

    def pin_memory(self) -> Chunk:
        """Called by the DataLoader where the device is a GPU."""
        self.tensors = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return self


@dataclass
class _Sample:
    image: torch.Tensor
    label: int
    noise: torch.Tensor
    flip: bool
    index: int
    key: str


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """A 64-bit seed for everything random about one sample in one epoch, whichever process draws it."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class SampleReader:
    """Reads, decodes and augments samples of a shard set; keeps decoded images while `cache_bytes` lasts."""

    def __init__(self, shards: ShardSet, view: View, cache_bytes: int) -> None:
        self.shards, self.view, self.free = shards, view, cache_bytes
        self.first_index = shards.first_index
        self.cache: dict[tuple[int, int], tuple[torch.Tensor, int, str]] = {}

    def raw(self, shard: int, members: Members) -> dict[int, Raw]:
        """The wanted members of a shard that are not cached, undecoded; missing ones become BadSample."""
        wanted = {int(m) for m in members if (shard, int(m)) not in self.cache}
        found: dict[int, Raw] = {}
        reason = "missing: the shard ends before it"
        if wanted:
            last = max(wanted)
            for position, sample in read_members(self.shards.urls[shard]):
                if isinstance(sample, Exception):
                    reason = f"missing: the shard is damaged ({sample})"
                elif position in wanted:
                    found[position] = sample
                if position >= last and not isinstance(sample, Exception):
                    break
        return {m: found.get(m) or BadSample(reason) for m in wanted}

    def sample(self, shard: int, member: int, raw: dict[int, Raw], epoch: int) -> _Sample | Skip:
        """Decode (or recall) one sample and draw its augmentation, flip and noise from its own seed."""
        view, key = self.view, f"#{member}"
        if (shard, member) in self.cache:
            pixels, label, key = self.cache[shard, member]
        else:
            try:
                content = raw.pop(member)
                if isinstance(content, BadSample):
                    raise content
                key = str(content["__key__"])
                pixels, label = decode_pixels(content, view.channels), decode_label(content, view.classes)
                if view.needs_labels and label < 0:
                    raise BadSample("no label (.cls), which this objective needs")
            except BadSample as problem:
                return Skip(self.shards.urls[shard], key, str(problem))
            if pixels.nbytes <= self.free:
                self.free -= pixels.nbytes
                self.cache[shard, member] = (pixels, label, key)
        index = int(self.first_index[shard]) + member
        torch.default_generator.manual_seed(sample_seed(view.seed, epoch, index))
        noise = torch.rand(view.noise)
        flip = view.flip and bool(torch.rand(()) < 0.5)
        return _Sample(view.transform(pixels), label, noise, flip, index, key)

    def chunk(self, samples: Sequence[_Sample], padded_to: int) -> Chunk:
        """Stack samples; padding repeats zeros with label -1, index -1 and valid False. At least one sample."""
        padding = padded_to - len(samples)
        blank = torch.zeros_like(samples[0].image)
        tensors = {
            "images": torch.stack([s.image for s in samples] + [blank] * padding),
            "labels": torch.tensor([s.label for s in samples] + [-1] * padding),
            "noise": torch.stack([s.noise for s in samples] + [torch.zeros(self.view.noise)] * padding),
            "flip": torch.tensor([s.flip for s in samples] + [False] * padding),
            "indices": torch.tensor([s.index for s in samples] + [-1] * padding),
            "valid": torch.tensor([True] * len(samples) + [False] * padding),
        }
        return Chunk(tensors, keys=[s.key for s in samples])


class _Lane:
    """One lane's endless samples from a position on."""

    def __init__(self, reader: SampleReader, seed: int, lanes: int, lane: int, start: LanePosition, keep: Any) -> None:
        self.reader, self.position = reader, start
        self.pieces = lane_stream(seed, reader.shards.counts, lanes, lane, start, keep)
        self.queue: Iterator[_Sample | Skip] = iter(())
        self.share = max(reader.shards.samples // lanes, 1)
        self.unread = 0

    def _read_piece(self) -> Iterator[_Sample | Skip]:
        start, shard, members = next(self.pieces)
        raw = self.reader.raw(shard, members)
        for offset, member in enumerate(members):
            self.position = LanePosition(start.epoch, start.position + offset + 1)
            yield self.reader.sample(shard, int(member), raw, start.epoch)

    def take(self, count: int, skipped: list[Skip]) -> list[_Sample]:
        samples: list[_Sample] = []
        while len(samples) < count:
            item = next(self.queue, None)
            if item is None:
                self.queue = self._read_piece()
            elif isinstance(item, Skip):
                skipped.append(item)
                self.unread += 1
                if self.unread > 2 * self.share:
                    raise UserError(f"no readable sample in a whole lane; the last one: {item.shard}: {item.reason}")
            else:
                self.unread = 0
                samples.append(item)
        return samples


class TrainStream(IterableDataset[Chunk]):
    """The endless training stream of one rank; iterate it through `train_batches`."""

    def __init__(
        self,
        shards: ShardSet,
        view: View,
        *,
        batch_size: int,
        lanes: int,
        workers: int,
        rank: int,
        ranks: int,
        positions: Sequence[LanePosition],
        keep: Sequence[Members] | None,
        cache_mb: int,
        strict: bool,
    ) -> None:
        self.shards, self.view, self.per_lane, self.lanes = shards, view, batch_size // lanes, lanes
        self.workers, self.rank, self.ranks, self.positions = workers, rank, ranks, list(positions)
        self.keep, self.cache_bytes, self.strict = keep, cache_mb << 20, strict

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        own = worker_lanes(self.lanes, self.ranks, self.rank, self.workers, worker.id if worker else 0)
        reader = SampleReader(self.shards, self.view, self.cache_bytes)
        streams = [_Lane(reader, self.view.seed, self.lanes, n, self.positions[n], self.keep) for n in own]
        while True:
            # Without workers this runs in the training process: its generator must not notice.
            state = torch.get_rng_state()
            try:
                chunk = self._chunk(reader, own, streams)
            except UserError as error:  # an exception would cross the process border as a wall of text
                chunk = Chunk(error=str(error))
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
        chunk = reader.chunk(samples, len(samples))
        chunk.positions = {n: lane.position for n, lane in zip(own, streams, strict=True)}
        chunk.skipped = skipped
        return chunk


def train_source(
    shards: ShardSet,
    view: View,
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
    check_channels(view.channels)
    check_topology(
        shards=len(shards.urls),
        samples=shards.samples if keep is None else sum(len(members) for members in keep),
        lanes=data.lanes,
        batch_size=batch_size,
        ranks=ranks,
        workers=data.workers,
        accumulate=accumulate,
    )

    def batches(positions: list[LanePosition]) -> Iterator[tuple[Batch, Chunk]]:
        stream = TrainStream(
            shards,
            view,
            batch_size=batch_size,
            lanes=data.lanes,
            workers=data.workers,
            rank=rank,
            ranks=ranks,
            positions=positions,
            keep=keep,
            cache_mb=data.cache_mb,
            strict=data.on_bad_sample == "fail",
        )
        return train_batches(stream, device)

    return batches


def train_batches(stream: TrainStream, device: torch.device) -> Iterator[tuple[Batch, Chunk]]:
    """Batches of one rank for ever: its workers' chunks in worker order, joined on the device.

    The second value carries what is not a tensor: the lanes' positions after this batch and the samples skipped.
    Raises UserError for what the workers could not get over.
    """
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=stream.workers,
        pin_memory=device.type == "cuda",
        prefetch_factor=4 if stream.workers else None,
        generator=torch.Generator(),  # else it would draw its base seed from the model's generator
    )
    chunks = iter(loader)
    while True:
        parts = [next(chunks) for _ in range(max(stream.workers, 1))]
        for part in parts:
            if part.error:
                raise UserError(part.error)
        yield _join(parts, device, stream.per_lane), _bookkeeping(parts)


class EvaluationStream(IterableDataset[Chunk]):
    """Every sample exactly once over all ranks, in index order; all ranks get the same number of equal batches."""

    def __init__(
        self,
        shards: ShardSet,
        view: View,
        *,
        batch_size: int,
        rank: int,
        ranks: int,
        workers: int,
        indices: np.ndarray | None = None,
        epoch: int = 0,
    ) -> None:
        self.shards, self.view, self.batch_size, self.workers, self.epoch = shards, view, batch_size, workers, epoch
        every = np.arange(shards.samples) if indices is None else np.unique(np.asarray(indices, dtype=np.int64))
        self.own = every[rank * len(every) // ranks : (rank + 1) * len(every) // ranks]
        self.batches = math.ceil(math.ceil(len(every) / ranks) / batch_size)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        numbers = range(first, self.batches, step)
        batches = [self.own[n * self.batch_size : (n + 1) * self.batch_size] for n in numbers]
        mine = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
        samples = self._samples(SampleReader(self.shards, self.view, 0), mine)
        for batch in batches:
            state = torch.get_rng_state()
            chunk = self._chunk([next(samples) for _ in batch])
            torch.set_rng_state(state)
            yield chunk

    def _samples(self, reader: SampleReader, indices: np.ndarray) -> Iterator[_Sample | Skip]:
        for shard, members in enumerate(self.shards.members_of(indices)):
            if len(members):
                raw = reader.raw(shard, members)
                for member in members:
                    yield reader.sample(shard, int(member), raw, self.epoch)

    def _chunk(self, items: list[_Sample | Skip]) -> Chunk:
        good = [item for item in items if isinstance(item, _Sample)]
        reader = SampleReader(self.shards, self.view, 0)
        chunk = reader.chunk(good or [self._blank()], self.batch_size)
        if not good:
            chunk.tensors["valid"][:], chunk.keys = False, []
        chunk.skipped = [item for item in items if isinstance(item, Skip)]
        return chunk

    def _blank(self) -> _Sample:
        image = self.view.transform(torch.zeros(self.view.channels, 8, 8, dtype=torch.uint8))
        return _Sample(image, -1, torch.zeros(self.view.noise), False, -1, "")


def evaluation_batches(stream: EvaluationStream, device: torch.device) -> Iterator[tuple[Batch, Chunk]]:
    """The stream's batches on the device, `len(stream)` of them on every rank; padding is marked by `valid`."""
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=stream.workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # as above
    )
    for chunk in loader:
        yield _join([chunk], device, 0), _bookkeeping([chunk])


def _join(parts: list[Chunk], device: torch.device, lane_size: int) -> Batch:
    def joined(name: str) -> torch.Tensor:
        moved = [part.tensors[name].to(device, non_blocking=True) for part in parts]
        return moved[0] if len(moved) == 1 else torch.cat(moved)

    tensors = {name: joined(name) for name in parts[0].tensors}
    return Batch(**tensors, keys=[key for part in parts for key in part.keys], lane_size=lane_size)


def _bookkeeping(parts: list[Chunk]) -> Chunk:
    positions = {lane: position for part in parts for lane, position in part.positions.items()}
    return Chunk(positions=positions, skipped=[skip for part in parts for skip in part.skipped])
