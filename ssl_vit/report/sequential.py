"""Group-sequential tests: what significance level each look at growing data may use.

The spending function is Lan and DeMets' Pocock-like one (Biometrika 70, 1983): alpha * log(1 + (e - 1) t) at the share
t of the seeds. It spends much at early looks, since stopping early saves the most compute. The levels come from the
recursive integration of Armitage, McPherson and Rowe (1969), for estimates with independent increments. Looks that
share their test images are correlated more strongly than that, so their true error is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from scipy.integrate import trapezoid
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import norm

from ssl_vit.records import ArmKind, ComparisonRecord
from ssl_vit.report.statistics import Estimate, plan
from ssl_vit.results import Table

MOST_LOOKS = 4  # each look widens the interval; each but the first adds at least a third of the seeds still allowed
_POINTS = 801  # of the grid of each integral


def levels(shares: Sequence[float], alpha: float = 0.05) -> list[float]:
    """Two-sided significance level of each look; all looks together reject a true hypothesis with probability `alpha`
    at most.

    shares: seeds at each look over the maximal number of seeds, ascending, in (0, 1]. A level depends only on the looks
        up to it.
    """
    levels_of_looks: list[float] = []
    grid, density, spent, before = np.zeros(1), np.ones(1), 0.0, 0.0  # of the score z * sqrt(share)
    for share in shares:
        total = alpha * math.log1p((math.e - 1) * share)
        scale, edge = math.sqrt(share - before), math.sqrt(share)
        z = brentq(_excess, 0.0, 9.0, args=(grid, density, edge, scale, total - spent))
        levels_of_looks.append(float(2 * ndtr(-z)))
        inside = np.linspace(-z * edge, z * edge, _POINTS)
        density = _integral(density * norm.pdf(inside[:, None], grid, scale), grid)
        grid, spent, before = inside, total, share
    return levels_of_looks


def confidence(shares: Sequence[float], tests: int = 1) -> float:
    """Confidence of the intervals at the last of these looks, before they are adjusted for `tests` hypotheses: all
    looks together reject one of them falsely with probability 5% at most.

    Each hypothesis spends 5% / tests. The levels of later looks for that are lower than those for 5%, divided by
    `tests`.
    """
    return 1 - tests * levels(shares, 0.05 / tests)[-1]


def confidence_of(record: ComparisonRecord) -> float:
    """Confidence of the intervals of a comparison's differences: that of its last look, before the first one that of
    the first; 0.95 where no seeds are added."""
    if not record.max_seeds:
        return 0.95
    seeds = [look.seeds for look in record.looks] or [len(_growing(record)[1])]
    return confidence([count / record.max_seeds for count in seeds], len(record.metrics))


def without_new_seeds(record: ComparisonRecord, table: Table) -> Table:
    """The rows whose seeds the last look counted: the others belong to the next one."""
    evaluators, seeds = _growing(record)
    new = seeds[record.looks[-1].seeds :] if record.looks else ()
    if not new:
        return table
    return Table([row for row in table.results if row.evaluator not in evaluators or row.seed not in new])


def headline_trains_encoder(trains: bool, kinds: Iterable[ArmKind], baseline: str | None) -> bool:
    """Whether the headlines are about evaluators that train the encoder.

    trains: whether the comparison has such an evaluator. kinds: of its arms. baseline: the key of the recipe.
    """
    return trains and (baseline is not None or "scratch" in kinds)


def _growing(record: ComparisonRecord) -> tuple[set[str], tuple[int, ...]]:
    """(evaluators, their seeds, which are added to until headlines are decided): those that train the encoder where
    there is training from scratch or a chosen baseline, else those of frozen features."""
    training = {name for name, evaluator in record.evaluators.items() if evaluator.trains_encoder}
    if headline_trains_encoder(bool(training), [arm.kind for arm in record.arms], record.baseline):
        return training, record.seeds
    return {*record.evaluators} - training, record.frozen_seeds


def _excess(z: float, grid: np.ndarray, density: np.ndarray, edge: float, scale: float, wanted: float) -> float:
    """Probability that the next score lies beyond z * edge on either side, minus the wanted one."""
    tails = ndtr((grid - z * edge) / scale) + ndtr((-grid - z * edge) / scale)
    return float(_integral(density * tails, grid)) - wanted


def _integral(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Over the last axis; of a single point its value."""
    return values[..., 0] if len(grid) == 1 else np.asarray(trapezoid(values, grid))


def most_seeds(
    estimate: Estimate, seeds: int, units: int, *, margin: float, tests: int, confidence_now: float
) -> int | None:
    """The number of seeds that would decide a headline at the last of the most looks that there may be, if the estimate
    stays the same. None: no number would.

    seeds: how many there are. units: more seeds or pretrainings that would decide without looks.
    margin: of equivalence. tests: number of headlines. confidence_now: before it is adjusted for their number.
    """
    share = (1 - estimate.confidence) / (1 - confidence_now)
    per = seeds // estimate.units
    most, enough = seeds + per * units, seeds
    while enough < most:
        enough = most
        level = confidence([*np.linspace(seeds / most, 1, MOST_LOOKS)], tests)
        more, _ = plan(replace(estimate, confidence=1 - (1 - level) * share), margin, tests, level)
        if more is None:
            return None
        most = seeds + per * more
    return enough
