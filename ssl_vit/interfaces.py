"""The words the rooms share: what a batch is, what an objective and an evaluator return, what a user's mistake is.

Nothing here imports torch, so that `ssl-vit --help`, the recipe and the report stay fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch


class UserError(Exception):
    """The user's input was wrong: the message is one or two plain lines that name the file or key and the mend.

    Commands print it without a traceback (unless `--debug`) and exit with code 2.
    """


class RunError(Exception):
    """Something outside the user's input failed (full disk, non-finite loss): one or two plain lines, exit code 1."""


class Config(BaseModel):
    """Base of every typed configuration: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass
class Batch:
    """One rank's share of the images of a step, in lane order.

    images: uint8 (B, C, H, W), 0..255, augmented but neither flipped nor normalised (the device does both).
    labels: int64 (B,), the class index; -1 in padding and where the objective needs no labels.
    noise: float32 (B, M), uniform in [0, 1): a function of (seed, epoch, sample index) alone, so that every random
        choice an objective makes from it is the same on any number of processes. M is what the objective asked for.
    flip: bool (B,), whether the device mirrors the image left to right.
    indices: int64 (B,), the sample's global index in its shard set; -1 in padding.
    valid: bool (B,), False in the padding that evaluation streams use to equalise batch counts.
    keys: the samples' names in their shards, for error messages.
    lane_size: consecutive images that came from one lane; B is a multiple of it (0: not from lanes).
    """

    images: torch.Tensor
    labels: torch.Tensor
    noise: torch.Tensor
    flip: torch.Tensor
    indices: torch.Tensor
    valid: torch.Tensor
    keys: list[str]
    lane_size: int = 0

    def split(self, parts: int) -> list[Batch]:
        """Equal consecutive micro-batches; the size must be a multiple of `parts`."""
        if parts == 1:
            return [self]
        size = len(self.images) // parts
        tensors = ("images", "labels", "noise", "flip", "indices", "valid")
        return [
            Batch(
                **{name: getattr(self, name)[n * size : (n + 1) * size] for name in tensors},
                keys=self.keys[n * size : (n + 1) * size],
                lane_size=self.lane_size,
            )
            for n in range(parts)
        ]

    def mean(self, values_B: torch.Tensor) -> torch.Tensor:
        """The mean over the samples that are not padding, as a float32 scalar; 0 if all are padding."""
        weights = self.valid.float()
        return (values_B.float() * weights).sum() / weights.sum().clamp(min=1)


@dataclass
class StepOutput:
    """What an objective returns: a scalar float32 loss (the mean over the batch's samples) and detached scalar
    metrics that stay on the device until they are logged."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """A torch module: backbone + head + loss. Built by its module's `Objective(backbone, config, classes)`."""

    backbone: Any

    def noise_per_sample(self) -> int:
        """How many uniform numbers `Batch.noise` must hold for each sample."""
        ...

    def __call__(self, batch: Batch) -> StepOutput: ...


class Evaluator(Protocol):
    """Built by its module's `Evaluator(config)`; judges one backbone on one pair of labelled shard sets."""

    def run(self, task: Any) -> Iterator[tuple[str, float]]:
        """Yield (name, value) pairs; names are stable and end up as keys in `results.json`."""
        ...
