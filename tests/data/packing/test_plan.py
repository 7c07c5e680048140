"""Which image goes into which shard: every image once, in the asked order, the same whenever it is asked again."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssl_vit.data.packing.plan import Options, plan_shards
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.interfaces import UserError


def source(labels: list[int] | None, count: int = 0) -> Source:
    classes = None if labels is None else [str(label) for label in range(max(labels) + 1)]
    array = None if labels is None else np.array(labels, dtype=np.int64)
    return Source("some", None, classes, array, range(count if labels is None else len(labels)), lambda item: item, "")


def planned(labels: list[int] | None, count: int = 0, **options: Any) -> dict[str, list[list[int]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = plan_shards(source(labels, count), Options(**options))
    return {part: [shard.tolist() for shard in found] for part, found in plan.items()}


def flat(found: list[list[int]]) -> list[int]:
    return [image for shard in found for image in shard]


some_labels = st.lists(st.integers(0, 4), min_size=1, max_size=60)


@given(labels=some_labels, shards=st.integers(1, 60), order=st.sampled_from(["shuffle", "stratified", "source"]))
def test_every_image_is_in_one_shard_and_shards_are_even(labels: list[int], shards: int, order: str) -> None:
    found = planned(labels, shards=min(shards, len(labels)), order=order)[""]
    assert sorted(flat(found)) == list(range(len(labels)))
    sizes = [len(shard) for shard in found]
    assert len(found) == min(shards, len(labels)) and max(sizes) - min(sizes) <= 1
    assert found == planned(labels, shards=min(shards, len(labels)), order=order)[""]
    if order == "source":
        assert flat(found) == sorted(flat(found))


@given(labels=some_labels, shards=st.integers(1, 20))
def test_stratified_shards_hold_the_same_number_of_each_class(labels: list[int], shards: int) -> None:
    found = planned(labels, shards=min(shards, len(labels)), order="stratified")[""]
    for label in set(labels):
        counts = [sum(labels[image] == label for image in shard) for shard in found]
        assert max(counts) - min(counts) <= 1


def test_stratified_shards_are_shuffled_over_the_source_and_inside() -> None:
    labels = [0] * 500 + [1] * 500
    found = planned(labels, shards=10, order="stratified")[""]
    for shard in found:
        assert max(shard) - min(shard) > 700  # from all over the source
        changes = sum(labels[a] != labels[b] for a, b in pairwise(shard))
        assert 25 < changes < 75  # of 99: neither class by class nor by turns
    assert found != planned(labels, shards=10, order="stratified", seed=1)[""]


@given(labels=some_labels, small=st.integers(1, 15), more=st.integers(0, 15), seed=st.integers(0, 3))
def test_a_larger_subset_holds_the_smaller_one(labels: list[int], small: int, more: int, seed: int) -> None:
    subsets = [set(flat(planned(labels, subset=size, seed=seed)[""])) for size in (small, small + more)]
    assert subsets[0] <= subsets[1]
    for size, subset in zip((small, small + more), subsets, strict=True):
        expected = {label: min(size, count) for label, count in Counter(labels).items()}
        assert Counter(labels[image] for image in subset) == expected


def test_subsets_are_random_and_small_classes_are_reported() -> None:
    labels = [0] * 100 + [1] * 8
    with pytest.warns(UserWarning, match=r"1 of 2 classes have fewer than subset=10 images \(as few as 8\)"):
        plan_shards(source(labels), Options(subset=10))
    first, second = (set(flat(planned(labels, subset=10, seed=seed)[""])) for seed in (0, 1))
    assert first != second and len(first) == 18
    assert max(image for image in first if image < 100) > 20
    assert len(flat(planned(None, count=50, subset=10)[""])) == 10


@given(labels=st.lists(st.integers(0, 3), min_size=8, max_size=60), holdout=st.floats(0.05, 0.9))
def test_a_holdout_is_the_asked_share_of_each_class(labels: list[int], holdout: float) -> None:
    counts = Counter(labels)
    if max(counts.values()) < 2:
        return
    plan = planned(labels, holdout=holdout)
    train, test = flat(plan["train"]), flat(plan["test"])
    assert sorted(train + test) == list(range(len(labels)))
    held_out = Counter(labels[image] for image in test)
    for label, count in counts.items():
        assert held_out[label] == min(max(round(holdout * count), 1), count - 1)


def test_shards_of_the_test_part_are_about_as_large_as_those_of_train() -> None:
    found = planned([0, 1] * 50, holdout=0.2, shards=8)
    assert {part: len(shards) for part, shards in found.items()} == {"train": 8, "test": 2}


def test_the_test_part_is_the_same_for_every_subset_and_order() -> None:
    labels = [0, 1, 2] * 40
    whole = planned(labels, holdout=0.25)
    for options in ({"subset": 5}, {"subset": 20}, {"order": "source"}, {"order": "stratified"}, {"shards": 3}):
        plan = planned(labels, holdout=0.25, **options)
        assert set(flat(plan["test"])) == set(flat(whole["test"]))
        assert set(flat(plan["train"])) <= set(flat(whole["train"]))
    assert set(flat(planned(labels, holdout=0.25, seed=1)["test"])) != set(flat(whole["test"]))
    assert Counter(labels[image] for image in flat(planned(labels, holdout=0.25, subset=5)["train"])) == dict.fromkeys(
        range(3), 5
    )


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([0] * 9, {"shards": 10}, "shards=10 is more than its 9 images"),
        ([0, 1] * 50, {"shards": 10, "subset": 4}, "shards=10 is more than its 8 images"),
        ([0, 1, 2], {"holdout": 0.5}, "0.5 of each class leaves train or test empty"),
        (None, {"holdout": 0.5, "count": 1}, "0.5 of the images leaves train or test empty"),
        ([0, 1] * 9, {"holdout": 0.5, "folds": 2}, "folds and holdout are mutually exclusive"),
        (None, {"order": "stratified"}, "needs labels"),
        (None, {"count": 0}, "has no images"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(labels: list[int] | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(labels, **({"count": 5} | options))


@given(labels=st.lists(st.integers(0, 4), min_size=5, max_size=60), folds=st.integers(2, 5))
def test_folds_hold_every_image_once_and_the_same_number_of_each_class(labels: list[int], folds: int) -> None:
    found = planned(labels, folds=folds, shards=1)
    assert list(found) == [f"fold_{fold}" for fold in range(folds)]
    assert sorted(image for part in found.values() for image in flat(part)) == list(range(len(labels)))
    for label in set(labels):
        counts = [sum(labels[image] == label for image in flat(part)) for part in found.values()]
        assert max(counts) - min(counts) <= 1
    assert found == planned(labels, folds=folds, shards=1)
    first, second = (planned(labels * 9, folds=2, seed=seed)["fold_0"] for seed in (0, 1))
    assert set(flat(first)) != set(flat(second))


def test_folds_of_a_subset_and_of_groups() -> None:
    parts = planned([0] * 20 + [1] * 10, folds=2, subset=8)
    assert sorted(len(flat(part)) for part in parts.values()) == [8, 8]
    groups = np.repeat(np.arange(5), [4, 1, 3, 6, 2])
    grouped = replace(source([0, 1] * 8), groups=groups)
    found = plan_shards(grouped, Options(folds=2, shards=2)).values()
    kept = [set(groups[np.concatenate(shards)]) for shards in found]
    assert kept == [{0, 1, 2}, {3, 4}], "whole groups, in order"
    pairs = np.repeat(np.arange(6), 2)
    some = plan_shards(replace(source([0] * 12), groups=pairs), Options(folds=2, subset=4, seed=7)).values()
    kept = [set(pairs[np.concatenate(shards)]) for shards in some]
    assert kept == [{0, 1}, {2, 5}], "as many each of the groups that the subset holds"
    with pytest.raises(UserError, match="folds=6 leaves a fold empty"):
        plan_shards(grouped, Options(folds=6))


def test_a_holdout_takes_whole_groups() -> None:
    groups = np.repeat(np.arange(10), 3)
    grouped = replace(source([0, 1, 2] * 10), groups=groups)
    parts = {part: np.concatenate(shards) for part, shards in plan_shards(grouped, Options(holdout=0.2)).items()}
    assert sorted(np.concatenate([*parts.values()])) == list(range(30))
    assert len(set(groups[parts["test"]])) == 2 and set(groups[parts["test"]]).isdisjoint(groups[parts["train"]])
    other = plan_shards(grouped, Options(holdout=0.2, seed=1))["test"]
    assert set(groups[np.concatenate(other)]) != set(groups[parts["test"]])
