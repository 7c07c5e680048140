"""Runs the tasks of a comparison that are missing, after checking that all of them can run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import yaml

from ssl_vit import precision, recipe, runs, stage
from ssl_vit.comparison import executor
from ssl_vit.comparison.config import ComparisonConfig, Study, load_comparison
from ssl_vit.comparison.plan import Plan
from ssl_vit.comparison.sets import DataSet
from ssl_vit.comparison.suites import prepare
from ssl_vit.comparison.unlabeled import with_labels
from ssl_vit.comparison.weights import import_arms
from ssl_vit.comparison.work import do, is_done
from ssl_vit.data import RemoteConfig
from ssl_vit.data.shards import ShardSet, check_same_classes, open_shards, open_training
from ssl_vit.environment import environment
from ssl_vit.evaluators import runner
from ssl_vit.evaluators.features import FeatureConfig, check_features, silent
from ssl_vit.evaluators.labels import choose_labeled, held_out_split, labels_of, set_notes
from ssl_vit.files import read_json, write_json, write_text
from ssl_vit.interfaces import UserError
from ssl_vit.models import factory
from ssl_vit.recipe import Recipe
from ssl_vit.records import ArmRecord, ComparisonRecord, DataRecord, EvaluatorRecord, RunSummary, TaskRecord
from ssl_vit.report.export import as_json
from ssl_vit.report.read import PLAN, Comparison, read_comparison
from ssl_vit.training import Precision, distributed

Say = Callable[[str], None]
RESULTS = "results.json"  # derived: for other programs; nothing here reads it


@dataclass(frozen=True)
class Checked:
    """A comparison that can run. shards: as `Plan.part` calls them. missing: tasks to run."""

    plan: Plan
    shards: dict[str, ShardSet]
    missing: list[TaskRecord]


def compare(
    comparison: Study | str | Path,
    overrides: Sequence[str] = (),
    *,
    only: str | None = None,
    command: str = "",
    say: Say = print,
) -> Comparison:
    """Run what is missing of a comparison and write `results.json`; returns its record and table.

    comparison: a recipe's file or name, or what `load_comparison` returned.
    overrides: `key=value` strings for the recipe.
    only: id of one task: run it and those it needs, and write no `results.json`.
    command: shown in the report.
    say: prints progress.

    Raises UserError for input that cannot work, before the first task wherever it can be seen.
    """
    study = comparison if isinstance(comparison, Study) else load_comparison(comparison, overrides)
    c, main = study.comparison, runs.is_main_process()
    if (c.jobs > 1 or c.scheduler) and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            "several processes were launched, which run every task together; set jobs=1 and remove scheduler"
        )
    say = say if main else silent
    _check_directory(study)
    study = import_arms(study, say)
    checked = check(study, prepare(study.sets, study.folder, say), say)
    plan = checked.plan
    wanted = {task.id for task in plan.tasks if only in (None, task.id)}
    if not wanted:
        raise UserError(f"{only}: no such task; `ssl-vit compare RECIPE --list` prints the ids")
    if main:
        _write_plan(checked, c, command)
    distributed.make_accelerator()  # the launched processes must agree from here on
    missing = distributed.gather(checked.missing)[0]
    say(f"{c.name}: {len(plan.tasks)} tasks, {len(plan.tasks) - len(missing)} of them done before")
    for task in reversed(plan.tasks):  # each comes after the ones it needs
        wanted |= set(task.after) if task.id in wanted else set()
    tasks = [task for task in missing if task.id in wanted]
    jobs, scheduler = (c.jobs, c.scheduler) if only is None else (1, None)
    executor.run(tasks, partial(do, plan), jobs=jobs, scheduler=scheduler, say=say)
    found = read_comparison(plan.run)
    if main and only is None:
        write_json(plan.run / RESULTS, as_json(found))
    return found


def check(study: Study, sets: dict[str, DataSet], say: Say = silent) -> Checked:
    """Plan a study on these data sets; writes nothing.

    say: prints what is no error, but worth knowing.

    Raises UserError for whatever would make a task impossible.
    """
    _check_directory(study)
    remotes = [study.comparison.data.remote, *(settings.data.remote for settings in study.recipes.values())]
    remote = next(filter(None, remotes), RemoteConfig())
    study = _with_precision(with_labels(study, remote), say)
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
                found = opened[plan.part(arm, "pretrain", fold)] = open_training(data)
                stage.check(settings.model_copy(update={"data": data}), found)
                if probe:
                    labels_of(open_shards(probe.data, remote) if probe.data else found)
            except UserError as error:
                raise UserError(f"arms.{arm}: {error}") from None
    plan = replace(plan, shards={key: shards.fingerprint for key, shards in opened.items()})
    missing = [task for task in plan.tasks if not is_done(plan, task)]
    for task in missing:
        if task.kind == "pretrain":
            own = plan.pretraining(task)
            runs.check(own.run_directory, own, plan.shards[plan.part(task.arm, "pretrain", task.fold)])
    for name, fold in dict.fromkeys((task.data, task.fold) for task in missing if task.evaluator):
        _check_labels(plan, name, *(opened[plan.part(name, part, fold)] for part in ("train", "test")), say=say)
    # By data set, evaluator and arm: seeds and budgets do not matter.
    for task in {(task.data, task.evaluator, task.arm): task for task in missing if task.evaluator}.values():
        try:
            _check_evaluator(plan, opened, task)
        except UserError as error:
            raise UserError(f"evaluators.{task.evaluator}, {task.arm}: {error}") from None
    return Checked(plan, opened, missing)


def _with_precision(study: Study, say: Say) -> Study:
    """The study with one precision in place of `auto` for all arms: the one it began with, else the fastest of the
    first of these arms."""
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
    evaluator, own = plan.evaluator(task.data, task.evaluator, row.name), plan.recipes.get(row.like)
    if own is None or row.kind == "pixels":
        return
    train, test = (opened[plan.part(task.data, part, task.fold)] for part in ("train", "test"))
    if evaluator.needs_head and row.name in plan.study.recipes:
        ours = opened[plan.part(row.name, "pretrain", task.fold)]
        check_same_classes(ours.classes, test.classes, f"{ours.spec} and {test.spec}")
    if isinstance(evaluator.config, FeatureConfig):
        check_features(own.encoder, evaluator.config)
    labels, (budgets, seeds) = labels_of(train), plan.budgets_and_seeds(task)
    images = choose_labeled(labels, next(iter(budgets)), next(iter(seeds)))
    for training in runner.training_recipes(evaluator, labeled(own, train), len(images), sweep=False):
        stage.check(training, train, classes=int(labels.max()) + 1, subset=images)


def labeled(recipe: Recipe, train: ShardSet) -> Recipe:
    """The recipe of an encoder as what an evaluator's own trainings on labeled shards take their settings from."""
    changes = {"train": train.spec, "samples": None, "workers": 0, "lanes": 1}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=changes), "init_from": None, "probe": None})


