"""The commands. Each is one call into the rooms below; nothing heavy is imported before a command runs."""

from __future__ import annotations

import errno
import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ssl_vit import __version__
from ssl_vit.interfaces import RunError, UserError

app = typer.Typer(
    name="ssl-vit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Does self-supervised pretraining of a Vision Transformer pay on your images, by how much and at what "
    "cost?\n\nExample: `ssl-vit demo`",
)
shards_app = typer.Typer(no_args_is_help=True, help="Make, check and count WebDataset shards.")
app.add_typer(shards_app, name="shards")

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Recipe keys to change, as key=value.", metavar="key=value")
]


@app.callback(invoke_without_command=True)
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"ssl-vit {__version__}")
        raise typer.Exit


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
                shuffle=False,  # in scikit-learn's order, so that others can check the few-shot rows on raw pixels
                overwrite=True,
                progress=False,
            )
            print(f"packed {info['samples']} {split} digits into {folder}")
    paths = [f"run={out}", *(f"data.{name}={out}/data/train" for name in ("train", "pretrain"))]
    _compare("demo_digits", [*paths, f"data.test={out}/data/test", *(overrides or [])], "ssl-vit demo")


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file or a shipped recipe's name.")],
    overrides: Overrides = None,
) -> None:
    """Train one stage: pretraining, supervised training or fine-tuning, as the recipe says. Resumes by itself.

    Example: `ssl-vit train digits_ssl data.train=shards/train training.steps=500`

    Several processes: `accelerate launch --multi_gpu --num_processes 2 -m ssl_vit train digits_ssl`
    """
    from ssl_vit import experiment
    from ssl_vit import recipe as recipes

    settings = recipes.load_recipe(recipe, overrides or [])
    outcome = experiment.train(settings)
    if not outcome.finished:
        raise typer.Exit(1)
    if experiment.is_main_process():
        run, train_shards = outcome.run, settings.data.train
        beside = Path(train_shards).parent / "test"
        test_shards = str(beside) if beside.is_dir() else "TEST_SHARDS"
        print(
            f"\nrun        {run}  (recipe, metrics.jsonl, TensorBoard events, checkpoints, backbone.safetensors)\n"
            f"evaluate   ssl-vit eval {run} few_shot --data {train_shards} --test {test_shards}\n"
            f"compare    ssl-vit compare own_images data.train={train_shards} data.test={test_shards}\n"
            f"look       ssl-vit report {run}   and   tensorboard --logdir {run}\n"
            f'in timm    timm.create_model("local-dir:{run}", pretrained=True)'
        )


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory, a checkpoint or a weights folder.")],
    evaluator: Annotated[str, typer.Argument(help="few_shot, linear_probe, knn or fine_tune.")],
    data: Annotated[str, typer.Option(help="Labelled training shards, or a folder that holds train/ and test/.")],
    test: Annotated[str | None, typer.Option(help="Labelled test shards (default: DATA/test).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    overrides: Annotated[list[str] | None, typer.Argument(help="Evaluator keys.", metavar="key=value")] = None,
) -> None:
    """Judge a backbone beside two references: the untrained backbone and raw pixels. Adds to RUN/results.json.

    Example: `ssl-vit eval runs/digits_ssl few_shot --data runs/demo/data shots=[1,5]`
    """
    from ssl_vit import experiment

    train_shards, test_shards = _train_and_test(data, test)
    result = experiment.evaluate(run, evaluator, train_shards, test_shards, overrides or [])
    if not experiment.is_main_process():
        return
    if as_json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result["values"].items():
        if "/seed" not in name:
            print(f"{name:40s} {value:8.4g}")
    if result["skipped"]:
        print(f"{len(result['skipped'])} unreadable sample(s) left out; they are listed in {run}/results.json")
    print(f"\n{evaluator} took {result['seconds']} s; saved in {run}/results.json")


@app.command()
def compare(
    recipe: Annotated[str, typer.Argument(help="A comparison recipe: a file or a shipped name.")],
    overrides: Overrides = None,
) -> None:
    """Arms x seeds x label budgets: who wins, by how much, at what cost. Repeating the command runs what is missing.

    Example: `ssl-vit compare demo_digits data.train=shards/train data.test=shards/test`
    """
    _compare(recipe, overrides or [], " ".join(["ssl-vit compare", recipe, *(overrides or [])]))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One comparison directory, or one or more run directories.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file (default: report.html in the first directory).")
    ] = None,
) -> None:
    """Write one self-contained HTML page: verdict, tables, curves, pictures, costs, commands.

    Example: `ssl-vit report runs/demo`
    """
    from ssl_vit.report import page

    print(page.write_report(runs, out or runs[0] / "report.html"))


