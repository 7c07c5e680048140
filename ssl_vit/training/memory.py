"""Micro-batches that the memory holds: `training.auto_batch`, and the one that a dry run or a trial measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn

from ssl_vit.interfaces import Batch, RunError, UserError, first_line
from ssl_vit.models.objective import Objective
from ssl_vit.training import OptimConfig, TrainingConfig, distributed
from ssl_vit.training.distributed import Engine
from ssl_vit.training.state import random_state, set_random_state

# Copies of the weights that an optimizer keeps (SGD: with momentum). AdamW and LARS allocate them in the first step,
# after its backward pass, SGD before it.
OPTIMIZER_COPIES = {"adamw": 2, "sgd": 1, "lars": 1}
USE_LESS = (
    "lower training.batch_size (in a comparison, jobs), or set training.checkpoint_activations=true or, where the "
    "objective allows it, training.auto_batch=true"
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
_RESERVE = 0.05  # share of a GPU's memory kept free: later steps fragment it


def find_accumulation(
    objective: Objective,
    batch: Batch,
    accelerator: Engine,
    training: TrainingConfig,
    optim: OptimConfig,
    *,
    least: int = 1,
    begun: bool = False,
) -> int:
    """The number of micro-batches, made of whole lanes, that every process has the memory for: `accumulate`, or with
    `auto_batch` the smallest one that fits, from `accumulate` and `least` on.

    batch: this process's part of a step. least: the smallest number to try with `auto_batch`.
    begun: whether the optimizer holds its copies of the weights already.

    Leaves weights, buffers and random state as they are. Raises UserError where nothing fits. `whole_batch` objectives
    of several processes are not tried: they communicate, and one without the memory would leave the others waiting.
    """
    lanes, counts = len(batch.images) // batch.lane_size, [training.accumulate]
    if training.auto_batch:
        first = min(max(training.accumulate, least), lanes)
        counts = [count for count in range(first, lanes + 1) if lanes % count == 0]
        if has_batch_norm(objective):  # which one image is too few for
            counts = [count for count in counts if len(batch.images) // count > 1] or counts[:1]
    copies = 0 if begun else OPTIMIZER_COPIES[optim.name]
    for count in counts:
        part = batch.split(count)[0]
        check_batch_norm(objective, len(part.images))
        if objective.whole_batch and distributed.several():
            return count
        with undisturbed(objective, accelerator):
            # From the second micro-batch on, the gradients of those before it are held, too.
            held, reserve = copies + (count > 1), _RESERVE if len(counts) > 1 else 0
            full = int(not _fits(objective, part, accelerator, held, reserve))
        if not distributed.largest(full):
            return count
        clear_device_cache(garbage_collection=True)
    splits = not (training.auto_batch or count == lanes or objective.whole_batch)
    smaller = "training.auto_batch=true" if splits else "a lower training.batch_size"
    error = UserError(
        f"the memory does not hold a micro-batch of {len(part.images)} images; set {smaller} or "
        "training.checkpoint_activations=true"
    )
    error.everywhere = True
    raise error


@contextmanager
def out_of_memory(advice: Callable[[], str]) -> Iterator[None]:
    """Turn a device's error into a RunError. advice: what to do about it."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        first = first_line(error)
        where = "this machine" if "CPUAllocator" in first else "the GPU"
        raise RunError(f"{where} has too little memory ({first}); {advice()}") from None


def _fits(objective: Objective, part: Batch, accelerator: Engine, copies: int, reserve: float) -> bool:
    device = accelerator.device
    try:
        held = [torch.zeros_like(p) for p in objective.parameters() if p.requires_grad for _ in range(copies)]
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            held.append(torch.empty(int(reserve * total), dtype=torch.uint8, device=device))
        # Not through DDP: a process that runs out of memory would leave the others waiting.
        forward_backward(objective, part, accelerator)
        held.clear()
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        return False
    return True


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Also errors of CUDA and its libraries outside of PyTorch's allocator, as on a GPU that other processes filled."""
    text = str(error)
    return should_reduce_batch_size(error) or "error: out of memory" in text or "STATUS_ALLOC_FAILED" in text


@contextmanager
def undisturbed(objective: Objective, accelerator: Engine) -> Iterator[None]:
    """At its end, gradients are removed, and random state and buffers are what they were at its start."""
    random, buffers = random_state(accelerator.device), [buffer.clone() for buffer in objective.buffers()]
    yield
    objective.zero_grad(set_to_none=True)
    set_random_state(random, accelerator.device)
    for buffer, kept in zip(objective.buffers(), buffers, strict=True):
        buffer.copy_(kept)


def has_batch_norm(module: nn.Module) -> bool:
    """Whether a layer needs the statistics of several images."""
    return any(isinstance(layer, _BATCH_NORMS) for layer in module.modules())


def check_batch_norm(objective: Objective, images: int) -> None:
    """Raises UserError where batch norm would see a micro-batch of one image, whose variance it cannot compute."""
    if images < 2 and has_batch_norm(objective):
        raise UserError(
            "batch norm needs at least two images per micro-batch and process; raise training.batch_size, or lower "
            "training.accumulate"
        )


def forward_backward(module: nn.Module, part: Batch, accelerator: Engine) -> tuple[float, int]:
    """Run one forward and backward pass.

    Returns (seconds, bytes that autograd keeps for the backward pass, without parameters; 0 on XLA).
    """
    start = time.perf_counter()
    counted = accelerator.device.type != "xla"  # whose tensors have no address
    parameter_storages = {p.untyped_storage().data_ptr() for p in module.parameters() if counted}
    saved_bytes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        # The tensor itself would refer to the graph that keeps it: a forward pass that fails would never be freed.
        return tensor.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor) if counted else nullcontext()
    with hooks, accelerator.autocast():
        loss = module(part).loss
    loss.backward()
    module.zero_grad(set_to_none=True)
    if accelerator.device.type not in ("cpu", "xla"):
        torch.accelerator.synchronize()
    return time.perf_counter() - start, sum(saved_bytes.values())