def _check_directory(study: Study) -> None:
    """Raises UserError where the comparison's directory holds something else."""
    run, name = study.comparison.run_directory, study.comparison.name
    held = "a training run" if (run / "recipe.yaml").is_file() else ""
    if (run / "pieces").is_dir():
        held = "a comparison of an earlier version of ssl-vit, which this version cannot continue"
    elif (run / PLAN).is_file() and (other := read_json(run / PLAN).get("name")) != name:
        held = f"the comparison {other}"
    if held:
        raise UserError(f"{run} holds {held}; give this comparison another directory with run=PATH")


def _check_labels(plan: Plan, name: str, train: ShardSet, test: ShardSet, *, say: Say) -> None:
    """Raises UserError where a data set's labels cannot be evaluated on; prints which classes have few images."""
    labels, _ = labels_of(train), labels_of(test)
    classes, counts = np.unique(labels[labels >= 0], return_counts=True)
    if len(classes) < 2:
        raise UserError(f"{train.spec}: all labeled images belong to one class; evaluation needs at least two")
    few: dict[int, int] = {}
    for (data, evaluator, _), built in plan.evaluators.items():
        if data == name:
            asked = runner.budgets(built, plan.study.comparison.labels_per_class)
            few |= {budget: int((counts < budget).sum()) for budget in asked if isinstance(budget, int)}
            if runner.has_sweep(built) and not len(held_out_split(labels, built.config.held_out, seed=0)[1]):
                share = f"held_out={built.config.held_out:g} of {counts.max()} images per class is none"
                raise UserError(f"evaluators.{evaluator}: {share}; raise it, or set sweep={{}}")
    for budget in sorted(budget for budget, number in few.items() if number):
        say(
            f"note: {train.spec}: {few[budget]} of {len(classes)} classes have fewer than {budget} images; all are used"
        )


