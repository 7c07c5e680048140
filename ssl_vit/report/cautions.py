"""What may be wrong with the numbers of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeGuard

from ssl_vit.evaluators import budget_words, several
from ssl_vit.records import ArmRecord
from ssl_vit.report.read import Comparison
from ssl_vit.report.runs import flat, joined, text
from ssl_vit.report.self_test import self_tests
from ssl_vit.report.statistics import points
from ssl_vit.report.summary import Difference, Summary


def cautions(comparison: Comparison, summary: Summary) -> Iterator[str]:
    """Sentences on what may be wrong with the numbers of a comparison, each once."""
    for sentence in by_dataset(comparison, _found(comparison, summary)):
        yield f"Caution: {sentence}"


def by_dataset(comparison: Comparison, found: Iterable[tuple[str, str]]) -> list[str]:
    """Each sentence once, after the names of its datasets where it does not hold for all.

    found: (dataset, or "" for all; sentence).
    """
    names: dict[str, list[str]] = {}
    for data, sentence in found:
        names.setdefault(sentence, []).append(data)
    sentences = []
    for sentence, given in names.items():
        some = list(dict.fromkeys(given))
        whole = "" in some or len(some) == len(comparison.record.metrics)
        sentences.append(sentence if whole else f"{joined(some)}: {sentence}")
    return sentences


def _found(comparison: Comparison, summary: Summary) -> Iterator[tuple[str, str]]:
    missing = {task.kind for task in comparison.record.tasks if task.id in comparison.missing}
    if missing:
        count = f"{len(comparison.missing)} of {len(comparison.record.tasks)} tasks are missing"
        change = ", so the numbers may change" * (missing != {"pictures"})
        yield "", f"the comparison has not finished ({count}){change}."
    if not comparison.record.study and (differing := architecture_differences(comparison.record.arms)):
        yield "", f"the arms differ in architecture, image preparation or precision. {'. '.join(differing)}."
    yield from _kept_dropout(comparison)
    said = {(head.place, head.arm, head.against) for head in summary.headlines}
    for row in (one for one in summary.means if one.role in ("reference", "baseline")):
        first = row.arm == comparison.tested[0] or (row.role == "reference" and row.arm in comparison.tested)
        if first and row.outcome == "worse" and (row.place, row.arm, row.against) not in said:
            title = comparison.record.evaluators[row.place.evaluator].title
            against, arm = comparison.spoken(row.against), comparison.spoken(row.arm)
            pair = f"{points(row.estimate)} points, not adjusted"
            yield row.place.data, f"{title}: {arm} is worse than {against} ({pair})."
    for test in self_tests(comparison):
        if test.result == "fail":
            row = test.difference
            title = comparison.record.evaluators[row.place.evaluator].title
            pair = f"{comparison.label(row.arm)} minus {comparison.label(row.against)}"
            yield (
                row.place.data,
                f"a self-test failed: {title}: {pair} is {points(row.estimate)} points ({row.outcome}), "
                f"expected: {' or '.join(test.expected)}.",
            )
    tried = {comparison.spoken(arm.name): comparison.tried(arm.name) for arm in comparison.record.arms}
    if len(set(tried.values())) > 1 and "sweep" not in missing:
        counts = ", ".join(f"{name} {count}" for name, count in tried.items())
        yield "", f"the arms had different numbers of settings in their sweeps ({counts})."
    for head in summary.headlines:
        for sentence in (*_narrow_interval(head), *_one_length(comparison, head), *_richly_selected(comparison, head)):
            yield head.place.data, sentence
    for data in comparison.record.metrics:
        if edges := [*_edges(comparison, data), *_edges_by_seed(comparison, data)]:
            yield data, f"best at the edge of the sweep: {'; '.join(edges)}. A wider sweep may change the order."


def _narrow_interval(head: Difference) -> Iterator[str]:
    """A caution where the interval is narrower than it would be without variance between seeds or pretrainings."""
    e = head.estimate
    if e.half_width is None or not e.standard_error or e.seed_variance > 0:
        return
    standard_error = math.sqrt(e.image_variance / e.images + e.residual_variance / (e.units * e.images))
    wider = replace(e, half_width=e.half_width * standard_error / e.standard_error)
    if points(wider) != points(e):
        yield (
            f"the variance between {head.unit}s is estimated as negative, so the interval is probably too narrow; with "
            f"a variance of zero it would be {points(wider)}, which may still be too narrow."
        )


def architecture_differences(arms: Sequence[ArmRecord]) -> list[str]:
    """What arms differ in from the first pretrained arm (without labels, if there is one): a phrase per arm that does,
    such as `supervised: encoder.depth 12 (masked patch prediction: 4)`; empty where all are alike. Dropout is not an
    architecture."""
    first = min((arm for arm in arms if arm.kind != "scratch"), key=lambda arm: arm.uses_labels)
    phrases = []
    for arm in (arm for arm in arms if arm.architecture != first.architecture):
        words = f"another encoder than {first.label}"
        if arm.encoder and first.encoder:
            sizes, first_sizes = flat(arm.encoder), flat(first.encoder)
            words = ", ".join(
                f"{key.removeprefix('prepared.')} {sizes[key]} ({first.label}: {first_sizes[key]})"
                for key in sizes
                if sizes[key] != first_sizes[key] and not key.endswith((".dropout", ".drop_path"))
            )
        phrases.append(f"{arm.label}: {words}")
    return phrases


def _kept_dropout(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Arms that are fine-tuned with different dropout, because an evaluator keeps that of their pretraining."""
    arms = [arm for arm in comparison.record.arms if arm.encoder]
    for (name, evaluator), key in product(comparison.record.evaluators.items(), ("dropout", "drop_path")):
        for data, settings in evaluator.settings.items():
            kept = {
                arm.label: arm.encoder["encoder"].get(key, 0.0)
                for arm in arms
                if key in settings
                and (settings | arm.own_settings(data, name))[key] is None
                and None in swept(comparison, data, name, arm.name).get(key, (None,))  # one candidate keeps it, or all
            }
            if len(set(kept.values())) > 1:
                each = ", ".join(f"{label} {text(rate)}" for label, rate in kept.items())
                yield (
                    data,
                    f"{evaluator.title} keeps the {key} of each arm's pretraining, which differs ({each}). "
                    f"Set evaluators.{name}.{key} to train all arms alike.",
                )


