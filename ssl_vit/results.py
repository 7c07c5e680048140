"""Results: one typed row per measured accuracy, the prediction for every test image beside it, and one table of both.

A file of results is `NAME.json` (rows and what they depend on) and `NAME.CHECKSUM.npz` (predictions). `Table` puts
rows together as a pandas DataFrame; `compare`, `eval`, the report and every statistic read that table. Torch-free.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter

from ssl_vit import records
from ssl_vit.files import atomic_file, read_arrays, read_json, sha256, weights_file, write_json
from ssl_vit.interfaces import UserError
from ssl_vit.records import Cost, EvaluationRecord, TaskResult

Settings = dict[str, bool | float | int | str | None]  # values by dotted key, such as {"optim.lr": 0.003}

FORMAT = 1
RESULTS = "results"  # the folder beside weights with what evaluators measured of them
KEY = ("data", "fold", "evaluator", "variant", "arm", "labels_per_class", "pretraining_seed", "seed")
"""The columns that tell any two rows of a table apart."""


def class_name(names: Sequence[str] | None, label: int) -> str:
    """The name of a class, else its number."""
    return names[label] if names and 0 <= label < len(names) else str(label)


@dataclass(frozen=True)
class Prediction:
    """Predictions of one classifier for the test images.

    images: int64 (M,), global indices of the test images, ascending.
    labels: int64 (M,), their classes.
    predicted: int64 (M,), the predicted classes.
    confidence: float32 (M,), the probabilities of the predicted classes, 0..1; None for a head without probabilities.
    """

    images: np.ndarray
    labels: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray | None = None

    @property
    def is_valid(self) -> bool:
        """Whether there is one class number per image, images ascending, and one confidence where there are any."""
        classes = [images := self.images, self.labels, self.predicted]
        shares = [] if self.confidence is None else [self.confidence]
        fit = all(one.ndim == 1 and one.shape == self.labels.shape for one in classes + shares)
        whole = all(one.dtype.kind in "iu" and one.min(initial=0) >= 0 for one in classes)
        return fit and whole and bool((images[1:] > images[:-1]).all()) and all(one.dtype.kind == "f" for one in shares)

    @property
    def correct(self) -> np.ndarray:
        """bool (M,)"""
        return np.asarray(self.predicted == self.labels)


@dataclass(frozen=True)
class Result:
    """One measured accuracy.

    data: name of the dataset.
    evaluator: its name, such as `few_shot`.
    arm: the arm of a comparison; for a single run `trained`, `untrained` or `pixels`.
    labels_per_class: the label budget.
    seed: seed that draws the labeled images, the head and the data order.
    pretraining_seed: seed of the pretraining (or initialization) that was evaluated.
    variant: tells rows of one evaluator apart that share all of the above, such as `k=20`; "" for the only one.
    primary: whether a comparison counts this row (one variant per evaluator).
    fold: in a cross-validation, the fold that was tested.
    labels: how many labeled images the budget came to.
    accuracy: share of correct predictions, 0..1.
    mean_per_class: mean of the per-class accuracies, 0..1.
    images_seen, flops, seconds: spent on training for this row (0: nothing was trained by gradient descent).
    selected: values of the sweep, selected on held-out training images (a note says where none could be held out).
    notes: what a reader must know about this number.
    prediction: for every test image.
    """

    data: str
    evaluator: str
    arm: str
    labels_per_class: PositiveInt | str
    seed: int
    pretraining_seed: int
    labels: int
    accuracy: float
    mean_per_class: float
    prediction: Prediction = field(repr=False, compare=False)
    variant: str = ""
    primary: bool = True
    fold: int = 0
    images_seen: NonNegativeInt = 0
    flops: NonNegativeFloat = 0.0
    seconds: NonNegativeFloat = 0.0
    selected: Settings = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)

    @property
    def cost(self) -> Cost:
        return Cost(images_seen=self.images_seen, flops=self.flops, seconds=self.seconds)


_ROW = TypeAdapter(Result)
COLUMNS = tuple(f.name for f in fields(Result) if f.name != "prediction")


def scored(prediction: Prediction, classes: np.ndarray | None = None) -> dict[str, float]:
    """`accuracy` and `mean_per_class` of a prediction, for `Result`; the classes are those of its labels, or `classes`,
    int (n,). Classes without a test image do not count."""
    _, index = np.unique(prediction.labels if classes is None else classes, return_inverse=True)
    by_class = np.bincount(index, weights=prediction.correct) / np.bincount(index)
    return {"accuracy": float(prediction.correct.mean()), "mean_per_class": float(by_class.mean())}


def save(path: Path, results: Sequence[Result], **about: Any) -> None:
    """Write `path` (.json) and its .npz; an earlier pair of the same name is replaced. A kill leaves either pair whole.

    results: rows.
    about: what else the JSON holds, such as `settings`; plain JSON values. `saved`, the time, is added (UTC, ISO 8601).
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
    digest = ""
    if rows:
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **arrays)
        digest = hashlib.sha256(content.getvalue()).hexdigest()
        with atomic_file(_arrays(path, digest)) as file:
            file.write(content.getvalue())
    saved = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(path, {"format": FORMAT, **about, "saved": saved, "predictions": digest, "rows": rows})
    arrays_of_path = re.compile(re.escape(path.stem) + r"\.[0-9a-f]{12}\.npz")
    for other in path.parent.glob("*.npz"):
        if arrays_of_path.fullmatch(other.name) and other != _arrays(path, digest):
            other.unlink(missing_ok=True)


