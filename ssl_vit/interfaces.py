"""Types that all packages share: batches, what an objective returns, errors. Torch-free."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch


Metric = Literal["accuracy", "mean_per_class"]
"""The metric reported for a dataset: the share of correct predictions, or the mean of the per-class shares."""


class UserError(Exception):
    """Wrong input: the message names the file or key, says what is wrong and what to do.

    Commands print it without a traceback (unless `--debug`) and exit with code 2.

    everywhere: whether every process raises it, so that only the main process prints it.
    """

    everywhere = False


def world_size() -> int:
    """Number of processes that a launcher started; needs no process group."""
    return int(os.environ.get("WORLD_SIZE", 1))


def end_with_parent(kind: signal.Signals) -> None:
    """On Linux, let the kernel send this process a signal when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, kind)  # PR_SET_PDEATHSIG


def is_main_process() -> bool:
    """Whether this process prints and writes; needs no process group. RANK alone may be that of a job array."""
    return os.environ.get("RANK", "0") == "0" or world_size() == 1


@contextmanager
def errors_about(place: str) -> Iterator[None]:
    """Context manager whose UserErrors begin with `place`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


class BadSample(Exception):
    """An image or sample that cannot be used; the message says why. It is skipped, counted and named."""


class RunError(Exception):
    """A failure other than wrong input, such as a full disk or a non-finite loss. Exit code 1."""

    everywhere = False


class Diverged(RunError):
    """Training diverged: a loss or gradient is NaN or infinite.

    steps: how many the training had taken. cost: `records.Cost` of those steps, or None.
    """

    steps = 0
    cost: object = None


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def printable(text: str) -> str:
    """A name from data with its control characters escaped, so that it cannot steer the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """`printable` text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def without_credentials(shared: Any) -> Any:
    """Text to be shared, or lists and dictionaries with it: URLs lose user names, passwords and queries, which may hold
    a signature."""
    if isinstance(shared, dict):
        return {without_credentials(key): without_credentials(value) for key, value in shared.items()}
    if isinstance(shared, list | tuple):
        return type(shared)(map(without_credentials, shared))
    if not isinstance(shared, str):
        return shared
    # The patterns begin at `://`: one that begins with the scheme takes quadratic time in an embedded picture.
    text = re.sub(r"(?<=://)[^\s/?\"<>]+@", "...@", shared)
    return re.sub(r"(://[^\n\"<>?]*\?)[^\s\"<>]+", r"\1...", text)


PREEMPTED = 75  # EX_TEMPFAIL: progress is saved, run the same command to resume


class Stopped(SystemExit):
    """Stopped by a signal after saving; `code` is the exit code (see PREEMPTED)."""


class Config(BaseModel):
    """Base class of typed configurations: unknown keys, infinity and NaN are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ObjectiveConfig(Config):
    """Base of the settings of objectives.

    name: `masked_patch`, `masked_autoencoder`, `lejepa`, `classification`, or the dotted name of a module with one.
    """

    name: str


class UnknownObjective(ObjectiveConfig):
    """The settings of an objective that cannot be imported: its run can be evaluated, inspected and exported."""

    model_config = ConfigDict(extra="allow")


def _local(path: str) -> str:
    if "://" in path:
        raise ValueError("give a path of this machine, not a URL")
    return path


LocalPath = Annotated[str, AfterValidator(_local)]
"""A folder that is written to."""

Size = int | tuple[int, int]  # pixels: the side of a square, or (height, width)

Budget = int | str
"""Labeled training images: per class (10), a share of every class ("10%"), or "all"."""


def pair(size: Size) -> tuple[int, int]:
    """(height, width) of an image size."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


@dataclass
class Batch:
    """The images of one process for one step, in lane order. With several views, the rows of an image are consecutive
    and its label, index and key are repeated.

    images: uint8 (B, C, H, W), 0..255, augmented but neither flipped nor normalized (the device does both); in
        memory as rows of pixels (channels last).
    labels: int64 (B,), the class index; -1 in padding and where the objective needs no labels.
    noise: float32 (B, M), uniform in [0, 1): a function of (seed, epoch, sample index, view) alone, so that every
        random choice an objective makes from it is the same on any number of processes. M is what the objective asked
        for.
    flip: bool (B,), whether the device mirrors the image left to right.
    jitter: float32 (B, 3) or (B, 6), the color augmentation that the device applies (see `data.augment`); None: none.
    indices: int64 (B,), the sample's global index in its shard set; -1 in padding.
    valid: bool (B,), False in the padding that evaluation streams use to equalize batch counts.
    keys: the samples' names in their shards, for error messages.
    lane_size: consecutive rows that came from one lane; B is a multiple of it (0: not from lanes).
    views: consecutive rows that show one image; B is a multiple of it.
    step: index of the optimizer step in training, from 0; the same on all processes.
    """

    images: torch.Tensor
    labels: torch.Tensor
    noise: torch.Tensor
    flip: torch.Tensor
    indices: torch.Tensor
    valid: torch.Tensor
    keys: list[str]
    lane_size: int = 0
    jitter: torch.Tensor | None = None
    views: int = 1
    step: int = 0

    def split(self, parts: int) -> list[Batch]:
        """Equal consecutive micro-batches; the size must be a multiple of `parts`."""
        if parts == 1:
            return [self]
        size = len(self.images) // parts
        return [self.rows(slice(n * size, (n + 1) * size)) for n in range(parts)]

    def rows(self, rows: slice) -> Batch:
        """Some of the samples."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        per_sample = {name: value for name, value in values.items() if not isinstance(value, int | None)}
        return replace(self, **{name: value[rows] for name, value in per_sample.items()})

    def mean(self, values_B: torch.Tensor) -> torch.Tensor:
        """The mean over the samples that are not padding, as a float32 scalar; 0 if all are padding."""
        weights = self.valid.float()
        return (values_B.float() * weights).sum() / weights.sum().clamp(min=1)


@dataclass
class StepOutput:
    """What an objective returns: a scalar float32 loss (the mean over the batch's samples) and detached metrics, means
    over the samples too, that stay on the device until they are logged. A metric may be a vector (M,) that the
    objective's `summarize` makes scalars of. Every step has the same metrics, and none has a name that the training
    logs itself, such as `loss`, `grad_norm` or `lr`."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
