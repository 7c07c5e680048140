"""Ctrl-C and SIGTERM: save first, then stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class StopRequest:
    """Whether some process was asked to stop; all processes get the same answer at the same step."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        # A CPU group of its own: agreeing must not wait for the accelerator.
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group: Any = dist.new_group(backend="gloo") if several else None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt  # asked twice: stop at once
        self.signal = signal.Signals(number)

    def agreed(self) -> bool:
        """Call once a step on every process."""
        if self.group is None:
            return self.signal is not None
        flag = torch.tensor([int(self.signal is not None)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a request while the block runs (in the main thread; elsewhere signals stay)."""
    request = StopRequest()
    old = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, request.handle)
    try:
        yield request
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
