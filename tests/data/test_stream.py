"""Shards -> batches: every sample once, the same views and batches on any topology, exact positions."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_vit.data import AugmentConfig, DataConfig, evaluation, loader
from ssl_vit.data.augment import color_augment
from ssl_vit.data.evaluation import EvaluationStream, evaluation_batches
from ssl_vit.data.images import Picture, train_transform
from ssl_vit.data.jpeg import Jpeg
from ssl_vit.data.order import LanePosition
from ssl_vit.data.samples import Chunk, Preprocess, Sample, SampleReader
from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.data.shards.reading import ShardFile
from ssl_vit.data.stream import train_source, training_samples
from ssl_vit.interfaces import BadSample, Batch, UserError
from ssl_vit.records import SkippedSample
from tests.tars import encoded, packed, write_tar

CPU = torch.device("cpu")
LANES, BATCH = 6, 60


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """360 digits in 7 shards, so that nothing divides anything."""
    folder = tmp_path_factory.mktemp("digits")
    packed("digits", folder, "train", shards=7, subset=36)
    return open_shards(str(folder))


def preprocess(noise: int = 5, seed: int = 3) -> Preprocess:
    augment = AugmentConfig(crop="shift", padding=1)
    return Preprocess(train_transform(8, augment), 1, 10, noise=noise, flip=True, seed=seed)


def rank_batches(
    shards: ShardSet, rank: int, ranks: int, workers: int, start: list[LanePosition] | None = None
) -> Iterator[tuple[Batch, dict[int, LanePosition]]]:
    data = DataConfig(train=shards.spec, lanes=LANES, workers=workers)
    source = train_source(shards, preprocess(), data, batch_size=BATCH, rank=rank, ranks=ranks, device=CPU)
    for batch, chunk in source(start or [LanePosition()] * LANES):
        yield batch, chunk.positions


def global_batches(shards: ShardSet, ranks: int, workers: int, steps: int) -> list[Batch]:
    """The ranks' batches of each step, joined in rank order."""
    parts = [itertools.islice(rank_batches(shards, rank, ranks, workers), steps) for rank in range(ranks)]
    joined = []
    for step in zip(*parts, strict=True):
        names = ("images", "labels", "noise", "flip", "indices", "valid")
        tensors: dict[str, Any] = {name: torch.cat([getattr(batch, name) for batch, _ in step]) for name in names}
        joined.append(Batch(**tensors, keys=[key for batch, _ in step for key in batch.keys]))
    return joined


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (3, 2), (6, 1)])
def test_global_batches_do_not_depend_on_the_topology(shards: ShardSet, ranks: int, workers: int) -> None:
    one, other = global_batches(shards, 1, 0, 4), global_batches(shards, ranks, workers, 4)
    for a, b in zip(one, other, strict=True):
        assert a.keys == b.keys
        for name in ("images", "labels", "noise", "flip", "indices", "valid"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_three_epochs_hold_every_sample_three_times(shards: ShardSet) -> None:
    steps = 3 * shards.samples // BATCH
    seen = torch.cat([batch.indices for batch in global_batches(shards, 3, 2, steps)])
    for epoch in range(3):
        assert seen[epoch * 360 : (epoch + 1) * 360].sort().values.tolist() == list(range(360))
    assert seen[:360].tolist() != seen[360:720].tolist()


def test_a_stream_resumes_from_its_positions_on_another_topology(shards: ShardSet) -> None:
    positions = [LanePosition()] * LANES
    whole = rank_batches(shards, 0, 1, 0)
    for _, moved in itertools.islice(whole, 4):
        for lane, position in moved.items():
            positions[lane] = position
    rest = [batch.indices for batch, _ in itertools.islice(whole, 5)]
    parts = [itertools.islice(rank_batches(shards, rank, 2, 1, positions), 5) for rank in range(2)]
    resumed = [torch.cat([batch.indices for batch, _ in step]) for step in zip(*parts, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(rest, resumed, strict=True))


def several_views(shards: ShardSet, ranks: int, workers: int, views: int, steps: int = 2) -> list[Batch]:
    """The first batch or two of each rank in rank order, in color augmentation too."""
    augment = AugmentConfig(crop="shift", padding=1, brightness=0.5, blur=0.5)
    data = DataConfig(train=shards.spec, lanes=LANES, workers=workers)
    see = replace(preprocess(), transform=train_transform(8, augment), color=color_augment(augment), views=views)
    found = []
    for rank in range(ranks):
        source = train_source(shards, see, data, batch_size=12, rank=rank, ranks=ranks, device=CPU)
        found += [batch for batch, _ in itertools.islice(source([LanePosition()] * LANES), steps)]
    return found


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (3, 1)])
def test_views_are_the_same_on_any_topology_and_of_one_image_on_one_process(
    shards: ShardSet, ranks: int, workers: int
) -> None:
    one = several_views(shards, 1, 0, 3, steps=1)[0]
    parts = several_views(shards, ranks, workers, 3, steps=1)
    assert one.views == 3 and one.lane_size == 6 and len(one.images) == 36
    assert one.keys[::3] == one.keys[1::3] == one.keys[2::3] and len({*one.keys}) == 12
    for part in parts:
        assert part.keys[::3] == part.keys[1::3] == part.keys[2::3]
    for name in ("images", "labels", "noise", "flip", "indices", "valid", "jitter"):
        assert torch.equal(getattr(one, name), torch.cat([getattr(part, name) for part in parts])), name


