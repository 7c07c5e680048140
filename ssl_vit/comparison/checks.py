"""Checks before the first task of a comparison: every task can run, and test images are only used for testing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from filelock import FileLock
from pydantic import ValidationError

from ssl_vit import precision, runs, stage
from ssl_vit.comparison.compute import equalize
from ssl_vit.comparison.config import Study
from ssl_vit.comparison.plan import Plan
from ssl_vit.comparison.suites import prepare
from ssl_vit.comparison.work import is_done
from ssl_vit.data import mixture
from ssl_vit.data.overlap import overlaps
from ssl_vit.data.places import check_outside
from ssl_vit.data.shards import ShardSet, check_same_classes, dropped_from, open_shards, open_training
from ssl_vit.evaluators import labels, runner, several
from ssl_vit.evaluators.features import FeatureConfig, check_features
from ssl_vit.evaluators.selection import candidates_of, configured
from ssl_vit.files import expanded, read_json, write_json
from ssl_vit.interfaces import Budget, RunError, UserError, errors_about, is_main_process, printable, world_size
from ssl_vit.models import factory
from ssl_vit.progress import Say, silent
from ssl_vit.recipe import Recipe, needs_labels, run_of, stages, training_places
from ssl_vit.records import ComparisonRecord, TaskRecord
from ssl_vit.report.read import PLAN
from ssl_vit.training import Precision, distributed

# The source that packing writes into info.json: the name, then the options that chose images.
_PACKED = re.compile(
    r"(?P<name>.*?)(, split (?P<split>[^,]+))?(, \d+ images( per class)?)?"
    r"(, (?P<part>train|test|fold_\d+)( part)? of (?P<options>.+))?(, seed (?P<seed>\d+))?"
)
_PRECISION = "precision.json"  # what `auto` of the arms' recipes was replaced by


@dataclass(frozen=True)
class Checked:
    """A comparison that can run. shards: by the names of `Plan.part`. missing: tasks to run."""

    plan: Plan
    shards: dict[str, ShardSet]
    missing: list[TaskRecord]


def check(
    study: Study, say: Say = silent, *, pack: bool = True, trial: bool = True, keep_precision: bool = False
) -> Checked:
    """Plan a study.

    say: prints warnings.
    pack: pack datasets that are given by a source; without it, they must be packed.
    trial: this machine runs the tasks: check that it has the precisions, and measure the fastest one for `auto` if none
        is stored yet; without it, use fp32.
    keep_precision: store the precision for the other processes of this comparison; nothing else is written.

    Raises UserError for anything that would make a task impossible.
    """
    check_directory(study)
    study = replace(study, sets=prepare(study.sets, study.folder, say, write=pack))
    remote, sets = study.remote, study.sets
    study = _with_precision(_with_labels(study, say), say, trial=trial, keep=keep_precision)
    plan, opened = Plan(study), dict[str, ShardSet]()
    for fold in plan.folds:
        for name in sets:
            chosen = plan.split(name, fold)
            assert chosen.train is not None and chosen.test is not None
            train, test = open_shards(chosen.train, remote), open_shards(chosen.test, remote)
            check_same_classes(train.classes, test.classes, f"{train.spec} and {test.spec}")
            places = [chosen.train] if isinstance(chosen.train, str) else chosen.train
            _check_apart(places, train, test, ", and settings are selected on training images")
            for note in labels.set_notes(train, test):
                say(f"note: {note}")
            _note_one_source(train, test, say, "the evaluators train on test images")
            opened |= {plan.part(name, "train", fold): train, plan.part(name, "test", fold): test}
        for arm, settings in study.recipes.items():
            data, probe = plan.pretraining_data(arm, fold), settings.probe
            with errors_about(f"arms.{arm}"):
                shards = opened[plan.part(arm, "pretrain", fold)] = open_training(data)
                dropped_from([shards], data)
                with_data = settings.model_copy(update={"data": data})
                against = [opened[plan.part(name, "test", fold)] for name in sets]
                for test in against:
                    _check_apart(training_places(with_data), shards, test)
                    runs.check_holdout(with_data, None, test.spec)
                    _note_one_source(shards, test, say, f"arms.{arm} is pretrained on test images")
                stage.check(with_data, shards, here=trial)
                if probe:
                    labels.labels_of(open_shards(probe.data, remote) if probe.data else shards)
    tests = [opened[plan.part(name, "test", fold)] for name in sets for fold in plan.folds]
    for arm, settings in plan.recipes.items():
        if arm not in study.recipes:  # weights of a run
            with errors_about(f"arms.{arm}"):
                weights = expanded(study.comparison.arms[arm].weights or "")
                for test in tests:
                    _check_apart(training_places(settings), None, test)
                    runs.check_holdout(settings, run_of(weights), test.spec)
                _check_run(settings, weights)
    plan = equalize(replace(plan, shards={key: part.fingerprint for key, part in opened.items()}), opened)
    missing = [task for task in plan.tasks if not is_done(plan, task)]
    for task in (task for task in missing if task.kind == "pretrain"):
        settings = plan.pretraining(task)
        runs.check(settings.run_directory, settings, plan.shards[plan.part(task.arm, "pretrain", task.fold)])
    for name, fold in dict.fromkeys((task.data, task.fold) for task in missing if task.evaluator):
        _check_dataset(plan, name, *(opened[plan.part(name, part, fold)] for part in ("train", "test")), say=say)
    # By dataset, evaluator and arm: seeds and budgets do not matter.
    for task in {(task.data, task.evaluator, task.arm): task for task in missing if task.evaluator}.values():
        with errors_about(f"evaluators.{task.evaluator}, {task.arm}"):
            _check_evaluator(plan, opened, task, trial)
    return Checked(plan, opened, missing)


def _check_apart(places: Sequence[str], shards: ShardSet | None, test: ShardSet, why: str = "") -> None:
    """Raises UserError for training data with images of a test set.

    places: of a training and of the runs that it starts from. shards: of the training itself, where they are open.
    why: what else the message says.
    """
    if overlaps(places, test, shards):
        raise UserError(
            f"{', '.join(places)} includes images of the test set {test.spec}{why}; name sets without common images, "
            "such as PLACE#train and PLACE#test"
        )


def _check_run(settings: Recipe, weights: Path) -> None:
    """Raises UserError for a run with early stopping, which uses labels, and for one that may still be training: tasks
    would load different encoders."""
    if any(one.probe and one.probe.patience for one in stages(settings)):
        raise UserError(f"{weights}: its training may have been stopped early using labels (probe.patience)")
    if (weights / "recipe.yaml").is_file() and not (weights / runs.SUMMARY).is_file():
        saved = factory.find_weights(weights)
        raise UserError(f"{weights} has not finished training; finish it, or give one of its checkpoints: {saved}")


def _note_one_source(train: ShardSet, test: ShardSet, say: Say, then: str) -> None:
    """Print a note where both were packed from a source of one name, but not as two parts of one packing."""
    for source in train.sources:
        ours, theirs = _PACKED.fullmatch(source), _PACKED.fullmatch(test.source or "")
        if ours and theirs and ours["name"] and ours["name"] == theirs["name"]:
            splits, parts = {ours["split"], theirs["split"]} - {None}, (ours["part"], theirs["part"])
            alike = all(ours[key] == theirs[key] for key in ("options", "seed"))
            one_packing = alike and None not in parts and parts[0] != parts[1]
            if len(splits) < 2 and not one_packing:
                what = f"{train.spec} and the test set {test.spec} were packed from sources of one name ({test.source})"
                say(f"note: {what}; if they share images, {then}")
                return


def _with_labels(study: Study, say: Say) -> Study:
    """If `data.pretrain` has no labels, arms that need labels train on `data.train`, and the others on both. Images of
    a single class count as not labeled."""
    data, recipes = study.comparison.data, dict(study.recipes)
    if data.pretrain is None or data.train is None:
        return study
    shards = open_shards(data.pretrain, study.remote)
    if shards.labeled and len(shards.classes or ()) != 1:
        if shards.classes and shards.classes != open_shards(data.train, study.remote).classes:
            own = f"{len(shards.classes)} classes of its own, such as {printable(shards.classes[0])}"
            note = f"{data.pretrain} has {own}: arms that need labels train on these, and no arm on {data.train}"
            say(f"note: {note}")
            notes = (*study.comparison.notes, f"{note}.")
            return replace(study, comparison=study.comparison.model_copy(update={"notes": notes}))
        return study
    both = mixture([data.pretrain, data.train])
    for arm, settings in study.recipes.items():
        if settings.data.train == data.pretrain:  # no override of the arm says otherwise
            train = data.train if needs_labels(settings) else both
            recipes[arm] = settings.model_copy(update={"data": settings.data.model_copy(update={"train": train})})
    return replace(study, recipes=recipes)


def _with_precision(study: Study, say: Say, *, trial: bool, keep: bool) -> Study:
    """Replace the precision `auto` of all arms by one precision: the stored one, else the fastest for the first such
    arm. trial, keep: see `check`."""
    auto = {arm: settings for arm, settings in study.recipes.items() if settings.training.precision == "auto"}
    if not auto:
        return study
    file = study.comparison.run_directory / _PRECISION
    try:
        if keep and is_main_process():
            file.parent.mkdir(parents=True, exist_ok=True)
        if trial and world_size() > 1:  # launched processes measure together, while the main one holds the lock
            distributed.make_accelerator()
        with FileLock(file.with_name(f".{_PRECISION}.lock")) if keep and is_main_process() else nullcontext():
            begun = distributed.from_main(read_json(file).get("precision") if file.is_file() else None)
            chosen: Precision = begun or "fp32"
            if trial and not begun:
                chosen = precision.choose(next(iter(auto.values())), say)
            if keep and not begun and is_main_process():
                write_json(file, {"precision": chosen})
    except OSError as error:
        raise RunError(f"run={file.parent}: cannot write there: {error}") from None
    fixed = {arm: precision.with_precision(settings, chosen) for arm, settings in auto.items()}
    return replace(study, recipes=study.recipes | fixed)


def check_precision(study: Study, plan: Plan) -> None:
    """Raises UserError where the tasks are not known yet: arms of different precisions have different references, and
    the first task replaces `auto`."""
    auto = [arm for arm, settings in study.recipes.items() if settings.training.precision == "auto"]
    if auto and len(auto) < len(plan.recipes) and not (plan.run / _PRECISION).is_file():
        raise UserError(
            f"training.precision=auto of {', '.join(auto)} is measured by the first task, and arms of different "
            "precisions have different references: set training.precision of these arms before --list"
        )


def _check_evaluator(plan: Plan, opened: dict[str, ShardSet], task: TaskRecord, here: bool) -> None:
    """Raises UserError where an evaluator cannot work with the encoder of a task, at next to no cost. here: as in
    `stage.check`."""
    row = plan.rows[task.arm]
    evaluator, own_recipe = plan.evaluator(task.data, task.evaluator, row.name), plan.recipes.get(row.like)
    if row.kind == "pixels":
        return
    train, test = (opened[plan.part(task.data, part, task.fold)] for part in ("train", "test"))
    known, (budgets, seeds) = labels.labels_of(train), plan.budgets_and_seeds(task)
    given = plan.study.comparison.arms[row.like].weights or ""
    encoder = factory.load(given) if own_recipe is None else plan.outline(row.like)
    drawn = np.unique(
        np.concatenate([labels.choose_labeled(known, budget, seed) for budget in budgets for seed in seeds])
    )
    for settings in candidates_of(evaluator):
        candidate = configured(evaluator, settings)
        if isinstance(candidate.config, FeatureConfig):
            check_features(encoder, candidate.config)
        candidate.check(encoder, len(drawn) + test.samples)
    if own_recipe is None:  # weights without a recipe
        return
    if evaluator.needs_head and row.name in plan.study.recipes:
        ours = opened[plan.part(row.name, "pretrain", task.fold)]
        check_same_classes(ours.classes, test.classes, f"{ours.spec} and {test.spec}")
    classes = int(known.max()) + 1
    for budget in budgets:
        images = labels.choose_labeled(known, budget, next(iter(seeds)))
        trainings = runner.training_recipes(evaluator, labeled(own_recipe, train), len(images), sweep=True)
        # Candidates that differ in the learning rate alone are checked once.
        different = {training.model_dump_json(exclude={"optim": {"lr"}}): training for training in trainings}
        for training in different.values():
            head = getattr(training.objective, "classes", None)
            if head and head < classes:
                raise UserError(f"head.classes={head}: the labels have {classes} classes; remove it")
            stage.check(training, train, classes=classes, subset=images, here=here)


def labeled(recipe: Recipe, train: ShardSet) -> Recipe:
    """An encoder's recipe with labeled shards as its data: the trainings of evaluators take their settings from it."""
    changes = {"train": train.spec, "samples": None, "workers": 0, "lanes": 1}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=changes), "init_from": None, "probe": None})


