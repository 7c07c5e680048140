"""The largest micro-batch that the memory holds, found once."""

from __future__ import annotations

from collections.abc import Callable

from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size

from ssl_vit.interfaces import UserError
from ssl_vit.training import distributed


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
