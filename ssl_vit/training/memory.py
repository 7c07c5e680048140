"""training.auto_batch: the largest micro-batch that the memory holds, found once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from ssl_vit.interfaces import Batch, UserError
from ssl_vit.training import distributed, optim
from ssl_vit.training.state import State, random_state, set_random_state


def find_accumulation(
    state: State, batch: Batch, autocast: Callable[[], AbstractContextManager[None]], lanes: int, least: int
) -> int:
    """The fewest micro-batches (`least` or more), made of whole ones of this process's `lanes`, that every process has
    the memory for.

    Leaves weights, buffers, optimizer and random state as they are. Raises UserError where nothing fits.
    """
    objective, optimizer = state.objective, state.optimizer
    random, fresh = random_state(state.device), not optimizer.state
    buffers = [buffer.clone() for buffer in objective.buffers()]

    def attempt(accumulate: int) -> None:
        try:
            if fresh:  # the optimizer's own memory counts: a step of nothing makes it take that
                optim.set_lr(optimizer.param_groups, 0.0)
                for parameter in objective.parameters():
                    parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
                optimizer.step()
            # Not through DDP: a process that runs out of memory would leave the others waiting.
            with autocast():
                loss = objective(batch.split(accumulate)[0]).loss
            loss.backward()
        finally:
            optimizer.zero_grad(set_to_none=True)
            if fresh:
                optimizer.state.clear()

    try:
        return first_that_fits([n for n in range(min(least, lanes), lanes + 1) if lanes % n == 0], attempt)
    finally:
        set_random_state(random, state.device)
        for buffer, kept in zip(objective.buffers(), buffers, strict=True):
            buffer.copy_(kept)


def first_that_fits(counts: list[int], attempt: Callable[[int], None]) -> int:
    """The first of these rising numbers of micro-batches that every process has the memory for.

    attempt: does what a step does, without other processes, and raises what an allocator raises.
    """
    for count in counts:
        full = False
        try:
            attempt(count)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            full = True
        if not distributed.largest(int(full)):
            return count
        clear_device_cache(garbage_collection=True)
    raise UserError(
        f"training.auto_batch: not even {counts[-1]} micro-batches per step fit into the memory; set "
        "training.checkpoint_activations=true, or raise data.lanes so that micro-batches can be smaller"
    )
