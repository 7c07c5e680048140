"""Selects an evaluator's settings on held-out images: successive halving over several held-out parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean

import numpy as np

from ssl_vit.evaluators.base import Classifier, Evaluator
from ssl_vit.evaluators.features import ImageSet
from ssl_vit.evaluators.parts import Part, Run, unstored
from ssl_vit.interfaces import Diverged, UserError, first_line
from ssl_vit.records import Cost, SweepRecord
from ssl_vit.results import Settings, scored


def candidates_of(evaluator: Evaluator) -> list[Settings]:
    return getattr(evaluator.config, "candidates", [{}])


def configured(evaluator: Evaluator, settings: Settings) -> Evaluator:
    return type(evaluator)(evaluator.config.with_settings(settings)) if settings else evaluator


def select(
    evaluator: Evaluator, splits: Sequence[tuple[ImageSet, ImageSet]], seed: int, part: Run = unstored
) -> tuple[SweepRecord, Classifier]:
    """The sweep, and the winner's classifier of the first split.

    splits: (images to train on, held-out images). The candidates of a split are the better half of those of the split
        before it, by the mean over the splits so far (successive halving).
    part: stores the score of each candidate on each split. A winner whose score was stored earlier is fitted again.
    If all candidates that were kept for later splits diverge, the best of the dropped ones is selected.
    Raises UserError if all candidates diverge.
    """
    context, train = splits[0][0].context, splits[0][0]
    candidates = candidates_of(evaluator)
    scores: dict[int, list[float]] = {index: [] for index in range(len(candidates))}
    # Of the first split, for those that are still candidates; None: not fitted by this process.
    fitted: dict[int, Classifier | None] = {}
    counts, total, reason, diverged = halved(len(candidates), len(splits)), Cost(), "", set[int]()

    def score(index: int, kept: ImageSet, held: ImageSet) -> Part:
        classifier = configured(evaluator, candidates[index]).fit(kept, seed)
        outputs = classifier(held)[0]
        fitted.setdefault(index, classifier)
        tried = {**candidates[index], "held_out_accuracy": scored(outputs.prediction)[context.metric]}
        return [], SweepRecord(candidates=(tried,), best={}, cost=outputs.cost)

    def best(count: int) -> list[int]:
        """Of equals the first."""
        return sorted(sorted(fitted, key=lambda index: -fmean(scores[index]))[:count])

    # Where the encoder is frozen, the bar of all budgets is open and names the rest.
    named = f"{context.title}: {train.source}, sweep" if evaluator.trains_encoder else "sweep"
    with context.progress(named, sum(counts)) as advance:
        for split, (kept, held) in enumerate(splits):
            following = counts[split + 1] if split + 1 < len(splits) else 1
            for index in [*fitted] if split else range(len(candidates)):
                try:
                    record = part(f"candidate{index}_part{split}", partial(score, index, kept, held))[1]
                    assert record is not None
                    cost = record.cost
                    scores[index].append(float(record.candidates[0]["held_out_accuracy"] or 0))
                    fitted.setdefault(index, None)
                except Diverged as error:
                    reason = first_line(error)
                    cost = error.cost if isinstance(error.cost, Cost) else Cost()
                    scores[index] = [0.0]
                    diverged.add(index)
                    fitted.pop(index, None)
                total += cost
                if evaluator.trains_encoder:
                    found = f"{scores[index][-1]:.1%} of the held-out images, {cost.seconds:.0f} s"
                    context.say(f"{in_words(candidates[index])}: {found if index in fitted else 'diverged'}")
                if not split:  # classifiers of large networks take memory
                    fitted = {index: fitted[index] for index in best(following)}
                advance(1)
            fitted = {index: fitted[index] for index in best(following)}
    if not fitted and (dropped := [index for index in scores if index not in diverged]):
        index = max(dropped, key=lambda index: fmean(scores[index]))  # of equals the first
        fitted[index] = classifier = configured(evaluator, candidates[index]).fit(train, seed)
        total += classifier(splits[0][1])[0].cost
    if not fitted:
        keys = ", ".join(candidates[0]) or "its settings"
        raise UserError(f"{evaluator.title}: every candidate of the sweep diverged ({keys}); the last one: {reason}")
    ((winner, kept_classifier),) = fitted.items()
    held_out = [held.images for _, held in splits if held.images is not None]
    trained = [kept.images for kept, _ in splits if kept.images is not None]
    tried = (
        {**settings, "held_out_accuracy": fmean(scores[i]), "held_out_parts": 0 if i in diverged else len(scores[i])}
        for i, settings in enumerate(candidates)
    )
    record = SweepRecord(
        candidates=tuple(tried),
        best=candidates[winner],
        cost=total,
        labels=len(np.unique(np.concatenate(trained + held_out))),
        held_out=len(np.unique(np.concatenate(held_out))),
    )
    return record, kept_classifier or configured(evaluator, candidates[winner]).fit(train, seed)


def halved(candidates: int, splits: int) -> list[int]:
    """Number of candidates of each split; from two on it stays, so that the last ones are compared on all splits."""
    counts = [candidates]
    while len(counts) < splits:
        counts.append(min(counts[-1], max(2, -(-counts[-1] // 2))))
    return counts


def in_words(settings: Settings) -> str:
    values = {key: "null" if value is None else value for key, value in settings.items()}
    return ", ".join(f"{key}={value}" for key, value in values.items()) or "the given settings"
