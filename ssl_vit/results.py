"""Results: one typed row per measured accuracy, the prediction for every test image beside it, and one table of both.

A file of results is `NAME.json` (rows and what they depend on) with `NAME.npz` (predictions). `Table.read` puts all
files of a folder together as a pandas DataFrame; `compare`, `eval`, the report and every statistic read that table.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from ssl_vit.files import atomic_file, read_json, write_json
from ssl_vit.interfaces import Config, UserError

Budget = int | str
"""Labeled training images: per class (10), a share of every class ("10%"), or "all"."""

FORMAT = 1
KEY = ("data", "evaluator", "variant", "arm", "labels_per_class", "pretraining_seed", "seed")
"""The columns that tell any two rows of a table apart."""


@dataclass(frozen=True)
class Prediction:
    """Predictions of one classifier for the test images.

    images: int64 (M,), global indices of the test images, ascending.
    labels: int64 (M,), their classes.
    predicted: int64 (M,), the predicted classes.
    top_classes: int64 (M, T), the T most probable classes, best first; None for a head without probabilities.
    top_scores: float32 (M, T), their probabilities; None likewise.
    """

    images: np.ndarray
    labels: np.ndarray
    predicted: np.ndarray
    top_classes: np.ndarray | None = None
    top_scores: np.ndarray | None = None

    @property
    def correct(self) -> np.ndarray:
        """bool (M,)"""
        return np.asarray(self.predicted == self.labels)


@dataclass(frozen=True)
class Result:
    """One measured accuracy.

    data: name of the data set.
    evaluator: its name, such as `few_shot`.
    arm: the arm of a comparison; for a single run `trained`, `untrained` or `pixels`.
    labels_per_class: the label budget.
    seed: of the labeled images, the head and the order.
    pretraining_seed: of the pretraining (or initialization) that was evaluated.
    variant: tells rows of one evaluator apart that share all of the above, such as `k=20`; "" for the only one.
    primary: whether a comparison counts this row (one variant per evaluator).
    labels: how many labeled images the budget came to.
    accuracy: share of correct predictions, 0..1.
    mean_per_class: mean of the per-class accuracies, 0..1.
    images_seen, flops, seconds: spent on training for this row (0: nothing was trained by gradient descent).
    selected: settings selected on held-out training images.
    notes: what a reader must know about this number.
    prediction: for every test image.
    """

    data: str
    evaluator: str
    arm: str
    labels_per_class: Budget
    seed: int
    pretraining_seed: int
    labels: int
    accuracy: float
    mean_per_class: float
    prediction: Prediction = field(repr=False, compare=False)
    variant: str = ""
    primary: bool = True
    images_seen: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    selected: dict[str, float | int | str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


COLUMNS = tuple(f.name for f in fields(Result) if f.name != "prediction")


def scored(prediction: Prediction) -> dict[str, float]:
    """`accuracy` and `mean_per_class` of a prediction, for `Result`. Classes without a test image do not count."""
    classes, index = np.unique(prediction.labels, return_inverse=True)
    correct = np.bincount(index, weights=prediction.correct, minlength=len(classes))
    count = np.bincount(index, minlength=len(classes))
    return {"accuracy": float(prediction.correct.mean()), "mean_per_class": float((correct / count).mean())}


def save(path: Path, results: Sequence[Result], **about: Any) -> None:
    """Write `path` (.json) and its .npz, each atomically; an earlier pair of the same name is replaced.

    results: rows.
    about: what else the JSON holds, such as `settings`; plain JSON values.
    """
    arrays: dict[str, np.ndarray] = {}
    rows = []
    for number, result in enumerate(results):
        for name, array in vars(result.prediction).items():
            first = results[0].prediction
            if number and name in ("images", "labels") and np.array_equal(getattr(first, name), array):
                continue  # the rows of a file share their test images: stored once
            if array is not None:
                arrays[f"{number}/{name}"] = array
        rows.append({name: getattr(result, name) for name in COLUMNS})
    if rows:
        with atomic_file(path.with_suffix(".npz")) as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
    write_json(path, {"format": FORMAT, **about, "rows": rows})


def load(path: Path) -> tuple[list[Result], dict[str, Any]]:
    """(results, everything else that the JSON holds). Raises UserError for a damaged or incomplete pair."""
    about = read_json(path)
    rows = about.pop("rows", [])
    try:
        if about.pop("format") != FORMAT:
            raise ValueError("written by another version")
        if not rows:
            return [], about
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            found = dict(arrays)

        def array(number: int, name: str) -> np.ndarray | None:
            own = found.get(f"{number}/{name}")
            return found.get(f"0/{name}") if own is None and name in ("images", "labels") else own

        names = [f.name for f in fields(Prediction)]
        results = [
            Result(
                **row | {"notes": tuple(row["notes"])},
                prediction=Prediction(**{name: array(number, name) for name in names}),  # type: ignore[arg-type]
            )
            for number, row in enumerate(rows)
        ]
        return results, about
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path}: results cannot be read ({error}); delete the file and run the command again"
        ) from None


class Table:
    """Results as one DataFrame with a column per field of `Result`, and their predictions by row."""

    def __init__(self, results: Sequence[Result]) -> None:
        """results: of two with the same KEY the later one counts."""
        last = {tuple(getattr(result, name) for name in KEY): result for result in results}
        self.results = list(last.values())
        self.frame = pd.DataFrame([{n: getattr(r, n) for n in COLUMNS} for r in self.results], columns=list(COLUMNS))

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Table:
        """From files of results. Raises UserError as `load` does."""
        return cls([result for path in paths for result in load(path)[0]])

    def prediction(self, row: int) -> Prediction:
        """Of the row with this index in `frame`."""
        return self.results[row].prediction

    def correct(self, rows: Sequence[int]) -> np.ndarray:
        """bool (S, M): whether each test image was classified correctly, for rows with this index in `frame`.

        M counts the test images that all of these rows have.
        """
        images = self.results[rows[0]].prediction.images
        for row in rows[1:]:
            images = np.intersect1d(images, self.results[row].prediction.images, assume_unique=True)
        found = []
        for row in rows:
            prediction = self.results[row].prediction
            found.append(prediction.correct[np.searchsorted(prediction.images, images)])
        return np.stack(found)


# What a comparison writes about itself (`plan.json`) and about each finished task, for the report.

ArmKind = Literal["scratch", "pretrained", "weights"]
TaskKind = Literal["pretrain", "pictures", "sweep", "measure"]


class Cost(Config):
    """images_seen: samples drawn, repeats counted. flops: forward and backward. seconds: wall time of training."""

    images_seen: int = 0
    flops: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in Cost.model_fields})


class RunSummary(Config):
    """What a finished training run was (`summary.json`)."""

    name: str
    objective: str
    steps: int
    images_seen: int
    flops: float
    seconds: float
    parameters: int
    samples: int
    processes: int = 1
    skipped_steps: int = 0
    classes: tuple[str, ...] = ()

    @property
    def cost(self) -> Cost:
        return Cost(images_seen=self.images_seen, flops=self.flops, seconds=self.seconds)


class SweepRecord(Config):
    """A sweep on held-out training images: once per arm and label budget.

    candidates: settings, each with its `held_out_accuracy`.
    best: the settings of the winner.
    cost: of all candidates.
    """

    candidates: tuple[dict[str, float | int | str], ...]
    best: dict[str, float | int | str]
    cost: Cost = Cost()


class SkippedSample(Config):
    """A sample that could not be read."""

    shard: str
    key: str
    reason: str


class TaskRecord(Config):
    """One independent unit of work of a comparison. after: ids of the tasks whose results it needs."""

    id: str
    kind: TaskKind
    arm: str
    data: str = ""
    evaluator: str = ""
    labels_per_class: Budget = 0
    seed: int = 0
    after: tuple[str, ...] = ()
    fingerprint: str = ""


class TaskResult(Config):
    """What a finished task leaves in `tasks/ID.json`, its rows apart (`load` returns them).

    sweep: of a `sweep` task. Its winner, trained at the sweep's seed, is a row of results too.
    run: of a `pretrain` task. pictures: folder of a `pictures` task, relative to the comparison; None: there are none.
    """

    id: str
    fingerprint: str
    processes: int = 1
    hardware: dict[str, Any] = Field({})
    seconds: float = 0.0
    run: RunSummary | None = None
    sweep: SweepRecord | None = None
    pictures: str | None = None
    skipped: tuple[SkippedSample, ...] = ()


class ArmRecord(Config):
    """An arm as the report sees it.

    run: run directory (or given weights), relative to the comparison; None for training from scratch.
    architecture: hash of sizes and image preparation: arms that share it may be compared directly.
    uses_labels: whether its pretraining used labels.
    starts_from: weights whose making is unknown here, which it started from.
    """

    name: str
    label: str
    kind: ArmKind
    run: str | None = None
    objective: str | None = None
    architecture: str = ""
    uses_labels: bool = False
    series: str | None = None
    starts_from: str | None = None
    summary: RunSummary | None = None


class DataRecord(Config):
    """Shards that a comparison reads."""

    path: str
    samples: int
    classes: tuple[str, ...] | None = None
    source: str | None = None


class EvaluatorRecord(Config):
    """title: for people. settings: by data set."""

    title: str
    trains_encoder: bool = False
    settings: dict[str, dict[str, Any]] = Field({})


class ComparisonRecord(Config):
    """A comparison and its tasks (`plan.json`).

    metrics: by data set, `accuracy` or `mean_per_class`.
    data: by "SET train", "SET test" and "pretraining of ARM".
    references: architecture by reference row (`untrained`, `untrained_ARM`, `pixels`).
    margin: differences within it count as equivalent (fraction, 0.01: one point).
    """

    name: str
    title: str
    command: str
    labels_per_class: tuple[Budget, ...]
    seeds: tuple[int, ...]
    pretrain_per_seed: bool = False
    margin: float = 0.01
    notes: tuple[str, ...] = ()
    jobs: int = 1
    study: Literal["samples", "flops"] | None = None
    metrics: dict[str, Literal["accuracy", "mean_per_class"]]
    data: dict[str, DataRecord] = Field({})
    arms: tuple[ArmRecord, ...]
    references: dict[str, str] = Field({})
    evaluators: dict[str, EvaluatorRecord] = Field({})
    tasks: tuple[TaskRecord, ...] = ()
    environment: dict[str, Any] = Field({})
