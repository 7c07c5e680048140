"""The dry run of one training: what it would do and cost."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssl_vit.data.order import LanePosition
from ssl_vit.data.shards import ShardSet
from ssl_vit.recipe import Recipe
from ssl_vit.stage import build
from ssl_vit.training import memory
from ssl_vit.training.distributed import largest, make_accelerator
from ssl_vit.training.flops import training_flops
from ssl_vit.training.loop import Job


@dataclass(frozen=True)
class DryRun:
    """What a training would do and cost.

    samples: number of images to train on. classes: number of classes; 0 where the shards name none.
    workers: loader processes of each process.
    epochs: passes over the images in all steps.
    gflop_per_image: forward and backward pass.
    weights_mib: memory of weights, gradients and optimizer.
    activations_mib: memory of the activations of one micro-batch.
    compute_seconds, data_seconds: time of one step for computing, and for reading its images.
    """

    run: str
    device: str
    samples: int
    classes: int
    workers: int
    steps: int
    epochs: float
    parameters: int
    gflop_per_image: float
    weights_mib: float
    activations_mib: float
    compute_seconds: float
    data_seconds: float
    recipe: dict[str, Any]

    @property
    def step_seconds(self) -> float:
        """Wall time of a step. Without loader processes, reading adds to it."""
        times = self.compute_seconds, self.data_seconds
        return max(times) if self.workers else sum(times)

    @property
    def hours(self) -> float:
        """Wall time of the whole run."""
        return self.steps * self.step_seconds / 3600


def measure(settings: Recipe, shards: ShardSet, subset: np.ndarray | None = None, *, job: Job | None = None) -> DryRun:
    """Measure the data of a training and one micro-batch; no run is written.

    subset: see `stage.build`.
    job: what `stage.build` made of these; None: it is built here.

    Times are this process's. Computing: the best of three forward and backward passes, not compiled, after a first one
    (fewer where they take over 10 seconds). Data: a batch after two passes over the images per loader process, after 3
    seconds, or near the end of the training, whichever is first. Memory is that of the tensors that autograd keeps.
    Raises UserError for anything that `stage.build` rejects, for unreadable data and for too little memory.
    """
    training = settings.training
    # Of each weight: itself, its gradient, the optimizer's state and the moving average.
    copies = 2 + memory.OPTIMIZER_COPIES[settings.optim.name] + bool(training.ema)
    accelerator = make_accelerator(training.precision, training.timeout)
    job = job or build(settings, shards, accelerator, subset=subset, quiet=True)
    flops, parameters = training_flops(job.objective, settings.data.views), list(job.objective.parameters())
    samples = (settings.data.samples or shards.samples) if subset is None else len(subset)
    with closing(job.batches([LanePosition()] * job.lanes)) as batches:
        start = time.perf_counter()
        next(batches)
        # Small sets are in memory after the first passes: lanes end theirs at different batches, and each loader
        # process keeps the images that it read.
        passes_of_all = 2 * max(1, settings.data.workers)
        left = min(passes_of_all * samples // training.batch_size, job.total_steps) - 2
        while left > 0 and time.perf_counter() - start < 3:  # seconds
            next(batches)
            left -= 1
        start = time.perf_counter()
        batch = next(batches)[0]
        data_seconds = time.perf_counter() - start
    module = job.objective.to(accelerator.device).train()
    accumulate = memory.find_accumulation(module, batch, accelerator, training, settings.optim)
    part = batch.split(accumulate)[0]
    passes = [memory.forward_backward(module, part, accelerator)]
    # Milliseconds of the slowest process: a forward pass may wait for the others.
    while len(passes) < 3 and largest(int(1000 * sum(seconds for seconds, _ in passes))) < 10_000:
        passes.append(memory.forward_backward(module, part, accelerator))
    return DryRun(
        run=str(settings.run_directory),
        device=str(accelerator.device),
        samples=samples,
        classes=len(shards.classes or ()),
        workers=settings.data.workers,
        steps=job.total_steps,
        epochs=round(job.total_steps * training.batch_size / samples, 2),
        parameters=sum(p.numel() for p in parameters),
        gflop_per_image=round(flops / 1e9, 3),
        weights_mib=round(sum(4 * p.numel() * (copies if p.requires_grad else 1) for p in parameters) / 2**20, 1),
        activations_mib=round(passes[-1][1] / 2**20, 1),
        compute_seconds=round(min(passes)[0] * accumulate, 4),
        data_seconds=round(data_seconds, 4),
        recipe=settings.model_dump(mode="json"),
    )