def _one_length(comparison: Comparison, head: Difference) -> Iterator[str]:
    """Where the headline is about fine-tuning: a length that was not selected, or that the two arms selected from
    different ones."""
    evaluator, data = comparison.record.evaluators[head.place.evaluator], head.place.data
    if not evaluator.trains_encoder:
        return
    settings = evaluator.settings.get(data, {})
    shared = {
        f"{section}.{key}": v for section in ("sweep", "training") for key, v in settings.get(section, {}).items()
    }
    tried, more, scratch = dict[str, tuple[str, ...]](), "", False
    for arm in (arm for arm in comparison.record.arms if arm.name in (head.arm, head.against)):
        own = shared | arm.own_settings(data, head.place.evaluator)
        keys = ("sweep.training.steps", "sweep.training.epochs", "training.steps", "training.epochs")
        key = next((key for key in keys if own.get(key)), "")
        unit = key.rpartition(".")[2]
        tried[arm.label] = tuple(f"{length:,} {unit}" for length in several(own.get(key, ())))
        scratch |= arm.kind == "scratch"
        more += f", {own['extra_steps']:,} more for {arm.label}" if own.get("extra_steps") else ""
    if len({*tried.values()}) == 1:
        used = joined(next(iter(tried.values())))
    else:
        used = "; ".join(f"{label}: {joined(lengths)}" for label, lengths in tried.items())
    given = f" ({used}{more})" if used else ""
    if fixed := [label for label, lengths in tried.items() if len(lengths) < 2]:
        reason = "Training from scratch often has to be longer. " * (scratch and not more)
        of = f" of {joined(fixed)}" if len(fixed) < len(tried) else ""
        other = f"give several lengths with evaluators.{head.place.evaluator}.sweep.training.steps"
        if more:  # the compute would not be equal any more
            other = "compare other lengths in separate comparisons"
        reason += f"The difference may depend on it; {other}."
        yield f"no sweep selected the length of fine-tuning{of}{given}. {reason}"
    elif len({*tried.values()}) > 1:
        yield f"the arms' sweeps try different lengths of fine-tuning{given}."


