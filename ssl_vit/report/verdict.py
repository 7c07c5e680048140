"""The sentences that the statistics of a comparison allow."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

from ssl_vit.evaluators import budget_words
from ssl_vit.overrides import flatten
from ssl_vit.report import sequential
from ssl_vit.report.cautions import by_dataset, cautions, swept
from ssl_vit.report.costs import compute
from ssl_vit.report.intervals import draws_labels
from ssl_vit.report.read import Comparison
from ssl_vit.report.runs import joined, listed, metric_name, objective_name, text
from ssl_vit.report.statistics import plan, points
from ssl_vit.report.summary import Difference, Efficiency, Summary, declared_headline

NO_HEADLINE = "no evaluator measures both the arm under test and its baseline"
QUICK = "Quick run, a tenth of the steps with two seeds."


def has_headline(comparison: Comparison) -> bool:
    """Whether the plan of a comparison has a headline for at least one dataset."""
    return any(declared_headline(comparison, data) for data in comparison.record.metrics)


def verdict(comparison: Comparison, summary: Summary) -> list[str]:
    """Sentences of the verdict: of each dataset headline, label efficiency, label budgets, variance and compute.

    Then cautions. For a single run, what it did and scored. Empty for several separate runs, which no plan compares.
    """
    if comparison.separate:
        return _run(comparison, summary) if len(comparison.record.arms) == 1 else []
    sentences: list[str] = []
    for head in summary.headlines:
        same = (head.place, head.arm, head.against)
        budgets = [row for row in summary.differences if (row.place, row.arm, row.against) == same]
        about_head = [_headline(comparison, head, budgets)]
        efficiencies = [row for row in summary.efficiencies if (row.place, row.arm, row.against) == same]
        about_head += [_efficiency(comparison, row) for row in efficiencies[:1]]
        if len(budgets) > 1:
            sizes = [f"{row.labels_per_class}: {points(row.estimate)} ({row.outcome})" for row in budgets]
            about_head.append(f"By labels per class: {', '.join(sizes)}.")
        about_head += [*compute(comparison, head), *_other_arms(comparison, summary, head)]
        about_head += _variance(comparison, head)
        several = len(comparison.record.metrics) > 1
        if comparison.record.quick:
            about_head[0] = f"{QUICK} {about_head[0]}"
        sentences += [f"{head.place.data}: {sentence}" if several else sentence for sentence in about_head]
    if not has_headline(comparison):
        sentences = [f"No headline: {NO_HEADLINE}. All differences are exploratory."]
    elif not sentences:
        sentences = ["No verdict yet: no seed has been measured at every label budget with both arms of the headline."]
    return sentences + list(cautions(comparison, summary))


def notes(comparison: Comparison) -> list[str]:
    """What a reader of the numbers must know besides the verdict."""
    pretrainings = comparison.record.pretrainings
    labels = "the labeled images, " * draws_labels(comparison)
    seed = (
        f"A seed draws {labels}the initial classifier (from scratch, the initial network) and the order and "
        "augmentation of the images."
    )
    if pretrainings > 1 and any(arm.kind == "pretrained" for arm in comparison.record.arms):
        seed += f" Each pretrained arm has {pretrainings} pretrainings; each seed uses one of them."
    of_rows = by_dataset(comparison, ((row.data, note) for row in comparison.table.results for note in row.notes))
    skipped = [f"{len(comparison.skipped)} sample(s) could not be used: {listed(comparison.skipped)}."]
    given = [*_saw_held_out(comparison), *_own_settings(comparison), *comparison.record.notes]
    return [seed, *given, *of_rows, *(skipped if comparison.skipped else [])]


def _saw_held_out(comparison: Comparison) -> Iterator[str]:
    """Which pretrainings saw the images that settings are selected on, in a sweep or by each seed."""
    record, several = comparison.record, len(comparison.record.metrics) > 1
    arms = [arm for arm in record.arms if arm.saw]
    places = [(data, name) for name, evaluator in record.evaluators.items() for data in evaluator.settings]
    tried = [values for place in places for arm in arms for values in swept(comparison, *place, arm.name).values()]
    if arms and (any(len(values) > 1 for values in tried) or any(task.kind == "sweep" for task in record.tasks)):
        of = {arm.name: f" of {joined(arm.saw)}" if several else "" for arm in arms}
        named = [f"{arm.label} ({'with' if arm.uses_labels else 'without'} labels{of[arm.name]})" for arm in arms]
        yield f"Pretraining may have used training images that settings are selected on: {'; '.join(named)}."


def _own_settings(comparison: Comparison) -> Iterator[str]:
    for arm in comparison.record.arms:
        for evaluator, settings in arm.evaluators.items():
            values = ", ".join(f"{key}={json.dumps(value)}" for key, value in flatten(settings).items())
            yield f"Settings of {arm.label} alone: {evaluator}: {values}."


def _run(comparison: Comparison, summary: Summary) -> list[str]:
    """What a single run did, and its test accuracies."""
    (arm,) = comparison.record.arms
    unknown = "its training has not finished" if comparison.runs[arm.name].recipe else "it holds weights alone"
    run, sentences = arm.summary, [f"{arm.label} has no summary.json: {unknown}."]
    if run:
        objective = objective_name(run.objective)
        length = f"{run.steps:,} steps, {run.images_seen:,} images seen, {run.seconds:,.0f} s"
        sentences = [f"{arm.label}: {objective}, {text(run.parameters)} parameters, {length}."]
    for place in summary.places:
        rows = [row for row in summary.accuracies if (row.place, row.arm) == (place, arm.name)]
        scores = [f"{budget_words(row.labels_per_class)} {points(row.estimate, '')}%" for row in rows]
        title = comparison.record.evaluators[place.evaluator].title
        sentences += [f"{title} on {place.data}: {', '.join(scores)}."] if scores else []
    return sentences


def _headline(comparison: Comparison, head: Difference, budgets: Sequence[Difference]) -> str:
    ours, theirs = (comparison.spoken(arm) for arm in (head.arm, head.against))
    size = text(100 * comparison.record.margin)
    claim = {
        "better": f"{ours} is better than {theirs}",
        "worse": f"{ours} is worse than {theirs}",
        "equivalent": f"{ours} and {theirs} are equivalent within {size} point{'s' * (size != '1')}",
        "undecided": f"undecided between {ours} and {theirs}",
    }[head.outcome]
    given = [row.labels_per_class or 0 for row in budgets]
    numbers = len(given) > 1 and all(isinstance(budget, int) for budget in given)
    words = f"{joined([*map(str, given)])} labels per class" if numbers else joined([*map(budget_words, given)])
    over = f" with {words}" if len(given) == 1 else f", the mean over {words}"
    title = comparison.record.evaluators[head.place.evaluator].title
    metric = metric_name(comparison.record.metrics[head.place.data])
    units = f"{head.estimate.units} {_units(comparison, head)}, " if head.unit == "pretraining" else ""
    design = f"{units}{head.seeds} seed{'s' * (head.seeds != 1)}, {head.estimate.images:,} test images"
    if comparison.record.folds > 1:
        design += f", cross-validated over {comparison.record.folds} folds"
    sentence = (
        f"{_capital(claim)}: {points(head.estimate)} points of {metric} ({100 * head.means[0]:.1f}% against "
        f"{100 * head.means[1]:.1f}%){over} ({title}, {design})."
    )
    if looks := comparison.record.looks:
        counts = joined([str(look.seeds) for look in looks])
        sentence += (
            f" After {len(looks)} look{'s' * (len(looks) > 1)} (at {counts} of at most {comparison.record.max_seeds} "
            f"seeds) the interval has {100 * head.estimate.confidence:.1f}% confidence, so that the chance of a false "
            "claim over all looks is nominally at most 5%, provided that no report was read before the first look."
        )
    if head.outcome == "undecided":
        sentence += f" {_plan(comparison, head)}"
    kinds = {row.name: row.kind for row in comparison.record.arms}
    for arm in head.fixed:
        made, others = ("pretrained", "pretrainings") if arm in kinds else ("initialized", "initializations")
        each = " per fold" if comparison.record.folds > 1 and kinds.get(arm) == "pretrained" else ""
        once = f"{_capital(comparison.spoken(arm))} was {made} only once{each}"
        sentence += f" {once}: the interval does not cover other {others}."
    return sentence


def _plan(comparison: Comparison, head: Difference) -> str:
    """What would decide. The suggested maximum allows for looks, each of which widens the interval."""
    if head.estimate.half_width is None:
        if head.estimate.units < 2:
            return "There is no interval: run at least 3 seeds."
        if head.estimate.images < 2:
            return "There is no interval: test on at least 2 images."
        return "The estimated variance is zero, so there is no interval."
    record = comparison.record
    if record.looks and record.looks[-1].seeds >= (record.max_seeds or 0):
        return "The maximum number of seeds is reached: run a new comparison with other seeds."
    units, images = plan(head.estimate, record.margin, len(record.metrics), comparison.confidence)
    name = _units(comparison, head)
    more = [f"{units:,} more {_units(comparison, head, units)}"] if units else []
    more += [f"{images:,} more test image{'s' * (images != 1)}"] if images else []
    if not more:
        return f"Neither more {name} nor more test images alone would decide a difference of this size."
    sentence = f"If the estimate stays the same, {' or '.join(more)} would decide."
    if record.max_seeds:
        left = f"{record.max_seeds - head.seeds:,} of at most {record.max_seeds:,} seeds are left"
        return f"{sentence} The next look has another confidence level, so more or fewer may be needed; {left}."
    tests, now = len(record.metrics), comparison.confidence
    most = units and sequential.most_seeds(
        head.estimate, head.seeds, units, margin=record.margin, tests=tests, confidence_now=now
    )
    if not most:
        return sentence
    added = f"{name} or seeds" if head.unit == "pretraining" else name
    return (
        f"{sentence} To decide, start a new comparison with other seeds, such as one with `--until-decided "
        f"--max-seeds {most}`: it adds {added} step by step, with wider intervals. Adding seeds to this comparison "
        "after its report was read raises the error rate above 5%."
    )


def _efficiency(comparison: Comparison, row: Efficiency) -> str:
    ours, theirs = (comparison.spoken(arm) for arm in (row.arm, row.against))
    covers = "no interval: fewer than 5 seeds or pretrainings"
    if not math.isnan(row.low):
        covers = "95% interval over seeds or pretrainings; it does not cover test images"
        if "[" not in needed(row):
            covers = f"both ends of the {covers}"
    given = budget_words(row.labels_per_class)
    return (
        f"Label efficiency (estimate): {theirs} needs {needed(row)} labels per class for the accuracy of {ours} with "
        f"{given} ({covers})."
    )


def needed(row: Efficiency) -> str:
    """Labels per class that the baseline needs, and their interval."""

    def number(labels: float) -> str:
        if labels == 0 or math.isinf(labels):
            return f"more than {row.measured[1]:g}" if labels else f"fewer than {row.measured[0]:g}"
        return f"{labels:.2g}" if labels < 99.5 else f"{labels:.0f}"

    value, low, high = (number(labels) for labels in (row.labels, row.low, row.high))
    return value if math.isnan(row.low) or low == high else f"{value} [{low}, {high}]"


def _units(comparison: Comparison, head: Difference, count: int = 2) -> str:
    """What varies between the units of a headline, in the plural where there are several."""
    plural = "s" * (count != 1)
    if head.unit == "pretraining":  # of an arm, or initializations of the untrained encoder that it is compared with
        drawn = head.arm in head.fixed and head.against not in {arm.name for arm in comparison.record.arms}
        return f"{'initialization' if drawn else 'pretraining'}{plural}"
    own = comparison.record.pretrainings == head.seeds > 1 and head.arm not in head.fixed
    return f"seed{plural} with one pretraining each" if own else f"seed{plural}"


def _variance(comparison: Comparison, head: Difference) -> list[str]:
    """Variance components of the headline, as shares: more seeds or pretrainings reduce the first, more test images
    the second, both the third."""
    if head.estimate.half_width is None:
        return []
    units, images, rest = (f"{share:.0%}" for share in head.estimate.variance_shares)
    named = _units(comparison, head) + " and their seeds" * (head.unit == "pretraining")
    parts = f"{units} from {named}, {images} from test images, {rest} from their interaction"
    return [f"Estimated variance of this difference: {parts} and the residual."]


def _other_arms(comparison: Comparison, summary: Summary, head: Difference) -> list[str]:
    """The arm of the headline against all other arms, and these against its baseline."""
    arms, said = {arm.name for arm in comparison.record.arms}, (head.arm, head.against)
    rows = [row for row in summary.means if row.place == head.place and (row.arm, row.against) != said]
    pairs = [
        f"{comparison.spoken(row.arm)} minus {comparison.spoken(row.against)} {points(row.estimate)} ({row.outcome})"
        for row in rows
        if (row.arm == head.arm and row.against in arms) or row.against == head.against
    ]
    return [f"Exploratory differences in points, not adjusted for their number: {'; '.join(pairs)}."] if pairs else []


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
