"""The training loop and what it needs. This module holds its configuration and does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ssl_vit.interfaces import Config
from ssl_vit.models import Pooling

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Config):
    """name: `adamw` (decoupled weight decay), `sgd` (momentum) or `lars`.

    lr: peak learning rate.
    lr_batch: batch size that `lr` is given for; it is scaled linearly to the actual one (MAE: 256; None: not scaled).
    betas: betas of adamw.
    momentum: momentum of sgd and lars.
    weight_decay: decoupled for adamw; never on biases, norms, class token, positions and mask token.
    layer_decay: factor of the learning rate from one layer of the encoder to the one below it (MAE: 0.65 for ViT-B,
        0.75 for L; None: the same learning rate for all layers).
    clip_norm: maximum global gradient norm (paper: 1); 0 disables clipping.
    warmup_steps: optimizer steps of linear warmup.
    schedule: learning rate after the warmup: `cosine` or `linear` to zero, or `constant`.
    """

    name: Literal["adamw", "sgd", "lars"] = "adamw"
    lr: float = Field(2e-4, gt=0)
    lr_batch: int | None = Field(None, ge=1, le=2**20)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    layer_decay: float | None = Field(None, gt=0, le=1)
    clip_norm: float = Field(1.0, ge=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(0, ge=0)


class TrainingConfig(Config):
    """How long, and in what portions.

    steps: length in optimizer steps; set either this or `epochs`.
    epochs: length in passes over the training images.
    batch_size: images in one optimizer step over all processes.
    accumulate: gradient accumulation: micro-batches per process and optimizer step. Batch norm, mixup and CutMix
        see one at a time.
    auto_batch: before the first step, raise `accumulate` until a micro-batch fits into the memory; `batch_size` stays
        the same.
    precision: `fp32`, `tf32` (float32 with matrix products in TensorFloat-32), `bf16`, `fp16` (with loss scaling), or
        `auto`: the faster of fp32 (GPUs: tf32) and bf16 in a short trial of this recipe on this device, without
        torch.compile; the run's recipe keeps the choice. Weights, color targets, norms and losses are float32 in any
        case.
    deterministic: use deterministic algorithms only, so that a GPU repeats a run bit for bit on the same hardware and
        number of processes (a CPU does so in any case); slower.
    compile: use torch.compile: faster on GPUs, after a minute or more before the first step. Of little use on CPUs.
        It needs a C compiler, and a model that is not sharded.
    checkpoint_activations: keep one block's activations at a time and compute them again in the backward pass: less
        memory, about a third more time, the same result.
    ema: EMA decay of the weights per step (0: none; 0.999 is common); the saved encoder then has the averaged
        weights. It starts lower, at (1 + step) / (10 + step). The statistics of batch norm are not averaged.
    timeout: seconds that a process waits for the others.
    trackers: Accelerate's trackers by name (`tensorboard`, `wandb`, `mlflow`, `clearml`, `trackio`, ...), each with its
        keyword arguments.
    log_every: steps between log lines.
    checkpoint_every: steps between checkpoints (0: only the last one).
    picture_every: steps between pictures of the predictions, and one at the end (0: none): PNG files in RUN/pictures,
        shown by trackers that take images, too.
    keep_last: newest checkpoints kept (one that was evaluated by its own path, RUN/checkpoints/STEP, stays too).
    """

    steps: int | None = Field(None, ge=1, le=10**10)
    epochs: float | None = Field(None, gt=0, le=10**6)
    batch_size: int = Field(256, ge=1, le=2**20)
    accumulate: int = Field(1, ge=1, le=2**20)
    auto_batch: bool = False
    precision: Precision = "fp32"
    deterministic: bool = False
    compile: bool = False
    checkpoint_activations: bool = False
    ema: float = Field(0.0, ge=0, lt=1)
    timeout: int = Field(600, ge=1, le=10**6)
    trackers: dict[str, dict[str, Any]] = Field({"tensorboard": {}})
    log_every: int = Field(50, ge=1)
    checkpoint_every: int = Field(1000, ge=0)
    picture_every: int = Field(0, ge=0)
    keep_last: int = Field(2, ge=1)

    @model_validator(mode="after")
    def _one_length(self) -> TrainingConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("set exactly one of steps and epochs")
        return self

    def total_steps(self, samples: int) -> int:
        """Optimizer steps of the whole run over a training set of `samples` images."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, -(-round(self.epochs * samples) // self.batch_size))


class ProbeConfig(Config):
    """A few-shot probe of the representation while a run trains; its accuracy goes to metrics.jsonl, the trackers and
    the display.

    every: steps between probes (and one at the end).
    data: labeled shards (None: the run's own training shards).
    labels_per_class: labeled images per class to fit to.
    images: maximum number of other images of these shards to score (at least one per class).
    pooling: as in the evaluator `few_shot`.
    l2: as in the evaluator `few_shot`.
    patience: probes in a row without a new best after which training ends (None: never). It looks at held-out training
        images, never at test; but such a run has used their labels, and its learning rate has not decayed.
    """

    every: int = Field(ge=1)
    data: str | None = None
    labels_per_class: int = Field(5, ge=1)
    images: int = Field(1000, ge=1)
    pooling: Pooling = "mean"
    l2: float = Field(2.0**10, gt=0)
    patience: int | None = Field(None, ge=1)
