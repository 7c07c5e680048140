"""Linear probe: the exact way (features once, multinomial logistic regression, C chosen on held-out train), or MAE's
(`main_linprobe.py`): a batch norm without parameters and a linear layer, trained by LARS on augmented images.

Both standardize the features, the exact way by the labeled images' own mean and variance.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from ssl_vit.data import AugmentConfig
from ssl_vit.evaluators import Numbers
from ssl_vit.evaluators.base import Choice, Judge, LabeledConfig, accuracy_name, score
from ssl_vit.evaluators.features import Features, Task
from ssl_vit.evaluators.labels import choose_labeled, held_out_split, short_note
from ssl_vit.evaluators.tuning import measurement, train_classifier
from ssl_vit.interfaces import Measurement, UserError
from ssl_vit.models.factory import at_size
from ssl_vit.objectives import classification
from ssl_vit.training import OptimConfig

_CS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)


class Config(LabeledConfig):
    """method: `exact`, or `lars` (MAE's; it reads `pooling` alone, and raw pixels get the exact method).

    Of `exact`: cs: inverse regularization strengths to choose from, by a `held_out` share of the labeled images;
    max_iterations: of L-BFGS.
    Of `lars`, all MAE's: lr for 256 images, scaled to the batch; batch_size images, or as many as there are labeled;
    epochs over the labeled images, the first `warmup_epochs` with a rising rate. lanes: see data.lanes.
    """

    method: Literal["exact", "lars"] = "exact"
    cs: Numbers = Field(_CS, min_length=1)
    held_out: float = Field(0.2, gt=0, lt=1)
    max_iterations: int = Field(1000, ge=1)
    lr: float = Field(0.1, gt=0)
    batch_size: int = Field(16384, ge=1)
    epochs: float = Field(90, gt=0)
    warmup_epochs: float = Field(10, ge=0)
    augment: AugmentConfig = AugmentConfig(scale=(0.08, 1.0))
    lanes: int = Field(8, ge=1)


class Fitted(NamedTuple):
    """predicted: int (m,), the classes of the test images. c: the C of the fit to all of train. converged: whether
    L-BFGS came to its end before `max_iterations` in it. chosen: whether held-out images chose C among several (None:
    there was one)."""

    predicted: np.ndarray
    c: float
    converged: bool
    chosen: bool | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        stopped = "the logistic regression stopped at max_iterations before it had converged"
        guess = f"no image could be held out to choose C by: {self.c:g}, the middle one, was taken"
        return (stopped,) * (not self.converged) + (guess,) * (self.chosen is False)


def probe_predictions(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    *,
    cs: Sequence[float],
    held_out: float = 0.2,
    seed: int = 0,
    max_iterations: int = 1000,
) -> Fitted:
    """C is chosen on a held-out part of train, then the fit uses all of train.

    features: float (n, d); labels: int (n,). Of equally good C the first counts. With so few labels that nothing can be
    held out (one image a class), the middle C is used.
    """

    def fitted(fit: np.ndarray, c: float, x: np.ndarray) -> Fitted:
        mean = train_features[fit].mean(0)
        scale = np.sqrt(train_features[fit].var(0) + 1e-6)
        model = LogisticRegression(C=c, max_iter=max_iterations)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # it is told in the result
            model.fit((train_features[fit] - mean) / scale, train_labels[fit])
        return Fitted(np.asarray(model.predict((x - mean) / scale)), c, int(np.max(model.n_iter_)) < max_iterations)

    kept, held = held_out_split(train_labels, held_out, seed)
    best, chosen = sorted(cs)[len(cs) // 2], len(held) > 0 if len(cs) > 1 else None
    if chosen:
        right = [float((fitted(kept, c, train_features[held]).predicted == train_labels[held]).mean()) for c in cs]
        best = cs[int(np.argmax(right))]
    return fitted(np.arange(len(train_labels)), best, test_features)._replace(chosen=chosen)


def probe_accuracy(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    **settings: Any,
) -> tuple[float, float]:
    """(test accuracy 0..1, chosen C); settings as in `probe_predictions`."""
    found = probe_predictions(train_features, train_labels, test_features, **settings)
    return float((found.predicted == test_labels).mean()), found.c


def measured(
    task: Task, fitted: Fitted, train: Features, test: Features, budget: int | str, seed: int, *notes: str
) -> Measurement:
    """A fit's score on test, with what a reader must know of it."""
    return Measurement(
        name=accuracy_name(budget),
        labels_per_class=budget,
        labels=len(train.labels),
        seed=seed,
        chosen={"C": fitted.c} if fitted.chosen else {},
        notes=(*notes, *fitted.notes, *short_note(train.labels, budget, task.train_labels)),
        **score(fitted.predicted, test.labels, task.classes),
    )


class Evaluator(Judge):
    """Accuracy at every label budget and seed, with the chosen C."""

    title = "Linear probe on frozen features"

    def measure(
        self,
        task: Task,
        source: str,
        budgets: Sequence[int | str],
        seeds: Sequence[int],
        choice: Choice | None = None,
    ) -> Iterator[Measurement]:
        if self.config.method == "lars" and source != "pixels":
            yield from (self._lars(task, source, budget, seed) for budget in budgets for seed in seeds)
            return
        c: Config = self.config
        settings: dict[str, Any] = {"cs": c.cs, "held_out": c.held_out, "max_iterations": c.max_iterations}
        test = task.features(source, "test", c.representation)
        for (budget, seed), train in task.labeled_features(source, c.representation, budgets, seeds):
            fitted = probe_predictions(train.vectors, train.labels, test.vectors, seed=seed, **settings)
            yield measured(task, fitted, train, test, budget, seed)

    def _lars(self, task: Task, source: str, budget: int | str, seed: int) -> Measurement:
        c: Config = self.config
        if c.pooling == "both" or c.block is not None:
            raise UserError("linear_probe: method=lars reads the model's output pooled as token, mean or patches")
        images = choose_labeled(task.train_labels, budget, seed)
        batch_size = min(c.batch_size, len(images)) // c.lanes * c.lanes
        if not batch_size:
            raise UserError(f"linear_probe: {len(images)} labeled images are fewer than lanes={c.lanes}: lower lanes")
        an_epoch = len(images) / batch_size
        optim = OptimConfig(
            name="lars",
            lr=c.lr,
            lr_batch=256,
            clip_norm=0,
            warmup_steps=min(round(c.warmup_epochs * an_epoch), math.ceil(c.epochs * an_epoch) // 5),
        )
        objective, cost = train_classifier(
            task,
            at_size(getattr(task, source), c.image_size or task.trained.image_size, c.position_resampling),
            classification.Config(head="probe", pooling=c.pooling),
            optim,
            name=f"linear probe of {source}",
            steps=math.ceil(c.epochs * an_epoch),
            batch_size=batch_size,
            augment=c.augment,
            lanes=c.lanes,
            images=images,
            seed=seed,
        )
        return measurement(task, objective, cost, budget, seed, images)
