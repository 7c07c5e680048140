"""Watches the losses: what is not finite, and what jumps far above the losses before it."""

from __future__ import annotations

from collections import deque
from statistics import median

_WINDOW = 100  # steps whose losses say what is usual
_LEAST = 20  # of them before anything counts as a spike
SKIPS_IN_A_ROW = 10  # steps in a row that are not finite mean that the weights are broken, not the batch
# Steps that the loss scale left out: it has halved from 2^16 to 2^-84, and still they overflow.
OVERFLOWS_IN_A_ROW = 100
REWINDS = 3  # times that the same checkpoint is gone back to


class Guard:
    """Finds loss spikes: a step whose loss is above `factor` times the median of the last 100 steps' losses.

    recent: the losses before, oldest first (a resumed run's checkpoint holds them).
    """

    def __init__(self, factor: float, recent: list[float]) -> None:
        self.factor = factor
        self.recent: deque[float] = deque(recent, _WINDOW)

    def spike(self, losses: list[float]) -> tuple[int, float] | None:
        """The first spike among the losses of the next steps: how many steps into them, and the usual loss.

        The losses before it become part of what is usual; the spike and what follows do not.
        """
        for number, loss in enumerate(losses):
            if len(self.recent) >= _LEAST and loss > self.factor * (usual := median(self.recent)):
                return number, usual
            self.recent.append(loss)
        return None
