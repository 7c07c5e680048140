"""Runs the tasks of a comparison that are missing, after checking that all of them can run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import yaml
from pydantic import ValidationError

from ssl_vit import precision, runs, stage
from ssl_vit.api import saw_test_images
from ssl_vit.comparison import executor, looks
from ssl_vit.comparison.compute import equalize
from ssl_vit.comparison.config import ComparisonConfig, Study
from ssl_vit.comparison.design import needs_labels
from ssl_vit.comparison.executor import Say
from ssl_vit.comparison.plan import Plan
from ssl_vit.comparison.record import record_of
from ssl_vit.comparison.sets import DataSet
from ssl_vit.comparison.suites import prepare
from ssl_vit.comparison.weights import import_arms
from ssl_vit.comparison.work import do, is_done
from ssl_vit.data import DataConfig, RemoteConfig, mixture
from ssl_vit.data.shards import ShardSet, check_same_classes, open_shards, open_training
from ssl_vit.evaluators import runner
from ssl_vit.evaluators.features import FeatureConfig, check_features, silent
from ssl_vit.evaluators.labels import check_classes, choose_labeled, labels_of, set_notes
from ssl_vit.files import read_json, write_json, write_text
from ssl_vit.interfaces import RunError, UserError, printable
from ssl_vit.models import factory
from ssl_vit.recipe import Recipe
from ssl_vit.records import ComparisonRecord, TaskRecord
from ssl_vit.report.export import as_json
from ssl_vit.report.read import PLAN, Comparison, read_comparison
from ssl_vit.training import Precision, distributed

RESULTS = "results.json"  # derived: for other programs; nothing here reads it


@dataclass(frozen=True)
class Checked:
    """A comparison that can run. shards: by the names of `Plan.part`. missing: tasks to run."""

    plan: Plan
    shards: dict[str, ShardSet]
    missing: list[TaskRecord]


def compare(
    study: Study,
    *,
    only: str | None = None,
    until_decided: bool = False,
    max_seeds: int | None = None,
    command: str = "",
    say: Say = print,
) -> Comparison:
    """Run the missing tasks of a comparison and write `results.json`; returns its record and table.

    only: id of one task: run it and those it needs, and write no `results.json`.
    The other arguments and errors are those of `functions.compare`.
    """
    c, main = study.comparison, runs.is_main_process()
    if (c.jobs > 1 or c.scheduler) and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            "several processes were launched, which run every task together; set jobs=1 and remove scheduler"
        )
    say = say if main else silent
    _check_directory(study)
    study = import_arms(study, say)
    following: Study | None = looks.resume(study, until_decided=until_decided, max_seeds=max_seeds)
    while following:
        study = following
        checked = _run_tasks(study, c, only, command, say)
        comparison = read_comparison(checked.plan.run)
        if only is not None:
            return comparison
        if study.max_seeds:
            study = looks.look(study, comparison)
            if main:
                looked = replace(checked.plan, study=replace(checked.plan.study, looks=study.looks))
                _write_plan(replace(checked, plan=looked, missing=[]), c, command)
            runs.wait_for_everyone()
            comparison = read_comparison(checked.plan.run)
            say(f"look {len(study.looks)}: {', '.join(study.looks[-1].outcomes.values()) or 'no headline'}")
        following = looks.extend(study, comparison) if until_decided else None
    if main:
        write_json(checked.plan.run / RESULTS, as_json(comparison))
    return comparison


def _run_tasks(study: Study, given: ComparisonConfig, only: str | None, command: str, say: Say) -> Checked:
    """Run the missing tasks; with `only`, that task and those it needs.

    given: the configuration before `import_arms`.
    """
    c = study.comparison
    checked = check(study, prepare(study.sets, study.folder, say), say)
    plan = checked.plan
    wanted = {task.id for task in plan.tasks if only in (None, task.id)}
    if not wanted:
        raise UserError(f"{only}: no such task; `ssl-vit compare RECIPE --list` prints the ids")
    if runs.is_main_process():
        _write_plan(checked, given, command)
    distributed.make_accelerator()  # the launched processes must agree from here on
    missing = distributed.gather(checked.missing)[0]
    say(f"{c.name}: {len(plan.tasks)} tasks, {len(plan.tasks) - len(missing)} of them done before")
    for task in reversed(plan.tasks):  # each comes after the ones it needs
        wanted |= set(task.after) if task.id in wanted else set()
    tasks = [task for task in missing if task.id in wanted]
    jobs, scheduler = (c.jobs, c.scheduler) if only is None else (1, None)
    executor.run(tasks, partial(do, plan), jobs=jobs, scheduler=scheduler, say=say)
    return checked


def check(study: Study, sets: dict[str, DataSet], say: Say = silent) -> Checked:
    """Plan a study on these datasets; writes nothing.

    say: prints warnings.

    Raises UserError for anything that would make a task impossible.
    """
    _check_directory(study)
    remote = study.remote
    study = _with_precision(_with_labels(study, remote), say)
    plan, opened = Plan(study, study.comparison.run_directory, sets), dict[str, ShardSet]()
    for fold in plan.folds:
        for name in sets:
            chosen = plan.split(name, fold)
            assert chosen.train is not None and chosen.test is not None
            train, test = open_shards(chosen.train, remote), open_shards(chosen.test, remote)
            check_same_classes(train.classes, test.classes, f"{train.spec} and {test.spec}")
            for note in set_notes(train, test):
                say(f"note: {note}")
            opened |= {plan.part(name, "train", fold): train, plan.part(name, "test", fold): test}
        for arm, settings in study.recipes.items():
            data, probe = plan.pretraining_data(arm, fold), settings.probe
            try:
                shards = opened[plan.part(arm, "pretrain", fold)] = open_training(data)
                _check_no_test_images(data, [opened[plan.part(name, "test", fold)] for name in sets], shards)
                stage.check(settings.model_copy(update={"data": data}), shards)
                if probe:
                    labels_of(open_shards(probe.data, remote) if probe.data else shards)
            except UserError as error:
                raise UserError(f"arms.{arm}: {error}") from None
    tests = [opened[plan.part(name, "test", fold)] for name in sets for fold in plan.folds]
    for arm, settings in plan.recipes.items():
        if arm not in study.recipes:  # weights of a run
            try:
                _check_no_test_images(settings.data, tests)
            except UserError as error:
                raise UserError(f"arms.{arm}: {error}") from None
    plan = equalize(replace(plan, shards={key: part.fingerprint for key, part in opened.items()}), opened)
    missing = [task for task in plan.tasks if not is_done(plan, task)]
    for task in missing:
        if task.kind == "pretrain":
            settings = plan.pretraining(task)
            runs.check(settings.run_directory, settings, plan.shards[plan.part(task.arm, "pretrain", task.fold)])
    for name, fold in dict.fromkeys((task.data, task.fold) for task in missing if task.evaluator):
        _check_labels(plan, name, *(opened[plan.part(name, part, fold)] for part in ("train", "test")), say=say)
    # By dataset, evaluator and arm: seeds and budgets do not matter.
    for task in {(task.data, task.evaluator, task.arm): task for task in missing if task.evaluator}.values():
        try:
            _check_evaluator(plan, opened, task)
        except UserError as error:
            raise UserError(f"evaluators.{task.evaluator}, {task.arm}: {error}") from None
    return Checked(plan, opened, missing)


def _check_no_test_images(data: DataConfig, tests: Sequence[ShardSet], shards: ShardSet | None = None) -> None:
    """Refuse to pretrain on a test set, on the whole of images of which it is a part, or on one of its shards."""
    for test in tests:
        shared = {*shards.checksums} & {*test.checksums} - {""} if shards else ()
        if shared or saw_test_images(data.places, test.spec):
            raise UserError(
                f"data.train={', '.join(data.places)} includes images of the test set {test.spec}; name others, such "
                "as PLACE#train"
            )


def _with_labels(study: Study, remote: RemoteConfig) -> Study:
    """If `data.pretrain` has no labels, arms that need labels train on `data.train`, and the others on both."""
    data, recipes = study.comparison.data, dict(study.recipes)
    if data.pretrain is None or data.train is None or open_shards(data.pretrain, remote).labeled:
        return study
    both = mixture([data.pretrain, data.train])
    for arm, settings in study.recipes.items():
        if settings.data.train == data.pretrain:  # no override of the arm says otherwise
            train = data.train if needs_labels(settings) else both
            recipes[arm] = settings.model_copy(update={"data": settings.data.model_copy(update={"train": train})})
    return replace(study, recipes=recipes)


def _with_precision(study: Study, say: Say) -> Study:
    """Replace the precision `auto` of all arms by one precision: that of an earlier start of this comparison, else the
    fastest for the first of these arms."""
    auto = {arm: settings for arm, settings in study.recipes.items() if settings.training.precision == "auto"}
    if not auto:
        return study
    path, first = study.comparison.run_directory / PLAN, next(iter(auto))
    begun = read_json(path).get("precisions", {}).get(first) if path.is_file() else None
    chosen: Precision = begun or precision.choose(auto[first], say)
    fixed = {arm: precision.with_precision(settings, chosen) for arm, settings in auto.items()}
    return replace(study, recipes=study.recipes | fixed)


def _check_evaluator(plan: Plan, opened: dict[str, ShardSet], task: TaskRecord) -> None:
    """Raises UserError where an evaluator cannot work with the encoder of a task, at next to no cost."""
    row = plan.rows[task.arm]
    evaluator, own_recipe = plan.evaluator(task.data, task.evaluator, row.name), plan.recipes.get(row.like)
    if row.kind == "pixels":
        return
    if own_recipe is None:  # weights without a recipe
        if isinstance(evaluator.config, FeatureConfig):
            given = plan.study.comparison.arms[row.like].weights or ""
            check_features(factory.load(given), evaluator.config)
        return
    train, test = (opened[plan.part(task.data, part, task.fold)] for part in ("train", "test"))
    if evaluator.needs_head and row.name in plan.study.recipes:
        ours = opened[plan.part(row.name, "pretrain", task.fold)]
        check_same_classes(ours.classes, test.classes, f"{ours.spec} and {test.spec}")
    if isinstance(evaluator.config, FeatureConfig):
        check_features(own_recipe.encoder, evaluator.config)
    labels, (budgets, seeds) = labels_of(train), plan.budgets_and_seeds(task)
    images = choose_labeled(labels, next(iter(budgets)), next(iter(seeds)))
    for training in runner.training_recipes(evaluator, labeled(own_recipe, train), len(images), sweep=False):
        stage.check(training, train, classes=int(labels.max()) + 1, subset=images)


def labeled(recipe: Recipe, train: ShardSet) -> Recipe:
    """An encoder's recipe with labeled shards as its data: the trainings of evaluators take their settings from it."""
    changes = {"train": train.spec, "samples": None, "workers": 0, "lanes": 1}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=changes), "init_from": None, "probe": None})


