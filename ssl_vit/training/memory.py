"""training.auto_batch: the largest micro-batch that the memory holds, found once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size

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

    counts = [n for n in range(min(least, lanes), lanes + 1) if lanes % n == 0]
    try:
        return fitting_accumulation(len(batch.images), counts, attempt)
    finally:
        set_random_state(random, state.device)
        for buffer, kept in zip(objective.buffers(), buffers, strict=True):
            buffer.copy_(kept)


def fitting_accumulation(share: int, candidates: list[int], attempt: Callable[[int], None]) -> int:
    """The first of the `candidates` (rising numbers of micro-batches) that every process has the memory for.

    share: one process's images of a step. attempt: does what a step does, without other processes, and raises what an
    allocator raises. Raises UserError when not even the last one fits.
    """
    sizes = iter([share // count for count in candidates])

    def fits(size: int) -> int:
        full = False
        try:
            attempt(share // size)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            full = True
        if distributed.largest(int(full)):
            raise RuntimeError("Some process is out of memory.")  # the words that make Accelerate try the next
        return share // size

    # Called, not used as a decorator, which drops `reduce_batch_size_fn` in older versions of Accelerate.
    search = find_executable_batch_size(fits, next(sizes), lambda: next(sizes, 0))
    try:
        return int(search())
    except RuntimeError as error:
        if "No executable batch size" not in str(error):
            raise
        raise UserError(
            f"training.auto_batch: not even micro-batches of {share // candidates[-1]} images fit into the memory; "
            "set training.checkpoint_activations=true, or raise data.lanes so that micro-batches can be smaller"
        ) from None
