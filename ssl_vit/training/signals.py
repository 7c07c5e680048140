"""Ctrl-C, SIGTERM and SIGUSR1: save first, then stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ssl_vit.interfaces import PREEMPTED, Stopped
from ssl_vit.training import distributed

_ONE_REQUEST = 3.0  # seconds; a launcher repeats the signal that the terminal or the scheduler has sent already
_GRACE_SECONDS = 5.0  # seconds to wait for a batch or a probe once asked to stop


def stopped(number: int) -> Stopped:
    """The exception that ends a program on a signal: exit code 1 for Ctrl-C, 75 for a preemption."""
    return Stopped(1 if number == signal.SIGINT else PREEMPTED)


class StopRequest:
    """Whether some process was asked to stop; all processes get the same answer at the same step.

    waiting: for a batch or a probe, where no step is half done: Stopped is raised there when it takes longer than 5
        seconds. Never with several processes, which save together at the end of a step.
    """

    def __init__(self) -> None:
        self.number = 0
        self.asked = 0.0
        self.waiting = False
        self.alarm: Any = signal.SIG_DFL  # the handler of SIGALRM before the request

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.number and time.monotonic() - self.asked > _ONE_REQUEST:
            self.waiting = False
            raise stopped(number)  # asked again: stop at once
        if not self.number:
            self.number, self.asked = number, time.monotonic()
            self.alarm = signal.signal(signal.SIGALRM, self.interrupt_waiting)
            signal.setitimer(signal.ITIMER_REAL, _GRACE_SECONDS, 1.0)

    def interrupt_waiting(self, number: int, frame: FrameType | None) -> None:
        if self.waiting:
            self.waiting = False  # once: what follows restores and saves
            raise stopped(self.number)

    def agreed(self) -> int:
        """The signal that some process got (0: none). Call once per step on every process."""
        return distributed.largest(self.number)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn the signals into a request while the block runs (in the main thread; elsewhere signals stay)."""
    request = StopRequest()
    old = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            old[number] = signal.signal(number, request.handle)
    try:
        yield request
    finally:
        if request.number:
            signal.setitimer(signal.ITIMER_REAL, 0)
            old[signal.SIGALRM] = request.alarm
        for number, handler in old.items():
            signal.signal(number, handler)
