"""`ssl-vit eval`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssl_vit.cli import complete
from ssl_vit.interfaces import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from ssl_vit.comparison.config import DataSet
    from ssl_vit.results import Evaluation, Result

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
        typer.Option(help="Labeled training shards, or a folder that holds train/ and test/. Repeat for several."),
    ] = None,
    test: Annotated[str | None, typer.Option(help="Labeled test shards (default: DATA/test).")] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="A suite of data sets: a file or a shipped name.", autocompletion=complete.suites),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows and settings as JSON.")] = False,
    per_class: Annotated[bool, typer.Option("--per-class", help="Print the accuracy of every class too.")] = False,
    overrides: Annotated[list[str] | None, typer.Argument(help="Evaluator keys.", metavar="key=value")] = None,
) -> None:
    """Evaluate an encoder beside references: an untrained one, raw pixels. Stores the results in RUN/results.

    Example: `ssl-vit eval runs/digits_ssl few_shot --data runs/demo/data shots=[1,5]`
    """
    from ssl_vit import api, runs

    found = [
        api.evaluate(
            run,
            evaluator,
            str(chosen.train),
            str(chosen.test),
            overrides or [],
            data=name,
            defaults=chosen.evaluators.get(evaluator),
            metric=chosen.metric,
            say=lambda text: print(text, file=sys.stderr),
        )
        for name, chosen in _data_sets(data or [], test, suite).items()
    ]
    if not runs.is_main_process():
        return
    if as_json:
        rows = [{k: v for k, v in asdict(row).items() if k != "prediction"} for one in found for row in one.results]
        print(json.dumps({"rows": rows, "about": [one.about for one in found]}, indent=1))
    else:
        _show(found, per_class)


def _data_sets(data: list[str], test: str | None, suite: str | None) -> dict[str, DataSet]:
    from ssl_vit.comparison.config import DataSet, load_suite
    from ssl_vit.comparison.suites import prepare

    if bool(data) == bool(suite):
        raise UserError("name the data: --data FOLDER (repeat it for more), or --suite NAME")
    if suite and test:
        raise UserError("a suite names its own test shards: remove --test")
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


def _name(row: Result) -> str:
    from ssl_vit.evaluators import budget_words

    return ", ".join(filter(None, (budget_words(row.labels_per_class), row.variant)))


def _show(found: Sequence[Evaluation], per_class: bool) -> None:
    """One table of all data sets, what was selected and skipped, and where the results are."""
    import numpy as np
    from rich.console import Console

    cells: dict[tuple[str, str], dict[str, list[float]]] = {}
    for one in found:
        for row in one.results:
            by_data = cells.setdefault((row.arm, _name(row)), {})
            by_data.setdefault(row.data, []).append(100 * getattr(row, one.about["metric"]))
    names = [one.results[0].data for one in found]
    table = _table(f"{found[0].about['title']} (% ± standard deviation over seeds)", ("", "labels", *names))
    for place, by_data in cells.items():
        shown = []
        for values in (by_data.get(name, []) for name in names):
            spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
            shown.append(f"{np.mean(values):.1f}{spread}" if values else "–")
        table.add_row(*place, *shown)
    Console().print(table)
    for name, one in zip(names, found, strict=True):
        if per_class:
            Console().print(_classes(one))
        lines = ["mean of the per-class accuracies"] if one.about["metric"] == "mean_per_class" else []
        for row in one.results:
            settings = ", ".join(f"{key}={value}" for key, value in row.selected.items())
            lines += [f"{row.arm}, {_name(row)}, seed {row.seed}: selected {settings}"] if settings else []
            lines += row.notes
        lines += [f"{len(one.about['skipped'])} unreadable sample(s) skipped"] if one.about["skipped"] else []
        for line in dict.fromkeys(lines):
            print(f"{name}: {line}")
    seconds = sum(one.about["seconds"] for one in found)
    print(f"\n{seconds:.2f} s; saved in {', '.join(str(one.path) for one in found)}")


def _table(title: str, headers: Sequence[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for number, header in enumerate(headers):
        table.add_column(Text(header), justify="right" if number > 1 else "left")
    return table


def _classes(one: Evaluation) -> Table:
    """Accuracy of every class with the trained encoder, mean over seeds: a column per label budget and variant."""
    import numpy as np
    from rich.text import Text

    correct: dict[str, list[np.ndarray]] = {}
    for row in one.results:
        if row.arm == "trained":
            correct.setdefault(_name(row), []).append(row.prediction.correct)
    first, names = one.results[0], one.about["classes"]
    labels = first.prediction.labels
    table = _table(f"{first.data}: accuracy of each class, %", ("class", "images", *correct))
    for label in range(max(len(names), int(labels.max()) + 1)):
        here = labels == label
        shares = [
            f"{100 * np.mean(seeds, axis=0)[here].mean():.1f}" if here.any() else "–" for seeds in correct.values()
        ]
        table.add_row(Text(names[label] if label < len(names) else str(label)), str(here.sum()), *shares)
    return table
