"""Who reads which sample, and when: pure functions, no I/O.

An epoch is one sequence of samples: the shards in an order drawn from (seed, epoch), each shard's samples in an order
drawn from (seed, epoch, shard). The sequence is cut into `lanes` equal slices (to within one sample). A lane is an
endless stream: its slice of epoch 0, then of epoch 1, and so on. Every optimiser step takes the same number of samples
from every lane, in lane order, so the global batch of a step is the same on any number of processes and workers; each
sample comes exactly once an epoch; no process ever waits for another's data; and where a run stands is one
(epoch, position) pair a lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ssl_vit.interfaces import UserError

Members = np.ndarray  # int64 positions of samples inside one shard


@dataclass(frozen=True)
class LanePosition:
    """How far a lane is: `position` samples of its slice of `epoch` were taken (read, or skipped as broken)."""

    epoch: int = 0
    position: int = 0


def epoch_order(
    seed: int, epoch: int, counts: Sequence[int], keep: Sequence[Members] | None = None
) -> list[tuple[int, Members]]:
    """All samples of an epoch in reading order, as (shard index, positions inside it).

    counts: samples in each shard. keep: positions to use of each shard (None: all); others never appear.
    """
    order = []
    for shard in np.random.default_rng([seed, epoch, 0]).permutation(len(counts)):
        members = np.arange(counts[shard]) if keep is None else np.asarray(keep[shard], dtype=np.int64)
        shuffled = np.random.default_rng([seed, epoch, 1, int(shard)]).permutation(members)
        order.append((int(shard), shuffled))
    return order


def lane_epoch(
    seed: int, epoch: int, counts: Sequence[int], lanes: int, lane: int, keep: Sequence[Members] | None = None
) -> list[tuple[int, Members]]:
    """One lane's slice of an epoch, as (shard index, positions inside it); shards that give it nothing are left out.

    Which slice a lane gets turns with the epoch, so that lanes stay level where the slices differ by one sample.
    """
    order = epoch_order(seed, epoch, counts, keep)
    total = sum(len(members) for _, members in order)
    turn = (lane + epoch) % lanes
    first, last = turn * total // lanes, (turn + 1) * total // lanes
    pieces, offset = [], 0
    for shard, members in order:
        piece = members[max(first - offset, 0) : max(last - offset, 0)]
        offset += len(members)
        if len(piece):
            pieces.append((shard, piece))
    return pieces


def lane_stream(
    seed: int,
    counts: Sequence[int],
    lanes: int,
    lane: int,
    start: LanePosition = LanePosition(),
    keep: Sequence[Members] | None = None,
) -> Iterator[tuple[LanePosition, int, Members]]:
    """The rest of a lane from `start` on, endlessly: (position of the piece's first sample, shard, positions in it)."""
    epoch, taken = start.epoch, start.position
    while True:
        offset = 0
        for shard, members in lane_epoch(seed, epoch, counts, lanes, lane, keep):
            rest = members[max(taken - offset, 0) :]
            if len(rest):
                yield LanePosition(epoch, offset + len(members) - len(rest)), shard, rest
            offset += len(members)
        epoch, taken = epoch + 1, 0


def rank_lanes(lanes: int, ranks: int, rank: int) -> range:
    """The lanes of one process: consecutive, so that the ranks' batches in rank order are the global batch."""
    return range(rank * lanes // ranks, (rank + 1) * lanes // ranks)


def worker_lanes(lanes: int, ranks: int, rank: int, workers: int, worker: int) -> list[int]:
    """The lanes of one loader worker: a consecutive part of its rank's (0 workers counts as one)."""
    own = rank_lanes(lanes, ranks, rank)
    parts = max(workers, 1)
    return list(own[worker * len(own) // parts : (worker + 1) * len(own) // parts])


def plan(
    seed: int, epoch: int, counts: Sequence[int], lanes: int, ranks: int, workers: int
) -> dict[tuple[int, int], list[tuple[int, int, Members]]]:
    """The whole plan of one epoch: (rank, worker) -> [(lane, shard, positions inside the shard), ...]."""
    return {
        (rank, worker): [
            (lane, shard, members)
            for lane in worker_lanes(lanes, ranks, rank, workers, worker)
            for shard, members in lane_epoch(seed, epoch, counts, lanes, lane)
        ]
        for rank in range(ranks)
        for worker in range(max(workers, 1))
    }


def check_topology(
    *, shards: int, samples: int, lanes: int, batch_size: int, ranks: int, workers: int, accumulate: int = 1
) -> None:
    """Refuse, before the first step, what cannot be dealt out evenly. Raises UserError naming the fix."""
    if samples == 0:
        raise UserError("there is no sample to train on: the shards are empty or the label budget keeps nothing")
    readers = ranks * max(workers, 1)
    if shards < readers:
        raise UserError(
            f"{shards} shard(s) are too few for {ranks} process(es) x {max(workers, 1)} loader worker(s): "
            f"repack with `ssl-vit shards make SOURCE OUT --overwrite --shards {readers}` or more, "
            "or lower data.workers"
        )
    if lanes % ranks:
        fits = [n for n in range(ranks, batch_size + 1, ranks) if batch_size % n == 0]
        raise UserError(
            f"data.lanes={lanes} cannot be dealt out to {ranks} processes: set data.lanes to a multiple of {ranks} "
            + (
                f"that divides training.batch_size={batch_size}, such as {fits[:4]}"
                if fits
                else f"and training.batch_size={batch_size} to a multiple of it"
            )
        )
    if max(workers, 1) > lanes // ranks:
        raise UserError(
            f"data.workers={workers} on each of {ranks} process(es) are more than the lanes they would own "
            f"({lanes // ranks} each): set data.workers to at most {lanes // ranks}, or raise data.lanes"
        )
    if batch_size % lanes:
        fits = [n for n in range(ranks, batch_size + 1, ranks) if batch_size % n == 0]
        raise UserError(
            f"training.batch_size={batch_size} is not a multiple of data.lanes={lanes}: "
            f"every lane gives the same number of samples to a step; "
            + (
                f"data.lanes could be one of {fits[-6:]}"
                if fits
                else f"set training.batch_size to a multiple of {lanes}"
            )
        )
    if lanes // ranks % accumulate:
        raise UserError(
            f"training.accumulate={accumulate} must divide the {lanes // ranks} lanes of each process: micro-batches "
            f"are made of whole lanes; set data.lanes to a multiple of {ranks * accumulate}"
        )
