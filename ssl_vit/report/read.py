"""Read comparisons, and runs side by side, into one typed object: a record, a table of results, runs. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path

import numpy as np

from ssl_vit import records, results
from ssl_vit.evaluators import ALL, several
from ssl_vit.interfaces import Metric, UserError
from ssl_vit.records import (
    ArmRecord,
    ComparisonRecord,
    Cost,
    DataRecord,
    EvaluationRecord,
    EvaluatorRecord,
    ReferenceRecord,
    RunSummary,
    SkippedSample,
    SweepRecord,
    TaskRecord,
    TaskResult,
)
from ssl_vit.report import sequential
from ssl_vit.report.runs import REFERENCES, Run, objective_name, read_run, without_replaced
from ssl_vit.results import Result, Table

PLAN = "plan.json"
_cell = attrgetter("data", "evaluator", "arm", "labels_per_class", "seed", "fold")


@dataclass(frozen=True)
class Comparison:
    """A comparison, finished or not; or separate runs as its arms.

    measured: all rows, with their files. tasks: the finished ones, by id. missing: ids of the others.
    runs: by arm. separate: runs that no plan compares, so that there is no verdict.
    """

    record: ComparisonRecord
    measured: Table
    paths: tuple[Path, ...]
    tasks: Mapping[str, TaskResult] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    runs: Mapping[str, Run] = field(default_factory=dict)
    skipped: tuple[SkippedSample, ...] = ()
    separate: bool = False

    @cached_property
    def table(self) -> Table:
        """The rows that statistics are computed from. Seeds that were added to the headlines after the last look count
        from the next one on. In a cross-validation the folds are joined into one row."""
        table = sequential.without_new_seeds(self.record, self.measured)
        if self.record.folds == 1:
            return table
        (data,) = self.record.metrics
        tests = [self.record.data[f"{data} test of fold {fold}"] for fold in range(self.record.folds)]
        return table.join_folds([test.samples or 0 for test in tests])

    def label(self, arm: str) -> str:
        """An arm's name in a table."""
        labels = {row.name: row.label for row in self.record.arms}
        kinds = Counter(row.kind for row in self.record.references if not row.repeats)
        for row in self.record.references:
            if row.repeats:
                labels[row.name] = f"{labels[row.repeats]}, repeated with other random numbers"
                continue
            words = "training from scratch" if row.kind == "scratch" else REFERENCES[row.kind]
            labels[row.name] = words + (f" of {labels[row.like]}" if kinds[row.kind] > 1 else "")
        return labels[arm]

    def spoken(self, arm: str) -> str:
        """Name of an arm in a sentence: its method, with its label where other arms use the same method."""
        words: dict[str, str] = {}
        for record in self.record.arms:
            if record.kind == "scratch":
                longer = " with the compute of pretraining" if record.compute_of else ""
                words[record.name] = f"training from scratch{longer}"
            if record.kind == "pretrained" and record.objective:
                objective = objective_name(record.objective)
                words[record.name] = "supervised pretraining" if record.objective == "classification" else objective
        if arm not in words:
            return self.label(arm)
        others = [words.get(name, self.label(name)) for name in self.arms if name != arm]
        return f"{words[arm]} ({self.label(arm)})" if words[arm] in others else words[arm]

    @cached_property
    def written(self) -> dict[Path, EvaluationRecord | TaskResult]:
        """What the files of rows, and evaluations of the runs, say beside them."""
        evaluations = [evaluation for run in self.runs.values() for evaluation in run.evaluations]
        of_runs = {evaluation.path: evaluation.about for evaluation in evaluations if evaluation.path}
        return of_runs | {file: self.tasks[file.stem] for file in self.measured.files if file.stem in self.tasks}

    @property
    def saved(self) -> list[str]:
        """When each row's file was written (UTC, ISO 8601)."""
        return [self.written[file].saved for file in self.measured.files]

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms in the recipe's order, then the reference rows that were measured, without controls."""
        measured = set(self.table.frame["arm"])
        others = [row.name for row in self.record.references if row.name in measured and row.kind != "control"]
        return (*(arm.name for arm in self.record.arms), *others)

    @cached_property
    def confidence(self) -> float:
        """Confidence of the intervals of differences; above 0.95 where seeds are added until headlines are decided."""
        return sequential.confidence_of(self.record)

    @property
    def tested(self) -> tuple[str, ...]:
        """Arms under test: pretrained without labels, else given weights without (imported ones, of unknown training,
        only where no arm is pretrained), else the first with pretraining. Not the chosen baseline of the headline."""
        arms = [arm for arm in self.record.arms if arm.name != self.record.baseline]
        if self.separate:
            return (arms[0].name,)
        pretrained = [arm for arm in arms if arm.kind == "pretrained"]
        weights = [arm for arm in arms if arm.kind == "weights" and (arm.objective or not pretrained)]
        unsupervised = [tuple(arm.name for arm in group if not arm.uses_labels) for group in (pretrained, weights)]
        return next(filter(None, unsupervised), tuple(arm.name for arm in arms if arm.kind != "scratch")[:1])

    def pretraining(self, arm: str) -> RunSummary | None:
        """The first pretraining of an arm."""
        ids = [task.id for task in self.record.tasks if task.arm == arm and task.kind == "pretrain"]
        summaries = [self.tasks[name].run for name in ids if name in self.tasks]
        return next(iter(summaries), None) or next(record.summary for record in self.record.arms if record.name == arm)

    def tried(self, arm: str) -> int:
        """How many settings the arm's sweeps tried."""
        return sum(len(sweep.candidates) for task, sweep in self.sweeps if task.arm == arm)

    @property
    def sweeps(self) -> list[tuple[TaskRecord, SweepRecord]]:
        """The finished sweeps with their tasks."""
        done = [(task, self.tasks[task.id].sweep) for task in self.record.tasks if task.id in self.tasks]
        return [(task, sweep) for task, sweep in done if sweep]

    def sizes(self) -> dict[str, float]:
        """By arm, the number of pretraining samples or FLOPs that the study varies; empty outside of a study."""
        summaries = {arm.name: self.pretraining(arm.name) for arm in self.record.arms if self.record.study}
        return {arm: float(getattr(summary, str(self.record.study))) for arm, summary in summaries.items() if summary}

    def class_names(self, data: str) -> tuple[str, ...]:
        """Class names of a dataset in label order; () where its shards name none."""
        shards = [part for name, part in self.record.data.items() if name.startswith((f"{data} test", f"{data} train"))]
        return next((part.classes for part in shards[::-1] if part.classes), ())

    def class_name(self, data: str, label: int) -> str:
        """The name of a class, else its number."""
        return results.class_name(self.class_names(data), label)

    def classes(self, data: str) -> int:
        """How many classes a dataset has: those that its shards name, else those of its test images."""
        rows = self.table.frame.index[self.table.frame["data"] == data]
        return len(self.class_names(data)) or len(np.unique(self.table.results[rows[0]].prediction.labels))


