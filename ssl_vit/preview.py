"""What a training run would do and cost, before it does it: `ssl-vit train RECIPE --dry-run`."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from ssl_vit import api
from ssl_vit.data.mixture import open_training
from ssl_vit.data.plan import LanePosition
from ssl_vit.interfaces import Batch
from ssl_vit.recipe import Recipe
from ssl_vit.training.engine import make_accelerator
from ssl_vit.training.flops import training_flops

_OPTIMIZER_STATES = {"adamw": 2, "sgd": 1, "lars": 1}  # float32 copies of the weights


def preview(settings: Recipe) -> dict[str, Any]:
    """Wire the run up as `train` would, take one batch, try one micro-batch on a copy; nothing is written.

    Times are this process's: the best of three forward and backward passes after a first one, and the second batch's
    data. Memory is counted from the tensors that autograd keeps. Raises UserError for whatever would stop the run
    before its first step.
    """
    training = settings.training
    accelerator = make_accelerator(training.precision, training.timeout)
    shards = open_training(settings.data)
    job = api.prepare(settings, shards, accelerator, quiet=True)
    parameters = sum(p.numel() for p in job.objective.parameters())
    trained = sum(p.numel() for p in job.objective.parameters() if p.requires_grad)
    flops = training_flops(job.objective)

    batches = job.batches([LanePosition()] * settings.data.lanes)
    next(batches)
    start = time.perf_counter()
    batch, chunk = next(batches)
    data_seconds = time.perf_counter() - start
    part = batch.split(training.accumulate)[0]
    module = job.objective.to(accelerator.device).train()
    kept = _step(module, part, accelerator)
    passes = []
    for _ in range(3):
        start = time.perf_counter()
        _step(module, part, accelerator)
        passes.append(time.perf_counter() - start)
    step_seconds = min(passes) * training.accumulate

    steps, samples = job.total_steps, settings.data.samples or shards.samples
    weights = 4 * (parameters + trained * (1 + _OPTIMIZER_STATES[settings.optim.name]))
    found: dict[str, Any] = {
        "run": str(settings.run_directory),
        "data": {
            "shards": len(shards.urls),
            "samples": samples,
            "classes": len(shards.classes) if shards.classes else None,
            "epochs": round(steps * training.batch_size / samples, 2),
            "lanes": settings.data.lanes,
            "processes": accelerator.num_processes,
            "loader_workers_a_process": settings.data.workers,
            "images_a_step_and_process": len(batch.images),
            "skipped_in_first_batches": len(chunk.skipped),
        },
        "model": {
            "parameters": parameters,
            "gflop_an_image": round(flops / 1e9, 3),
            "pflop_in_all": round(flops * steps * training.batch_size / 1e15, 3),
        },
        "memory": {
            "weights_gradients_and_optimizer_mib": round(weights / 2**20, 1),
            "activations_of_a_micro_batch_mib": round(kept / 2**20, 1),
        },
        "time": {
            "steps": steps,
            "seconds_a_step": round(step_seconds, 4),
            "seconds_for_its_images": round(data_seconds, 4),
            "device": str(accelerator.device),
        },
        "recipe": settings.model_dump(mode="json"),
    }
    found["time"] |= {"hours_in_all": round(steps * seconds_of_a_step(found) / 3600, 3)}
    return found


def seconds_of_a_step(found: dict[str, Any], share: float = 1.0) -> float:
    """Computing (a share of it) and reading, of what `preview` found: the slower of the two where loader processes read
    meanwhile, else both."""
    computing, reading = share * found["time"]["seconds_a_step"], found["time"]["seconds_for_its_images"]
    return float(max(computing, reading) if found["data"]["loader_workers_a_process"] else computing + reading)


def _step(module: nn.Module, part: Batch, accelerator: Any) -> int:
    """One forward and backward pass; returns the bytes that autograd kept in between, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), accelerator.autocast():
        loss = module(part).loss
    loss.backward()
    module.zero_grad(set_to_none=True)
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    return sum(kept.values())
