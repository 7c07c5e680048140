"""The self-test of a comparison: differences whose outcome is known, measured in the same way as the headline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ssl_vit.evaluators import ALL
from ssl_vit.report.read import Comparison
from ssl_vit.report.statistics import Outcome
from ssl_vit.report.summary import Difference, Measured, baseline_of, declared_headline, rows_by_place

SAME: tuple[Outcome, ...] = ("equivalent", "undecided")
BETTER: tuple[Outcome, ...] = ("better",)


@dataclass(frozen=True)
class SelfTest:
    """expected: SAME for a row and its repetition with other random numbers, which chance calls different in 5% of
    comparisons; BETTER for an arm that was pretrained with all labels of the training set and its baseline, unless the
    baseline has all labels too or the compute of pretraining: then either may be better."""

    expected: tuple[Outcome, ...]
    difference: Difference

    @property
    def result(self) -> Literal["pass", "fail", "undecided"]:
        outcome = self.difference.outcome
        if self.difference.estimate.half_width is None:
            return "undecided"
        return "pass" if outcome in self.expected else "undecided" if outcome == "undecided" else "fail"


def self_tests(comparison: Comparison) -> list[SelfTest]:
    """Those that have been measured: repetitions everywhere, pretraining with all labels where a headline is."""
    headlines = [declared[0] for data in comparison.record.metrics if (declared := declared_headline(comparison, data))]
    record, tests = comparison.record, []
    for place, budgets in rows_by_place(comparison, controls=True).items():
        measured = Measured(comparison, place, budgets)
        pairs = [(SAME, reference.name, reference.repeats) for reference in record.references if reference.repeats]
        labeled = [arm.name for arm in record.arms if arm.trained_on == place.data and arm.uses_labels]
        supervised = [arm for arm in labeled if arm in measured.arms]
        longer = {arm.name for arm in record.arms if arm.compute_of}
        others = [arm for arm in measured.arms if arm not in longer]
        baseline = baseline_of(comparison, supervised[0], others) if supervised else None
        if place in headlines and baseline:
            pairs.append((BETTER, supervised[0], baseline))
        for expected, arm, against in pairs:
            both = [budget for budget, arms in budgets.items() if arm in arms and against in arms]
            if expected == BETTER:
                both = [budget for budget in both if budget != ALL]
            rows = measured.difference(both, arm, against, "reference") if both else ()
            tests += [SelfTest(expected, row) for row in rows]
    return tests
