"""Commands that train, judge and report: demo, train, eval, compare, report, recipes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssl_vit.cli import complete
from ssl_vit.interfaces import UserError

if TYPE_CHECKING:
    from ssl_vit.comparison.config import DataSet

app = typer.Typer()


class Form(StrEnum):
    html = "html"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


Overrides = Annotated[
    list[str] | None, typer.Argument(help="Recipe keys to change, as key=value.", metavar="key=value")
]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for the demo's shards, runs and report.")] = Path("runs/demo"),
    overrides: Overrides = None,
) -> None:
    """Compare SSL, supervised and scratch on 1,797 real handwritten digits: pack, pretrain, evaluate, report. On CPU.

    Example: `ssl-vit demo`
    """
    from ssl_vit.data import pack, sources

    for split in ("train", "test"):
        folder = out / "data" / split
        if not (folder / "info.json").exists():
            info = pack.make(
                sources.open_source("digits", split=split),
                folder,
                shards=8,
                order="source",  # in scikit-learn's order, so that others can check the few-shot rows on raw pixels
                overwrite=True,
                progress=False,
            )
            print(f"packed {info['samples']} {split} digits into {folder}")
    named = [] if out == Path("runs/demo") else ["--out", str(out)]
    command = shlex.join(["ssl-vit", "demo", *named, *(overrides or [])])
    paths = [f"run={out}", *(f"data.{name}={out}/data/train" for name in ("train", "pretrain"))]
    _compare("demo_digits", [*paths, f"data.test={out}/data/test", *(overrides or [])], command)


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe file, a shipped recipe's name, or a run's directory, to go on with it.",
            autocompletion=complete.stages,
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the run's data, size, memory and time, and do not train.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The dry run as JSON, with the whole recipe.")] = False,
    overrides: Overrides = None,
) -> None:
    """Train one stage: pretraining, supervised training or fine-tuning, as the recipe says. Resumes by itself.

    Example: `ssl-vit train digits_ssl data.train=shards/train training.steps=500`

    Several processes: `accelerate launch --multi_gpu --num_processes 2 -m ssl_vit train digits_ssl`
    """
    import torch

    from ssl_vit import api, runs
    from ssl_vit import recipe as recipes

    settings = recipes.load_recipe(recipe, overrides or [])
    if dry_run:
        from ssl_vit.cli import previewed
        from ssl_vit.preview import preview
        from ssl_vit.training.trackers import check_trackers

        check_trackers(settings.training.trackers)
        runs.check(settings.run_directory, settings)
        found = preview(settings)
        if runs.is_main_process():
            previewed.stage(found, as_json)
        return
    if as_json:
        raise UserError("--json goes with --dry-run")
    run = api.train(settings)
    if runs.is_main_process():
        named = settings.data.train
        train_shards = named if isinstance(named, str) else named[0].shards
        beside = Path(train_shards).parent / "test"
        test_shards = str(beside) if beside.is_dir() else "TEST_SHARDS"
        train_shards, test_shards = shlex.quote(train_shards), shlex.quote(test_shards)
        name = shlex.quote(str(run))
        own = "own_images" if torch.accelerator.is_available() else "own_images_cpu"
        compared = f"compare    ssl-vit compare {own} data.train={train_shards} data.test={test_shards}\n"
        print(
            f"\nrun        {run}  (recipe, metrics.jsonl, TensorBoard events, checkpoints, encoder.safetensors)\n"
            f"evaluate   ssl-vit eval {name} few_shot --data {train_shards} --test {test_shards}\n"
            f"{compared if settings.encoder.channels == 3 else ''}"
            f"look       ssl-vit report {name}   and   tensorboard --logdir {name}"
        )
        if settings.encoder.norm_eps is None:  # timm's config names no other
            print(f'in timm    timm.create_model("local-dir:{run}", pretrained=True)')


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory, a checkpoint or a weights folder.")],
    evaluator: Annotated[
        str,
        typer.Argument(help="few_shot, linear_probe, knn, fine_tune or own_head.", autocompletion=complete.evaluators),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Labeled training shards, or a folder that holds train/ and test/. Several: give it again."),
    ] = None,
    test: Annotated[str | None, typer.Option(help="Labeled test shards (default: DATA/test).")] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="A suite of data sets: a file or a shipped name.", autocompletion=complete.suites),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    per_class: Annotated[bool, typer.Option("--per-class", help="Print the accuracy of every class too.")] = False,
    overrides: Annotated[list[str] | None, typer.Argument(help="Evaluator keys.", metavar="key=value")] = None,
) -> None:
    """Judge an encoder beside the untrained one and raw pixels (a run's own head: alone). Adds to RUN/results.json.

    Example: `ssl-vit eval runs/digits_ssl few_shot --data runs/demo/data shots=[1,5]`
    """
    from ssl_vit import api, runs
    from ssl_vit.cli.judged import show

    results = {}
    for name, chosen in _data_sets(data or [], test, suite).items():
        results[name] = api.evaluate(
            run,
            evaluator,
            str(chosen.train),
            str(chosen.test),
            overrides or [],
            defaults=chosen.evaluators.get(evaluator),
            metric=chosen.metric,
            say=lambda text: print(text, file=sys.stderr),
        )
    if not runs.is_main_process():
        return
    if as_json:
        print(json.dumps(list(results.values()) if len(results) > 1 else next(iter(results.values())), indent=1))
    else:
        show(results, run, per_class)


@app.command()
def compare(
    recipe: Annotated[
        str,
        typer.Argument(help="A comparison recipe: a file or a shipped name.", autocompletion=complete.comparisons),
    ],
    overrides: Overrides = None,
    show: Annotated[
        bool, typer.Option("--list", help="Print the pieces (id, stage, done or missing) instead of running them.")
    ] = False,
    only: Annotated[str | None, typer.Option(help="Run one piece, by its id, and what it needs.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the comparison's size, memory and time, and run nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The dry run as JSON.")] = False,
) -> None:
    """Arms x seeds x label budgets: who wins, by how much, at what cost. Repeating the command runs what is missing.

    Example: `ssl-vit compare demo_digits data.train=shards/train data.test=shards/test`

    On many machines: run each id of stage 0 by `--only ID`, then those of stage 1, and so on, as
    recipes/launch/compare_slurm.sh does; `ssl-vit report RUN` shows whatever is finished.
    """
    changed = overrides or []
    command = shlex.join(["ssl-vit", "compare", recipe, *changed])
    if dry_run:
        from ssl_vit.cli import previewed
        from ssl_vit.comparison.config import load_comparison
        from ssl_vit.comparison.preview import preview

        previewed.comparison(preview(load_comparison(recipe, changed)), as_json)
        return
    if as_json:
        raise UserError("--json goes with --dry-run")
    if not show and only is None:
        _compare(recipe, changed, command)
        return
    from ssl_vit.comparison import run as comparisons
    from ssl_vit.comparison import work
    from ssl_vit.comparison.config import load_comparison
    from ssl_vit.comparison.suites import prepare

    study = load_comparison(recipe, changed)
    if only is not None:
        comparisons.run_only(comparisons.open_plan(study, command), only)
        return
    plan = comparisons.look(study, prepare(study.sets, study.folder, lambda text: print(text, file=sys.stderr)))[0]
    print(f"# run: {plan.run}")
    for piece, stage in zip(plan.pieces, comparisons.stages(plan).values(), strict=True):
        print(f"{piece.id}\t{stage}\t{'done' if work.is_done(plan, piece) else 'missing'}")


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="One comparison directory (or several with parts of it), or one or more run directories."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file to write (default: report.html, .md, .tex or .csv in the first).")
    ] = None,
    form: Annotated[
        Form, typer.Option("--format", help="A page, tables for a paper, or every measurement as CSV.")
    ] = Form.html,
) -> None:
    """Write one self-contained HTML page: verdict, tables, curves, pictures, costs, commands. Of an unfinished
    comparison, whatever is finished.

    Example: `ssl-vit report runs/demo`
    """
    from ssl_vit.report import export, merge, page

    if len(runs) == 1 and (runs[0] / merge.PLAN).is_file():
        try:
            merge.update(runs[0])
        except OSError as error:  # the report itself needs nothing of it
            print(f"{runs[0] / merge.RESULTS} stays as it is: {error.strerror}", file=sys.stderr)
    out = out or runs[0] / f"report{export.SUFFIXES[form.value]}"
    if form == Form.html:
        print(page.write_report(runs, out))
    else:
        print(export.write_tables(runs, out, form.value))


@app.command()
def recipes() -> None:
    """List the shipped recipes and suites of data sets, each with its first sentence.

    Example: `ssl-vit recipes`
    """
    from ssl_vit import recipe as recipe_files
    from ssl_vit.comparison.config import suites

    width = max(shutil.get_terminal_size().columns, 60) if sys.stdout.isatty() else 10_000
    for title, found in (("", recipe_files.shipped()), ("suites, for --suite:\n", suites())):
        print(f"\n{title}" if title else "", end="")
        for name, path in found.items():
            comment = takewhile(lambda line: line[:1] == "#", path.read_text().splitlines())
            head = " ".join(line[1:].strip() for line in comment)
            sentences = re.split(r"(?<=[.?])\s", head)
            about = " ".join(sentences[: 1 + sentences[0].endswith("?")])  # a question, and what it is about
            print(textwrap.fill(f"{name:28s} {about}", width, subsequent_indent=" " * 29, break_on_hyphens=False))
    print(f"\nfiles: {recipe_files.recipes_folder()}")


def _data_sets(data: list[str], test: str | None, suite: str | None) -> dict[str, DataSet]:
    from ssl_vit.comparison.config import DataSet, load_suite
    from ssl_vit.comparison.suites import prepare

    if bool(data) == bool(suite):
        raise UserError("name the data: --data FOLDER (again for more), or --suite NAME")
    if suite and test:
        raise UserError("a suite names its own test shards: leave --test out")
    if suite:
        found = load_suite(suite)
        return prepare(found.sets, Path(found.folder), lambda text: print(text, file=sys.stderr))
    if test:
        if len(data) > 1:
            raise UserError("--test goes with one --data; give several as folders that hold train/ and test/")
        return {test: DataSet(train=data[0], test=test)}  # the numbers are about these images
    for folder in data:
        if not ((Path(folder) / "train").is_dir() and (Path(folder) / "test").is_dir()):
            raise UserError(f"{folder} does not hold train/ and test/: name the test shards with --test")
    return {folder: DataSet(train=f"{folder}/train", test=f"{folder}/test") for folder in data}


def _compare(name: str, overrides: list[str], command: str) -> None:
    from rich.console import Console

    from ssl_vit.comparison import run as comparisons
    from ssl_vit.comparison.config import load_comparison
    from ssl_vit.report import page, tables
    from ssl_vit.runs import is_main_process

    study = load_comparison(name, overrides)
    say = print if is_main_process() else (lambda text: None)
    results: dict[str, Any] = comparisons.compare(study, command, say)
    if not is_main_process():
        return
    run = study.comparison.run_directory
    Console().print(tables.terminal_table(results))
    print(f"\nreport   {page.write_report([run], run / 'report.html')}\nresults  {run / 'results.json'}")
