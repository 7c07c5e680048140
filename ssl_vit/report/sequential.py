"""Group-sequential tests: what significance level each look at growing data may use.

The spending function is Lan and DeMets' Pocock-like one (Biometrika 70, 1983): alpha * log(1 + (e - 1) t) at the share
t of the seeds. It spends much at early looks, since stopping early saves the most compute. The levels come from the
recursive integration of Armitage, McPherson and Rowe (1969), for estimates with independent increments. Looks that
share their test images are correlated more strongly than that, so their true error is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.integrate import trapezoid
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import norm

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


def _excess(z: float, grid: np.ndarray, density: np.ndarray, edge: float, scale: float, wanted: float) -> float:
    """Probability that the next score lies beyond z * edge on either side, minus the wanted one."""
    tails = ndtr((grid - z * edge) / scale) + ndtr((-grid - z * edge) / scale)
    return float(_integral(density * tails, grid)) - wanted


def _integral(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Over the last axis; of a single point its value."""
    return values[..., 0] if len(grid) == 1 else np.asarray(trapezoid(values, grid))