def _arrays(path: Path, digest: str) -> Path:
    """The predictions that belong to a JSON file. digest: their sha256, which the JSON holds."""
    return path.with_name(f"{path.stem}.{digest[:12]}.npz")


def load(path: Path) -> tuple[list[Result], dict[str, Any]]:
    """(results, everything else that the JSON holds). Raises UserError for a damaged or incomplete pair."""
    about = read_json(path)
    rows, digest = about.pop("rows", []), about.pop("predictions", "")
    try:
        if about.pop("format") != FORMAT:
            raise ValueError("written by another version")
        if not rows:
            return [], about
        file = _arrays(path, digest)
        if sha256(file) != digest:
            raise ValueError("the .npz beside it does not belong to it")
        arrays = read_arrays(file)
        shared = {name: arrays[f"0/{name}"] for name in ("images", "labels")}
        names, results = [f.name for f in fields(Prediction)], list[Result]()
        for number, row in enumerate(rows):
            own = {name: arrays[f"{number}/{name}"] for name in names if f"{number}/{name}" in arrays}
            results.append(_ROW.validate_python(row | {"prediction": Prediction(**shared | own)}))
        if not all(len(row.prediction.labels) and row.prediction.is_valid for row in results):
            raise ValueError("predictions do not fit the images")
        if not all(abs(row.accuracy - row.prediction.correct.mean()) < 1e-9 for row in results):
            raise ValueError("accuracies are not those of the predictions")
        return results, about
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: results cannot be read ({reason}); delete it and run the command again") from None


def finished(path: Path, fingerprint: str) -> tuple[list[Result], TaskResult] | None:
    """(rows, record) of a task; None where its file is missing, damaged or has another fingerprint."""
    with suppress(UserError, FileNotFoundError):
        rows, about = load(path)
        done = records.read(path, TaskResult, about)
        return (rows, done) if done.fingerprint == fingerprint else None
    return None


@dataclass(frozen=True)
class Evaluation:
    """The results of one run of an evaluator.

    path: the file (None: nothing is stored about a network in memory).
    """

    path: Path | None
    results: list[Result]
    about: EvaluationRecord

    @property
    def table(self) -> pd.DataFrame:
        """A row per result with a column per field of `Result`, and the evaluator's settings as JSON."""
        return Table(self.results).frame.assign(settings=json.dumps(self.about.settings))

    def _repr_html_(self) -> str:  # in a notebook
        return str(self.table[["evaluator", "arm", "labels_per_class", "seed", self.about.metric]].to_html())


