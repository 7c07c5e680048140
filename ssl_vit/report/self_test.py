"""The self-test of a comparison: differences whose outcome is known, measured in the same way as the headline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ssl_vit.report.read import Comparison
from ssl_vit.report.summary import Difference, Measured, baseline_of, declared_headline, rows_by_place


@dataclass(frozen=True)
class SelfTest:
    """expected: "same" for a row and its repetition with other random numbers, which chance calls different in 5% of
    comparisons; "better" for an arm that was pretrained with all labels and its baseline."""

    expected: Literal["same", "better"]
    difference: Difference

    @property
    def passed(self) -> bool:
        outcomes = ("equivalent", "undecided") if self.expected == "same" else ("better",)
        return self.difference.outcome in outcomes


def self_tests(comparison: Comparison) -> list[SelfTest]:
    """Those that have been measured: repetitions everywhere, pretraining with all labels where a headline is."""
    headlines = [found[0] for data in comparison.record.metrics if (found := declared_headline(comparison, data))]
    tests = []
    for place, budgets in rows_by_place(comparison).items():
        measured = Measured(comparison, place, budgets)
        for expected, arm, against in _pairs(comparison, measured.arms, headline=place in headlines):
            both = [budget for budget, arms in budgets.items() if arm in arms and against in arms]
            rows = measured.difference(both, arm, against, "reference") if both else ()
            tests += [SelfTest(expected, row) for row in rows]
    return tests


def _pairs(
    comparison: Comparison, measured: list[str], *, headline: bool
) -> Iterator[tuple[Literal["same", "better"], str, str]]:
    """(expected outcome, row, against). headline: whether a headline is about this place."""
    for control in (one for one in comparison.record.references if one.repeats):
        yield "same", control.name, control.repeats
    supervised = [arm.name for arm in comparison.record.arms if arm.uses_labels and arm.name in measured]
    for arm in supervised[:headline]:
        if baseline := baseline_of(comparison, arm, measured):
            yield "better", arm, baseline
