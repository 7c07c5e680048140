"""The statistics against independent calculations, simulations with a known truth, and a bootstrap."""

from __future__ import annotations

import math
from dataclasses import replace

import interval_coverage
import numpy as np
import pytest
from scipy import stats

from ssl_vit.report.statistics import (
    Estimate,
    balanced,
    crossed_mean,
    holm,
    label_efficiency,
    outcome,
    paired_difference,
    plan,
    points,
    units_of,
    within_variance,
)


def simulated(seeds: int, images: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    a, b = interval_coverage.simulate(seeds, images, np.random.default_rng(seed))
    return np.asarray(a), np.asarray(b)


def estimate(mean: float, half_width: float | None) -> Estimate:
    return Estimate(mean, half_width, 0.01, 10.0, 0.0, 0.0, 0.0, 5, 100)


def test_the_interval_is_that_of_the_two_way_analysis_of_variance() -> None:
    a, b = simulated(4, 120)
    d = a.astype(float) - b
    S, M = d.shape
    ms_seed = M * sum((d[s].mean() - d.mean()) ** 2 for s in range(S)) / (S - 1)
    ms_image = S * sum((d[:, i].mean() - d.mean()) ** 2 for i in range(M)) / (M - 1)
    residual = sum((d[s, i] - d[s].mean() - d[:, i].mean() + d.mean()) ** 2 for s in range(S) for i in range(M))
    ms_residual = residual / ((S - 1) * (M - 1))
    assert ms_image > ms_residual, "the example must have variance between images"
    top = ms_seed + ms_image - ms_residual
    spread = ms_seed**2 / (S - 1) + ms_image**2 / (M - 1) + ms_residual**2 / ((S - 1) * (M - 1))
    freedom = max(top**2 / spread, S - 1)
    found = paired_difference(a, b)
    assert freedom >= S - 1
    assert found.mean == pytest.approx(a.mean() - b.mean())
    assert found.degrees_of_freedom == pytest.approx(freedom)
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(top / (S * M)))
    assert found.image_variance == pytest.approx((ms_image - ms_residual) / S)
    assert found.residual_variance == pytest.approx(ms_residual)
    assert found.p_value == pytest.approx(2 * stats.t.sf(abs(found.mean) / math.sqrt(top / (S * M)), freedom))


@pytest.mark.parametrize("shape", [(1, 20), (4, 1), (20,), (4, 20, 1)])
def test_arms_that_do_not_share_seeds_and_images_are_not_paired(shape: tuple[int, ...]) -> None:
    """NumPy would broadcast them."""
    with pytest.raises(ValueError, match="one number per seed and image"):
        paired_difference(np.ones((4, 20), dtype=bool), np.zeros(shape, dtype=bool))
    with pytest.raises(ValueError, match="one number per seed and image"):
        paired_difference(np.ones(shape[:1]), np.ones(shape[:1]))
    with pytest.raises(ValueError, match="finite"):
        paired_difference(np.full((4, 20), np.nan), np.zeros((4, 20)))


@pytest.mark.parametrize("shape", [(1, 20), (4, 1), (3, 20)])
def test_one_seed_one_image_or_no_variation_make_no_interval(shape: tuple[int, int]) -> None:
    same = np.ones(shape, dtype=bool)
    found = paired_difference(same, ~same)
    assert found.mean == 1.0
    assert found.half_width is None and found.p_value == 1.0
    assert outcome(found, 0.01) == "undecided"


@pytest.mark.parametrize(("seeds", "images"), [(3, 200), (8, 400)])
def test_intervals_cover_the_truth(seeds: int, images: int) -> None:
    """The full table: tools/interval_coverage.py."""
    both, *_ = interval_coverage.coverage(seeds, images, 300, np.random.default_rng(0))
    assert 0.905 <= both <= 0.98


