from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_vit.data import order as planning
from ssl_vit.data.order import LanePosition, SampleSet, check_topology, worker_lanes
from ssl_vit.interfaces import UserError

quick = settings(max_examples=30, deadline=None, database=None, derandomize=True)

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=200).filter(lambda counts: sum(counts) > 0)
SEEDS = st.integers(0, 2**31)
LANES = st.integers(1, 64)
EPOCHS = st.integers(0, 1000)

Sample = tuple[int, int]  # shard, position inside it


def flat(pieces: Sequence[tuple[int, np.ndarray]]) -> list[Sample]:
    return [(shard, int(member)) for shard, members in pieces for member in members]


def epoch_order(seed: int, epoch: int, counts: Sequence[int], keep: Any = None) -> list[tuple[int, np.ndarray]]:
    return lane_epoch(seed, epoch, counts, 1, 0, keep)


def slices(seed: int, epoch: int, sets: Sequence[SampleSet], lanes: int, lane: int) -> list[tuple[int, np.ndarray]]:
    """One lane's slice of an epoch, as (shard, positions inside it), set after set, not interleaved."""
    bounds = zip(sets, planning.lane_bounds(epoch, sets, lanes, lane), strict=True)
    return [run[1:] for samples, (first, last) in bounds for run in planning.set_slice(seed, samples, first, last)]


def lane_epoch(
    seed: int, epoch: int, counts: Sequence[int], lanes: int, lane: int, keep: Any = None
) -> list[tuple[int, np.ndarray]]:
    return slices(seed, epoch, [SampleSet(counts, keep)], lanes, lane)


def lane_stream(
    seed: int, counts: Sequence[int], lanes: int, lane: int, start: LanePosition = LanePosition(), keep: Any = None
) -> Any:
    return planning.lane_stream(seed, [SampleSet(counts, keep)], lanes, lane, start)


def every_sample(counts: Sequence[int]) -> list[Sample]:
    return [(shard, member) for shard, count in enumerate(counts) for member in range(count)]


# --- one epoch ---


@quick
@given(counts=COUNTS, seed=SEEDS, lanes=LANES, first=EPOCHS)
def test_every_epoch_gives_every_sample_to_one_lane_once(counts: list[int], seed: int, lanes: int, first: int) -> None:
    for epoch in range(first, first + 2):
        split = [flat(lane_epoch(seed, epoch, counts, lanes, lane)) for lane in range(lanes)]
        assert sorted(sample for lane in split for sample in lane) == every_sample(counts)
        sizes = [len(lane) for lane in split]
        assert max(sizes) - min(sizes) <= 1


@quick
@given(counts=COUNTS, seed=SEEDS, lanes=st.integers(1, 16), epoch=EPOCHS)
def test_lanes_are_slices_of_one_sequence_turning_with_the_epoch(
    counts: list[int], seed: int, lanes: int, epoch: int
) -> None:
    order = flat(epoch_order(seed, epoch, counts))
    split = [flat(lane_epoch(seed, epoch, counts, lanes, lane)) for lane in range(lanes)]
    turned = [sample for n in range(lanes) for sample in split[(n - epoch) % lanes]]
    assert turned == order


