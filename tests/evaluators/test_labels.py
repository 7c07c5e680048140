"""Label budgets: shots a class, shares and all, nested and chosen alike by every evaluator."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ssl_vit.evaluators import budget_words
from ssl_vit.evaluators.knn import Config
from ssl_vit.evaluators.labels import choose_labeled, choose_shots

LABELS = np.random.default_rng(0).permutation(np.repeat([0, 2, 5, -1], [100, 40, 3, 10]))


def test_a_share_is_taken_of_every_class_and_at_least_one_image() -> None:
    for share, counts in (("10%", [10, 4, 1]), ("1%", [1, 1, 1]), ("50%", [50, 20, 2]), ("99.5%", [100, 40, 3])):
        chosen = choose_labeled(LABELS, share, 0)
        assert [int((LABELS[chosen] == label).sum()) for label in (0, 2, 5)] == counts, share
        assert len(set(chosen.tolist())) == len(chosen) == sum(counts)


def test_larger_budgets_contain_smaller_ones_of_the_same_seed() -> None:
    for budgets in [("1%", "10%", "50%", "all"), (1, 3, 20, 200)]:
        for seed in (0, 1):
            sets = [set(choose_labeled(LABELS, budget, seed).tolist()) for budget in budgets]
            assert all(smaller < larger for smaller, larger in pairwise(sets))
    assert set(choose_labeled(LABELS, "10%", 0)) != set(choose_labeled(LABELS, "10%", 1))


def test_shots_are_the_few_shot_protocols_and_all_is_every_labeled_image() -> None:
    np.testing.assert_array_equal(choose_labeled(LABELS, 7, 3), choose_shots(LABELS, 7, 3))
    np.testing.assert_array_equal(choose_labeled(LABELS, "all", 3), np.flatnonzero(LABELS >= 0))


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