@pytest.mark.parametrize("deviations", [(0.15, 0.0), (0.15, 0.15)], ids=["one arm", "both arms"])
def test_intervals_over_pretrainings_cover_the_truth(deviations: tuple[float, float]) -> None:
    covered = interval_coverage.nested_coverage(3, deviations, 8, 400, 300, np.random.default_rng(0))
    assert 0.905 <= covered <= 0.985


def test_a_bootstrap_of_seeds_and_images_agrees() -> None:
    """Resampling both ways has, in expectation, two residual variances more (Owen 2007)."""
    a, b = simulated(12, 300)
    d, generator = a.astype(float) - b, np.random.default_rng(1)
    means = [d[generator.integers(12, size=12)][:, generator.integers(300, size=300)].mean() for _ in range(3000)]
    found = paired_difference(a, b)
    assert found.standard_error is not None
    expected = found.standard_error**2 + 2 * found.residual_variance / d.size
    assert np.var(means) == pytest.approx(expected, rel=0.15)


def test_two_seeds_have_one_degree_of_freedom() -> None:
    """The mean square of images alone would give hundreds, and intervals that cover the truth too rarely."""
    a, b = simulated(2, 2000)
    found = paired_difference(a, b)
    assert found.degrees_of_freedom == 1 and found.variance_shares[1] > 0
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, 1) * found.standard_error)


def test_fewer_pretrainings_than_seeds_are_the_unit() -> None:
    a, b = simulated(6, 50)
    d = a.astype(float) - b
    found = crossed_mean(d, pretrainings=[0, 0, 1, 1, 2, 2])
    assert found == crossed_mean(d.reshape(3, 2, 50).mean(axis=1))
    assert found.units == 3
    assert crossed_mean(d, pretrainings=range(6)) == paired_difference(a, b)


def test_of_two_arms_the_unit_is_the_pretraining_of_the_one_with_fewer() -> None:
    assert units_of([0, 0, 0], [0, 1, 2]) is None
    assert units_of([0, 1, 2, 0, 1, 2], [4, 5, 4, 5, 4, 5]) == [4, 5, 4, 5, 4, 5]
    assert units_of([0, 0, 0, 0], [0, 1, 0, 1]) == [0, 1, 0, 1]
    assert units_of() is None


def test_holm_excludes_zero_exactly_where_its_test_rejects() -> None:
    family = [
        crossed_mean(shift + np.random.default_rng(n).normal(size=(5, 40))) for n, shift in enumerate((0.5, 0.3, 0.02))
    ]
    order = sorted(family, key=lambda one: one.p_value)
    rejected = []
    for rank, one in enumerate(order):
        if one.p_value > 0.05 / (3 - rank):
            break
        rejected.append(one.mean)
    for one, before in zip(holm(family), family, strict=True):
        assert one.half_width is not None and before.half_width is not None
        assert one.mean == before.mean and one.half_width >= before.half_width - 1e-12
        assert (abs(one.mean) > one.half_width) == (one.mean in rejected)
    assert 0 < len(rejected) < 3, "the example must have both"
    assert holm(family[:1]) == family[:1]


@pytest.mark.parametrize(
    ("mean", "half_width", "expected"),
    [
        (0.03, 0.02, "better"),
        (-0.03, 0.02, "worse"),
        (0.002, 0.005, "equivalent"),
        (0.006, 0.003, "equivalent"),
        (0.03, 0.04, "undecided"),
        (0.0, 0.01, "equivalent"),
        (0.0, 0.011, "undecided"),
        (0.5, None, "undecided"),
    ],
)
def test_four_outcomes(mean: float, half_width: float | None, expected: str) -> None:
    assert outcome(estimate(mean, half_width), 0.01) == expected


