"""Fine-tuning (paper, table 4): zero-initialised linear head, SGD with momentum, learning rate swept on held-out train.

Everything that is chosen is chosen on a held-out part of the training images, never on test; the untrained backbone
(training from scratch) gets the same sweep of its own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from accelerate.utils import gather_object
from pydantic import Field

from ssl_vit.data import AugmentConfig
from ssl_vit.data.evaluation import evaluation_batches
from ssl_vit.data.samples import View
from ssl_vit.data.shards import ShardSet
from ssl_vit.data.stream import train_source
from ssl_vit.data.transforms import train_transform
from ssl_vit.evaluators.features import Task, evaluation_stream
from ssl_vit.evaluators.labels import choose_shots, held_out_split, labels_of
from ssl_vit.evaluators.linear_probe import probe_accuracy
from ssl_vit.interfaces import Config as BaseConfig
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.models import backbone as backbones
from ssl_vit.objectives import classification
from ssl_vit.training import OptimConfig, TrainingConfig, loop


class Config(BaseConfig):
    """The paper's protocol by default; every number is a key, so that a recipe scales it.

    lrs x steps: the candidates of the sweep. held_out: share of the training images (each class's) that the sweep is
        scored on; no run ever trains on them. tune_seed: the seed whose labelled subset the sweep trains on.
    tune_labels_per_class: the label budget of the sweep (None: that of the run), so that one sweep can serve several
        budgets.
    labels_per_class: train on that many images a class, chosen as few_shot does (None: all that are not held out).
    seeds: of the labelled subset, the head, the order and augmentation, and the untrained backbone's weights.
    optimizer: `sgd` (momentum 0.9) or `adamw`. image_size: None keeps the pretraining's; other sizes resample the
        positions. lanes: see data.lanes.
    """

    lrs: tuple[float, ...] = (0.003, 0.01, 0.03, 0.06)
    steps: tuple[int, ...] = (500,)
    batch_size: int = Field(512, ge=1)
    warmup_steps: int = Field(100, ge=0)
    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, ge=0)
    pooling: Literal["token", "mean", "patches"] = "token"
    image_size: int | None = Field(None, ge=1)
    augment: AugmentConfig = AugmentConfig()
    lanes: int = Field(8, ge=1)
    held_out: float = Field(0.1, gt=0, lt=1)
    tune_seed: int = 0
    tune_labels_per_class: int | None = Field(None, ge=1)
    labels_per_class: int | None = Field(None, ge=1)
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True)
class Measured:
    """One fine-tuning: its accuracy (0..1) on the images it was scored on, and what it cost."""

    accuracy: float
    images_seen: int
    seconds: float


def labelled(labels: np.ndarray, config: Config, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(images to train on, held-out images) as sorted global indices; the split itself never depends on the seed."""
    kept, held = held_out_split(labels, config.held_out, seed=0)
    if config.labels_per_class is None:
        return kept, held
    masked = np.full_like(labels, -1)
    masked[kept] = labels[kept]
    return np.sort(choose_shots(masked, config.labels_per_class, seed)), held


@dataclass
class Sweep:
    """What a sweep found. rows: lr, steps, held_out_accuracy of every candidate; chosen: the winner's row.

    measured: the winner's own test accuracy and cost, None where the sweep ran at another label budget than the run.
    """

    rows: list[dict[str, Any]]
    chosen: dict[str, Any]
    measured: Measured | None


def sweep(task: Task, source: str, labels: np.ndarray, config: Config) -> Sweep:
    """Try every (lr, steps) on the tuning seed's labelled subset; the winner is chosen on held-out train alone.

    Of equals the one with fewer steps wins, then the lower learning rate. Only the winner is scored on test.
    """
    budget = config.tune_labels_per_class or config.labels_per_class
    train, held = labelled(labels, config.model_copy(update={"labels_per_class": budget}), config.tune_seed)
    rows: list[dict[str, Any]] = []
    winner: tuple[dict[str, Any], classification.Objective, float] | None = None
    for steps in sorted(config.steps):
        for lr in sorted(config.lrs):
            start = time.perf_counter()
            try:
                objective = fine_tune(task, source, config, lr, steps, config.tune_seed, train)
            except RunError:  # it diverged: the candidate has lost, the others go on
                rows.append({"lr": lr, "steps": steps, "held_out_accuracy": 0.0})
                continue
            seconds = time.perf_counter() - start
            rows.append({"lr": lr, "steps": steps, "held_out_accuracy": accuracy(task, objective, task.train, held)})
            if winner is None or rows[-1]["held_out_accuracy"] > winner[0]["held_out_accuracy"]:
                winner = rows[-1], objective, seconds
    if winner is None:
        raise UserError(
            f"fine_tune: no candidate of lrs={config.lrs} and steps={config.steps} trained without diverging"
        )
    chosen, objective, seconds = winner
    measured = None
    if budget == config.labels_per_class:
        measured = Measured(accuracy(task, objective, task.test), chosen["steps"] * config.batch_size, seconds)
    return Sweep(rows, chosen, measured)


def measure(task: Task, source: str, labels: np.ndarray, config: Config, chosen: dict[str, Any], seed: int) -> Measured:
    """One fine-tuning with the sweep's choice on a seed's labelled subset, scored on test."""
    start = time.perf_counter()
    train, _ = labelled(labels, config, seed)
    objective = fine_tune(task, source, config, chosen["lr"], chosen["steps"], seed, train)
    seconds = time.perf_counter() - start
    return Measured(accuracy(task, objective, task.test), chosen["steps"] * config.batch_size, seconds)


def fine_tune(
    task: Task, source: str, config: Config, lr: float, steps: int, seed: int, train: np.ndarray
) -> classification.Objective:
    """Fine-tune the `trained` backbone or a fresh `untrained` one on the `train` images (global indices)."""
    encoder = _start(task, source, config, seed)
    classes = max(len(task.train.classes or ()), len(task.test.classes or ())) or None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        head = classification.Config(head="linear", pooling=config.pooling)
        objective = classification.Objective(encoder, head, classes)
    accelerator = task.accelerator
    view = View(
        train_transform(encoder.image_size, config.augment),
        encoder.channels,
        classes,
        flip=config.augment.flip,
        seed=seed,
        needs_labels=True,
    )
    own_lanes, own_shards = (n // accelerator.num_processes for n in (config.lanes, len(task.train.urls)))
    data = task.data.model_copy(update={"lanes": config.lanes, "workers": min(task.workers, own_lanes, own_shards)})
    batches = train_source(
        task.train,
        view,
        data,
        batch_size=config.batch_size,
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
        device=accelerator.device,
        keep=task.train.members_of(train),
    )
    optim = OptimConfig(
        name=config.optimizer,
        lr=lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        warmup_steps=min(config.warmup_steps, steps // 5),
    )
    training = TrainingConfig(steps=steps, batch_size=config.batch_size, log_every=steps, checkpoint_every=0)
    outcome = loop.train(
        loop.Job(
            name=f"fine-tune {source}",
            objective=objective,
            batches=batches,
            lanes=config.lanes,
            total_steps=steps,
            training=training,
            optim=optim,
            accelerator=accelerator,
            quiet=True,
        )
    )
    accelerator.free_memory()
    task.skipped += outcome.skipped
    if not outcome.finished:
        raise KeyboardInterrupt  # stopped by a signal: half a fine-tuning is no measurement
    return objective


def _start(task: Task, source: str, config: Config, seed: int) -> backbones.Backbone:
    if source == "untrained":
        return backbones.fresh(task.trained, seed, config.image_size)
    if config.image_size in (None, task.trained.image_size):
        return copy.deepcopy(task.trained)
    encoder = backbones.fresh(task.trained, seed, config.image_size)
    backbones.initialise(encoder, task.trained, task.weights or "the trained backbone")
    return encoder


@torch.inference_mode()
def accuracy(
    task: Task, objective: classification.Objective, shards: ShardSet, indices: np.ndarray | None = None
) -> float:
    """Share of right answers (0..1) on the shards (or some global indices of them), each image counted once."""
    objective.eval()
    hits = seen = 0
    stream = evaluation_stream(task, shards, indices, objective.backbone.image_size)
    for batch, chunk in evaluation_batches(stream, task.accelerator.device):
        task.skipped += chunk.skipped
        with task.accelerator.autocast():
            predicted = objective.logits(batch.images).argmax(-1)
        hits += int(((predicted == batch.labels) & batch.valid).sum())
        seen += int(batch.valid.sum())
    counts = gather_object([(hits, seen)])
    total = sum(count for _, count in counts)
    if not total:
        raise UserError(f"{shards.spec}: no labelled image there to score on")
    return sum(right for right, _ in counts) / total


class Evaluator:
    """Sweep, then a fine-tuning a seed, for the trained backbone and from scratch; raw pixels get the linear probe."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def run(self, task: Task) -> Iterator[tuple[str, float]]:
        c = self.config
        labels = labels_of(task.train)
        for source in ("trained", "untrained"):
            found = sweep(task, source, labels, c)
            for name in ("lr", "steps", "held_out_accuracy"):
                yield f"{source}/{name}", found.chosen[name]
            runs = [
                (found.measured if seed == c.tune_seed else None)
                or measure(task, source, labels, c, found.chosen, seed)
                for seed in c.seeds
            ]
            yield from _summary(source, c.seeds, [run.accuracy for run in runs])
        train, test = (task.features("pixels", split, "mean") for split in ("train", "test"))
        from_pixels = []
        for seed in c.seeds:
            rows = labelled(train.labels, c, seed)[0]
            cs = (1e-3, 1e-2, 1e-1, 1.0)
            few = (train.vectors[rows], train.labels[rows], test.vectors, test.labels)
            from_pixels.append(probe_accuracy(*few, cs=cs, seed=seed)[0])
        yield from _summary("pixels", c.seeds, from_pixels)


def _summary(source: str, seeds: tuple[int, ...], accuracies: list[float]) -> Iterator[tuple[str, float]]:
    yield f"{source}/mean", float(np.mean(accuracies))
    yield f"{source}/std", float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else 0.0
    for seed, accuracy in zip(seeds, accuracies, strict=True):
        yield f"{source}/seed{seed}", accuracy