@app.command()
def recipes() -> None:
    """List the shipped recipes, each with its first line.

    Example: `ssl-vit recipes`
    """
    from ssl_vit import recipe as recipe_files

    for name, path in recipe_files.shipped().items():
        first = path.read_text().splitlines()[0].removeprefix("#").strip()
        print(f"{name:24s} {first}")
    print(f"\nfiles: {recipe_files.recipes_folder()}")


@shards_app.command("make")
def shards_make(
    source: Annotated[str, typer.Argument(help="A folder of class folders, a `datasets` source, or `digits`.")],
    out: Annotated[Path, typer.Argument(help="Where the shards and info.json go.")],
    split: Annotated[str | None, typer.Option(help="The source's split, such as train or test.")] = None,
    shard_size: Annotated[int, typer.Option(min=1, help="Samples in a shard, at most.")] = 1000,
    shards: Annotated[int | None, typer.Option(min=1, help="How many shards, instead of --shard-size.")] = None,
    holdout: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of each class for OUT/test; the rest: OUT/train.")
    ] = 0.0,
    resize: Annotated[int | None, typer.Option(min=1, help="Resize the shorter side to this many pixels.")] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="JPEG quality of resized images.")] = 95,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of the samples.")] = 0,
    image_column: Annotated[str | None, typer.Option(help="Image column of a `datasets` source.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Label column of a `datasets` source.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the shards in OUT.")] = False,
) -> None:
    """Pack images into WebDataset shards; JPEG, PNG and WebP bytes are copied as they are.

    Example: `ssl-vit shards make my_images shards --holdout 0.2`
    """
    from ssl_vit.data import pack, sources

    opened = sources.open_source(source, split=split, label_column=label_column, image_column=image_column)
    info = pack.make(
        opened,
        out,
        shard_size=shard_size,
        shards=shards,
        holdout=holdout,
        resize=resize,
        quality=quality,
        seed=seed,
        overwrite=overwrite,
    )
    for folder, part in {out / name: info[name] for name in ("train", "test")}.items() if holdout else [(out, info)]:
        classes = f"{len(part['classes'])} classes" if part["classes"] else "no labels"
        print(f"{folder}: {part['samples']} samples in {len(part['shards'])} shards, {classes}")
    for dropped in info["dropped"]:
        print(f"left out {dropped['file']}: {dropped['reason']}", file=sys.stderr)


@shards_app.command("verify")
def shards_verify(folder: Annotated[Path, typer.Argument(help="A folder of shards.")]) -> None:
    """Read every byte of every shard and list each defect; exit code 1 if there is one.

    Example: `ssl-vit shards verify shards/train`
    """
    from ssl_vit.data import check

    defects = check.verify(folder)
    for defect in defects:
        print(f"{defect.shard}: {defect.key or '-'}: {defect.kind}: {defect.detail}")
    print(f"{folder}: {len(defects)} defect(s)" if defects else f"{folder}: no defect found")
    if defects:
        raise typer.Exit(1)


@shards_app.command("stats")
def shards_stats(folder: Annotated[Path, typer.Argument(help="A folder of shards.")]) -> None:
    """Samples, classes and image sizes of a folder of shards, as JSON.

    Example: `ssl-vit shards stats shards/train`
    """
    from ssl_vit.data import check

    print(json.dumps(check.stats(folder), indent=1))


def _train_and_test(data: str, test: str | None) -> tuple[str, str]:
    if test:
        return data, test
    if (Path(data) / "train").is_dir() and (Path(data) / "test").is_dir():
        return f"{data}/train", f"{data}/test"
    raise UserError(f"{data} does not hold train/ and test/: name the test shards with --test")


def _compare(name: str, overrides: list[str], command: str) -> None:
    from rich.console import Console

    from ssl_vit import compare as comparisons
    from ssl_vit import experiment
    from ssl_vit import recipe as recipe_files
    from ssl_vit.report import page, tables

    comparison, arms = recipe_files.load_comparison(name, overrides)
    main_process = experiment.is_main_process()
    say = print if main_process else (lambda text: None)
    results: dict[str, Any] = comparisons.compare(comparison, arms, command, say)
    run = comparison.run_directory
    if not main_process:
        return
    Console().print(tables.terminal_table(results))
    print(f"\n{results['summary']['verdict']}\n")
    print(f"report   {page.write_report([run], run / 'report.html')}\nresults  {run / 'results.json'}")


def main() -> None:
    """Run the command line; exit code 2 for the user's mistakes, 1 for other failures."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: whatever runs may save and clean up
    try:
        app(arguments)
    except (UserError, RunError) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except OSError as error:
        if debug or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        print(f"error: {error}: the disk refuses; free it and run the same command to go on", file=sys.stderr)
        sys.exit(1)
    except SystemExit as stop:
        if stop.code != _INTERRUPTED:
            raise
        print("stopped; run the same command to go on", file=sys.stderr)
        sys.exit(1)


_INTERRUPTED = 130  # Typer's exit code after Ctrl-C
