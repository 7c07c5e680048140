"""Micro-batches that the memory holds: `training.auto_batch`, and the one that a dry run or a trial measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn

from ssl_vit.interfaces import Batch, UserError
from ssl_vit.training import TrainingConfig, distributed
from ssl_vit.training.distributed import Engine
from ssl_vit.training.state import State, random_state, set_random_state

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
_OPTIMIZER_COPIES = 2  # of the weights, which AdamW keeps, and which the first step takes after its backward pass
_RESERVE = 0.05  # share of a GPU's memory kept free: later steps fragment it


def find_accumulation(
    state: State, batch: Batch, autocast: Callable[[], AbstractContextManager[None]], lanes: int, least: int
) -> int:
    """The fewest micro-batches (`least` or more), made of whole ones of this process's `lanes`, that every process has
    the memory for.

    Leaves weights, buffers, optimizer and random state as they are. Raises UserError where nothing fits.
    """
    objective, random = state.objective, random_state(state.device)
    buffers = [buffer.clone() for buffer in objective.buffers()]
    copies = 0 if state.optimizer.state else _OPTIMIZER_COPIES

    def attempt(count: int) -> None:
        held = [torch.zeros_like(p) for p in objective.parameters() if p.requires_grad for _ in range(copies)]
        if state.device.type == "cuda":
            total = torch.cuda.get_device_properties(state.device).total_memory
            held.append(torch.empty(int(_RESERVE * total), dtype=torch.uint8, device=state.device))
        part = batch.split(count)[0]
        check_batch_norm(objective, len(part.images))
        # Not through DDP: a process that runs out of memory would leave the others waiting.
        with autocast():
            loss = objective(part).loss
        loss.backward()
        held.clear()

    for count in (n for n in range(min(least, lanes), lanes + 1) if lanes % n == 0):
        full = 0
        try:
            attempt(count)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            full = 1
        objective.zero_grad(set_to_none=True)
        set_random_state(random, state.device)
        for buffer, kept in zip(objective.buffers(), buffers, strict=True):
            buffer.copy_(kept)
        if not distributed.largest(full):
            return count
        clear_device_cache(garbage_collection=True)
    raise UserError(
        f"training.auto_batch: not even {lanes} micro-batches per step fit into the memory; set "
        "training.checkpoint_activations=true, or raise data.lanes so that micro-batches can be smaller"
    )


def check_batch_norm(objective: nn.Module, images: int) -> None:
    """Raises UserError where batch norm would see a micro-batch of one image, whose variance it cannot compute."""
    if images < 2 and any(isinstance(module, _BATCH_NORMS) for module in objective.modules()):
        raise UserError(
            "batch norm needs at least two images per micro-batch and process; raise training.batch_size, or lower "
            "training.accumulate"
        )


def first_micro_batch(
    objective: nn.Module, batch: Batch, accelerator: Engine, training: TrainingConfig, lanes: int
) -> tuple[Batch, int]:
    """The first micro-batch of a process's part of a step, and how many there are: `accumulate`, or with `auto_batch`
    the fewest that this process has the memory for.

    lanes: of this process. Raises UserError where none fits.
    """
    more = range(training.accumulate + 1, lanes + 1) if training.auto_batch else ()
    for count in (training.accumulate, *(n for n in more if lanes % n == 0)):
        part = batch.split(count)[0]
        check_batch_norm(objective, len(part.images))
        try:
            forward_backward(objective, part, accelerator)
            return part, count
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
        objective.zero_grad(set_to_none=True)
        clear_device_cache(garbage_collection=True)
    raise UserError(
        "the memory does not hold one micro-batch; set training.auto_batch=true, raise training.accumulate or set "
        "training.checkpoint_activations=true"
    )


def forward_backward(module: nn.Module, part: Batch, accelerator: Engine) -> tuple[float, int]:
    """Run one forward and backward pass.

    Returns (seconds, bytes that autograd keeps for the backward pass, without parameters).
    """
    start = time.perf_counter()
    parameter_storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    saved_bytes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), accelerator.autocast():
        loss = module(part).loss
    loss.backward()
    module.zero_grad(set_to_none=True)
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, sum(saved_bytes.values())
