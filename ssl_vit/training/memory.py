"""Memory: the largest micro-batch that it holds, found once, and what a CPU step frees kept for the next one."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size

from ssl_vit.interfaces import UserError
from ssl_vit.training import processes


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
        if processes.largest(int(full)):
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


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees; whether that could be arranged (glibc alone knows how).

    By default glibc gives a step's activations back to the system when the step frees them and asks for them again in
    the next: up to a sixth of a small model's step on a CPU goes into that. The process stays as large as its largest
    step, and no larger.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl has none
        return False
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    return bool(mallopt(m_mmap_max, 0)) and bool(mallopt(m_trim_threshold, 2**31 - 1))
