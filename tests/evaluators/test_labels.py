"""Label budgets: shots per class, shares and all, nested and chosen alike by every evaluator."""

from __future__ import annotations

import io
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ssl_vit.data.packing import pack, sources
from ssl_vit.data.shards import open_shards
from ssl_vit.evaluators import budget_words
from ssl_vit.evaluators.knn import Config
from ssl_vit.evaluators.labels import choose_labeled, choose_shots, held_out_split, labels_of

CHOSEN = np.random.default_rng(0).choice([0, 1, 4], 150, p=[0.6, 0.3, 0.1])
LABELS = np.random.default_rng(0).permutation(np.repeat([0, 2, 5, -1], [100, 40, 3, 10]))


def test_a_share_is_taken_of_every_class_and_at_least_one_image() -> None:
    for share, counts in (("10%", [10, 4, 1]), ("1%", [1, 1, 1]), ("50%", [50, 20, 2]), ("99.5%", [100, 40, 3])):
        chosen = choose_labeled(LABELS, share, 0)
        assert [int((LABELS[chosen] == label).sum()) for label in (0, 2, 5)] == counts, share
        assert len(set(chosen.tolist())) == len(chosen) == sum(counts)


def test_larger_budgets_contain_smaller_ones_of_the_same_seed() -> None:
    tuples: list[tuple[int | str, ...]] = [("1%", "10%", "50%", "all"), (1, 3, 20, 200)]
    for budgets in tuples:
        for seed in (0, 1):
            sets = [set(choose_labeled(LABELS, budget, seed).tolist()) for budget in budgets]
            assert all(smaller < larger for smaller, larger in pairwise(sets))
    assert set(choose_labeled(LABELS, "10%", 0)) != set(choose_labeled(LABELS, "10%", 1))


def test_shots_are_the_few_shot_protocols_and_all_is_every_labeled_image() -> None:
    np.testing.assert_array_equal(choose_labeled(LABELS, 7, 3), choose_shots(LABELS, 7, 3))
    np.testing.assert_array_equal(choose_labeled(LABELS, "all", 3), np.flatnonzero(LABELS >= 0))


def test_images_without_a_label_are_never_chosen_and_change_nothing() -> None:
    labels = np.array([1, 0, 1, 0, 0, 1])
    hidden = np.concatenate([labels, [-1, -1, -1]])
    np.testing.assert_array_equal(choose_shots(hidden, 2, 0), choose_shots(labels, 2, 0))
    assert sorted(choose_shots(hidden, 99, 0)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("given", "means"), [(5, 5), (None, "all"), ("all", "all"), ("100%", "all"), ("1.0%", "1%"), ("0.5%", "0.5%")]
)
def test_budgets_as_people_write_them(given: int | str | None, means: int | str) -> None:
    assert Config.model_validate({"labels_per_class": given}).labels_per_class == (means,)
    assert Config.model_validate({"labels_per_class": [given, 3]}).labels_per_class == (means, 3)


@pytest.mark.parametrize("given", [0, -1, "0%", "101%", "ten", True, 2.5, "-3%"])
def test_what_is_no_budget_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="a label budget is"):
        Config.model_validate({"labels_per_class": given})


def test_budgets_in_words() -> None:
    assert [budget_words(b) for b in (1, 10, "1%", "all")] == [
        "1 label per class",
        "10 labels per class",
        "1% of the labels",
        "all labels",
    ]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_split_is_stratified_disjoint_and_complete(share: float, seed: int) -> None:
    kept, held = held_out_split(CHOSEN, share, seed)
    assert sorted([*kept, *held]) == list(range(150))
    assert kept.tolist() == sorted(kept)
    assert held.tolist() == sorted(held)
    for label in (0, 1, 4):
        count = int(np.sum(label == CHOSEN))
        assert abs((CHOSEN[held] == label).sum() - share * count) <= 0.5
        assert (CHOSEN[kept] == label).any()


def test_held_out_split_depends_on_the_seed_alone() -> None:
    first, again, other = (held_out_split(CHOSEN, 0.2, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[1], other[1])


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_single_image_of_a_class_is_never_held_out(share: float) -> None:
    labels = np.array([0] * 10 + [1] + [2] * 2)
    kept, held = held_out_split(labels, share, 0)
    assert set(labels[kept]) == {0, 1, 2}
    assert 10 not in held


def test_images_without_a_label_are_on_neither_side() -> None:
    hidden = np.where(np.arange(150) % 2 == 0, CHOSEN, -1)
    kept, held = held_out_split(hidden, 0.3, 0)
    assert sorted([*kept, *held]) == list(range(0, 150, 2))


def test_a_label_of_astronomical_size_is_none(tmp_path: Path) -> None:
    source = sources.open_source("digits", split="test")
    pack(source, tmp_path / "digits", shards=1, progress=False)
    with tarfile.open(tmp_path / "digits" / "000000.tar") as tar, tarfile.open(tmp_path / "0.tar", "w") as out:
        for number, member in enumerate(tar):
            content = tar.extractfile(member).read()  # type: ignore[union-attr]
            content = b"4000000000" if number < 2 and member.name.endswith("cls") else content
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    labels = labels_of(open_shards(str(tmp_path / "0.tar")))
    assert (labels < 0).sum() == 1 and labels.max() == 9
