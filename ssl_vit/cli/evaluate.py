"""`ssl-vit eval`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssl_vit.interfaces import Metric, UserError, is_main_process, printable

if TYPE_CHECKING:
    import pandas as pd

    from ssl_vit.comparison.sets import DataSet
    from ssl_vit.results import Evaluation, Result


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory, a checkpoint or a weights folder.")],
    evaluator: Annotated[
        str,
        typer.Argument(help="few_shot, linear_probe, attentive_probe, knn, fine_tune or own_head."),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Labeled images or shards with train and test parts (default: the run's own); with --test, only "
            "those to train on. Repeat for several."
        ),
    ] = None,
    test: Annotated[str | None, typer.Option(help="Labeled images or shards to test on.")] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="A suite of datasets: a file or a shipped name."),
    ] = None,
    metric: Annotated[
        Metric | None,
        typer.Option(help="Metric to show and to select settings by. Default: the suite's, else accuracy."),
    ] = None,
    real_labels: Annotated[
        Path | None,
        typer.Option(
            help="real.json of ImageNet-ReaL: also score the predictions for ImageNet's validation images by it."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows and settings as JSON.")] = False,
    per_class: Annotated[bool, typer.Option("--per-class", help="Print the accuracy of every class too.")] = False,
    overrides: Annotated[list[str] | None, typer.Argument(help="Evaluator keys.", metavar="key=value")] = None,
) -> None:
    """Evaluate an encoder and, where the evaluator has them, its references: an untrained encoder (for fine_tune,
    training from scratch) and raw pixels. Stores the results in RUN/results. `ssl-vit eval EVALUATOR --help` lists the
    keys of an evaluator.

    Example: `ssl-vit eval runs/ssl few_shot --data my_images "labels_per_class=[1,5]"`
    """
    from ssl_vit import execution, plugins, progress, recipe
    from ssl_vit.evaluators import protocol_settings
    from ssl_vit.files import expanded
    from ssl_vit.models import factory

    if as_json and per_class:
        raise UserError("--json and --per-class are mutually exclusive")
    if real_labels and (suite or len(data or []) > 1):
        raise UserError("--real-labels has the labels of one test set; leave out --suite and name one --data")
    config = plugins.load("evaluators", evaluator).Config  # the command line is checked before the data
    run, real_labels = expanded(run), expanded(real_labels) if real_labels else None
    factory.find_weights(run)
    given = recipe.parse_overrides(overrides or [])

    evaluations = [
        execution.evaluate(
            run,
            evaluator,
            chosen.train or "",
            chosen.test or "",
            recipe.onto(protocol_settings(config, chosen.evaluators.get(evaluator, {}), given), given),
            data=name,
            metric=metric or chosen.metric,
            real_labels=real_labels,
            say=progress.say,
        )
        for name, chosen in _data_sets(run, data or [], test, suite).items()
    ]
    if not is_main_process():
        return
    if as_json:
        rows = [
            {k: v for k, v in asdict(row).items() if k != "prediction"}
            for evaluation in evaluations
            for row in evaluation.results
        ]
        about = [evaluation.about.model_dump(mode="json", exclude={"saved"}) for evaluation in evaluations]
        print(json.dumps({"rows": rows, "about": about}, indent=1))
    else:
        _show(evaluations, per_class)


def _data_sets(run: Path, data: list[str], test: str | None, suite: str | None) -> dict[str, DataSet]:
    from ssl_vit import progress
    from ssl_vit.api import labeled_parts
    from ssl_vit.comparison.sets import DataSet, load_suite
    from ssl_vit.comparison.suites import prepare
    from ssl_vit.data import train_and_test
    from ssl_vit.files import expanded

    if "" in (suite, test, *data):
        raise UserError("--data, --test and --suite need a value: one of them is empty")
    if suite:
        if test or data:
            raise UserError("--suite cannot be combined with --data or --test")
        chosen_suite = load_suite(suite)
        return prepare(chosen_suite.sets, expanded(chosen_suite.folder), progress.say)
    if test and len(data) > 1:
        raise UserError("--test goes with one --data; give several as folders that hold both parts")
    if not data or test:
        parts = labeled_parts(run, None, data[0] if data else None, test)
        return {parts[1]: DataSet(train=parts[0], test=parts[1])}  # the numbers are about these images
    parts_of = {location: train_and_test(location) for location in data}
    return {location: DataSet(train=train, test=test) for location, (train, test) in parts_of.items()}


def _show(evaluations: Sequence[Evaluation], per_class: bool) -> None:
    """One table of all datasets, what was selected and skipped, and where the results are."""
    import pandas as pd
    from rich.console import Console

    from ssl_vit.evaluators.selection import in_words
    from ssl_vit.report.intervals import HALF_WIDTH
    from ssl_vit.report.runs import listed
    from ssl_vit.report.tables import Shown, rich_table

    names = [evaluation.results[0].data for evaluation in evaluations]
    frames = [evaluation.table.assign(labels=[*map(_words, evaluation.results)]) for evaluation in evaluations]
    columns = [_accuracies(evaluation, frame) for evaluation, frame in zip(evaluations, frames, strict=True)]
    cells = pd.concat(columns, axis=1, keys=names)
    title = (
        f"{evaluations[0].about.title} (test accuracy, % ± {HALF_WIDTH.format('seeds')}; "
        "in parentheses the standard deviation over seeds)"
    )
    table = cells.fillna("–").reset_index(names=["", "labels"], allow_duplicates=True)  # a dataset may be named labels
    Console().print(rich_table(Shown(title, table)))
    for name, evaluation, frame in zip(names, evaluations, frames, strict=True):
        if per_class:
            Console().print(rich_table(Shown(f"{name}: accuracy per class, %", _classes(evaluation, frame))))
        lines = ["mean of the per-class accuracies"] if evaluation.about.metric == "mean_per_class" else []
        for row, labels in zip(evaluation.results, frame["labels"], strict=True):
            if row.selected:
                lines.append(f"{row.arm}, {labels}, seed {row.seed}: selected {in_words(row.selected)}")
            lines += row.notes
        if skipped := evaluation.about.skipped:
            lines.append(f"{len(skipped)} sample(s) could not be used: {listed(skipped)}")
        for line in dict.fromkeys(lines):
            print(printable(f"{name}: {line}"))
    seconds = sum(evaluation.about.seconds for evaluation in evaluations)
    print(f"\n{seconds:.2f} s; saved in {', '.join(str(evaluation.path) for evaluation in evaluations)}")


def _words(row: Result) -> str:
    """Label budget and variant."""
    from ssl_vit.evaluators import budget_words

    return ", ".join(filter(None, (budget_words(row.labels_per_class), row.variant)))


def _accuracies(evaluation: Evaluation, frame: pd.DataFrame) -> pd.Series:
    """Test accuracy by arm and labels, as the report prints it, and its standard deviation over seeds."""
    from ssl_vit.report.statistics import points
    from ssl_vit.report.summary import mean_accuracy
    from ssl_vit.results import Table

    table, metric = Table(evaluation.results), evaluation.about.metric

    def words(group: pd.DataFrame) -> str:
        mean = points(mean_accuracy(table, list(group.index), weighted=metric == "mean_per_class"), "")
        return f"{mean} ({100 * group[metric].std():.1f})" if len(group) > 1 else mean

    return frame.groupby(["arm", "labels"], sort=False).apply(words)


def _classes(evaluation: Evaluation, frame: pd.DataFrame) -> pd.DataFrame:
    """Accuracy per class with the trained encoder, mean over seeds: a column per label budget and variant but ReaL,
    whose images may have several classes."""
    import pandas as pd

    from ssl_vit.evaluators.real_labels import VARIANT
    from ssl_vit.results import class_name

    labels, names = evaluation.results[0].prediction.labels, evaluation.about.classes
    shown = [n for n, row in enumerate(evaluation.results) if row.arm == "trained" and VARIANT not in row.variant]
    correct = pd.DataFrame([evaluation.results[n].prediction.correct for n in shown], index=shown)
    shares = correct.groupby(frame["labels"][shown], sort=False).mean().T.groupby(labels)
    cells = shares.mean().mul(100).map("{:.1f}".format)
    cells.insert(0, "images", shares.size())
    cells.insert(0, "class", [class_name(names, label) for label in cells.index])
    return cells