def test_the_first_view_is_that_of_a_single_one_and_the_others_differ(shards: ShardSet) -> None:
    single, several = several_views(shards, 1, 0, 1), several_views(shards, 1, 0, 3)
    for alone, views in zip(single, several, strict=True):
        for name in ("images", "noise", "flip", "indices", "jitter"):
            assert torch.equal(getattr(alone, name), getattr(views, name)[::3]), name
        assert not torch.equal(views.noise[::3], views.noise[1::3])
        assert not torch.equal(views.noise[1::3], views.noise[2::3])
        assert not torch.equal(views.images[1::3], views.images[2::3])
    half = several[0].split(2)[1]
    assert half.views == 3 and half.keys == several[0].keys[18:]


def test_a_bad_sample_is_skipped_once_with_all_its_views(shards: ShardSet) -> None:
    def picky(picture: Picture) -> torch.Tensor:
        if int(picture.whole().sum()) % 3 == 0:
            raise BadSample("a sum that 3 divides")
        return picture.whole()

    def skips(views: int) -> tuple[list[str], list[str]]:
        data = DataConfig(train=shards.spec, lanes=LANES, workers=0)
        see = replace(preprocess(), transform=picky, views=views)
        source = train_source(shards, see, data, batch_size=30, rank=0, ranks=1, device=CPU)
        steps = list(itertools.islice(source([LanePosition()] * LANES), 3))
        keys = [key for batch, _ in steps for key in batch.keys[::views]]
        return keys, [skip.key for _, chunk in steps for skip in chunk.skipped]

    assert skips(1) == skips(4)
    kept, skipped = skips(4)
    assert len(kept) == 90 and len(skipped) == len({*skipped}) > 20 and not {*kept} & {*skipped}


