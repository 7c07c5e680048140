"""Confusion matrices, accuracy per class and calibration at the largest label budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ssl_vit.interfaces import Budget
from ssl_vit.report.read import Comparison
from ssl_vit.report.statistics import Estimate, crossed_mean
from ssl_vit.report.summary import EvaluationKey, rows_by_place
from ssl_vit.results import Prediction

_MOST = 1000  # classes in a confusion matrix: with ImageNet-21k's it would take gigabytes
BINS = 15  # of Guo et al. 2017 (arXiv 1706.04599)


@dataclass(frozen=True)
class Calibration:
    """Calibration of the probability of the predicted class, over all seeds.

    confidence, accuracy: mean probability and share of correct predictions in each bin that is not empty, float64 (B,).
    share: share of all predictions in each of these bins, float64 (B,).
    error: expected calibration error, the mean over seeds, 0..1.
    """

    confidence: np.ndarray
    accuracy: np.ndarray
    share: np.ndarray
    error: float


@dataclass(frozen=True)
class Classes:
    """Statistics by class of one dataset under one evaluator, at its largest label budget.

    names: (K,), of the classes of test images and predictions, in the order of their labels.
    images: int64 (K,), test images of each class.
    confusion: by arm, float64 (K, K): share of the images of a class (row) that was predicted as each class, over all
        seeds; a row without test images is nan. Empty for more than 1,000 classes.
    accuracies: by arm, one per class (None: it has no test image).
    calibration: by arm whose classifier gives probabilities.
    """

    budget: Budget
    names: tuple[str, ...]
    images: np.ndarray
    confusion: Mapping[str, np.ndarray]
    accuracies: Mapping[str, tuple[Estimate | None, ...]]
    calibration: Mapping[str, Calibration]


def classes(comparison: Comparison, place: EvaluationKey) -> Classes:
    """Statistics by class of one dataset under one evaluator. Raises KeyError where nothing was measured."""
    from sklearn.metrics import confusion_matrix  # takes a second to import

    table = comparison.table
    budget, arms = list(rows_by_place(comparison)[place].items())[-1]
    rows = {arm: [*arms[arm].values()] for arm in comparison.arms if arm in arms}
    predictions = {arm: [table.results[row].prediction for row in of_arm] for arm, of_arm in rows.items()}
    everything = [prediction for of_arm in predictions.values() for prediction in of_arm]
    labels = np.unique(
        np.concatenate([part for prediction in everything for part in (prediction.labels, prediction.predicted)])
    )
    of_images, _ = table.cells([row for of_arm in rows.values() for row in of_arm])
    confusion = {}
    for arm, of_arm in predictions.items() if len(labels) <= _MOST else ():
        true, predicted = (
            np.concatenate([getattr(prediction, name) for prediction in of_arm]) for name in ("labels", "predicted")
        )
        counts = confusion_matrix(true, predicted, labels=labels).astype(np.float64)
        totals = counts.sum(axis=1, keepdims=True)
        confusion[arm] = np.divide(counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)
    accuracies = {}
    for arm, indices in rows.items():
        own_labels, correct_SM = table.cells(indices)
        units = [pretraining_seed for pretraining_seed, _ in arms[arm]] if arm in comparison.record.encoders else None
        of_class = [correct_SM[:, own_labels == label] for label in labels]
        accuracies[arm] = tuple(
            crossed_mean(correct, pretrainings=units) if correct.shape[1] else None for correct in of_class
        )
    return Classes(
        budget=budget,
        names=tuple(comparison.class_name(place.data, label) for label in labels.tolist()),
        images=np.array([(of_images == label).sum() for label in labels]),
        confusion=confusion,
        accuracies=accuracies,
        calibration={arm: curve for arm, of_arm in predictions.items() if (curve := calibration(of_arm))},
    )


def calibration(predictions: Sequence[Prediction]) -> Calibration | None:
    """Calibration of the predictions of several seeds, in 15 bins of equal width; None without probabilities."""
    parts = [
        pd.DataFrame({"seed": seed, "confidence": p.confidence.astype(np.float64), "correct": p.correct})
        for seed, p in enumerate(predictions)
        if p.confidence is not None
    ]
    if len(parts) < len(predictions):
        return None
    frame = pd.concat(parts)
    frame["bin"] = np.ceil(frame["confidence"] * BINS).clip(1)
    bins = frame.groupby("bin")[["confidence", "correct"]].mean()
    each = frame.groupby(["seed", "bin"])[["confidence", "correct"]].agg(["mean", "size"])
    gaps = (each["confidence", "mean"] - each["correct", "mean"]).abs() * each["correct", "size"]
    errors = gaps.groupby("seed").sum() / frame.groupby("seed").size()
    share = frame.groupby("bin").size() / len(frame)
    confidence, accuracy = bins["confidence"].to_numpy(), bins["correct"].to_numpy()
    return Calibration(confidence, accuracy, share.to_numpy(), float(errors.mean()))