def read(paths: Sequence[Path]) -> Comparison:
    """The runs in these directories (one or more) side by side, or the one comparison.

    Raises UserError for a directory that is neither, or a comparison given together with runs.
    """
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: no such directory. Give the directory that a run or a comparison wrote.")
    planned = [path for path in paths if (path / PLAN).is_file()]
    if planned and len(paths) > 1:
        raise UserError(f"{planned[0]} is a comparison; report it alone, or give run directories only.")
    return read_comparison(paths[0]) if planned else read_runs(paths)


def read_comparison(path: Path) -> Comparison:
    """Read a comparison from its directory, with all tasks that have finished."""
    record = records.read(path / PLAN, ComparisonRecord)
    tasks: dict[str, TaskResult] = {}
    rows: list[tuple[Result, Path]] = []
    planned = {_cell(task) for task in record.tasks if task.kind == "measure"}
    for task in record.tasks:
        file = path / "tasks" / f"{task.id}.json"
        if done := results.finished(file, task.fingerprint):
            tasks[task.id] = done[1]
            if any((row.arm, row.data, row.evaluator) != (task.arm, task.data, task.evaluator) for row in done[0]):
                raise UserError(f"{file}: its rows are not of the task {task.id}; delete it and run the command again")
            # Not the winner of a sweep at a label budget that is not measured.
            rows += [(row, file) for row in done[0] if task.kind != "sweep" or _cell(task) in planned]
    runs: dict[str, Run] = {}
    for arm, run in ((one.name, one.run) for one in record.arms if one.run):
        with suppress(UserError):  # weights only, not started, or deleted to save space; its results are still there
            runs[arm] = read_run(path / run)
    table = Table([row for row, _ in rows], [file for _, file in rows])
    missing = tuple(task.id for task in record.tasks if task.id not in tasks)
    skipped = tuple(dict.fromkeys(sample for finished in tasks.values() for sample in finished.skipped))
    return Comparison(record, table, (path,), tasks, missing, runs, skipped)