def test_the_plan_decides() -> None:
    """Experiments of the planned size, drawn with the same variance components, have the wanted half-width."""
    found = Estimate(0.04, 0.2, 0.06, 3.0, 0.1**2, 0.2**2, 0.3**2, units=4, images=300)
    units, _ = plan(found, 0.01)
    assert units is not None and 5 < units < 100
    generator, S = np.random.default_rng(0), 4 + units

    def drawn() -> np.ndarray:
        d = 0.1 * generator.normal(size=(S, 1)) + 0.2 * generator.normal(size=300)
        return np.asarray(d + 0.3 * generator.normal(size=(S, 300)))

    assert np.mean([crossed_mean(drawn()).half_width or 0 for _ in range(20)]) == pytest.approx(0.04, rel=0.1)


def test_the_plan_of_one_of_several_headlines_needs_the_interval_that_calls_it_equivalent() -> None:
    found = Estimate(0.0, 0.012, 0.005, 7.0, 0.01**2, 0.0, 0.1**2, units=8, images=2000)
    alone, one_of_three = (plan(found, 0.01, tests)[0] for tests in (1, 3))
    assert alone is not None and one_of_three is not None and alone < one_of_three
    large = replace(found, mean=0.03)
    assert plan(large, 0.01, 3) == plan(large, 0.01), "what makes it different is its own interval"


def test_balanced_values_have_the_mean_of_the_per_class_means_by_seed() -> None:
    labels = np.array([0] * 6 + [1] * 3 + [5])
    correct = np.random.default_rng(0).random((2, 10)) < 0.5
    expected = np.mean([correct[:, labels == label].mean(axis=1) for label in (0, 1, 5)], axis=0)
    np.testing.assert_allclose(balanced(correct, labels).mean(axis=1), expected)


def test_imbalanced_classes_add_no_variation_between_images() -> None:
    """An accuracy of 100% has no spread, and the standard error is that of repeated draws of the images."""
    labels = np.repeat(np.arange(10), [200, 150, 100, 80, 60, 50, 40, 30, 20, 10])
    assert crossed_mean(balanced(np.ones((4, len(labels))), labels)).half_width is None
    generator, found = np.random.default_rng(0), []
    for _ in range(300):
        hits = generator.random(len(labels)) < np.linspace(0.95, 0.5, 10)[labels]  # the same for all seeds
        found.append(crossed_mean(balanced(np.stack([hits, hits, hits, hits]), labels)))
    errors = np.mean([one.standard_error or 0 for one in found])
    assert errors == pytest.approx(np.std([one.mean for one in found]), rel=0.15)


@pytest.mark.parametrize(("accuracy", "expected"), [(0.3, 10**0.5), (0.6, 100), (0.2, 1), (0.1, 0), (0.9, math.inf)])
def test_label_efficiency_is_log_linear_between_budgets(accuracy: float, expected: float) -> None:
    curve = np.array([[0.2, 0.4, 0.8]] * 3)
    assert label_efficiency(np.array([accuracy] * 3), curve, np.array([1.0, 10.0, 1000.0]))[0] == pytest.approx(
        expected
    )


def test_equivalence_of_one_of_several_differences_needs_a_wider_interval() -> None:
    rows = [Estimate(mean, None, 0.002, 1e6, 0.0, 0.0, 0.0, 5, 100) for mean in (0.0055, 0.014, 0.015, 0.016)]
    first = holm(rows)[0]
    assert outcome(first, margin=0.01) == "equivalent"
    assert outcome(first, margin=0.01, tests=4) == "better", "0.0055 + 2.5 standard errors are more than the margin"


def test_the_shares_of_the_variance_say_what_more_of_each_would_save() -> None:
    found = Estimate(0.1, 0.05, 0.02, 9.0, 0.003, 0.2, 0.1, 10, 400)
    seeds, images, rest = found.variance_shares
    variance = 0.003 / 10 + 0.2 / 400 + 0.1 / 4000
    assert (seeds, images, rest) == pytest.approx((0.0003 / variance, 0.0005 / variance, 0.000025 / variance))


