"""Who reads which sample, and when: pure functions, no I/O.

An epoch of a shard set is one sequence of samples: the shards in an order drawn from (seed, epoch), each shard's
samples in an order drawn from (seed, epoch, shard). The sequence is cut into `lanes` equal slices (to within one
sample). A lane is an endless stream: its slice of epoch 0, then of epoch 1, and so on. Every optimizer step takes the
same number of samples from every lane, in lane order, so the global batch of a step is the same on any number of
processes and workers; each sample comes exactly once per epoch; no process ever waits for another's data; and a
run's position is one (epoch, position) pair per lane.

A mixture is several sets with weights. Its epoch has as many samples as the sets hold together, each set giving its
share of them: the next part of its own endless sequence of epochs, so that a small set is repeated and a large one
continues where it was. A lane takes its slice of every set's part and interleaves them evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ssl_vit.interfaces import UserError

Members = np.ndarray  # int64 positions of samples inside one shard


@dataclass(frozen=True, order=True)
class LanePosition:
    """How far a lane is: `position` samples of its slice of `epoch` were taken (read, or skipped as broken)."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class SampleSet:
    """The samples of one shard set.

    counts: samples in each shard. keep: positions to use of each shard (None: all); others never appear.
    first_shard: the number of the set's first shard in the mixture. weight: its share, relative to the other sets'
    (None: its number of samples, so that every sample comes once per epoch).
    """

    counts: Sequence[int]
    keep: Sequence[Members] | None = None
    first_shard: int = 0
    weight: float | None = None

    def used(self, shard: int) -> int:
        """How many samples of the shard (counted inside the set) are used."""
        return int(self.counts[shard]) if self.keep is None else len(self.keep[shard])

    @property
    def samples(self) -> int:
        return sum(self.used(shard) for shard in range(len(self.counts)))


@dataclass(frozen=True)
class Segment:
    """Consecutive samples of a lane, all of one shard.

    start: the lane's position before the first. epoch: the set's own; a small set of a mixture goes through its epochs
    faster than the mixture does. members: positions inside the shard, in reading order. upcoming: the shard that the
    same set gives the lane next, for opening it in advance.
    """

    start: LanePosition
    epoch: int
    shard: int
    members: Members
    upcoming: int


def shard_order(seed: int, epoch: int, samples: SampleSet) -> np.ndarray:
    """The set's shards (counted inside the set) in the order in which an epoch reads them."""
    return np.random.default_rng([seed, epoch, 0, samples.first_shard]).permutation(len(samples.counts))


def shard_members(seed: int, epoch: int, samples: SampleSet, shard: int) -> Members:
    """The used samples of one shard in the order in which an epoch reads them."""
    members = np.arange(samples.counts[shard]) if samples.keep is None else np.asarray(samples.keep[shard])
    return np.random.default_rng([seed, epoch, 1, samples.first_shard + shard]).permutation(members.astype(np.int64))


