"""Few-shot linear evaluation: the closed-form ridge protocol of the paper's authors (big_vision, `fewshot_lsr`)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from pydantic import Field
from threadpoolctl import threadpool_limits

from ssl_vit.evaluators import Budgets, Seeds
from ssl_vit.evaluators.base import Classifier, LabeledConfig, Scored, SweepConfig
from ssl_vit.evaluators.base import Evaluator as BaseEvaluator
from ssl_vit.evaluators.features import FeatureConfig, ImageSet
from ssl_vit.evaluators.labels import choose_labeled, short_classes
from ssl_vit.results import Prediction

_BIAS = 100.0  # the constant feature; regularized like the rest, so its size sets how free the bias is
_SCORES = 1 << 22  # scores computed at once by a thread: 32 MiB


class Config(FeatureConfig, LabeledConfig, SweepConfig):
    """l2: penalty of the ridge regression (published protocol: 2**10). `sweep={l2: [...]}` selects one on held-out
    labeled images."""

    labels_per_class: Budgets = (1, 5, 10, 25)
    seeds: Seeds = (0, 1, 2)
    l2: float = Field(2.0**10, gt=0)


class Evaluator(BaseEvaluator):
    """Ridge regression, which has no probabilities."""

    title = "Few-shot linear classifier on frozen features"

    def fit(self, train: ImageSet, seed: int) -> Classifier:
        c: Config = self.config
        features = train.features(c)
        ridge = Ridge(features.vectors, features.labels)

        def classify(images: ImageSet) -> list[Scored]:
            test = images.features(c)
            predicted = ridge.predict(test.vectors, c.l2)
            return [Scored(Prediction(test.images, test.labels, predicted), labels=len(features.labels))]

        return classify


class Ridge:
    """Ridge regression on one-hot +1/-1 targets, for any l2 from one eigendecomposition.

    Features are standardized by the training images' own mean and population standard deviation (+ 1e-5); a constant
    feature of 100 carries the bias and is regularized like the rest. Solved in float64 by one thread, so that the same
    arrays give the same bits on any number of cores.

    With x the standardized features (n, d), the weights argmin_w |x w - y|^2 + l2 |w|^2 are `basis @ (targets /
    (eigenvalues + l2))`. The smaller of the two Gram matrices is decomposed: `basis` is (d, min(n, d)).
    """

    @threadpool_limits.wrap(limits=1, user_api="blas")
    def __init__(self, features: np.ndarray, labels: np.ndarray) -> None:
        """features: float (n, d). labels: int (n,)."""
        order = np.argsort(labels, kind="stable")
        x = features[order].astype(np.float64)
        self.mean, self.deviation = x.mean(0), x.std(0) + 1e-5
        x = np.concatenate([(x - self.mean) / self.deviation, np.full((len(x), 1), _BIAS)], axis=1)
        self.classes, first = np.unique(labels[order], return_index=True)
        tall = len(x) >= x.shape[1]
        eigenvalues, vectors = np.linalg.eigh(x.T @ x if tall else x @ x.T)
        self.eigenvalues = np.maximum(eigenvalues, 0)
        self.basis = vectors if tall else x.T @ vectors
        sums = np.add.reduceat(x if tall else vectors, first, axis=0).T  # per class
        targets = 2 * sums - sums.sum(1, keepdims=True)
        self.targets = vectors.T @ targets if tall else targets

    @threadpool_limits.wrap(limits=1, user_api="blas")
    def predict(self, features: np.ndarray, l2: float) -> np.ndarray:
        """The predicted classes, int64 (m,). features: float (m, d)."""
        basis, bias = self.basis[:-1] / self.deviation[:, None], _BIAS * self.basis[-1]
        weights = self.targets / (self.eigenvalues + l2)[:, None]
        predicted = np.empty(len(features), dtype=np.int64)
        rows = max(1, _SCORES // max(basis.shape[1], len(self.classes)))
        for start in range(0, len(features), rows):
            block = slice(start, start + rows)
            projected = (features[block] - self.mean) @ basis + bias
            predicted[block] = self.classes[(projected @ weights).argmax(1)]
        return predicted


def few_shot_accuracy(
    train_features: np.ndarray | Sequence[np.ndarray],
    train_labels: np.ndarray,
    test_features: np.ndarray | Sequence[np.ndarray],
    test_labels: np.ndarray,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: Sequence[int] = (0, 1, 2),
    l2: float = 2.0**10,
) -> dict[tuple[int, int], float]:
    """{(shots, seed): test accuracy, 0..1}; see `Ridge`.

    features: float (n, d), or n vectors such as the column `embedding` of `ssl_vit.embed`.
    labels: int (n,); training images with a negative label are not used.
    Warns about classes with fewer images than shots. Raises ValueError for arrays that do not fit together, features
    that are not finite, labels that are not one integer per image, shots below 1, an `l2` that is not positive, and
    images without a label where they need one.
    """
    train_features, test_features = (
        features if isinstance(features, np.ndarray) and features.ndim == 2 else np.stack([*features])
        for features in (train_features, test_features)
    )
    train_labels, test_labels = np.asarray(train_labels), np.asarray(test_labels)
    if len(train_features) != len(train_labels) or len(test_features) != len(test_labels) or not len(test_labels):
        raise ValueError("features and labels must have equal, non-zero lengths")
    if train_features.ndim != 2 or train_features.shape[1:] != test_features.shape[1:]:
        raise ValueError(f"train features {train_features.shape} and test features {test_features.shape} do not fit")
    if not np.isfinite(train_features).all() or not np.isfinite(test_features).all():
        raise ValueError("features must be finite")
    if any(labels.dtype.kind not in "iu" or labels.ndim != 1 for labels in (train_labels, test_labels)):
        raise ValueError("labels must be integers, one per image: an array of one dimension")
    if (test_labels < 0).any():
        raise ValueError("labels of test images must be 0 or larger")
    if not len(shots) or any(shot < 1 or shot != int(shot) for shot in shots):
        raise ValueError(f"shots must be integers of 1 or larger, got {list(shots)}")
    if not 0 < l2 < np.inf:
        raise ValueError(f"l2 must be larger than 0 and finite, got {l2}")
    if not (train_labels >= 0).any():
        raise ValueError("no training image has a label")
    short = short_classes(train_labels, max(shots), train_labels)
    if short:
        warnings.warn(
            f"{len(short)} class(es) have fewer than {max(shots)} images; all are used: {short[:10]}",
            stacklevel=2,
        )
    pairs = [(int(shot), int(seed)) for shot in shots for seed in seeds]  # of an array, too
    chosen = {(shot, seed): choose_labeled(train_labels, shot, seed) for shot, seed in pairs}

    def accuracy(images: np.ndarray) -> float:
        predicted = Ridge(train_features[images], train_labels[images]).predict(test_features, l2)
        return float((predicted == test_labels).mean())

    # The limit around the pool stays while any thread works: BLAS has one setting for the whole process.
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return dict(zip(chosen, pool.map(accuracy, chosen.values()), strict=True))