def test_label_efficiency_does_not_depend_on_the_order_of_budgets() -> None:
    accuracy, curve, labels = np.array([0.55] * 3), np.array([[0.2, 0.5, 0.7, 0.9]] * 3), np.array([1.0, 10, 10, 1000])
    found = label_efficiency(accuracy, curve, labels)
    assert found[0] == pytest.approx(10 ** (1 - 0.05 / 0.4)), "0.6 is the mean of both accuracies at 10 labels"
    for order in ([3, 1, 0, 2], [2, 0, 1, 3]):
        assert label_efficiency(accuracy, curve[:, order], labels[order]) == found


def test_the_interval_of_label_efficiency_resamples_seeds() -> None:
    generator = np.random.default_rng(0)
    curve = np.array([0.3, 0.5, 0.7]) + 0.03 * generator.normal(size=(8, 3))
    labels, low, high = label_efficiency(0.45 + 0.03 * generator.normal(size=8), curve, np.array([5.0, 10.0, 20.0]))
    assert 5 < low < labels < high < 20
    for units in (1, 4):
        few = label_efficiency(np.full(units, 0.45), curve[:units], np.array([5.0, 10.0, 20.0]))
        assert math.isnan(few[1]), "an interval of so few would be little more than their range"


def test_the_interval_of_label_efficiency_covers_the_truth() -> None:
    """Percentiles of 2.5% and 97.5% cover 84%."""
    assert interval_coverage.efficiency_coverage(5, 200, np.random.default_rng(1)) >= 0.9


@pytest.mark.parametrize(("curve", "accuracy", "expected"), [
    ([0.5, 0.48, 0.7], 0.6, 250**0.5),  # between 10 labels, where nothing was gained, and 25
    ([0.5, 0.5, 0.7], 0.501, 10 * 2.5**0.005),
    ([0.5, 0.5, 0.7], 0.5, 5),
])  # fmt: skip
def test_label_efficiency_on_a_curve_that_does_not_rise_everywhere(
    curve: list[float], accuracy: float, expected: float
) -> None:
    found = label_efficiency(np.array([accuracy] * 3), np.array([curve] * 3), np.array([5.0, 10.0, 25.0]))
    assert found[0] == pytest.approx(expected)


@pytest.mark.parametrize("sizes", [(300, 300, 1), (200, 200, 3), (100, 100, 5, 5)])
def test_a_class_of_few_images_makes_no_false_claim(sizes: tuple[int, ...]) -> None:
    """Such images may all be right for one arm by chance, without any spread: alone they cover 62 to 91%."""
    assert interval_coverage.per_class_coverage(sizes, 300, np.random.default_rng(0)) >= 0.91


@pytest.mark.parametrize(("classes", "each"), [(100, 1), (50, 2), (20, 5)])
def test_few_images_per_class_do_not_make_the_interval_of_the_per_class_mean_too_narrow(
    classes: int, each: int
) -> None:
    generator, labels, found = np.random.default_rng(0), np.repeat(np.arange(classes), each), []
    for _ in range(300):
        image = 0.4 * generator.normal(size=len(labels))
        values = image + 0.3 * generator.normal(size=(5, len(labels)))
        found.append(crossed_mean(balanced(values, labels)))
    errors = np.mean([one.standard_error or 0 for one in found])
    assert errors == pytest.approx(np.std([one.mean for one in found]), rel=0.1)


def test_the_variance_components_of_an_example_worked_out_by_hand() -> None:
    """Mean squares of 24 for seeds, 6 for images and 2 for the residual."""
    found = crossed_mean(np.array([[0.0, 1.0, 2.0], [4.0, 3.0, 8.0]]))
    components = found.seed_variance, found.image_variance, found.residual_variance
    assert components == pytest.approx(((24 - 2) / 3, (6 - 2) / 2, 2))