def set_slice(seed: int, samples: SampleSet, first: int, last: int) -> Iterator[tuple[int, int, Members]]:
    """Samples first..last-1 of a set's endless sequence of epochs, as (the set's epoch, shard number in the mixture,
    positions in it).

    Only the shards that the slice touches are shuffled.
    """
    size = samples.samples
    for epoch in range(first // size, -(-last // size)) if size else ():
        offset = epoch * size
        for shard in shard_order(seed, epoch, samples):
            used = samples.used(shard)
            begin, end = max(first - offset, 0), min(last - offset, used)
            if begin < end:
                members = shard_members(seed, epoch, samples, shard)[begin:end]
                yield epoch, samples.first_shard + int(shard), members
            offset += used


def lane_bounds(epoch: int, sets: Sequence[SampleSet], lanes: int, lane: int) -> list[tuple[int, int]]:
    """A lane's slice of an epoch, in each set's endless sequence, as (first, last + 1).

    The slice that a lane gets rotates with the epoch, so that lanes stay level where slices differ by a sample.
    """
    sizes = [samples.samples for samples in sets]
    total = sum(sizes)
    # A set's share is counted in whole samples over all epochs so far: rounding never adds up.
    weights = [
        Fraction(n if samples.weight is None or n == 0 else samples.weight)
        for samples, n in zip(sets, sizes, strict=True)
    ]
    turn = (lane + epoch) % lanes
    bounds = []
    for weight in weights:
        begin, end = (int(number * total * weight / (sum(weights) or 1)) for number in (epoch, epoch + 1))
        bounds.append((begin + turn * (end - begin) // lanes, begin + (turn + 1) * (end - begin) // lanes))
    return bounds


def interleave(sizes: Sequence[int]) -> np.ndarray:
    """The set of each sample of a lane's epoch, in reading order: integers (sum(sizes),), spread as evenly as the sizes
    of the sets' slices allow."""
    if len(sizes) == 1:  # of a large set, sorting takes seconds and much memory
        return np.zeros(sizes[0], np.int8)
    places = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes if size] or [np.empty(0)])
    return np.repeat(np.arange(len(sizes)), sizes)[np.argsort(places, kind="stable")]


def lane_stream(
    seed: int, sets: Sequence[SampleSet], lanes: int, lane: int, start: LanePosition = LanePosition()
) -> Iterator[Segment]:
    """The rest of a lane from `start` on, endlessly. At least one set must hold a sample."""
    epoch, taken = start.epoch, start.position
    while True:
        owners = interleave([last - first for first, last in lane_bounds(epoch, sets, lanes, lane)])
        done = np.bincount(owners[:taken], minlength=len(sets))
        segments = [_segments_of_set(seed, epoch, sets, lanes, lane, n, int(done[n])) for n in range(len(sets))]
        begun: list[tuple[int, int, Members, int]] = [(0, 0, np.empty(0, np.int64), 0)] * len(sets)
        ends = (taken + 1 + np.flatnonzero(np.diff(owners[taken:]))).tolist()  # of samples in a row of one set
        for end in [*ends, len(owners)]:
            while taken < end:
                owner, length = int(owners[taken]), end - taken
                unread = begun[owner] if len(begun[owner][2]) else next(segments[owner])
                set_epoch, shard, members, upcoming = unread
                segment = members[:length]
                begun[owner] = (set_epoch, shard, members[length:], upcoming)
                yield Segment(LanePosition(epoch, taken), set_epoch, shard, segment, upcoming)
                taken += len(segment)
        epoch, taken = epoch + 1, 0


def _segments_of_set(
    seed: int, epoch: int, sets: Sequence[SampleSet], lanes: int, lane: int, number: int, done: int
) -> Iterator[tuple[int, int, Members, int]]:
    """The part of one set in a lane's epoch, from its sample `done` on: (epoch of the set, shard, positions, next
    shard)."""
    first, last = lane_bounds(epoch, sets, lanes, lane)[number]
    current: tuple[int, int, Members] | None = None
    for segment in set_slice(seed, sets[number], first + done, last):
        if current is not None:
            yield *current, segment[1]
        current = segment
    if current is not None:
        first, last = lane_bounds(epoch + 1, sets, lanes, lane)[number]
        upcoming = next(set_slice(seed, sets[number], first, last), current)
        yield *current, upcoming[1]


def worker_lanes(lanes: int, ranks: int, rank: int, workers: int, worker: int) -> list[int]:
    """The lanes of one loader worker: a consecutive part of its rank's (0 workers counts as one). Those of a rank are
    consecutive, so that the ranks' batches in rank order are the global batch."""
    own = range(rank * lanes // ranks, (rank + 1) * lanes // ranks)
    parts = max(workers, 1)
    return list(own[worker * len(own) // parts : (worker + 1) * len(own) // parts])


def check_topology(*, samples: int, lanes: int, batch_size: int, ranks: int, workers: int, accumulate: int = 1) -> None:
    """Refuse, before the first step, what cannot be split evenly. Raises UserError naming the fix."""
    own, readers = lanes // ranks, max(workers, 1)
    if samples == 0:
        raise UserError("there is no sample to train on: the shards are empty or the label budget keeps nothing")
    if lanes % ranks or batch_size % lanes:
        fits = [n for n in range(ranks, batch_size + 1, ranks) if batch_size % n == 0]
        hint = f"such as {fits[-6:]}" if fits else f"and training.batch_size to a multiple of {ranks}"
        counts = [n for n in range(1, lanes + 1) if lanes % n == 0 and batch_size % lanes == 0]
        # A run that has begun keeps its lanes (`runs.MAY_CHANGE`).
        resumed = f" (to resume a run, start {' or '.join(map(str, counts))} process(es) instead)" if counts else ""
        raise UserError(
            f"data.lanes={lanes} must be a multiple of the {ranks} process(es) and divide training.batch_size="
            f"{batch_size}; set data.lanes to another number, {hint}{resumed}"
        )
    if readers > own:
        raise UserError(
            f"data.workers={workers} on each of {ranks} process(es) are more than the lanes they would own ({own} "
            f"each): set data.workers to at most {own}, or raise data.lanes"
        )
    if own % accumulate:
        raise UserError(
            f"training.accumulate={accumulate} must divide the {own} lanes of each process: micro-batches are made of "
            f"whole lanes; lower it, or set data.lanes to a multiple of {ranks * accumulate}"
        )
