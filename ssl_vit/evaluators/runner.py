"""Evaluators applied: label budgets, seeds, sources, settings selected on held-out images, scores and cost.

Settings (the `sweep` of an evaluator) are never selected on test images. An evaluator that trains the encoder sweeps
once per source and label budget, on a fixed held-out part of the training set that no other training sees but the one
with all labels. Any other evaluator selects for every label budget and seed, on a part of the labeled images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ssl_vit.evaluators import ALL, budget_words
from ssl_vit.evaluators.base import Classifier, Evaluator, Scored
from ssl_vit.evaluators.context import EvalContext
from ssl_vit.evaluators.features import ImageSet
from ssl_vit.evaluators.labels import choose_labeled, held_out_split, short_note
from ssl_vit.interfaces import Diverged, UserError
from ssl_vit.recipe import Recipe
from ssl_vit.records import Cost, SweepRecord
from ssl_vit.results import Budget, Result, Settings, scored


def budgets(evaluator: Evaluator, asked: Sequence[Budget]) -> tuple[Budget, ...]:
    """The label budgets to measure where these are asked for."""
    return evaluator.budgets or tuple(asked)


def has_sweep(evaluator: Evaluator) -> bool:
    """Whether `sweep` comes before `measure`, once per source and sweep budget."""
    return evaluator.trains_encoder and len(_candidates(evaluator)) > 1


def sweep_budget(evaluator: Evaluator, budget: Budget) -> Budget:
    """The label budget whose sweep serves `budget`."""
    return getattr(evaluator.config, "sweep_labels_per_class", None) or budget


def sweep(
    evaluator: Evaluator, context: EvalContext, source: str, budget: Budget, seed: int
) -> tuple[SweepRecord, Result | None]:
    """Fit every candidate to the labeled images of a seed, and select by held-out training images.

    Of equally good candidates the first wins. Only the winner predicts the test images: its result is what `measure`
    gives for this budget and seed (None for all labels, which `measure` fits to the held-out images too). A candidate
    that diverges loses. Raises UserError where all do, or where no image is held out.
    """
    images, held = _train_images(evaluator, context, budget, seed, all_labels=False)
    if not len(held):
        raise UserError(
            f"{evaluator.title}: held_out={evaluator.config.held_out:g} holds out none of so few images per class: "
            "raise it, or sweep nothing (sweep={})"
        )
    context.say(
        f"{source}, {budget_words(budget)}: {len(_candidates(evaluator))} trainings, {len(held)} held-out images"
    )
    train = ImageSet(context, source, "train", images, images)
    record, winner = _select(evaluator, train, ImageSet(context, source, "train", held, held), seed)
    if winner is None:
        raise UserError(f"{evaluator.title}: every candidate of the sweep diverged: lower optim.lr")
    if budget == ALL:
        return record, None
    (row,) = _results(evaluator, winner, train, budget, seed, record.best)
    return record, row


def measure(
    evaluator: Evaluator,
    context: EvalContext,
    source: str,
    budgets: Sequence[Budget],
    seeds: Sequence[int],
    best: Settings | None = None,
) -> Iterator[Result]:
    """Fit to the labeled images of every budget and seed, and predict the test images.

    best: what a sweep selected (None: the only candidate; or selected here, on a part of the labeled images).
    The rows have `data` "", the source as `arm` and `pretraining_seed` 0.
    """
    chosen = {
        (budget, seed): _train_images(evaluator, context, budget, seed)[0] for budget in budgets for seed in seeds
    }
    wanted = np.unique(np.concatenate(list(chosen.values())))
    extract = None if len(wanted) == (context.train_labels >= 0).sum() else wanted
    for (budget, seed), images in chosen.items():
        train = ImageSet(context, source, "train", images, extract)
        settings, notes = (best, ()) if best is not None else _settings(evaluator, train, seed)
        try:
            classifier = _configured(evaluator, settings).fit(train, seed)
            rows = list(_results(evaluator, classifier, train, budget, seed, settings, notes))
        except Diverged as error:
            if not settings:
                raise
            message = (
                f"{evaluator.title}: {_words(settings)} diverged with seed {seed} ({source}, {len(images)} images)"
            )
            diverged = Diverged(f"{message}: {str(error).splitlines()[0]}; remove that value from the sweep")
            diverged.everywhere = error.everywhere
            raise diverged from None
        if rows[0].seconds:
            context.say(f"{source}, {budget_words(budget)}, seed {seed}: {rows[0].seconds:.0f} s")
        yield from rows


def evaluate(evaluator: Evaluator, context: EvalContext) -> tuple[list[Result], dict[str, SweepRecord]]:
    """Everything that the evaluator's settings ask for: the trained encoder, then the references.

    Returns the rows, and the sweeps by "SOURCE, BUDGET".
    """
    results: list[Result] = []
    sweeps: dict[str, SweepRecord] = {}
    seeds = evaluator.config.seeds
    asked = budgets(evaluator, getattr(evaluator.config, "labels_per_class", (ALL,)))
    for source in ("trained", *evaluator.references):
        if not has_sweep(evaluator):
            results += measure(evaluator, context, source, asked, seeds)
            continue
        rows: dict[tuple[Budget, int], Result | None] = {}
        records = {}
        for at in dict.fromkeys(sweep_budget(evaluator, budget) for budget in asked):
            records[at], rows[at, seeds[0]] = sweep(evaluator, context, source, at, seeds[0])
            sweeps[f"{source}, {budget_words(at)}"] = records[at]
        for budget in asked:
            best = records[sweep_budget(evaluator, budget)].best
            for seed in seeds:
                row = rows.get((budget, seed))
                results += [row] if row else measure(evaluator, context, source, (budget,), (seed,), best)
    return results, sweeps


def training_recipes(evaluator: Evaluator, like: Recipe, images: int, *, sweep: bool) -> list[Recipe]:
    """The trainings of a `sweep` or of one `measure` with so many labeled images, for a dry run.

    like: the recipe of the encoder that is evaluated, its `data.train` the labeled shards. Of several candidates
    `measure` is taken to train the longest.
    """
    stages = []
    for settings in _candidates(evaluator):
        stage = _configured(evaluator, settings).stage(like.data, like.encoder, images, 0)
        if stage is not None:
            training = stage.training.model_copy(update={"precision": like.training.precision})
            stages.append(stage.model_copy(update={"training": training}))
    return stages if sweep else stages[-1:]


def _candidates(evaluator: Evaluator) -> list[Settings]:
    return getattr(evaluator.config, "candidates", [{}])


def _configured(evaluator: Evaluator, settings: Settings) -> Evaluator:
    return type(evaluator)(evaluator.config.with_settings(settings)) if settings else evaluator


def _train_images(
    evaluator: Evaluator, context: EvalContext, budget: Budget, seed: int, *, all_labels: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """(labeled images, held-out images): global indices.

    all_labels: whether the budget "all" includes the held-out images.
    """
    labels = context.train_labels
    if not evaluator.trains_encoder:
        return choose_labeled(labels, budget, seed), np.empty(0, dtype=np.int64)
    kept, held = held_out_split(labels, evaluator.config.held_out, seed=0)  # the same for every seed
    if budget == ALL and all_labels:
        return choose_labeled(labels, ALL, seed), held
    without = np.full_like(labels, -1)
    without[kept] = labels[kept]
    return np.sort(choose_labeled(without, budget, seed, share_of=labels)), held


def _settings(evaluator: Evaluator, train: ImageSet, seed: int) -> tuple[Settings, tuple[str, ...]]:
    """(settings, notes): the only candidate, or the best on a held-out part of the labeled images; the middle one where
    nothing can be held out (one image per class)."""
    candidates = _candidates(evaluator)
    if len(candidates) == 1:
        return candidates[0], ()
    assert train.images is not None
    kept, held = held_out_split(train.context.train_labels[train.images], evaluator.config.held_out, seed)
    if not len(held):
        middle = candidates[len(candidates) // 2]
        return middle, (f"no image could be held out to select by: {_words(middle)}, the middle one, was taken",)
    return _select(evaluator, train.of(kept), train.of(held), seed)[0].best, ()


def _select(evaluator: Evaluator, train: ImageSet, held: ImageSet, seed: int) -> tuple[SweepRecord, Classifier | None]:
    """The sweep, and the winner's classifier (None: all candidates diverged)."""
    context, best, winner, total = train.context, -1.0, None, Cost()
    tried: list[Settings] = []
    for settings in _candidates(evaluator):
        try:
            classifier = _configured(evaluator, settings).fit(train, seed)
            found = classifier(held)[0]
        except Diverged as error:
            total += error.cost if isinstance(error.cost, Cost) else Cost()
            tried.append({**settings, "held_out_accuracy": 0.0})
            context.say(f"{_words(settings)}: diverged")
            continue
        score = scored(found.prediction)[context.metric]
        total += found.cost
        tried.append({**settings, "held_out_accuracy": score})
        if evaluator.trains_encoder:
            context.say(f"{_words(settings)}: {score:.1%} of the held-out images, {found.cost.seconds:.0f} s")
        if score > best:
            best, winner, selected = score, classifier, settings
    return SweepRecord(candidates=tuple(tried), best=selected if winner else {}, cost=total), winner


