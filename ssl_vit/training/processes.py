"""What the processes of a run do together: share values and errors, and notice that one of them is gone."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ssl_vit.interfaces import RunError, UserError

# How gloo, NCCL and torch's store word it that another process does not answer any more.
_GONE = re.compile(
    r"(?i)connection (closed|reset|refused)|timed out|wait timeout|broken pipe|socket timeout|gloo|nccl|"
    r"failed to (recv|send)|no route to host"
)


@dataclass
class _Together:
    group: Any = None
    timeout: int = 0


_together = _Together()


def connect(timeout: int) -> None:
    """Give the launched processes a CPU group of their own: what they agree on does not wait for the accelerator.

    timeout: seconds that a process waits for the others. Every process must call it; one alone needs no group. It
    returns once all are there: if the main process, which tells the others where to find each other, left before (with
    an error in the recipe, say), they would look for it for ever.
    """
    if not several() and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _together.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        _together.timeout = timeout
        gather(None)


def group() -> Any:
    """torch's process group of all processes on the CPU; None for one process alone."""
    return _together.group


def several() -> bool:
    """Whether there are other processes to agree with."""
    return _together.group is not None


def rank() -> int:
    return dist.get_rank() if several() else 0


def is_main() -> bool:
    return rank() == 0


def gather(value: Any) -> list[Any]:
    """Every process's value, in rank order, on every process."""
    if not several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_together.group)
    return values


def largest(value: int) -> int:
    """The largest of the processes' numbers; cheap enough for every step."""
    if not several():
        return value
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=_together.group)
    return int(tensor)


def total(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the processes' CPU tensors."""
    if several():
        dist.all_reduce(tensor, group=_together.group)
    return tensor


@contextmanager
def shared_errors() -> Iterator[None]:
    """A block that every process runs: a UserError or RunError of one of them is raised on all. It is a barrier too.

    Other exceptions pass on their own process alone, whose end the others notice.
    """
    own: UserError | RunError | None = None
    try:
        yield
    except (UserError, RunError) as error:
        own = error
    found = [item for item in gather((type(own), str(own)) if own else None) if item]
    if own and not several():
        raise own
    if found:
        kind, text = found[0]
        shared = kind(text)
        shared.everywhere = True
        raise shared from own


@contextmanager
def others_watched(last_saved: Callable[[], str]) -> Iterator[None]:
    """Turn the end of another process, or its silence for longer than the timeout, into a plain RunError.

    last_saved: says which checkpoint is the last good one.
    """
    try:
        yield
    except RuntimeError as error:
        if not several() or not _GONE.search(str(error)):
            raise
        reason = str(error).splitlines()[0].split("] ", 1)[-1].split(". This is typically")[0]
        raise RunError(
            f"another process of this run is gone, or has not answered for {_together.timeout} s (training.timeout): "
            f"its own output says why ({reason})\n{last_saved()}; run the same command on all machines to go on"
        ) from error
