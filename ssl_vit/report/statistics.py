"""Statistics of a comparison: differences between arms over seeds and test images, with intervals that cover both.

Every comparison is a crossed design: S seeds x M test images, both arms on the same cells. The interval is that of a
two-way random-effects analysis of variance (Dorfman, Berbaum, Metz 1992; Hillis 2007: seeds are the readers, images
the cases). Pure functions of arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.special import ndtr, stdtr, stdtrit

Outcome = Literal["better", "worse", "equivalent", "undecided"]
_ROUNDING = 1e-12  # a mean square below it is zero
_FEW = 10  # images of a class
_LEAST_UNITS = 5  # that are resampled: of fewer, the interval would be little more than their range


@dataclass(frozen=True)
class Estimate:
    """A mean over units (seeds or pretrainings) and test images, and its interval.

    half_width: half-width of the interval; None with one unit, and where the estimated variance of the mean is 0.
    standard_error, degrees_of_freedom: those of the mean; None in the same cases.
    seed_variance, image_variance, residual_variance: of one value; estimates, never below 0.
    units, images: how many there are.
    """

    mean: float
    half_width: float | None
    standard_error: float | None
    degrees_of_freedom: float | None
    seed_variance: float
    image_variance: float
    residual_variance: float
    units: int
    images: int
    confidence: float = 0.95

    def at(self, confidence: float) -> Estimate:
        """The same estimate with an interval of another confidence."""
        if self.standard_error is None or self.degrees_of_freedom is None:
            return replace(self, confidence=confidence)
        half_width = _quantile(self.degrees_of_freedom, confidence) * self.standard_error
        return replace(self, confidence=confidence, half_width=half_width)

    @property
    def variance_shares(self) -> tuple[float, float, float]:
        """What share of the variance of the mean comes from seeds, from test images and from the rest. Only of an
        estimate with an interval."""
        S, M = self.units, self.images
        parts = self.seed_variance / S, self.image_variance / M, self.residual_variance / (S * M)
        seed, image, rest = (part / sum(parts) for part in parts)
        return seed, image, rest

    @property
    def p_value(self) -> float:
        """Two-sided, of the mean against 0; 1 without an interval."""
        if not self.standard_error or self.degrees_of_freedom is None:
            return 1.0
        return float(2 * stdtr(self.degrees_of_freedom, -abs(self.mean) / self.standard_error))


def points(estimate: Estimate, sign: str = "+") -> str:
    """Percentage points and the half-width of the interval, where there is one; sign: "" for accuracies."""
    mean = f"{round(100 * estimate.mean, 1) + 0.0:{sign}.1f}"  # adding 0.0 turns -0.0 into 0.0
    return mean if estimate.half_width is None else f"{mean} ± {100 * estimate.half_width:.1f}"


def paired_difference(
    correct_a_SM: np.ndarray,
    correct_b_SM: np.ndarray,
    *,
    confidence: float = 0.95,
) -> Estimate:
    """Accuracy of A minus that of B, with an interval over seeds and test images.

    correct_a_SM, correct_b_SM: bool (S, M), whether seed s classified test image i correctly; both arms share seeds and
        images.
    Raises ValueError for arrays of different shapes, or of another number of dimensions, and for NaN.

    Example: `paired_difference(correct_a, correct_b).half_width`
    """
    a_SM, b_SM = (np.asarray(correct, dtype=np.float64) for correct in (correct_a_SM, correct_b_SM))
    if a_SM.shape != b_SM.shape or a_SM.ndim != 2 or not a_SM.size:
        raise ValueError(f"both arms need one number per seed and image, (S, M); got {a_SM.shape} and {b_SM.shape}")
    if not np.isfinite(difference_SM := a_SM - b_SM).all():
        raise ValueError("a number is not finite")
    return crossed_mean(difference_SM, confidence=confidence)


def crossed_mean(
    values_SM: np.ndarray,
    *,
    confidence: float = 0.95,
    pretrainings: Sequence[int] | None = None,
) -> Estimate:
    """Mean of values over seeds and test images, with an interval over both.

    values_SM: (S, M), of seed s and test image i.
    pretrainings: (S,), which pretraining each seed used; see `units_of`. None: the unit is the seed.
    """
    values = np.asarray(values_SM, dtype=np.float64)
    if pretrainings is not None and (units := units_of(pretrainings)):
        values = unit_means(values, units)
    S, M = values.shape
    mean = float(values.mean())
    if S < 2 or M < 2:
        image = float(values.var(ddof=1)) if M > 1 else 0.0
        return Estimate(mean, None, None, None, 0.0, image, 0.0, S, M, confidence)
    rows, columns = values.mean(axis=1), values.mean(axis=0)
    residual = values - rows[:, None] - columns[None, :] + mean
    mean_squares = (
        M * float(((rows - mean) ** 2).sum()) / (S - 1),
        S * float(((columns - mean) ** 2).sum()) / (M - 1),
        float((residual**2).sum()) / ((S - 1) * (M - 1)),
    )
    ms_seed, ms_image, ms_residual = (0.0 if square < _ROUNDING else square for square in mean_squares)
    components = max(ms_seed - ms_residual, 0) / M, max(ms_image - ms_residual, 0) / S, ms_residual
    variance, freedom = _variance(ms_seed, ms_image, ms_residual, S, M)
    if variance == 0:
        return Estimate(mean, None, None, None, *components, S, M, confidence)
    found = Estimate(mean, None, math.sqrt(variance), freedom, *components, S, M, confidence)
    return found.at(confidence)


def units_of(*pretrainings: Sequence[int]) -> Sequence[int] | None:
    """The unit that an interval covers: (S,), the pretraining of each of S seeds, or None where the unit is the seed.

    pretrainings: for each pretrained arm, the pretraining of each seed, (S,). With P different pretrainings:

    - P = 1: the unit is the seed. The interval covers seeds of the evaluation, not other pretrainings.
    - 1 < P < S: the unit is the pretraining, its seeds averaged first. The interval covers both.
    - P = S: the unit is the seed. Each has its own pretraining, so the interval covers both.

    Where both arms of a difference have 1 < P < S, the unit is the pretraining of the one with fewer.
    """
    several = [own for own in pretrainings if 1 < len(set(own)) < len(own)]
    return min(several, key=lambda own: len(set(own)), default=None)


def unit_means(values_SX: np.ndarray, pretrainings: Sequence[int]) -> np.ndarray:
    """Values of the seeds of each pretraining averaged: (P, ...), in order of first appearance."""
    of = np.asarray(pretrainings)
    return np.stack([values_SX[of == one].mean(axis=0) for one in dict.fromkeys(pretrainings)])


def within_variance(values_S: np.ndarray, pretrainings: Sequence[int]) -> float:
    """Pooled variance of the values of the seeds of each pretraining. At least one has several."""
    groups = [np.array([one == name for one in pretrainings]) for name in dict.fromkeys(pretrainings)]
    squares = sum(float(((values_S[of] - values_S[of].mean()) ** 2).sum()) for of in groups)
    return squares / (len(values_S) - len(groups))


def _variance(ms_seed: float, ms_image: float, ms_residual: float, S: int, M: int) -> tuple[float, float]:
    """(variance of the mean, its degrees of freedom by Satterthwaite) from mean squares."""
    image = max(ms_image - ms_residual, 0.0)
    total = ms_seed + image
    spread = ms_seed**2 / (S - 1)
    if image > 0:
        spread += ms_image**2 / (M - 1) + ms_residual**2 / ((S - 1) * (M - 1))
    # With two seeds the approximation gives far too many, and too narrow intervals; one is too few
    # (tools/interval_coverage).
    if S == 2 or not spread:
        return total / (S * M), S - 1
    return total / (S * M), max(total**2 / spread, S - 1)


def _quantile(freedom: float, confidence: float) -> float:
    return float(stdtrit(freedom, 0.5 + confidence / 2))


def balanced(values_XSM: np.ndarray, labels_M: np.ndarray) -> np.ndarray:
    """Values whose mean over images is the mean of the per-class means, float64 (..., S, M).

    The classes are fixed: only the spread within each class counts as variation between images. Deviations from the
    mean of a class of n images are scaled by sqrt(n / (n - 1)), because that mean is estimated from them. A few images
    may all have one value by chance, so classes of less than 10 count as one with the smallest others (the collapsed
    strata of survey sampling), which makes their spread larger rather than smaller.

    values_XSM: (..., S, M), by seed and test image.
    labels_M: int64 (M,), classes of the test images.
    """
    _, index, counts = np.unique(labels_M, return_inverse=True, return_counts=True)
    weights = len(labels_M) / (len(counts) * counts[index])
    smallest = np.argsort(counts, kind="stable")
    stratum = np.arange(len(counts))
    if (few := int((counts < _FEW).sum())) > 0:
        enough = int(np.searchsorted(np.cumsum(counts[smallest]), _FEW)) + 1
        stratum[smallest[: max(few, enough)]] = smallest[0]
    _, group, sizes = np.unique(stratum[index], return_inverse=True, return_counts=True)
    values = np.asarray(values_XSM, dtype=np.float64)
    by_group, first = np.argsort(group, kind="stable"), np.cumsum(sizes) - sizes
    means = np.add.reduceat(values[..., by_group], first, axis=-1) / sizes  # (..., S, groups)
    between = (means - means.mean(axis=-2, keepdims=True))[..., group]
    within = (values - means[..., group]) * np.sqrt(sizes / np.maximum(sizes - 1, 1))[group]
    deviations = weights * (between + within)
    means_XS1 = (values * weights).mean(axis=-1, keepdims=True)
    return np.asarray(means_XS1 + deviations - deviations.mean(axis=-1, keepdims=True))


def holm(estimates: Sequence[Estimate], confidence: float = 0.95, tests: int | None = None) -> list[Estimate]:
    """The same estimates with intervals adjusted for their number, by Holm's step-down rule.

    tests: how many were planned; those that are not measured yet count as not significant (None: all are measured).

    The k-th smallest p-value of n gets an interval of confidence 1 - alpha / (n - k + 1); from the first that includes
    0 on, all get that one's. So an interval excludes 0 exactly where Holm's test rejects. All of them together may
    cover less often than each: they say nothing about values other than 0.
    """
    adjusted = list(estimates)
    alpha, stopped, level, tests = 1 - confidence, False, 0.0, tests or len(estimates)
    for rank, place in enumerate(sorted(range(len(estimates)), key=lambda n: estimates[n].p_value)):
        if not stopped:
            level = alpha / (tests - rank)
            stopped = estimates[place].p_value > level
        adjusted[place] = estimates[place].at(1 - level)
    return adjusted


def outcome(estimate: Estimate, margin: float, tests: int = 1, confidence: float = 0.95) -> Outcome:
    """What an interval says about a difference.

    margin: differences up to it count as equivalent. An interval within it is "equivalent", also where it excludes 0.
    tests: number of differences that `holm` adjusted together, at this confidence. Its intervals are adjusted for tests
        of 0 alone, so "equivalent" needs Bonferroni's interval, of confidence 1 - alpha / tests, within the margin.
    """
    if estimate.half_width is None:
        return "undecided"
    low, high = estimate.mean - estimate.half_width, estimate.mean + estimate.half_width
    widest = estimate.at(1 - (1 - confidence) / tests) if tests > 1 else estimate
    if abs(estimate.mean) + (widest.half_width or 0) <= margin:
        return "equivalent"
    return "better" if low > 0 else "worse" if high < 0 else "undecided"


def plan(estimate: Estimate, margin: float, tests: int = 1, confidence: float = 0.95) -> tuple[int | None, int | None]:
    """How many more seeds (or pretrainings), and how many more test images, would each decide an undecided difference,
    if it and its variance components stay as measured. None: no number would. Arguments: as in `outcome`."""
    if estimate.half_width is None:
        return None, None
    size, widest = abs(estimate.mean), 1 - (1 - confidence) / tests if tests > 1 else estimate.confidence
    S, M = estimate.units, estimate.images

    def decides(units: int, images: int) -> bool:
        residual = estimate.residual_variance
        ms_seed, ms_image = images * estimate.seed_variance + residual, units * estimate.image_variance + residual
        variance, freedom = _variance(ms_seed, ms_image, residual, units, images)
        different = _quantile(freedom, estimate.confidence) * math.sqrt(variance) < size
        return different or _quantile(freedom, widest) * math.sqrt(variance) < margin - size

    more = [int(number) for number in np.unique(np.geomspace(1, 1e6, 500).round())]  # in steps of 3%
    units = next((number for number in more if decides(S + number, M)), None)
    return units, next((number for number in more if decides(S, M + number)), None)


def label_efficiency(accuracy_S: np.ndarray, curve_SB: np.ndarray, labels_B: np.ndarray) -> tuple[float, float, float]:
    """How many labels per class the arm of a curve needs for another arm's accuracy: (labels, low, high).

    0: fewer than its smallest label budget; inf: more than its largest. The curve, made non-decreasing by its running
    maximum, is interpolated on a logarithmic axis of labels. The interval (95%) is the expanded percentile interval
    (Hesterberg 2015) of resampled units, the same for both arms, so it excludes the test images; low, high: nan with
    fewer than 5 units.

    accuracy_S: (S,), of the other arm at one label budget, by unit (seed or pretraining).
    curve_SB: (S, B), accuracies of the curve's arm at each label budget.
    labels_B: (B,), labels per class, in any order; accuracies at the same number of labels are averaged.
    """
    labels_B, of_B = np.unique(labels_B, return_inverse=True)
    curve_SB = np.stack([curve_SB[:, of_B == place].mean(axis=1) for place in range(len(labels_B))], axis=1)

    def needed(accuracy_D: np.ndarray, curve_DB: np.ndarray) -> np.ndarray:
        rising, draws, last = np.maximum.accumulate(curve_DB, axis=1), np.arange(len(curve_DB)), len(labels_B) - 1
        above = (rising < accuracy_D[:, None]).sum(axis=1)  # the first label budget that is as accurate
        upper, lower = np.minimum(above, last), np.maximum(above - 1, 0)
        start, step = rising[draws, lower], rising[draws, upper] - rising[draws, lower]
        share = np.divide(accuracy_D - start, step, out=np.zeros_like(step), where=step > 0)
        labels = np.exp((1 - share) * np.log(labels_B[lower]) + share * np.log(labels_B[upper]))
        return np.where(above > last, math.inf, np.where(accuracy_D < rising[:, 0], 0.0, labels))

    found, S = float(needed(accuracy_S.mean(keepdims=True), curve_SB.mean(axis=0, keepdims=True))[0]), len(accuracy_S)
    if S < _LEAST_UNITS:
        return found, math.nan, math.nan
    drawn = np.random.default_rng(0).integers(S, size=(10_000, S))
    resampled = needed(accuracy_S[drawn].mean(axis=1), curve_SB[drawn].mean(axis=1))
    tail = float(ndtr(-_quantile(S - 1, 0.95) * math.sqrt(S / (S - 1))))  # instead of 0.025: the spread of few is small
    low, high = np.quantile(resampled, [tail, 1 - tail], method="nearest")
    return found, float(low), float(high)