def _results(
    evaluator: Evaluator,
    classifier: Classifier,
    train: ImageSet,
    budget: Budget,
    seed: int,
    selected: Settings,
    notes: tuple[str, ...] = (),
) -> Iterator[Result]:
    """A classifier's rows for the test images."""
    context, images = train.context, train.images
    assert images is not None
    notes += short_note(context.train_labels[images], budget, context.train_labels)
    for found in classifier(ImageSet(context, train.source, "test")):
        accuracies = scored(found.prediction)
        yield Result(
            data="",
            evaluator=type(evaluator).__module__.rpartition(".")[2],
            arm=train.source,
            labels_per_class=budget,
            seed=seed,
            pretraining_seed=0,
            labels=len(images) if found.labels is None else found.labels,
            prediction=found.prediction,
            variant=found.variant,
            primary=found.primary,
            selected=selected,
            notes=(*found.notes, *notes, *_unreadable(evaluator, found, len(images))),
            **vars(found.cost),
            accuracy=accuracies["accuracy"],
            mean_per_class=accuracies["mean_per_class"],
        )


def _unreadable(evaluator: Evaluator, found: Scored, images: int) -> tuple[str, ...]:
    missing = 0 if found.labels is None or evaluator.needs_head else images - found.labels
    return (f"{missing} of the {images} labeled images could not be read",) * bool(missing)


def _words(settings: Settings) -> str:
    return ", ".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in settings.items()
    )
