"""The significance levels of repeated looks."""

from __future__ import annotations

import interval_coverage
import numpy as np
import pytest
from scipy.stats import norm

from ssl_vit.report.sequential import confidence, levels


def test_the_boundaries_are_those_of_the_literature() -> None:
    """Five equal looks: Pocock-type spending, table 2 of Jennison and Turnbull's program and R's gsDesign/ldbounds."""
    expected = [2.4380, 2.4268, 2.4102, 2.3966, 2.3860]
    assert norm.isf(np.array(levels([0.2, 0.4, 0.6, 0.8, 1.0])) / 2) == pytest.approx(expected, abs=2e-3)
    assert levels([1.0]) == pytest.approx([0.05])


def test_independent_increments_are_rejected_as_often_as_planned() -> None:
    shares = np.array([0.3, 0.45, 0.9])
    steps = np.sqrt(np.diff(shares, prepend=0)) * np.random.default_rng(0).normal(size=(200_000, 3))
    scores = np.abs(steps.cumsum(axis=1) / np.sqrt(shares))
    rejected = (scores > norm.isf(np.array(levels(list(shares))) / 2)).any(axis=1).mean()
    assert rejected == pytest.approx(0.05 * np.log1p((np.e - 1) * 0.9), abs=0.0015)


def test_adding_seeds_until_decided_makes_few_false_claims() -> None:
    spent, free = (
        interval_coverage.false_claims(200, 300, np.random.default_rng(5), spending=spending)
        for spending in (True, False)
    )
    assert spent <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 300)
    assert free > spent


def test_the_error_over_looks_at_several_hypotheses_is_limited() -> None:
    """Each of ten hypotheses is rejected at any look with probability 5% / 10, so at most 5% make a false claim."""
    shares, tests = np.array([0.4, 0.6, 0.8, 1.0]), 10
    bounds = [norm.isf((1 - confidence(list(shares[: n + 1]), tests)) / tests / 2) for n in range(len(shares))]
    steps = np.sqrt(np.diff(shares, prepend=0)) * np.random.default_rng(0).normal(size=(2_000_000, 4))
    scores = np.abs(steps.cumsum(axis=1) / np.sqrt(shares))
    rejected = (scores > bounds).any(axis=1).mean()
    assert rejected == pytest.approx(0.05 / tests, abs=2e-4)
    unadjusted = [norm.isf(level / tests / 2) for level in levels(list(shares))]
    assert (scores > unadjusted).any(axis=1).mean() > 0.0052, "5% spent over the looks, then divided by ten"
