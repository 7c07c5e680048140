"""Evaluators applied: label budgets, seeds, sources, settings selected on held-out images, scores and cost.

Settings (the `sweep` of an evaluator) are never selected on test images. An evaluator that trains the encoder sweeps
once per source and label budget, on a held-out part of the training set, the same for every seed; only a training with
all labels sees these images. Any other evaluator selects for every budget and seed, on a part of the labeled images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ssl_vit.evaluators import ALL, budget_words
from ssl_vit.evaluators.base import Classifier, Evaluator
from ssl_vit.evaluators.features import EvalContext, ImageSet
from ssl_vit.evaluators.labels import choose_labeled, held_out_split, short_note, untrained_note
from ssl_vit.evaluators.parts import Part, Run, unstored
from ssl_vit.evaluators.selection import candidates_of, configured, halved, in_words, select
from ssl_vit.interfaces import Budget, Diverged, UserError, first_line
from ssl_vit.recipe import Recipe
from ssl_vit.records import Cost, SweepRecord
from ssl_vit.results import Result, Settings, scored


def budgets(evaluator: Evaluator, asked: Sequence[Budget]) -> tuple[Budget, ...]:
    """The label budgets to measure: those in the evaluator's settings, else `asked`, those of the comparison. With
    `needs_head`, all labels."""
    if evaluator.needs_head:
        return (ALL,)
    named = "labels_per_class" in evaluator.config.model_fields_set
    return evaluator.config.labels_per_class if named else tuple(asked)


def has_sweep(evaluator: Evaluator) -> bool:
    """Whether `sweep` comes before `measure`, once per source and sweep budget."""
    return evaluator.trains_encoder and len(candidates_of(evaluator)) > 1


def check_held_out(evaluator: Evaluator, labels: np.ndarray) -> None:
    """Raises UserError where a sweep would be scored on images of one class. labels: int (n,), of train."""
    if has_sweep(evaluator) and held_out_classes(evaluator, labels) < 2:
        _, counts = np.unique(labels[labels >= 0], return_counts=True)
        share = f"held_out={evaluator.config.held_out:g} of {counts.min()} to {counts.max()} images per class"
        raise UserError(f"{share} holds out images of fewer than two classes; raise it, or set sweep={{}}")


def held_out_classes(evaluator: Evaluator, labels: np.ndarray) -> int:
    """How many classes have images that a sweep is scored on. labels: int (n,), of train."""
    return len(np.unique(labels[held_out_split(labels, evaluator.config.held_out, seed=0)[1]]))


def sweep_budget(evaluator: Evaluator, budget: Budget) -> Budget:
    """The label budget whose sweep selects the settings for `budget`."""
    return getattr(evaluator.config, "sweep_labels_per_class", None) or budget


def sweep(
    evaluator: Evaluator, context: EvalContext, source: str, budget: Budget, seed: int, part: Run = unstored
) -> tuple[SweepRecord, list[Result]]:
    """Fit every candidate to the labeled images of a seed, and select by held-out training images.

    part: as in `selection.select`; its names are those of this sweep.

    Among equally good candidates the first wins; a candidate that diverges loses. Only the winner predicts the test
    images. Its results equal those of `measure` for this budget and seed; there are none for all labels, because
    `measure` then also fits to the held-out images. Raises UserError if all diverge, or if no image is held out.
    """
    evaluator = evaluator.for_source(source)
    check_held_out(evaluator, context.train_labels)
    splits = [
        _train_images(evaluator, context, source, budget, seed, include_held_out=False, repeat=repeat)
        for repeat in range(evaluator.config.held_out_repeats)
    ]
    train, _ = splits[0]
    record, winner = select(evaluator, splits, seed, lambda name, run: part(f"{source}_{budget}_{name}", run))
    record = record.model_copy(update={"source": source, "labels_per_class": budget})
    context.say(f"{source}, {budget_words(budget)}: sweep scored on {record.held_out} held-out images")
    return record, [] if budget == ALL else [*_results(evaluator, winner, train, budget, seed, record.best)]


def measure(
    evaluator: Evaluator,
    context: EvalContext,
    source: str,
    budgets: Sequence[Budget],
    seeds: Sequence[int],
    best: Settings | None = None,
    *,
    shift: int = 0,
) -> Iterator[Result]:
    """Fit to the labeled images of every budget and seed, and predict the test images.

    best: settings that a sweep selected (None: the only candidate, or select on a part of the labeled images).
    shift: added to the seed of everything but the choice of the labeled images and the selection of settings.
    The rows have `data` and `evaluator` "", the source as `arm` and `pretraining_seed` 0.
    """
    evaluator = evaluator.for_source(source)
    cells = [(budget, seed) for budget in budgets for seed in seeds]
    chosen = [_train_images(evaluator, context, source, budget, seed)[0] for budget, seed in cells]
    wanted = np.unique(np.concatenate([train.images for train in chosen if train.images is not None]))
    together = None if len(wanted) == len(context.train_labels) else wanted
    with context.progress(f"{context.title}: {source}", len(cells)) as advance:
        for (budget, seed), images in zip(cells, chosen, strict=True):
            train = ImageSet(context, source, "train", images.images, together)
            settings, notes, spent = (best, (), Cost()) if best is not None else _settings(evaluator, train, seed)
            try:
                classifier = configured(evaluator, settings).fit(train, seed + shift)
                rows = list(_results(evaluator, classifier, train, budget, seed, settings, notes))
                if not rows:
                    raise UserError(f"{evaluator.title}: its classifier must return one `Scored` or more")
                rows[0] = replace(rows[0], **vars(rows[0].cost + spent))
            except Diverged as error:
                if settings:
                    error.args = (
                        f"{evaluator.title}: {in_words(settings)} diverged with seed {seed} ({source}, "
                        f"{budget_words(budget)}): {first_line(error)}; remove that value from the sweep",
                    )
                raise
            if rows[0].seconds:
                context.say(f"{source}, {budget_words(budget)}, seed {seed}: {rows[0].seconds:.0f} s")
            advance(1)
            yield from rows


def evaluate(
    evaluator: Evaluator, context: EvalContext, part: Run = unstored
) -> tuple[list[Result], list[SweepRecord]]:
    """The rows and the sweeps of all label budgets and seeds of the evaluator's settings, for the trained encoder and
    the references.

    part: stores the parts: a sweep and each of its candidates, the training of an encoder, or all classifiers of one
        source on frozen features.
    """
    results: list[Result] = []
    sweeps: list[SweepRecord] = []
    seeds = evaluator.config.seeds
    asked: tuple[Budget, ...] = (ALL,) if evaluator.needs_head else evaluator.config.labels_per_class

    def measured(source: str, budgets: Sequence[Budget], seeds: Sequence[int], best: Settings | None = None) -> Part:
        return list(measure(evaluator, context, source, budgets, seeds, best)), None

    def swept(source: str, budget: Budget) -> Part:
        record, rows = sweep(evaluator, context, source, budget, seeds[0], part)
        return rows, record

    for source in ("trained", *evaluator.references):
        if not evaluator.trains_encoder:
            results += part(source, partial(measured, source, asked, seeds))[0]
            continue
        winners: dict[Budget, Part] = {}
        if has_sweep(evaluator.for_source(source)):
            for at in dict.fromkeys(sweep_budget(evaluator, budget) for budget in asked):
                winners[at] = part(f"{source}_{at}_sweep", partial(swept, source, at))
            sweeps += [record for _, record in winners.values() if record]
        for budget in asked:
            rows, record = winners.get(sweep_budget(evaluator, budget), ([], None))
            done = [row for row in rows if row.labels_per_class == budget]
            results += done
            for seed in seeds[1:] if done else seeds:
                train = partial(measured, source, (budget,), (seed,), record.best if record else None)
                results += part(f"{source}_{budget}_seed{seed}", train)[0]
    return results, sweeps


def training_recipes(evaluator: Evaluator, like: Recipe, images: int, *, sweep: bool) -> list[Recipe]:
    """The trainings by gradient descent of a `sweep`, or of one `measure`, for a dry run.

    like: the recipe of the encoder that is evaluated. images: number of labeled images. `measure`, and a sweep that
    halves its candidates, are assumed to train the longest ones.
    """
    stages = []
    for settings in candidates_of(evaluator):
        stage = configured(evaluator, settings).stage(like.data, like.encoder, images, 0)
        if stage is not None:
            training = stage.training.model_copy(update={"precision": like.training.precision})
            stages.append(stage.model_copy(update={"training": training}))
    if not sweep:
        return stages[-1:]
    counts = halved(len(stages), getattr(evaluator.config, "held_out_repeats", 1)) if stages else []
    return [stage for count in counts for stage in stages[-count:]]


def _train_images(
    evaluator: Evaluator,
    context: EvalContext,
    source: str,
    budget: Budget,
    seed: int,
    *,
    include_held_out: bool = True,
    repeat: int = 0,
) -> tuple[ImageSet, ImageSet]:
    """(labeled images, held-out images).

    include_held_out: whether the budget "all" is all labeled images.
    repeat: which of the held-out parts; `measure` uses the first one.
    """
    labels, held = context.train_labels, np.empty(0, dtype=np.int64)
    if not evaluator.trains_encoder:
        images = choose_labeled(labels, budget, seed)
    else:
        kept, held = held_out_split(labels, getattr(evaluator.config, "held_out", 0.0), 0, repeat)
        allowed = np.full_like(labels, -1)
        allowed[kept] = labels[kept]
        if budget == ALL and include_held_out:
            allowed = labels
        images = np.sort(choose_labeled(allowed, budget, seed, share_of=labels))
    train, others = (ImageSet(context, source, "train", part, np.sort(part)) for part in (images, held))
    return train, others


def _settings(evaluator: Evaluator, train: ImageSet, seed: int) -> tuple[Settings, tuple[str, ...], Cost]:
    """(settings, notes, cost of the selection): the only candidate, or the best on a held-out part of the labeled
    images; the middle value of each key where images of fewer than two classes can be held out (few per class)."""
    candidates = candidates_of(evaluator)
    if len(candidates) == 1:
        return candidates[0], (), Cost()
    labels, c = train.context.train_labels[train.images], evaluator.config
    splits = [held_out_split(labels, c.held_out, seed, repeat) for repeat in range(c.held_out_repeats)]
    if len(np.unique(labels[splits[0][1]])) < 2:  # of one class alone every candidate may score 100%
        middle = {key: values[len(values) // 2] for key, values in c.sweep.items()}
        held = "no images" if not len(splits[0][1]) else "images of one class alone"
        note = f"{held} could be held out for selection; the middle of the sweep, {in_words(middle)}, was used"
        return middle, (note,), Cost()
    record, _ = select(evaluator, [(train.of(kept), train.of(held)) for kept, held in splits], seed)
    return record.best, (), record.cost


def _results(
    evaluator: Evaluator,
    classifier: Classifier,
    train: ImageSet,
    budget: Budget,
    seed: int,
    selected: Settings,
    notes: tuple[str, ...] = (),
) -> Iterator[Result]:
    """A classifier's rows for the test images; the caller fills in the names of data and evaluator."""
    everything, names = train.context.train_labels, train.context.train.classes or train.context.test.classes
    labels = everything[train.images]
    for outputs in classifier(ImageSet(train.context, train.source, "test")):
        found = outputs.prediction
        arrays = {name: value for name, value in vars(found).items() if name != "confidence" or value is not None}
        if wrong := [name for name, value in arrays.items() if not isinstance(value, np.ndarray)]:
            raise UserError(f"{evaluator.title}: {', '.join(wrong)} of its predictions must be NumPy arrays")
        if not found.is_valid:
            shape, kind = found.predicted.shape, found.predicted.dtype
            raise UserError(
                f"{evaluator.title}: it predicted {kind} {shape} for {len(found.labels)} images; return a class number "
                "per image, from 0 on, in ascending order of the images"
            )
        used = len(labels) if outputs.labels is None else outputs.labels
        unreadable = (f"{len(labels) - used} of {len(labels)} labeled images could not be read",)
        yield Result(
            data="",
            evaluator="",
            arm=train.source,
            labels_per_class=budget,
            seed=seed,
            pretraining_seed=0,
            labels=used,
            prediction=found,
            variant=outputs.variant,
            primary=outputs.primary,
            selected=selected,
            notes=(
                *outputs.notes,
                *notes,
                *short_note(labels, budget, everything, names),
                *(() if evaluator.needs_head else untrained_note(found.labels, everything, names)),
                *unreadable * (used < len(labels) and not evaluator.needs_head),
            ),
            **scored(found),  # type: ignore[arg-type]
            **vars(outputs.cost),
        )