def test_the_degrees_of_freedom_are_at_least_those_of_the_seeds() -> None:
    """Seeds of equal means: Satterthwaite's rule alone would give a tenth of a degree."""
    interaction = 1.5 * np.array([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert crossed_mean(np.array([1.0, -1.0, 0.0]) + interaction).degrees_of_freedom == 2


def test_balanced_values_have_the_unbiased_variance_of_each_class() -> None:
    labels, values = np.repeat([0, 1], 10), np.random.default_rng(0).normal(size=(1, 20))
    found = balanced(values, labels)
    for label in (0, 1):
        assert found[0, labels == label].var() == pytest.approx(values[0, labels == label].var(ddof=1))


def test_after_the_first_interval_that_includes_zero_all_do() -> None:
    """Of p-values of 0.03 and 0.04 the second is below its own level, but the first is above 0.05 / 2."""
    rows = [Estimate(0.002 * stats.norm.isf(p / 2), None, 0.002, 1e9, 0.0, 0.0, 0.0, 5, 100) for p in (0.03, 0.04)]
    assert [one.confidence for one in holm(rows)] == pytest.approx([0.975, 0.975])
    assert all((one.half_width or 0) > one.mean for one in holm(rows))


def test_the_plan_counts_the_residual() -> None:
    """Without spread between seeds and between images, every further seed still averages the residual."""
    units, _ = plan(Estimate(0.04, 0.2, 0.06, 3.0, 0.0, 0.0, 2.0, units=4, images=300), 0.01)
    assert units is not None
    widths = [stats.t.ppf(0.975, 3 + more) * math.sqrt(2.0 / ((4 + more) * 300)) for more in (units - 1, units)]
    assert widths[0] >= 0.04 > widths[1]


def test_the_interval_of_label_efficiency_is_expanded_for_few_units() -> None:
    """Its tail is 0.1% for five units: a share of 1/3125 of the draws has the lowest accuracy alone, 5/3125 all but
    once, so the limit is the mean of four times the lowest and once the second one."""
    accuracy, curve = np.array([0.40, 0.45, 0.50, 0.55, 0.60]), np.array([[0.2, 0.8]] * 5)
    _, low, high = label_efficiency(accuracy, curve, np.array([1.0, 1000.0]))
    assert (low, high) == pytest.approx((1000 ** ((0.41 - 0.2) / 0.6), 1000 ** ((0.59 - 0.2) / 0.6)))


def test_label_efficiency_resamples_the_same_units_of_both_arms() -> None:
    """What a seed changes in both arms alike changes nothing."""
    shared = 0.05 * np.arange(5)
    found = label_efficiency(0.5 + shared, np.array([0.2, 0.8]) + shared[:, None], np.array([1.0, 100.0]))
    assert found == pytest.approx((10, 10, 10))


def test_a_difference_that_rounds_to_zero_has_no_minus() -> None:
    assert points(estimate(-0.0004, 0.002)) == "+0.0 ± 0.2"
    assert points(estimate(-0.0006, None)) == "-0.1"


def test_balanced_values_keep_what_a_seed_changes_in_one_class_alone() -> None:
    labels = np.repeat([0, 1], 20)
    found = crossed_mean(balanced(np.stack([labels == 0, labels == 1]), labels))
    assert found.residual_variance > 0.2


@pytest.mark.parametrize(("few", "varies"), [(9, True), (10, False)])
def test_classes_of_fewer_than_ten_images_are_joined_with_others(few: int, varies: bool) -> None:
    labels = np.repeat([0, 1], [few, 30])
    found = crossed_mean(balanced(np.stack([labels == 0] * 4), labels))
    assert (found.image_variance > 0) == varies


def test_the_variance_within_pretrainings_worked_out_by_hand() -> None:
    """Squares of 2 and 8, and one degree of freedom for each pretraining."""
    assert within_variance(np.array([0.0, 2.0, 1.0, 5.0]), [0, 0, 1, 1]) == 5