def evaluations(folder: Path) -> tuple[dict[Path, Evaluation], list[Path]]:
    """Read the evaluations in a run, checkpoint or weights folder.

    Returns (evaluations of the current weights by file, files with results of other weights). Raises UserError for a
    damaged file, or one of the current weights that another version wrote.
    """
    digest = sha256(newest) if (newest := weights_file(folder)) else None
    current, outdated = dict[Path, Evaluation](), list[Path]()
    for path in sorted(filter(Path.is_file, (folder / RESULTS).glob("*.json"))):
        if digest and read_json(path).get("sha256", digest) != digest:
            outdated.append(path)
        else:
            rows, about = load(path)
            current[path] = Evaluation(path, rows, records.read(path, EvaluationRecord, about))
    return current, outdated


class Table:
    """Results as one DataFrame with a column per field of `Result`; those of its row n are `results[n]`."""

    def __init__(self, results: Sequence[Result], files: Sequence[Path] = ()) -> None:
        """results: of two with the same KEY the later one counts. files: where each of them was read, if known."""
        last = {tuple(getattr(result, name) for name in KEY): number for number, result in enumerate(results)}
        self.results = [results[number] for number in last.values()]
        self.files = [files[number] for number in last.values()] if files else []
        self.frame = pd.DataFrame([{n: getattr(r, n) for n in COLUMNS} for r in self.results], columns=list(COLUMNS))

    def join_folds(self, samples: Sequence[int]) -> Table:
        """One row for the folds of a cross-validation, with the predictions of all of them; its image indices count
        through the folds' test images in order. Rows with a missing fold are excluded.

        samples: test images of each fold.
        """
        rows: dict[tuple[Any, ...], list[Result]] = {}
        for result in sorted(self.results, key=lambda row: row.fold):
            rows.setdefault(tuple(getattr(result, name) for name in KEY if name != "fold"), []).append(result)
        first = np.cumsum([0, *samples])
        return Table([_joined(folds, first) for folds in rows.values() if len(folds) == len(samples)])

    def images(self, rows: Sequence[int]) -> np.ndarray:
        """The test images that all of these rows have: int64 (M,), global indices, ascending."""
        first, *others = (self.results[row].prediction.images for row in rows)
        for images in others:
            if not np.array_equal(first, images):
                first = np.intersect1d(first, images, assume_unique=True)
        return first

    def cells(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(classes of the M test images that all of these rows have, int64 (M,); whether each was classified correctly,
        bool (S, M)). rows: S indices in `frame`."""
        predictions, images = [self.results[row].prediction for row in rows], self.images(rows)
        indices = [
            slice(None) if np.array_equal(prediction.images, images) else np.searchsorted(prediction.images, images)
            for prediction in predictions
        ]
        correct = [prediction.correct[index] for prediction, index in zip(predictions, indices, strict=True)]
        return predictions[0].labels[indices[0]], np.stack(correct)


def _joined(folds: Sequence[Result], first: np.ndarray) -> Result:
    """One row for all folds: costs are summed. first: number of test images before each fold."""
    predictions = [replace(row.prediction, images=row.prediction.images + first[row.fold]) for row in folds]
    arrays = {name: [getattr(prediction, name) for prediction in predictions] for name in vars(predictions[0])}
    whole = Prediction(**{k: None if v[0] is None else np.concatenate(v) for k, v in arrays.items()})  # type: ignore[arg-type]
    shared = set.intersection(*({*row.selected.items()} for row in folds))
    return replace(
        folds[0],
        prediction=whole,
        labels=round(fmean(row.labels for row in folds)),
        **vars(sum((row.cost for row in folds), Cost())),
        selected=dict(shared),
        notes=tuple(dict.fromkeys(note for row in folds for note in row.notes)),
        **scored(whole),  # type: ignore[arg-type]
    )