def _check_directory(study: Study) -> None:
    """Raises UserError where the comparison's directory holds something else."""
    run, name = study.comparison.run_directory, study.comparison.name
    held = "a training run" if (run / "recipe.yaml").is_file() else ""
    if (run / PLAN).is_file():
        try:
            other = ComparisonRecord.model_validate(read_json(run / PLAN)).name
            held = f"the comparison {other}" if other != name else ""
        except ValidationError:
            held = "a comparison of another version of ssl-vit, which this version cannot continue"
    if held:
        raise UserError(f"{run} holds {held}; give this comparison another directory with run=PATH")


def _check_labels(plan: Plan, name: str, train: ShardSet, test: ShardSet, *, say: Say) -> None:
    """Raises UserError where a dataset's labels cannot be evaluated on; prints which classes have few images."""
    labels, _ = labels_of(train), labels_of(test)
    classes, counts = np.unique(labels[labels >= 0], return_counts=True)
    check_classes(train, labels)
    few: dict[int, np.ndarray] = {}
    for (data, evaluator, _), built in plan.evaluators.items():
        if data == name:
            asked = runner.budgets(built, plan.study.comparison.labels_per_class)
            few |= {budget: classes[counts < budget] for budget in asked if isinstance(budget, int)}
            try:
                runner.check_held_out(built, labels)
            except UserError as error:
                raise UserError(f"evaluators.{evaluator}: {error}") from None
    for budget in sorted(budget for budget, short in few.items() if len(short)):
        short, names = few[budget], train.classes or ()
        named = [names[label] if label < len(names) else str(label) for label in short[:5]]
        more = f" and {len(short) - 5} more" if len(short) > 5 else ""
        say(
            f"note: {train.spec}: {len(short)} of {len(classes)} classes have fewer than {budget} images, all of which "
            f"are used: {', '.join(map(printable, named))}{more}"
        )


def _write_plan(checked: Checked, given: ComparisonConfig, command: str) -> None:
    """Write `comparison.yaml`, the recipe, and `plan.json`, for the report. given: see `_run_tasks`."""
    plan = checked.plan
    c = plan.study.comparison.model_copy(update={"arms": given.arms, "notes": given.notes})
    unset = {key: {"seeds", "labels_per_class"} - config.model_fields_set for key, config in c.evaluators.items()}
    recipe_content = c.model_dump(mode="json", exclude={"evaluators": unset})
    try:
        plan.run.mkdir(parents=True, exist_ok=True)
        write_text(plan.run / "comparison.yaml", yaml.safe_dump(recipe_content, sort_keys=False, allow_unicode=True))
        record = record_of(plan, checked.shards, command, finished=not checked.missing)
        write_json(plan.run / PLAN, record.model_dump(mode="json"))
    except OSError as error:
        raise RunError(f"run={plan.run}: cannot write there: {error}") from None
