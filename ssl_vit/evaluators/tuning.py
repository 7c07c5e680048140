"""Training a classifier on some of the images inside an evaluation, and scoring it: what fine-tuning and the streaming
linear probe share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from ssl_vit.data import AugmentConfig
from ssl_vit.data.evaluation import evaluation_batches
from ssl_vit.data.images import train_transform
from ssl_vit.data.samples import Preprocess
from ssl_vit.data.shards import ShardSet
from ssl_vit.data.stream import train_source
from ssl_vit.evaluators.base import accuracy_name, score
from ssl_vit.evaluators.features import Task, evaluation_stream, not_finite
from ssl_vit.evaluators.labels import short_note
from ssl_vit.interfaces import Diverged, Measurement, UserError
from ssl_vit.models import factory
from ssl_vit.objectives import classification
from ssl_vit.training import OptimConfig, TrainingConfig, distributed, loop
from ssl_vit.training.flops import training_flops

_LOG_EVERY = 500  # steps; until then each keeps its metrics on the device and its samples' names


@dataclass(frozen=True)
class Cost:
    """images_seen: samples drawn, repeats counted. flops: forward and backward. seconds: of training, on the wall."""

    images_seen: int
    flops: float
    seconds: float


def train_classifier(
    task: Task,
    encoder: factory.Encoder,
    head: classification.Config,
    optim: OptimConfig,
    *,
    name: str,
    steps: int,
    batch_size: int,
    augment: AugmentConfig,
    lanes: int,
    images: np.ndarray,
    seed: int,
) -> tuple[classification.Objective, Cost]:
    """Train `encoder` and a new head on the task's training images with these global indices, through the one loop.

    seed: of the head, of the order and augmentation of the images, and of dropout and mixup. Nothing is kept on disk.
    Raises Diverged, with its `cost`, when it does.
    """
    accelerator, classes = task.accelerator, task.classes
    set_seed(seed)
    objective = classification.Objective(encoder, head, classes)
    # Dropout and mixup are each process's own; what was trained or judged before in it changes nothing.
    set_seed(seed + 1 + accelerator.process_index)
    preprocess = Preprocess(
        train_transform(encoder.image_size, augment),
        encoder.channels,
        classes,
        flip=augment.flip,
        jitter=augment.jitter,
        seed=seed,
        needs_labels=True,
    )
    own_lanes, own_shards = (n // accelerator.num_processes for n in (lanes, len(task.train.urls)))
    data = task.data.model_copy(update={"lanes": lanes, "workers": min(task.workers, own_lanes, own_shards)})
    batches = train_source(
        task.train,
        preprocess,
        data,
        batch_size=batch_size,
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
        device=accelerator.device,
        keep=task.train.members_of(images),
    )
    job = loop.Job(
        name=name,
        objective=objective,
        batches=batches,
        lanes=lanes,
        total_steps=steps,
        training=TrainingConfig(steps=steps, batch_size=batch_size, log_every=_LOG_EVERY, checkpoint_every=0),
        optim=optim,
        accelerator=accelerator,
        quiet=True,
    )
    start, flops = time.perf_counter(), batch_size * training_flops(objective)

    def cost_of(taken: int) -> Cost:
        return Cost(taken * batch_size, taken * flops, round(time.perf_counter() - start, 2))

    scale = accelerator.scaler.state_dict() if accelerator.scaler else None
    try:
        task.skipped += loop.train(job).skipped
    except Diverged as error:
        error.cost = cost_of(error.steps)
        raise
    finally:
        accelerator.free_memory()
        if scale:  # the next training of this process starts from the same loss scale
            accelerator.scaler.load_state_dict(scale)
    return objective, cost_of(steps)


@torch.no_grad()
def predictions(
    task: Task, objective: classification.Objective, shards: ShardSet, indices: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(predicted classes, labels), int64 (n,), of all labeled images of the shards (or some global indices of them),
    each once, the same on every rank. Raises UserError where there is none, Diverged for logits that are not finite."""
    objective.eval()
    found: list[tuple[list[int], list[int], list[int]]] = []
    stream = evaluation_stream(task, shards, indices, objective.encoder.image_size)
    for batch, chunk in evaluation_batches(stream, task.accelerator.device):
        task.skipped += chunk.skipped
        with task.accelerator.autocast():
            logits = objective.logits(batch.images).cpu()
        valid = batch.valid.cpu()  # chosen on the host: on XLA, each number of them would be a program of its own
        bad = batch.indices.cpu()[valid & ~logits.isfinite().all(-1)]
        found.append((logits.argmax(-1)[valid].tolist(), batch.labels.cpu()[valid].tolist(), bad.tolist()))
    everyone = distributed.gather(found)
    predicted_all, labels, unusable = (
        np.array([value for rank in everyone for part in rank for value in part[n]], dtype=np.int64) for n in range(3)
    )
    if len(unusable):
        raise not_finite("logits", shards, int(unusable.min()))
    if not len(labels):
        raise UserError(f"{shards.spec}: no labeled image there to score on")
    return predicted_all, labels


def scores(
    task: Task, objective: classification.Objective, shards: ShardSet, indices: np.ndarray | None = None
) -> dict[str, Any]:
    """accuracy, mean_per_class and per_class on labeled images; see `predictions`."""
    return score(*predictions(task, objective, shards, indices), task.classes)


def measurement(
    task: Task,
    objective: classification.Objective,
    cost: Cost,
    budget: int | str,
    seed: int,
    images: np.ndarray,
    chosen: dict[str, Any] | None = None,
) -> Measurement:
    """What a classifier scores on test, trained on the images with these global indices, and what it cost."""
    return Measurement(
        name=accuracy_name(budget),
        labels_per_class=budget,
        labels=len(images),
        seed=seed,
        chosen=chosen or {},
        notes=short_note(task.train_labels[images], budget, task.train_labels),
        **vars(cost),
        **scores(task, objective, task.test),
    )