def _by_name(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by name; by path where a name occurs twice or is that of a reference."""
    taken = [*(run.name for run in runs), "scratch", *REFERENCES, *REFERENCES.values()]
    return {str(run.path) if taken.count(run.name) > 1 else run.name: run for run in runs}


def read_runs(paths: Sequence[Path]) -> Comparison:
    """Read separate runs as the arms of one table. Runs share an evaluator only if they were evaluated with the same
    settings on the same data."""
    runs = _by_name([without_replaced(read_run(paths[0]))] if len(paths) == 1 else [read_run(path) for path in paths])
    first = next(iter(runs))
    evaluators, protocols = dict[str, EvaluatorRecord](), dict[str, tuple[str, str]]()  # (evaluator, dataset)
    data, metrics = dict[str, DataRecord](), dict[str, Metric]()
    rows: list[tuple[Result, Path]] = []
    skipped, references = list[SkippedSample](), dict[str, ReferenceRecord]()
    predicted: dict[tuple[str, str], list[bytes]] = {}  # by evaluator and source
    tasks, swept = dict[str, TaskRecord](), dict[str, TaskResult]()
    for name, evaluation in ((name, evaluation) for name, run in runs.items() for evaluation in run.evaluations):
        file, measured, about = evaluation.path, evaluation.results, evaluation.about
        assert file is not None, "it was read"
        places = {part: " + ".join(several(place)) for part, place in about.data.items()}
        if about.protocol not in protocols:
            test, count = places["test"], sum(used.split(" (")[0] == about.evaluator for used in evaluators)
            if metrics.setdefault(test, about.metric) != about.metric:  # as if of another dataset
                test = f"{test} ({about.metric.replace('_', ' ')})"
                metrics[test] = about.metric
            new = f"{about.evaluator} ({count + 1})" if count else about.evaluator
            settings = {test: about.settings}
            evaluators[new] = EvaluatorRecord(title=about.title, trains_encoder=about.trains_encoder, settings=settings)
            for part, path in places.items():
                data[f"{test} {part}"] = DataRecord(path=path, classes=about.classes or None)
            protocols[about.protocol] = new, test
        evaluator, test = protocols[about.protocol]
        skipped += about.skipped
        for source in dict.fromkeys(row.arm for row in measured):
            source_rows = [row for row in measured if row.arm == source]
            given = [row.prediction.predicted.tobytes() for row in source_rows]
            shared = predicted.setdefault((evaluator, source), given) == given  # equal in all runs: one reference
            kind = "scratch" if about.trains_encoder and source == "untrained" else source
            arm = name if source == "trained" else kind if shared else f"{kind}_{name}"
            for row in source_rows:
                seed = row.pretraining_seed if source == "trained" else 0  # references have one encoder
                row = replace(row, data=test, evaluator=evaluator, arm=arm, pretraining_seed=seed)
                rows.append((row, file))
            for task, result in _sweeps(about, source, source_rows, arm=arm, data=test, evaluator=evaluator):
                tasks[task.id] = task
                swept[task.id] = result
            if source != "trained":
                references.setdefault(arm, ReferenceRecord(name=arm, kind=kind, like=name))
    record = ComparisonRecord(
        name=first,
        title=first if len(paths) == 1 else f"{len(paths)} runs side by side",
        command="",
        seeds=tuple(sorted({row.seed for row, _ in rows})),
        frozen_seeds=tuple(sorted({row.seed for row, _ in rows})),
        metrics=metrics,
        data=data,
        arms=tuple(
            ArmRecord(
                name=name,
                label=name,
                kind="pretrained",
                run=str(run.path),
                # Of other objectives, only those with labels know the names of the classes.
                uses_labels=bool(run.summary and (run.summary.objective == "classification" or run.summary.classes)),
                starts_from=run.starts_from,
                summary=run.summary,
            )
            for name, run in runs.items()
        ),
        references=tuple(references.values()),
        evaluators=evaluators,
        tasks=tuple(tasks.values()),
    )
    table = Table([row for row, _ in rows], [file for _, file in rows])
    return Comparison(record, table, tuple(paths), swept, (), runs, tuple(dict.fromkeys(skipped)), separate=True)


def _sweeps(
    about: EvaluationRecord, source: str, rows: Sequence[Result], **place: str
) -> Iterator[tuple[TaskRecord, TaskResult]]:
    """The sweeps of one source of an evaluation as tasks. Their cost excludes the winners that are rows, too."""
    for sweep in (one for one in about.sweeps if one.source == source):
        budget, cost = sweep.labels_per_class, sweep.cost
        measured = [row for row in rows if row.labels_per_class == budget]
        if measured and budget != ALL:
            winner = measured[0].cost
            cost = Cost(
                images_seen=cost.images_seen - winner.images_seen,
                flops=cost.flops - winner.flops,
                seconds=max(cost.seconds - winner.seconds, 0.0),
            )
        name, sweep = f"{place['evaluator']} {place['arm']} {budget}", sweep.model_copy(update={"cost": cost})
        task = TaskRecord(id=name, kind="sweep", labels_per_class=budget, **place)
        yield task, TaskResult(fingerprint="", processes=about.processes, sweep=sweep)
