"""`ssl-vit demo` and `ssl-vit compare`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from ssl_vit.cli.keys import Overrides
from ssl_vit.interfaces import UserError, is_main_process, printable_lines


def demo(
    out: Annotated[Path, typer.Option(help="Directory for the demo's shards, runs and report.")] = Path("runs/demo"),
    overrides: Overrides = None,
) -> None:
    """Compare SSL, supervised and scratch on 1,797 real handwritten digits: pack, pretrain, evaluate, report. On CPU.

    Example: `ssl-vit demo`
    """
    from ssl_vit import recipe
    from ssl_vit.data.packing import pack
    from ssl_vit.data.packing.plan import Options
    from ssl_vit.data.packing.sources import open_source
    from ssl_vit.data.shards.info import RECORD
    from ssl_vit.files import expanded

    out = expanded(out)
    changed = overrides or []
    folds = [out / "data" / Path(fold).name for fold in recipe.read(recipe.find("demo_digits"))["data"]["folds"]]
    if not all((fold / "info.json").exists() for fold in folds):
        # In scikit-learn's order, so that others can check the few-shot rows on raw pixels.
        options = Options(shards=8, order="source", folds=len(folds))
        ours = any((fold / RECORD).exists() for fold in folds)  # of another version, or not finished
        for folder, info in pack(open_source("digits"), out / "data", options, overwrite=ours, progress=False).items():
            print(f"packed {info.samples} digits into {folder}")
    named = [] if out == Path("runs/demo") else ["--out", str(out)]
    places = [f"run={_quoted(str(out))}", f"data.folds={_quoted([*map(str, folds)])}"]
    _compare("demo_digits", [*places, *changed], shlex.join(["ssl-vit", "demo", *named, *changed]))


def compare(
    recipe: Annotated[
        str,
        typer.Argument(help="A comparison recipe: a file, a shipped name, or a comparison's directory to resume."),
    ],
    overrides: Overrides = None,
    show: Annotated[
        bool,
        typer.Option(
            "--list", help="Print the tasks (id, level, done or missing) instead of running them. Packs data first."
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A trial: a tenth of all steps and epochs, two seeds, one pretraining; the report says so."
        ),
    ] = False,
    only: Annotated[str | None, typer.Option(help="Run the task with this id and the tasks it depends on.")] = None,
    until_decided: Annotated[
        bool, typer.Option("--until-decided", help="Add seeds, or pretrainings, until the headline is decided.")
    ] = False,
    max_seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds at which --until-decided stops (default: 2.5 times the recipe's).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Time one step of each training; print size, memory and time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the dry run as JSON.")] = False,
) -> None:
    """Run a comparison: every arm with every seed and label budget. Run the same command again to resume.

    Example: `ssl-vit compare own_images_cpu data=my_images`

    On a cluster: `scheduler=tcp://HOST:8786` runs the tasks on the workers of a dask scheduler. As job arrays: run each
    id of level 0 with `--only ID`, then those of level 1, and so on, as recipes/launch/compare_slurm.sh does.
    """
    if as_json and not dry_run:
        raise UserError("--json requires --dry-run")
    if [show, dry_run, only is not None, until_decided].count(True) > 1:
        raise UserError("--list, --only, --dry-run and --until-decided are mutually exclusive")
    if max_seeds is not None and not until_decided:
        raise UserError("--max-seeds requires --until-decided")
    changed = [*(overrides or []), *(["quick=true"] if quick else [])]
    options = ["--until-decided"] * until_decided + ([f"--max-seeds={max_seeds}"] if max_seeds else [])
    command = shlex.join(["ssl-vit", "compare", recipe, *changed, *options])
    if only is None and not show and not dry_run:
        _compare(recipe, changed, command, until_decided, max_seeds)
        return
    from ssl_vit.comparison.config import load_comparison

    study = load_comparison(recipe, changed)
    from ssl_vit import progress  # and torch, after the keys were checked
    from ssl_vit.comparison import looks, run
    from ssl_vit.comparison.checks import check, check_precision
    from ssl_vit.comparison.weights import import_arms

    if dry_run:
        from ssl_vit.cli import previewed
        from ssl_vit.comparison.dry_run import dry_run_comparison

        preview = dry_run_comparison(study, progress.say)
        if is_main_process():
            previewed.comparison(preview, as_json)
    elif only is not None:
        run.compare(study, only=only, command=command, say=_print)
    else:
        checked = check(looks.resume(import_arms(study, progress.say)), progress.say, trial=False)
        check_precision(study, checked.plan)
        if not is_main_process():
            return
        print(f"# run: {checked.plan.run}")
        for task, level in zip(checked.plan.tasks, checked.plan.levels, strict=True):
            print(f"{task.id}\t{level}\t{'missing' if task in checked.missing else 'done'}")


def _quoted(value: str | list[str]) -> str:
    """Paths as YAML, whatever they look like."""
    return json.dumps(value, ensure_ascii=False)


def _compare(
    name: str, overrides: list[str], command: str, until_decided: bool = False, max_seeds: int | None = None
) -> None:
    from rich.console import Console

    from ssl_vit.comparison.config import load_comparison

    study = load_comparison(name, overrides)
    from ssl_vit import api  # torch, after the keys were checked
    from ssl_vit.report import tables

    finished = api.compare(
        study,
        until_decided=until_decided,
        max_seeds=max_seeds,
        command=command,
        say=_print,
    )
    if is_main_process():
        Console().print(tables.terminal(finished.comparison))
        print(f"\nreport  {finished.report()}")


def _print(text: str) -> None:
    print(printable_lines(text))
