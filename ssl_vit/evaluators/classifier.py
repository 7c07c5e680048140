"""Classifiers trained by gradient descent inside an evaluation: what fine-tuning and the LARS probe share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator
from scipy.special import softmax
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from ssl_vit import stage
from ssl_vit.data import AugmentConfig, DataConfig
from ssl_vit.evaluators import UNUSED, several
from ssl_vit.evaluators.base import Classifier, Evaluator, Scored, SweepConfig, not_given
from ssl_vit.evaluators.features import ImageSet, extract
from ssl_vit.interfaces import Diverged, UserError
from ssl_vit.models import EncoderConfig
from ssl_vit.models.encoder import Encoder
from ssl_vit.objectives import classification
from ssl_vit.overrides import LENGTHS
from ssl_vit.recipe import Recipe, flatten
from ssl_vit.records import Cost
from ssl_vit.results import Prediction, Settings
from ssl_vit.training import OptimConfig, TrainingConfig, loop
from ssl_vit.training.flops import training_flops
from ssl_vit.training.signals import stopped

_LOG_EVERY = 500  # steps; until then each keeps its metrics on the device and its samples' names


class TrainedConfig(SweepConfig):
    """A training inside an evaluation. Nothing of it is kept on disk; its precision is that of the encoder's recipe.

    optim: as in a training recipe. Warmup is at most a fifth of the training.
    training: as in a training recipe. The precision is that of the encoder's recipe; `precision`, `timeout`,
        `trackers`, `log_every`, `checkpoint_every`, `picture_every` and `keep_last` cannot be set here.
    head: the objective `classification`.
    warmup_epochs: warmup in passes over the labeled images, in place of `optim.warmup_steps`.
    extra_steps: steps beyond `training`; a comparison sets them for an arm with another arm's compute (`compute_of`).
    augment: as `data.augment`.
    lanes: as `data.lanes`.
    """

    CHOICE: ClassVar[str]
    """The key that chooses the defaults of the others."""
    DEFAULTS: ClassVar[dict[str, dict[str, Any]]]
    """By its value, the first one's where it is not given."""

    optim: OptimConfig
    training: TrainingConfig
    head: classification.Config
    warmup_epochs: float | None = Field(None, ge=0)
    extra_steps: int = Field(0, ge=0)
    augment: AugmentConfig = AugmentConfig()
    lanes: int = Field(8, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _merge_defaults(cls, given: Any) -> Any:
        """The given values on top of the chosen defaults, section by section, except `sweep`, which is one value."""
        if not isinstance(given, dict):
            return given
        choice = given.get(cls.CHOICE, next(iter(cls.DEFAULTS)))
        if str(choice) not in cls.DEFAULTS:
            raise ValueError(f"{cls.CHOICE}={choice}: choose one of {', '.join(cls.DEFAULTS)}")
        chosen = cls.DEFAULTS[str(choice)]
        merged = dict(chosen) | given
        for key in set(chosen).intersection(given) - {"sweep"}:
            if isinstance(chosen[key], dict) and isinstance(given[key], dict):
                merged[key] = chosen[key] | given[key]
        if "sweep" not in given:
            merged["sweep"] = not_given(chosen.get("sweep", {}), given)
        if "warmup_epochs" not in given and isinstance(optim := given.get("optim"), dict) and "warmup_steps" in optim:
            merged["warmup_epochs"] = None
        training = given.get("training")
        lengths = {k: v for k, v in training.items() if k in LENGTHS and v} if isinstance(training, dict) else {}
        for key, values in flatten(merged.get("sweep") or {}).items():
            numbers = [value for value in several(values) if isinstance(value, int | float)]
            if key in ("training.steps", "training.epochs") and numbers:
                lengths = {key.removeprefix("training."): max(numbers)}
        if lengths and isinstance(merged["training"], dict):  # they replace the other way of counting the length
            merged["training"] = {k: v for k, v in merged["training"].items() if k not in LENGTHS} | lengths
        return merged

    @model_validator(mode="after")
    def _check_sweep(self) -> Self:
        """The defaults were filled in before: a swept choice would change no other key than itself."""
        if self.CHOICE in self.sweep:
            raise ValueError(f"sweep.{self.CHOICE}: it sets defaults of other keys, which a sweep does not; remove it")
        if {"warmup_epochs", "optim.warmup_steps"} <= self.sweep.keys():
            raise ValueError("sweep.warmup_epochs: optim.warmup_steps replaces it; sweep one of them")
        return self

    @field_validator("training")
    @classmethod
    def _check_training(cls, training: TrainingConfig) -> TrainingConfig:
        if training.precision != "fp32":
            raise ValueError("precision: it is that of the evaluated encoder's recipe; remove it")
        for key in UNUSED:
            if getattr(training, key) != TrainingConfig.model_fields[key].get_default(call_default_factory=True):
                raise ValueError(f"{key} has no effect in an evaluation; remove it")
        return training

    def with_settings(self, settings: Settings) -> Self:
        """Warmup steps among the settings replace `warmup_epochs`."""
        own = self.model_copy(update={"warmup_epochs": None}) if "optim.warmup_steps" in settings else self
        return super(TrainedConfig, own).with_settings(settings)

    def recipe(
        self, name: str, data: DataConfig, encoder: EncoderConfig, images: int, seed: int, batch_size: int
    ) -> Recipe:
        """The training on this number of labeled images, as a recipe."""
        if batch_size % self.lanes:
            raise UserError(f"training.batch_size={batch_size} is not a multiple of lanes={self.lanes}; change either")
        training = self.training.model_copy(update={"batch_size": batch_size})
        steps = training.total_steps(images) + self.extra_steps
        epochs = self.warmup_epochs
        warmup = self.optim.warmup_steps if epochs is None else round(epochs * images / batch_size)
        schedule = {"steps": steps, "epochs": None, "log_every": _LOG_EVERY, "checkpoint_every": 0}
        return Recipe(
            name=name,
            seed=seed,
            data=data.model_copy(update={"augment": self.augment, "lanes": self.lanes, "samples": None, "views": 1}),
            encoder=encoder,
            objective=self.head,
            optim=self.optim.model_copy(update={"warmup_steps": min(warmup, steps // 5)}),
            training=training.model_copy(update=schedule),
        )


class _Steps(loop.Callback):
    """Shows how many steps are done."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.advance = advance

    def after_step(self, trainer: loop.Trainer) -> None:
        self.advance(1)


def fit(evaluator: Evaluator, images: ImageSet, encoder: Encoder, seed: int) -> Classifier:
    """Train `encoder` and a new head on labeled images as the evaluator's `stage` says. Raises Diverged, with its
    `cost`."""
    context, accelerator = images.context, images.context.accelerator
    assert images.images is not None
    sizes = EncoderConfig(image_size=encoder.image_size, channels=encoder.channels)
    recipe = evaluator.stage(context.data, sizes, len(images.images), seed)
    assert recipe is not None
    number = getattr(recipe.objective, "classes", None)
    if number and number < context.classes:
        raise UserError(f"head.classes={number}: the images have {context.classes} classes; remove it")
    workers = min(recipe.data.workers, recipe.data.lanes // accelerator.num_processes)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"workers": workers})})
    if recipe.data.lanes % accelerator.num_processes:
        raise UserError(f"lanes={recipe.data.lanes} must be a multiple of the {accelerator.num_processes} processes")
    job = stage.build(
        recipe,
        images.shards,
        accelerator,
        encoder=encoder,
        classes=context.classes,
        subset=images.images,
        quiet=True,
    )
    objective = job.objective
    assert isinstance(objective, classification.Objective)
    flops, start = training_flops(objective), time.perf_counter()  # a sharded network cannot be counted any more

    def cost_of(steps: int) -> Cost:
        seen, seconds = steps * recipe.training.batch_size, round(time.perf_counter() - start, 2)
        return Cost(images_seen=seen, flops=seen * flops, seconds=seconds)

    try:
        with context.progress("training", job.total_steps) as advance:
            job.callbacks = [*job.callbacks, _Steps(advance)]
            outcome = loop.train(job)
    except Diverged as error:
        error.cost = cost_of(error.steps)
        raise
    context.skipped += outcome.skipped
    if outcome.signal:
        raise stopped(outcome.signal)
    if isinstance(objective, FSDPModule):  # else only `forward` gathers the sharded parameters
        register_fsdp_forward_method(objective, "logits")
    cost, labels = cost_of(job.total_steps), max(len(images.images) - len(outcome.skipped), 0)

    def classify(others: ImageSet) -> list[Scored]:
        try:
            return [Scored(predict(objective, others), cost=cost, labels=labels)]
        except Diverged as error:  # the last step made the weights infinite
            error.cost = cost
            raise

    return classify


def predict(objective: classification.Objective, images: ImageSet) -> Prediction:
    """Predictions for labeled images, each once, the same on every process. Raises as `extract` does."""
    objective.eval()
    logits = extract(images, lambda batch: objective.logits(batch.images), objective.encoder.image_size, "logits")
    confidence = softmax(logits.vectors, axis=1).max(1)
    return Prediction(logits.images, logits.labels, logits.vectors.argmax(1), confidence)