@quick
@given(counts=st.lists(st.integers(1, 9), min_size=20, max_size=60), seed=SEEDS, epoch=EPOCHS)
def test_another_seed_or_epoch_is_another_order(counts: list[int], seed: int, epoch: int) -> None:
    orders = [flat(epoch_order(seed + s, epoch + e, counts)) for s, e in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert len({tuple(order) for order in orders}) == 4


def test_samples_are_shuffled_inside_their_shard_and_differently_in_each() -> None:
    members = {shard: positions.tolist() for shard, positions in epoch_order(0, 0, [50, 50, 50])}
    assert all(sorted(positions) == list(range(50)) for positions in members.values())
    assert len({tuple(positions) for positions in members.values()} | {tuple(range(50))}) == 4


@quick
@given(data=st.data(), counts=COUNTS, seed=SEEDS, lanes=st.integers(1, 16))
def test_only_the_kept_samples_appear(data: st.DataObject, counts: list[int], seed: int, lanes: int) -> None:
    generator = np.random.default_rng(data.draw(SEEDS))
    keep = [np.flatnonzero(generator.random(count) < 0.4) for count in counts]
    wanted = [(shard, int(member)) for shard, members in enumerate(keep) for member in members]
    for epoch in range(2):
        split = [flat(lane_epoch(seed, epoch, counts, lanes, lane, keep)) for lane in range(lanes)]
        assert sorted(sample for lane in split for sample in lane) == wanted
        assert max(map(len, split)) - min(map(len, split)) <= 1


# --- endless lanes ---


def walk(stream: Any, samples: int) -> list[tuple[LanePosition, Sample]]:
    """The next samples of a lane, one by one, each with its own position."""
    walked: list[tuple[LanePosition, Sample]] = []
    for piece in stream:
        assert len(piece.members) > 0
        for offset, member in enumerate(piece.members):
            walked.append((LanePosition(piece.start.epoch, piece.start.position + offset), (piece.shard, int(member))))
        if len(walked) >= samples:
            return walked[:samples]
    raise AssertionError("a lane is endless")


# --- ranks and workers ---


@quick
@given(lanes=LANES, ranks=st.integers(1, 64), workers=st.integers(0, 8))
def test_ranks_and_workers_split_the_lanes_in_order(lanes: int, ranks: int, workers: int) -> None:
    by_rank = [worker_lanes(lanes, ranks, rank, 0, 0) for rank in range(ranks)]
    assert [lane for own in by_rank for lane in own] == list(range(lanes))
    for rank, own in enumerate(by_rank):
        by_worker = [worker_lanes(lanes, ranks, rank, workers, worker) for worker in range(max(workers, 1))]
        assert [lane for mine in by_worker for lane in mine] == own
        assert max(map(len, by_worker)) - min(map(len, by_worker)) <= 1
    if lanes % ranks == 0:
        assert {len(own) for own in by_rank} == {lanes // ranks}


@quick
@given(
    counts=COUNTS,
    seed=SEEDS,
    epoch=st.integers(0, 3),
    steps=st.integers(0, 40),
    before=st.sampled_from([(1, 0), (2, 3), (4, 1), (6, 4), (12, 2)]),
    after=st.sampled_from([(1, 4), (3, 2), (4, 0), (12, 1)]),
)
def test_a_resume_on_another_topology_loses_and_repeats_nothing(
    counts: list[int], seed: int, epoch: int, steps: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Some steps on one topology, then, from what its ranks wrote down, the rest of the epoch on another."""

    def owned(topology: tuple[int, int]) -> list[list[int]]:
        ranks, workers = topology
        return [worker_lanes(12, ranks, rank, workers, n) for rank in range(ranks) for n in range(max(workers, 1))]

    read: list[Sample] = []
    positions: dict[int, LanePosition] = {}
    for lane in (lane for own in owned(before) for lane in own):
        taken = walk(lane_stream(seed, counts, 12, lane, LanePosition(epoch)), steps) if steps else []
        read += [sample for position, sample in taken if position.epoch == epoch]
        last = taken[-1][0] if taken else LanePosition(epoch, -1)
        positions[lane] = LanePosition(last.epoch, last.position + 1)
    for lane in (lane for own in owned(after) for lane in own):
        share = len(flat(lane_epoch(seed, epoch, counts, 12, lane)))
        rest = walk(lane_stream(seed, counts, 12, lane, positions[lane]), share + 1)
        read += [sample for position, sample in rest if position.epoch == epoch]
    assert sorted(read) == every_sample(counts)


@quick
@given(counts=COUNTS, seed=SEEDS, lanes=st.integers(1, 6), lane=st.integers(0, 5))
def test_the_upcoming_shard_is_the_next_one(counts: list[int], seed: int, lanes: int, lane: int) -> None:
    if sum(counts) < 3 * lanes:
        return  # a lane whose share of an epoch may be nothing cannot look ahead over it
    stream = lane_stream(seed, counts, lanes, lane % lanes)
    pieces = list(islice(stream, 30))
    assert [piece.upcoming for piece in pieces[:-1]] == [piece.shard for piece in pieces[1:]]


# --- mixtures ---

MIXTURES = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.sampled_from([None, 0.25, 1.0, 2.0, 7.5])),
    min_size=1,
    max_size=4,
).filter(lambda mixture: sum(sum(counts) for counts, _ in mixture) > 0)


def mixed(mixture: list[tuple[list[int], float | None]]) -> list[SampleSet]:
    first, sets = 0, []
    for counts, weight in mixture:
        sets.append(SampleSet(counts, None, first, weight))
        first += len(counts)
    return sets


@quick
@given(mixture=MIXTURES, seed=SEEDS, lanes=st.integers(1, 8), epoch=st.integers(0, 20))
def test_a_mixture_keeps_its_shares_and_goes_through_each_set_in_whole_epochs(
    mixture: list[tuple[list[int], float | None]], seed: int, lanes: int, epoch: int
) -> None:
    sets = mixed(mixture)
    sizes = [sum(counts) for counts, _ in mixture]
    weights = [0 if n == 0 else n if weight is None else weight for (_, weight), n in zip(mixture, sizes, strict=True)]
    begun = 0
    for e in range(epoch, epoch + 2):
        split = [flat(slices(seed, e, sets, lanes, lane)) for lane in range(lanes)]
        everything = [sample for lane in split for sample in lane]
        assert abs(len(everything) - sum(sizes)) <= len(sets)
        assert max(map(len, split)) - min(map(len, split)) <= len(sets)
        for number, samples in enumerate(sets):
            own = range(samples.first_shard, samples.first_shard + len(samples.counts))
            count = sum(shard in own for shard, _ in everything)
            assert abs(count - sum(sizes) * weights[number] / sum(weights)) <= 1
        begun += len(everything)
    assert begun >= 2 * sum(sizes) - 2 * len(sets)


@quick
@given(
    mixture=MIXTURES,
    seed=SEEDS,
    lanes=st.integers(1, 5),
    lane=st.integers(0, 4),
)
def test_a_lane_of_a_mixture_continues_from_any_position(
    mixture: list[tuple[list[int], float | None]], seed: int, lanes: int, lane: int
) -> None:
    sets, lane = mixed(mixture), lane % lanes
    whole = walk(planning.lane_stream(seed, sets, lanes, lane), 40)
    for taken in range(0, 40, 3):
        last = whole[taken - 1][0] if taken else LanePosition(0, -1)
        resumed = planning.lane_stream(seed, sets, lanes, lane, LanePosition(last.epoch, last.position + 1))
        assert walk(resumed, 40 - taken) == whole[taken:]
    epochs = {position.epoch for position, _ in whole[:-1]} - {whole[-1][0].epoch}
    for epoch in epochs:
        read = sorted(sample for position, sample in whole if position.epoch == epoch)
        assert read == sorted(flat(slices(seed, epoch, sets, lanes, lane)))


def test_over_the_epochs_a_small_set_is_repeated_whole_and_a_large_one_continues() -> None:
    sets = mixed([([3, 2], 1.0), ([10, 10], 1.0)])
    small: list[Any] = []
    large: list[Any] = []
    for epoch in range(8):  # 25 samples an epoch, half of each set: 100 of the small one, 100 of the large one
        for lane in range(2):
            for shard, member in flat(slices(1, epoch, sets, 2, lane)):
                (small if shard < 2 else large).append((shard, member))
    assert sorted(small) == sorted(every_sample([3, 2]) * 20)
    assert sorted(large) == sorted((shard + 2, member) for shard, member in every_sample([10, 10]) * 5)


def test_sets_are_interleaved_evenly_and_each_keeps_its_own_epoch() -> None:
    sets = mixed([([40], 1.0), ([5], 1.0), ([15], 2.0)])
    pieces = list(islice(planning.lane_stream(0, sets, 1, 0), 200))
    order = [piece.shard for piece in pieces for _ in piece.members]
    for first in range(0, len(order) - 8, 8):
        assert np.bincount(order[first : first + 8], minlength=3).tolist() == pytest.approx([2, 2, 4], abs=1)
    assert max(piece.epoch for piece in pieces if piece.shard == 1) > max(piece.start.epoch for piece in pieces)


# --- refusals ---

GOOD = {"samples": 1000, "lanes": 8, "batch_size": 32, "ranks": 4, "workers": 2, "accumulate": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 0}, "no sample"),
        ({"lanes": 6}, r"data\.lanes=6 .* 4 process\(es\) .* \[4, 8, 16, 32\]"),
        ({"lanes": 6, "batch_size": 24}, r"to resume a run, start 1 or 2 or 3 or 6 process\(es\)"),
        ({"lanes": 2}, r"data\.lanes=2 .* multiple of the 4"),
        ({"lanes": 6, "batch_size": 30}, r"training\.batch_size to a multiple of 4"),
        ({"workers": 3}, r"data\.workers=3 .* at most 2, or raise data\.lanes"),
        ({"batch_size": 36}, r"data\.lanes=8 .* training\.batch_size=36; .* \[4, 12, 36\]"),
        ({"accumulate": 4}, r"training\.accumulate=4 .* multiple of 16"),
    ],
)
def test_what_cannot_be_split_evenly_is_refused_with_the_fix(change: dict[str, int], message: str) -> None:
    check_topology(**GOOD)
    with pytest.raises(UserError, match=message):
        check_topology(**(GOOD | change))


@settings(quick, max_examples=400)
@given(
    samples=st.integers(0, 5),
    lanes=LANES,
    batch_size=st.integers(1, 128),
    ranks=st.integers(1, 8),
    workers=st.integers(0, 8),
    accumulate=st.integers(1, 4),
)
def test_exactly_the_impossible_is_refused(**topology: int) -> None:
    lanes, ranks, readers = topology["lanes"], topology["ranks"], max(topology["workers"], 1)
    owned = [worker_lanes(lanes, ranks, rank, topology["workers"], n) for rank in range(ranks) for n in range(readers)]
    possible = (
        topology["samples"] > 0
        and all(owned)  # no worker without a lane
        and len({len(worker_lanes(lanes, ranks, rank, 0, 0)) for rank in range(ranks)}) == 1
        and topology["batch_size"] / lanes == topology["batch_size"] // lanes
        and lanes / ranks / topology["accumulate"] == lanes // ranks // topology["accumulate"]
    )
    if possible:
        check_topology(**topology)
    else:
        with pytest.raises(UserError):
            check_topology(**topology)


def test_every_set_and_epoch_draws_its_own_order() -> None:
    one, other = (SampleSet([50] * 20, None, first) for first in (0, 20))
    drawn = [
        (planning.shard_order(0, epoch, samples).tolist(), planning.shard_members(0, epoch, samples, 3).tolist())
        for samples in (one, other)
        for epoch in (0, 1)
    ]
    for orders in zip(*drawn, strict=True):
        assert len({tuple(order) for order in orders}) == 4


def test_an_empty_set_of_a_mixture_takes_no_share_from_the_others() -> None:
    assert planning.lane_bounds(0, mixed([([0], 3.0), ([8], 1.0)]), 1, 0) == [(0, 0), (0, 8)]


def test_samples_of_sets_are_interleaved_in_a_fixed_order() -> None:
    """A resumed run, on another machine too, must find the same one."""
    assert planning.interleave([1, 3]).tolist() == [1, 0, 1, 1], "in the middle, and of equals the first set"
    assert planning.interleave([1000, 1000]).tolist() == [0, 1] * 1000