def _write_plan(checked: Checked, c: ComparisonConfig, command: str) -> None:
    """Write `comparison.yaml`, the recipe, and `plan.json`, for the report."""
    plan = checked.plan
    unset = {key: {"seeds", "labels_per_class"} - one.model_fields_set for key, one in c.evaluators.items()}
    recipe_content = c.model_dump(mode="json", exclude={"evaluators": unset})
    try:
        plan.run.mkdir(parents=True, exist_ok=True)
        write_text(plan.run / "comparison.yaml", yaml.safe_dump(recipe_content, sort_keys=False, allow_unicode=True))
        write_json(plan.run / PLAN, _record(checked, command).model_dump(mode="json"))
    except OSError as error:
        raise UserError(f"run={plan.run}: cannot write there: {error}") from None


def _record(checked: Checked, command: str) -> ComparisonRecord:
    """What the report must know of a comparison besides the results of its tasks."""
    plan, c, shards = checked.plan, checked.plan.study.comparison, checked.shards
    parts = [plan.part(name, part, fold) for name in plan.sets for fold in plan.folds for part in ("train", "test")]
    data = {key: shards[key] for key in parts}
    for arm in plan.study.recipes:
        found = shards[plan.part(arm, "pretrain", 0)]
        if found.fingerprint not in {other.fingerprint for other in data.values()}:
            data[f"pretraining of {arm}"] = found
    evaluators: dict[str, EvaluatorRecord] = {}
    for (name, key, arm), built in plan.evaluators.items():
        if not arm:
            record = evaluators.setdefault(key, EvaluatorRecord(title=built.title, trains_encoder=built.trains_encoder))
            record.settings[name] = built.config.model_dump(mode="json")
    # The environment is that of whoever measured: the checkout may change before the same command is given again.
    kept = not checked.missing and (plan.run / PLAN).is_file()
    return ComparisonRecord(
        name=c.name,
        title=(c.title or c.name) + (" (quick run)" if c.quick else ""),
        quick=c.quick,
        command=command,
        labels_per_class=c.labels_per_class,
        seeds=c.seeds,
        frozen_seeds=c.frozen_seeds,
        pretrainings=c.pretrainings,
        folds=len(plan.folds),
        margin=c.margin,
        notes=c.notes,
        jobs=c.jobs,
        precisions={arm: settings.training.precision for arm, settings in plan.study.recipes.items()},
        study=c.study,
        metrics={name: chosen.metric for name, chosen in plan.sets.items()},
        data={
            key: DataRecord(path=one.spec, samples=one.samples, classes=one.classes, source=one.source)
            for key, one in data.items()
        },
        arms=arm_records(plan),
        references=plan.references,
        evaluators=evaluators,
        tasks=plan.tasks,
        environment=read_json(plan.run / PLAN)["environment"] if kept else environment(),
    )


def arm_records(plan: Plan) -> tuple[ArmRecord, ...]:
    """What the report must know of the arms."""
    return tuple(_arm(plan, arm) for arm in plan.study.comparison.arms)


def _arm(plan: Plan, arm: str) -> ArmRecord:
    given, settings = plan.study.comparison.arms[arm], plan.recipes.get(arm)
    weights = plan.weights(arm, plan.study.comparison.seeds[0], 0)
    path = Path(given.weights or "") / runs.SUMMARY
    summary = recipe.validate(RunSummary, read_json(path), f"{path}: ") if given.weights and path.is_file() else None
    return ArmRecord(
        name=arm,
        label=given.label,
        kind=given.kind,
        run=os.path.relpath(weights, plan.run) if weights else None,
        objective=settings.objective.name if settings else None,
        architecture=plan.architecture(arm),
        encoder=plan.encoder(arm),
        uses_labels=plan.uses_labels(arm),
        evaluators=given.evaluators,
        series=given.series,
        # Weights of unknown making: given without a run, or what a training started from.
        starts_from=factory.origin(weights) or given.weights
        if weights and given.weights and not summary
        else settings.init_from
        if settings
        else None,
        summary=summary,
    )