def test_the_training_process_keeps_its_generator(shards: ShardSet) -> None:
    """Without workers, augmentation runs in the training process: the model's random numbers must not notice."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    for workers in (0, 1):
        batches = rank_batches(shards, 0, 1, workers)
        torch.manual_seed(5)
        next(batches)
        first = torch.rand(1)
        next(batches)
        assert torch.equal(torch.cat([first, torch.rand(2)]), expected), workers


def test_only_kept_samples_are_drawn(shards: ShardSet) -> None:
    wanted = np.array([0, 5, 51, 52, 53, 100, 359])
    data = DataConfig(train=shards.spec, lanes=1, workers=0)
    keep = shards.members_of(wanted)
    source = train_source(shards, preprocess(), data, batch_size=7, rank=0, ranks=1, device=CPU, keep=keep)
    for batch, _ in itertools.islice(source([LanePosition()]), 4):
        assert sorted(batch.indices.tolist()) == wanted.tolist()


def test_a_small_cache_changes_nothing(shards: ShardSet) -> None:
    def images(cache_mb: int) -> torch.Tensor:
        data = DataConfig(train=shards.spec, lanes=LANES, workers=0, cache_mb=cache_mb)
        source = train_source(shards, preprocess(), data, batch_size=BATCH, rank=0, ranks=1, device=CPU)
        return torch.stack([batch.images for batch, _ in itertools.islice(source([LanePosition()] * LANES), 12)])

    assert torch.equal(images(0), images(64))


def test_only_what_is_never_decoded_at_a_reduced_size_is_kept(tmp_path: Path) -> None:
    pixels = Image.effect_noise((64, 64), 50).convert("RGB")
    write_tar(tmp_path / "0.tar", {"0.png": encoded(pixels, "PNG"), "1.jpg": encoded(pixels, "JPEG")})
    see = Preprocess(train_transform(32, AugmentConfig()), 3, None)
    kept, cold = (SampleReader(open_shards(str(tmp_path)), see, cache) for cache in (1 << 20, 0))
    for epoch in range(5):
        for reader in (kept, cold):
            reader.sample(0, 1, epoch)
        one, other = (reader.sample(0, 0, epoch) for reader in (kept, cold))
        assert isinstance(one, list) and isinstance(other, list) and torch.equal(one[0].image, other[0].image)
    assert [*kept.cache] == [(0, 0)]


def test_a_cache_does_not_decide_whether_a_damaged_image_is_bad(tmp_path: Path) -> None:
    """A crop above the damage can be decoded, the whole image cannot."""
    generator = np.random.default_rng(1)
    pixels = Image.fromarray(generator.integers(0, 255, (12, 10, 3), dtype=np.uint8))
    whole, bad = encoded(pixels.resize((130, 150), Image.Resampling.BICUBIC), "JPEG", quality=90), None
    while bad is None:  # a marker of another kind in the last quarter
        broken, place = bytearray(whole), int(generator.integers(len(whole) * 3 // 4, len(whole) - 70))
        broken[place : place + 2] = 0xFF, int(generator.integers(1, 0xD0))
        try:
            Jpeg(bytes(broken), 3).whole()
        except BadSample:
            bad = bytes(broken)
    write_tar(tmp_path / "0.tar", {"0.jpg": bad, "1.jpg": whole})
    see = Preprocess(train_transform(96, AugmentConfig(scale=(0.05, 0.3))), 3, None)
    found = []
    for cache in (0, 1 << 20):
        reader = SampleReader(open_shards(str(tmp_path)), see, cache)
        found.append([isinstance(reader.sample(0, 0, epoch), SkippedSample) for epoch in range(20)])
    assert found[0] == found[1] and 0 < sum(found[0]) < 20


def test_a_cache_that_no_memory_holds_is_named(shards: ShardSet) -> None:
    with pytest.raises(UserError, match=r"data\.cache_mb=1099511627776"):
        SampleReader(shards, Preprocess(train_transform(8, AugmentConfig()), 3, None), 1 << 60)


def test_few_labeled_images_among_many_train(tmp_path: Path) -> None:
    members = {f"{number:03d}.png": encoded(Image.new("L", (8, 8), number)) for number in range(200)}
    members |= {f"{number:03d}.cls": b"1" for number in range(0, 200, 40)}
    write_tar(tmp_path / "0.tar", sorted(members.items()))
    shards = open_shards(str(tmp_path))
    data = DataConfig(train=shards.spec, lanes=8, workers=0)
    see = replace(preprocess(), needs_labels=True)
    source = train_source(shards, see, data, batch_size=8, rank=0, ranks=1, device=CPU)
    for batch, _ in itertools.islice(source([LanePosition()] * 8), 5):
        assert {index % 40 for index in batch.indices.tolist()} == {0} and (batch.labels == 1).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("batch_size", "workers", "count"), [(50, 0, None), (7, 2, None), (20, 3, 101), (64, 0, 101), (400, 1, None)]
)
def test_evaluation_sees_every_sample_exactly_once(
    shards: ShardSet, ranks: int, batch_size: int, workers: int, count: int | None
) -> None:
    data = DataConfig(train=shards.spec, evaluation_resize=1.0, workers=workers)
    indices = None if count is None else np.arange(0, 2 * count, 2)
    seen, lengths = [], set()
    for rank in range(ranks if workers == 0 else min(ranks, 2)):
        stream = EvaluationStream(shards, data, 8, 1, batch_size=batch_size, rank=rank, ranks=ranks, indices=indices)
        batches = [batch for batch, _ in evaluation_batches(stream, CPU)]
        lengths.add(len(batches))
        assert {len(batch.images) for batch in batches} == {stream.batch_size}
        own = torch.cat([batch.indices[batch.valid] for batch in batches])
        assert all((batch.labels[~batch.valid] == -1).all() for batch in batches)
        seen.append(own)
    assert len(lengths) == 1, "ranks would wait for each other"
    expected = list(range(360)) if indices is None else indices.tolist()
    found = torch.cat(seen).tolist()
    assert (sorted(found) if workers > 1 else found) == expected[: len(found)], "in index order"
    assert len(found) == len(expected) or (workers and ranks > 2)


def test_small_evaluation_sets_are_read_once(shards: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def images(size: int = 8, **data: Any) -> torch.Tensor:
        preparation = DataConfig(train=shards.spec, evaluation_resize=1.0, workers=0, **data)
        stream = EvaluationStream(shards, preparation, size, 1, batch_size=100)
        return torch.cat([batch.images for batch, _ in evaluation_batches(stream, CPU)])

    reads: list[int] = []
    read = SampleReader.sample

    def counted(self: SampleReader, shard: int, member: int, epoch: int) -> list[Sample] | SkippedSample:
        reads.append(member)
        return read(self, shard, member, epoch)

    monkeypatch.setattr(SampleReader, "sample", counted)
    first = images()
    assert len(reads) == 360
    assert torch.equal(images(), first)
    assert len(reads) == 360
    assert images(12).shape[-1] == 12
    assert len(reads) == 720
    for _ in range(2):
        assert torch.equal(images(10, cache_mb=0), images(10, cache_mb=0))
    assert len(reads) == 720 + 4 * 360
    images(on_bad_sample="fail")
    assert len(reads) == 720 + 5 * 360, "a kept set may hold skips"


def test_small_evaluation_sets_of_loader_workers_are_read_once(
    shards: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_kept", {})
    loads: list[EvaluationStream] = []

    def counted(stream: EvaluationStream, prefetch: int) -> Iterator[Chunk]:
        loads.append(stream)
        return loader.loaded(stream, prefetch)

    monkeypatch.setattr(evaluation, "loaded", counted)

    def images(workers: int) -> torch.Tensor:
        data = DataConfig(train=shards.spec, evaluation_resize=1.0, workers=workers)
        batches = [batch for batch, _ in evaluation_batches(EvaluationStream(shards, data, 8, 1, batch_size=20), CPU)]
        order = torch.cat([batch.indices for batch in batches]).argsort()
        return torch.cat([batch.images for batch in batches])[order]

    assert torch.equal(images(3), images(3))
    assert len(loads) == 1
    evaluation._kept.clear()
    assert torch.equal(images(3), images(0))


def test_evaluation_workers_read_their_own_shards(shards: ShardSet) -> None:
    data = DataConfig(train=shards.spec, evaluation_resize=1.0, workers=4)
    stream = EvaluationStream(shards, data, 8, 1, batch_size=10)
    chunks = [[chunk.tensors["indices"] for chunk in stream.chunks(worker)] for worker in range(4)]
    assert [len(own) for own in chunks] == [9, 9, 9, 9]
    assert torch.cat([indices for own in chunks for indices in own]).tolist() == list(range(360))


def test_images_are_kept_for_their_preparation_alone(shards: ShardSet) -> None:
    def key(needs_labels: bool = False, **data: Any) -> Hashable:
        preparation = DataConfig(train=shards.spec, workers=0, **data)
        return EvaluationStream(shards, preparation, 8, 1, needs_labels=needs_labels).key

    keys = [key(), key(needs_labels=True), key(evaluation_resize=1.0), key(max_pixels=100), key(on_bad_sample="fail")]
    assert key() == keys[0] and len(set(keys)) == len(keys)


@pytest.mark.parametrize("share", [0.0, 0.37, 0.9])
def test_a_resume_opens_one_shard_per_lane_and_its_next(
    shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """200 shards of 51 samples: whatever was read before is skipped by its counts, not read again."""
    for number in range(200):
        (tmp_path / f"{number:06d}.tar").hardlink_to(shards.urls[1])
    many = open_shards(str(tmp_path))
    assert many.samples == 200 * shards.counts[1]
    opened = []
    original = ShardFile.__init__

    def counted(self: ShardFile, *arguments: Any) -> None:
        opened.append(arguments)
        original(self, *arguments)

    monkeypatch.setattr(ShardFile, "__init__", counted)
    start = [LanePosition(2, int(share * many.samples / LANES))] * LANES
    next(rank_batches(many, 0, 1, 0, start))
    assert LANES <= len(opened) <= 3 * LANES  # a step may cross from one shard into the next


def test_shards_of_many_lanes_are_opened_once(
    shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are opened ahead are still open when their lane reaches them."""
    for number in range(64):
        (tmp_path / f"{number:06d}.tar").hardlink_to(shards.urls[1])
    many, opened = open_shards(str(tmp_path)), []
    original = ShardFile.__init__

    def counted(self: ShardFile, *arguments: Any) -> None:
        opened.append(arguments)
        original(self, *arguments)

    monkeypatch.setattr(ShardFile, "__init__", counted)
    data = DataConfig(train=many.spec, lanes=8, workers=0)
    source = train_source(many, preprocess(), data, batch_size=64, rank=0, ranks=1, device=CPU)
    for _ in itertools.islice(source([LanePosition()] * 8), many.samples // 64):
        pass
    assert len(opened) <= 64 + 2 * 8, "at the borders of the lanes a shard is read by two, and the next epoch begins"


def test_the_seed_decides_which_samples_come_first(shards: ShardSet) -> None:
    data, first = DataConfig(train=shards.spec, lanes=LANES, workers=0), []
    for seed in (3, 3, 4):
        see = preprocess(seed=seed)
        source = train_source(shards, see, data, batch_size=BATCH, rank=0, ranks=1, device=CPU)
        first.append(next(source([LanePosition()] * LANES))[0].keys)
    assert first[0] == first[1] != first[2] and {*first[0]} != {*first[2]}


def test_more_samples_contain_fewer_ones(shards: ShardSet) -> None:
    found = [training_samples(shards, DataConfig(train=shards.spec, samples=count)) for count in (50, 200)]
    few, more = (set(np.asarray(drawn).tolist()) for drawn in found)
    assert (len(few), len(more)) == (50, 200) and few < more
