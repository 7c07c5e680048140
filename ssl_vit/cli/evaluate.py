"""`ssl-vit eval`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssl_vit.cli import complete
from ssl_vit.interfaces import UserError

if TYPE_CHECKING:
    from ssl_vit.comparison.config import DataSet

app = typer.Typer()


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
