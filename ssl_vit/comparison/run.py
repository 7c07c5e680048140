"""Runs the tasks of a comparison that are missing, after checking that all of them can run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import yaml
from filelock import FileLock

from ssl_vit import records
from ssl_vit.comparison import executor, looks
from ssl_vit.comparison.checks import Checked, check
from ssl_vit.comparison.config import Study
from ssl_vit.comparison.record import record_of
from ssl_vit.comparison.weights import import_arms
from ssl_vit.comparison.work import do, is_done, path_of
from ssl_vit.files import write_json, write_text
from ssl_vit.interfaces import RunError, UserError, is_main_process, world_size
from ssl_vit.progress import Say, silent
from ssl_vit.records import ComparisonRecord
from ssl_vit.report.read import PLAN, Comparison, read_comparison
from ssl_vit.report.verdict import NO_HEADLINE, has_headline
from ssl_vit.results import Table
from ssl_vit.training import distributed


def compare(
    study: Study,
    *,
    only: str | None = None,
    until_decided: bool = False,
    max_seeds: int | None = None,
    command: str = "",
    say: Say = print,
) -> Comparison:
    """Run the missing tasks of a comparison; returns its record and table.

    only: id of one task: run it and those it needs.
    The other arguments and errors are those of `api.compare`.
    """
    c, main = study.comparison, is_main_process()
    if (c.jobs > 1 or c.scheduler) and world_size() > 1:
        raise UserError(
            "several processes were launched, which run every task together; set jobs=1 and remove scheduler"
        )
    say = say if main else silent
    following: Study | None = looks.resume(import_arms(study, say), until_decided=until_decided, max_seeds=max_seeds)
    while following:
        study = following
        checked = _run_tasks(study, only, command, say)
        comparison = read_comparison(checked.plan.run)
        if only is not None:
            return comparison
        if study.max_seeds:
            study = looks.look(study, comparison)
            with distributed.shared_errors():
                if main:
                    looked = replace(checked.plan, study=replace(checked.plan.study, looks=study.looks))
                    _write_plan(replace(checked, plan=looked), command)
            comparison = read_comparison(checked.plan.run)
            say(f"look {len(study.looks)}: {', '.join(study.looks[-1].outcomes.values())}")
        following = looks.extend(study, comparison) if until_decided else None
    return comparison


def _run_tasks(study: Study, only: str | None, command: str, say: Say) -> Checked:
    """Run the missing tasks; with `only`, that task and those it needs."""
    c = study.comparison
    checked = check(study, say, keep_precision=True)
    plan = checked.plan
    wanted = {task.id for task in plan.tasks if only in (None, task.id)}
    if not wanted:
        raise UserError(f"{only}: no such task; `ssl-vit compare RECIPE --list` prints the ids")
    if study.max_seeds or c.baseline:
        proposed = Comparison(record_of(plan, checked.shards, command), Table([]), ())
        if not has_headline(proposed):
            what = f"baseline={c.baseline}" if c.baseline else "--until-decided"
            raise UserError(f"{what} requires a headline, but {NO_HEADLINE}")
    distributed.make_accelerator()  # the launched processes must agree from here on
    with distributed.shared_errors():
        if is_main_process():
            _write_plan(checked, command)
    missing = distributed.from_main(checked.missing)
    say(f"{c.name}: {len(plan.tasks)} tasks, {len(plan.tasks) - len(missing)} of them done before")
    for task in reversed(plan.tasks):  # each comes after the ones it needs
        wanted |= set(task.after) if task.id in wanted else set()
    tasks = [task for task in missing if task.id in wanted]
    jobs, scheduler = (c.jobs, c.scheduler) if only is None else (1, None)
    try:
        executor.run(tasks, partial(do, plan), jobs=jobs, scheduler=scheduler, say=say)
    except (UserError, RunError) as error:
        error.args = (f"{error}\n`ssl-vit report {plan.run}` reports what is done",)
        raise
    lost = distributed.from_main([path_of(plan, task) for task in tasks if not is_done(plan, task)])
    if lost:
        what = "another command replaced it" if lost[0].is_file() else "not there, although its task has finished"
        raise RunError(f"{lost[0]}: {what}; workers must share run={plan.run}, and commands with other keys must not")
    return checked


def _write_plan(checked: Checked, command: str) -> None:
    """Write `comparison.yaml`, the recipe, and `plan.json`, for the report."""
    plan = checked.plan
    try:
        plan.run.mkdir(parents=True, exist_ok=True)
        with FileLock(plan.run / f".{PLAN}.lock"):
            file = plan.run / PLAN
            held = records.read(file, ComparisonRecord).looks if file.is_file() else ()
            if len(held) > len(plan.study.looks):
                raise UserError(f"{plan.run}: another process added seeds (--until-decided); run the command again")
            record = record_of(plan, checked.shards, command)
            content = yaml.safe_dump(plan.study.given, sort_keys=False, allow_unicode=True)
            write_text(plan.run / "comparison.yaml", content)
            write_json(file, record.model_dump(mode="json"))
    except OSError as error:
        raise RunError(f"run={plan.run}: cannot write there: {error}") from None