def check_directory(study: Study) -> None:
    """Raises UserError where the comparison's directory holds something else, or lies inside the images."""
    run, name = study.comparison.run_directory, study.comparison.name
    trains = [place for settings in study.recipes.values() for place in settings.data.places]
    sets = [place for one in study.sets.values() for place in (*several(one.train), one.test) if place]
    check_outside(run, [*trains, *sets])
    if file := next((path for path in (run, *run.parents) if path.is_file()), None):
        raise UserError(f"run={run}: {file} is a file; name a directory")
    held = "a training run" if (run / "recipe.yaml").is_file() else ""
    if (run / PLAN).is_file():
        try:
            other = ComparisonRecord.model_validate(read_json(run / PLAN)).name
            held = f"the comparison {other}" if other != name else ""
        except ValidationError:
            held = "a comparison of another version of ssl-vit, which this version cannot continue"
    if held:
        raise UserError(f"{run} holds {held}; give this comparison another directory with run=PATH")


def _check_dataset(plan: Plan, name: str, train: ShardSet, test: ShardSet, *, say: Say) -> None:
    """Raises UserError where a dataset cannot be evaluated on; prints which classes have few images."""
    known, _ = labels.labels_of(train), labels.labels_of(test)
    for settings in plan.recipes.values():  # both raise where no sample may be skipped
        labels.invalid_labels(train, settings.data)
        dropped_from((train, test), settings.data)
    labels.check_classes(train)
    budgets = set[Budget]()
    for (data, evaluator, arm), built in plan.evaluators.items():
        if data == name:
            budgets.update(runner.budgets(built, plan.study.comparison.labels_per_class))
            with errors_about(f"evaluators.{evaluator}"):
                runner.check_held_out(built, known)
            swept = runner.has_sweep(built) and not arm
            if swept and (scored := runner.held_out_classes(built, known)) < (count := labels.labeled_classes(train)):
                say(
                    f"note: evaluators.{evaluator}: settings are selected on images of {scored} of {count} classes; a "
                    "higher held_out would include more"
                )
    for budget in sorted(budget for budget in budgets if isinstance(budget, int)):
        for note in labels.short_note(known, budget, known, train.classes):
            say(printable(f"note: {train.spec}: {note}"))
