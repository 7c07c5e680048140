"""Linear probe: the exact way (features once, multinomial logistic regression, C selected on held-out train), or MAE's
(`main_linprobe.py`): a batch norm without parameters and a linear layer, trained by LARS on augmented images.

Both standardize the features, the exact way by the labeled images' own mean and variance.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from ssl_vit.data import DataConfig
from ssl_vit.evaluators.base import Classifier, LabeledConfig, Scored
from ssl_vit.evaluators.base import Evaluator as BaseEvaluator
from ssl_vit.evaluators.classifier import TrainedConfig, fit
from ssl_vit.evaluators.features import FeatureConfig, Features, ImageSet
from ssl_vit.interfaces import UserError
from ssl_vit.models import EncoderConfig
from ssl_vit.models.factory import at_size
from ssl_vit.objectives import classification
from ssl_vit.recipe import Recipe
from ssl_vit.results import Prediction

_TOLERANCE = 1e-6  # of the gradient; scikit-learn's default of 1e-4 stops where predictions still change


class Config(FeatureConfig, LabeledConfig, TrainedConfig):
    """method: `exact`: logistic regression on frozen features, on the CPU; the sweep selects `c`. It is slow for
        hundreds of thousands of images. `lars`: MAE's linear probe, trained with LARS on augmented images, also on a
        GPU, without a sweep by default. Only `lars` takes `optim`, `training`, `head`, `augment`, `warmup_epochs` and
        `lanes`; it does not support `block`, `pooling=both` or raw pixels. With it, set `pooling` (MAE: token), not
        `head.pooling`; the batch size is at most the number of labeled images. Its batch norm sees the images of one
        process, so results depend on the number of processes.

    held_out: fraction of the labeled images that the sweep is scored on.
    c: inverse regularization strength of `exact`.
    max_iterations: maximum number of L-BFGS iterations (`exact`).
    """

    CHOICE: ClassVar[str] = "method"
    UNUSED: ClassVar[dict[str, tuple[str, ...]]] = {
        "exact": ("optim", "training", "head", "augment", "warmup_epochs", "lanes"),
        "lars": ("c", "max_iterations"),
    }
    DEFAULTS: ClassVar[dict[str, dict[str, Any]]] = {
        method: {
            "sweep": sweep,
            "optim": {"name": "lars", "lr": 0.1, "lr_batch": 256, "clip_norm": 0},
            "training": {"epochs": 90, "batch_size": 16384, "auto_batch": True},
            "warmup_epochs": 10,
            "head": {"head": "probe"},
            "augment": {"scale": (0.08, 1.0)},
        }
        for method, sweep in (("exact", {"c": (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)}), ("lars", {}))
    }

    method: Literal["exact", "lars"] = "exact"
    c: float = Field(1.0, gt=0)
    max_iterations: int = Field(1000, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _check_given(cls, given: Any) -> Any:
        if isinstance(given, dict):
            saved = cls.model_fields.keys() <= given.keys()  # has all keys, used or not
            unused = cls.UNUSED["exact"] if given.get("method", "exact") == "exact" and not saved else ()
            if key := next((key for key in unused if key in given), None):
                raise ValueError(f"{key}: only method=lars trains by gradient descent; set it or remove the key")
            if "pooling" not in given and isinstance(head := given.get("head"), dict) and "pooling" in head:
                raise ValueError(f"head.pooling={head['pooling']}: set pooling={head['pooling']} instead")
        return given

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        swept = [key for key in self.sweep if key.partition(".")[0] in self.UNUSED[self.method]]
        fixed = [key for key in self.UNUSED["lars"] if getattr(self, key) != type(self).model_fields[key].default]
        if unused := [*(f"sweep.{key}" for key in swept), *(fixed if self.method == "lars" else ())]:
            raise ValueError(f"{unused[0]}: method={self.method} does not use it; remove it or change the method")
        if self.method == "lars" and (self.pooling == "both" or self.block is not None):
            raise ValueError("method=lars reads the model's output pooled as token, mean or patches")
        if self.head.pooling not in (classification.Config().pooling, self.pooling):
            raise ValueError(f"head.pooling={self.head.pooling}: set pooling={self.head.pooling} instead")
        if self.head.head != "probe":
            raise ValueError(f"head.head={self.head.head}: it would train the encoder too; use fine_tune")
        return self


class Evaluator(BaseEvaluator):
    """One classifier for every label budget and seed."""

    title = "Linear probe on frozen features"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.method == "lars":
            self.references = ("untrained",)

    def fit(self, images: ImageSet, seed: int) -> Classifier:
        c, context = self.config, images.context
        if c.method == "exact":
            return logistic_regression(images.features(c), c)
        encoder = context.untrained if images.source == "untrained" else context.trained
        return fit(self, images, at_size(encoder, c.image_size or encoder.image_size, c.position_resampling), seed)

    def stage(self, data: DataConfig, encoder: EncoderConfig, images: int, seed: int) -> Recipe | None:
        c: Config = self.config
        if c.method == "exact":
            return None
        batch_size = min(c.training.batch_size, images) // c.lanes * c.lanes
        if not batch_size:
            raise UserError(f"linear_probe: {images} labeled images are fewer than lanes={c.lanes}: lower lanes")
        head = c.head.model_copy(update={"pooling": c.pooling})
        sizes = encoder.model_copy(update={"image_size": c.image_size} if c.image_size else {})
        return c.model_copy(update={"head": head}).recipe("linear_probe", data, sizes, images, seed, batch_size)


def logistic_regression(features: Features, c: Config) -> Classifier:
    """Multinomial logistic regression on features standardized as MAE's batch norm does (variance + 1e-6)."""
    if len(np.unique(features.labels)) < 2:
        raise UserError("linear_probe: the readable labeled images are all of one class; it needs two")
    mean, scale = features.vectors.mean(0), np.sqrt(features.vectors.var(0) + 1e-6)
    model = LogisticRegression(C=c.c, max_iter=c.max_iterations, tol=_TOLERANCE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit((features.vectors - mean) / scale, features.labels)
    stopped = any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
    reached = " at max_iterations" if int(np.max(model.n_iter_)) >= c.max_iterations else ""
    notes = (f"the logistic regression stopped{reached} before it had converged",) if stopped else ()

    def classify(images: ImageSet) -> list[Scored]:
        test = images.features(c)
        x = (test.vectors - mean) / scale
        confidence = model.predict_proba(x).max(1).astype(np.float32)
        prediction = Prediction(test.images, test.labels, model.predict(x), confidence)
        return [Scored(prediction, notes=notes, labels=len(features.labels))]

    return classify
