"""What the intervals of a report cover, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ssl_vit.evaluators import ALL
from ssl_vit.report.read import Comparison
from ssl_vit.report.runs import joined
from ssl_vit.report.summary import Difference, Summary

HALF_WIDTH = "half-width of a 95% interval that covers {} and test images"  # with the unit
FEW_UNITS = 6  # with fewer than these, but more than two, intervals are too narrow (tools/interval_coverage.py)


def interval(comparison: Comparison, summary: Summary) -> str:
    """What the intervals cover, and their confidence."""
    rows = [*summary.accuracies, *summary.differences, *summary.means]
    units = sorted({"pretrainings" if row.estimate.units < row.seeds else "seeds" for row in rows})
    unit = "seeds (pretrainings, where an arm has several but fewer than seeds)" if len(units) > 1 else "".join(units)
    pretrained = any(arm.kind == "pretrained" for arm in comparison.record.arms)
    if pretrained and units == ["seeds"] and comparison.record.pretrainings == len(comparison.record.seeds) > 1:
        unit = "seeds, each with its own pretraining,"
    labels = "the draw of the labeled images from these training images, but " * draws_labels(comparison)
    sentence = (
        f"± is the {HALF_WIDTH.format(unit or 'seeds')} (Student's t on a two-way random-effects analysis of variance; "
        f"two arms are paired by seed and image). It covers {labels}no other training images."
    )
    if comparison.sweeps:
        sentence += (
            " It does not cover another selection of settings by the sweeps; the result of the first seed may be that "
            "of the selected run."
        )
    if comparison.record.folds > 1:
        sentence += (
            " Each image is a test image in one fold and a training image in the others; the interval ignores this "
            "dependence."
        )
    frozen = [one for one in comparison.record.evaluators.values() if not one.trains_encoder]
    tried = [v for one in frozen for settings in one.settings.values() for v in settings.get("sweep", {}).values()]
    if any(len(values) > 1 for values in tried):
        sentence += " Probes of frozen features select their settings anew for each seed, which the interval covers."
    if not comparison.separate:
        sentence += " The recipe declares the headline"
        if len(summary.means) > len(summary.headlines):
            sentence += "; all other differences are exploratory, not adjusted for the number of arms or evaluators"
        sentence += ". Whether the recipe was changed after results had been seen is not recorded."
    several_headlines = len(comparison.record.metrics) > 1 and not comparison.separate
    if several_headlines or several_budgets(summary.differences):
        sentence += (
            " Differences at several label budgets, or headlines of several datasets, have intervals adjusted for "
            "their number (Holm): one excludes zero where Holm's test rejects. They are called equivalent where "
            "Bonferroni's interval, which is wider, lies within the margin."
        )
    if comparison.record.max_seeds:
        sentence += f" With these looks, intervals of differences have {100 * comparison.confidence:.1f}% confidence."
    estimates = [row.estimate for row in (*rows, *summary.headlines)]
    if any(one.half_width is not None and 2 < one.units < FEW_UNITS for one in estimates):
        sentence += (
            f" With fewer than {FEW_UNITS} seeds or pretrainings, as here, intervals cover the truth a little less "
            "often than their confidence says."
        )
    said = {arm for head in summary.headlines for arm in head.fixed}
    fixed = dict.fromkeys(arm for row in (*summary.means, *summary.differences) for arm in row.fixed)
    if once := [comparison.label(arm) for arm in fixed if arm not in said]:
        named = joined(once)
        sentence += f" It does not cover other pretrainings or initializations of {named}: there is only one of each."
    return sentence


def draws_labels(comparison: Comparison) -> bool:
    """Whether any label budget is a part of the labeled images."""
    return any(row.labels_per_class != ALL for row in comparison.table.results)


def several_budgets(differences: Sequence[Difference]) -> bool:
    """Whether two arms are compared at several label budgets of one dataset and evaluator."""
    pairs = [(row.place, row.arm, row.against) for row in differences]
    return len(pairs) > len({*pairs})