def _richly_selected(comparison: Comparison, head: Difference) -> Iterator[str]:
    """A label budget whose settings were selected with more than twice the labels that it has."""
    place = head.place.data, head.place.evaluator
    smallest = min(
        (row for row in comparison.table.results if (row.data, row.evaluator) == place), key=lambda row: row.labels
    )
    settings = comparison.record.evaluators[head.place.evaluator].settings.get(head.place.data, {})
    budget = settings.get("sweep_labels_per_class") or smallest.labels_per_class
    cell = (*place, budget)
    sweeps = [s for task, s in comparison.sweeps if (task.data, task.evaluator, task.labels_per_class) == cell]
    if any(sweep.labels > 2 * smallest.labels for sweep in sweeps):
        used = max(sweep.labels for sweep in sweeps)
        yield (
            f"the settings for {budget_words(smallest.labels_per_class)} ({smallest.labels:,} labeled images) "
            f"were selected with {used:,} labeled images. The labels of the budget alone do not suffice for this "
            "selection; without it, accuracies may be lower."
        )


def _edges(comparison: Comparison, data: str) -> list[str]:
    """Swept settings whose best value was the smallest (0 apart) or largest of those tried, with the arms."""
    arms_by_setting: dict[str, list[str]] = {}
    for sweep, arm in ((sweep, task.arm) for task, sweep in comparison.sweeps if task.data == data):
        for key, best in sweep.best.items():
            values = {value for candidate in sweep.candidates if _is_number(value := candidate.get(key))}
            if len(values) > 1 and best is not None and best in (min(values) or None, max(values)):
                arms_by_setting.setdefault(f"{key} {text(best)}", []).append(comparison.spoken(arm))
    return [f"{setting} ({joined(list(dict.fromkeys(arms)))})" for setting, arms in arms_by_setting.items()]


def _is_number(value: object) -> TypeGuard[int | float]:
    """Not a boolean: neither of its two values is an edge."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def swept(comparison: Comparison, data: str, evaluator: str, arm: str) -> dict[str, Sequence[object]]:
    """The values that an evaluator tries for an arm, or a reference, by dotted key."""
    shared = comparison.record.evaluators[evaluator].settings.get(data, {}).get("sweep", {})
    own = next((row.own_settings(data, evaluator) for row in comparison.record.arms if row.name == arm), {})
    tried = shared | {key.removeprefix("sweep."): values for key, values in own.items() if key.startswith("sweep.")}
    return {key: values for key, values in tried.items() if values is not None}  # None: the arm does not try this key


def _edges_by_seed(comparison: Comparison, data: str) -> list[str]:
    """Settings of evaluators on frozen features, which each seed selects: those of three values or more whose smallest
    (0 apart) or largest one was selected by more than half of an arm's seeds."""
    rows, arms_by_setting = comparison.measured.results, dict[str, list[str]]()  # of each fold
    frozen = {name: one for name, one in comparison.record.evaluators.items() if not one.trains_encoder}
    for (name, evaluator), arm in product(frozen.items(), comparison.arms):
        found = [one.selected for one in rows if (one.data, one.evaluator, one.arm) == (data, name, arm)]
        for key, values in swept(comparison, data, name, arm).items():
            tried = sorted(value for value in values if _is_number(value))
            chosen = [selected[key] for selected in found if key in selected]
            for edge in (tried[0], tried[-1]) if len(tried) > 2 else ():
                if edge and 2 * (times := chosen.count(edge)) > len(chosen):
                    arms = arms_by_setting.setdefault(f"{evaluator.title}: {key} {text(edge)}", [])
                    arms.append(f"{comparison.spoken(arm)}, {times} of {len(chosen)} selections")
    return [f"{setting} ({'; '.join(arms)})" for setting, arms in arms_by_setting.items()]
