"""Label budgets: shots per class, shares and all, all nested; and held-out parts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.evaluators.knn import Config
from ssl_vit.evaluators.labels import choose_labeled, held_out_split, set_notes
from tests.tars import packed

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


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_held_out_split_is_stratified_disjoint_complete_and_takes_no_whole_class(share: float) -> None:
    labels = np.append(LABELS, 7)  # one image
    kept, held = held_out_split(labels, share, 0)
    assert sorted([*kept, *held]) == np.flatnonzero(labels >= 0).tolist()
    assert kept.tolist() == sorted(kept) and held.tolist() == sorted(held)
    for label, count in ((0, 100), (2, 40), (5, 3), (7, 1)):
        assert (labels[held] == label).sum() == min(round(share * count), count - 1)
    assert not np.array_equal(held, held_out_split(labels, share, 1)[1])


def test_repeated_splits_differ_and_the_first_is_the_only_one_of_no_repeat() -> None:
    labels = np.repeat([0, 1], 50)
    splits = [held_out_split(labels, 0.2, 0, repeat)[1] for repeat in range(3)]
    assert np.array_equal(splits[0], held_out_split(labels, 0.2, 0)[1])
    assert len({tuple(one) for one in splits}) == 3


def test_sets_of_gray_and_color_images_or_of_other_classes_get_a_note(tmp_path: Path) -> None:
    def images(name: str, modes: str, classes: str = "ab") -> ShardSet:
        for label in classes:
            (tmp_path / name / label).mkdir(parents=True)
            for n, mode in enumerate(modes):
                image = Image.new({"g": "L", "c": "RGB"}[mode], (8, 8), n)
                image.save(tmp_path / name / label / f"{n}.png")
        return open_shards(str(packed(tmp_path / name, tmp_path / f"{name}_shards", shards=1)))

    color, gray = images("color", "cccc"), images("gray", "gggg")
    (note,) = set_notes(color, gray)
    assert "0 of 8 images" in note and "8 of 8" in note
    assert not set_notes(color, images("half", "ccgg")), "half of the images may differ"
    (note,) = set_notes(color, images("more", "cccc", "abc"))
    assert "names 2 classes" in note and "names 3" in note
    assert len(set_notes(gray, images("other", "cccc", "abc"))) == 2
    (note,) = set_notes(color, color)
    assert "1 shards in common" in note


def test_the_same_images_are_drawn_as_before() -> None:
    """Where these change, the comparisons that users have finished cannot be repeated or extended."""
    labels = np.repeat([0, 1], 6)
    assert choose_labeled(labels, 3, 0).tolist() == [3, 2, 5, 10, 11, 7]
    assert held_out_split(labels, 0.5, 0)[1].tolist() == [1, 3, 4, 7, 9, 11]
