"""What a run writes as it trains: `metrics.jsonl`, Accelerate's trackers and the display, all by the main process."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ssl_vit.interfaces import Batch, StepOutput, UserError, printable, without_credentials
from ssl_vit.records import SkippedSample
from ssl_vit.training import distributed
from ssl_vit.training.distributed import Engine, shared_errors

Trackers = Mapping[str, dict[str, Any]]
_TIMES = ("images_per_second", "data_wait", "seconds_per_step", "seconds")
_OWN = ("step", "event", "loss", "grad_norm", "lr", "images_seen", *_TIMES)


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did: its micro-batches, the objective's outputs, the gradient norm before clipping."""

    parts: list[Batch]
    outputs: list[StepOutput]
    norm: torch.Tensor


def metric_shapes(output: StepOutput) -> dict[str, list[int]]:
    """The shapes of an objective's metrics by name. Raises UserError for one that cannot be logged."""
    for name, value in output.metrics.items():
        if name in _OWN:
            raise UserError(f"an objective's metric must not be named {name}: the training logs its own {name}")
        if not isinstance(value, torch.Tensor):
            raise UserError(f"an objective's metric must be a tensor: {name} is {value!r}")
    return {name: [*value.shape] for name, value in output.metrics.items()}


class Window:
    """Losses and metrics of the steps since the last log line, left on the device so that no step waits for it.

    first: the step before them. start: when they began. waited: seconds spent waiting for data.
    """

    def __init__(self, first: int) -> None:
        self.first, self.start, self.waited = first, time.perf_counter(), 0.0
        self.rows: list[torch.Tensor] = []
        self.steps: list[int] = []
        self.keys: list[list[str]] = []
        self.sizes: dict[str, int] = {}
        self.shapes: dict[str, list[int]] | None = None
        self._means: dict[str, torch.Tensor] = {}

    def add(self, step: int, result: StepResult) -> None:
        """Keep one optimizer step. Raises UserError for metrics that cannot be averaged over steps."""
        outputs = result.outputs
        shapes = [metric_shapes(output) for output in outputs]
        for each in shapes:
            if self.shapes not in (None, each):
                raise UserError(f"an objective's metrics and their shapes must not change: {self.shapes}, then {each}")
            self.shapes = each
        count = torch.stack([part.valid.sum() for part in result.parts]).float()
        share = count / count.sum().clamp(min=1)
        values = {"loss": torch.stack([output.loss.detach().float() for output in outputs])}
        for name in outputs[0].metrics:
            values[name] = torch.stack([output.metrics[name].detach().float() for output in outputs])
        means = {name: torch.tensordot(share, stacked, 1) for name, stacked in values.items()}
        means["grad_norm"] = result.norm.detach().float()
        self.sizes = {name: mean.numel() for name, mean in means.items()}
        # This process's sums over its samples; the number of samples comes last.
        row = torch.cat([mean.reshape(-1) for mean in means.values()]) * count.sum()
        self.rows.append(torch.cat([row, count.sum()[None]]))
        self.steps.append(step)
        self.keys.append([key for part in result.parts for key in part.keys])

    def means(self) -> dict[str, torch.Tensor]:
        """Each step's means over its global batch, float64 (S,) or (S, M) on the CPU.

        The one place where the host waits for the device. Every process must call it at the same step.
        """
        if not self._means:
            # Copied to the host row by row: on XLA, each stack of another length would compile another program.
            sums = distributed.total(torch.stack([row.cpu() for row in self.rows]).double())
            columns = (sums[:, :-1] / sums[:, -1:].clamp(min=1)).split(list(self.sizes.values()), dim=1)
            table = zip(self.sizes, columns, strict=True)
            self._means = {name: column[:, 0] if column.shape[1] == 1 else column for name, column in table}
        return self._means


def check_trackers(trackers: Trackers) -> None:
    """Raises UserError for a tracker that Accelerate does not know or that is not installed."""
    for name in trackers:
        if name not in LOGGER_TYPE_TO_CLASS:
            near = get_close_matches(name, LOGGER_TYPE_TO_CLASS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            raise UserError(f"training.trackers.{name}: Accelerate has no such tracker; {hint}")
        if name not in map(str, get_available_trackers()):
            raise UserError(
                f"training.trackers.{name}: not installed: pip install {name}, or pip install 'ssl-vit[trackers]'"
            )


class RunLogger:
    """Everything that a run writes. Every process must make the same calls: an error of writing reaches all of them.

    run: its directory; None keeps nothing but the display.
    skipped: the samples that all processes skipped so far.
    """

    def __init__(self, total: int, run: Path | None, accelerator: Engine, trackers: Trackers, quiet: bool) -> None:
        main = accelerator.is_main_process
        # Not the name of the recipe, which several trainings of a comparison share.
        self.name, self.total, self.quiet = run.resolve().name if run else "", total, quiet or not main
        console = Console(stderr=True)
        # Processes that share a terminal must not each move a bar on it.
        moving = not self.quiet and console.is_terminal and multiprocessing.parent_process() is None
        columns = (TextColumn("[bold]{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not moving)
        self.task = self.bar.add_task(self.name, total=total)
        self.path = run / "metrics.jsonl" if run and main else None
        self.accelerator, self.settings, self.tracking = accelerator, trackers, bool(run and main and trackers)
        self.size = 0  # of metrics.jsonl when the checkpoint was saved
        self.skipped, self.skips_in_total = dict[tuple[str, str], SkippedSample](), 0

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": self.file.tell() if self.path else 0, "skips_in_total": self.skips_in_total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.size, self.skips_in_total = state["bytes"], state["skips_in_total"]

    def begin(self, step: int, notes: list[str], recipe: dict[str, Any]) -> None:
        """Continue the log where the checkpoint of `step` was saved; what came later is dropped."""
        with shared_errors(f"{self.path}: cannot write"):
            if self.path:
                self.file = self.path.open("ab")
                self.file.truncate(min(self.size, self.file.tell()))
        if self.tracking:
            self._try(lambda: self._start_trackers(step, recipe))
        for note in [*notes, *([f"resuming at step {step} of {self.total}"] if step else [])]:
            self.say(note)

    def __enter__(self) -> RunLogger:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.path and hasattr(self, "file"):
            with suppress(OSError):  # closing writes again what `event` could not write, and would hide that error
                self.file.close()
        if self.tracking:  # not `end_training`, which would also end the process group
            self._try(lambda: [tracker.finish() for tracker in self.accelerator.trackers])
        self.accelerator.trackers = []
        self.bar.stop()

    def say(self, text: str) -> None:
        """A line on stderr, above the bar."""
        if not self.quiet:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def event(self, step: int, values: dict[str, Any]) -> None:
        """A line of `metrics.jsonl` that is no measurement."""
        with shared_errors(f"{self.path}: cannot write"):
            if self.path:
                self.file.write(json.dumps({"step": step, **values}).encode() + b"\n")
                self.file.flush()

    def values(self, step: int, values: dict[str, float]) -> None:
        """Measured numbers: a line of `metrics.jsonl`, the trackers and the display."""
        self.event(step, values)
        if self.tracking:
            self._try(lambda: self.accelerator.log(values, step=step))
        if "loss" in values:
            left = timedelta(seconds=round((self.total - step) * values["seconds_per_step"]))
            self.say(f"{self.name}  {step}/{self.total}  {describe(values)}  {left} left")

    def skips(self, step: int, own_skips: list[SkippedSample]) -> None:
        """Log the samples that all processes skipped since the last call. own_skips: those of this process."""
        skips = [skip for part in distributed.gather(own_skips) for skip in part]
        if not skips:
            return
        every = {(skip.shard, skip.key): skip for skip in skips}
        new = {name: skip for name, skip in every.items() if name not in self.skipped}  # not again in every epoch
        self.skipped |= new
        self.skips_in_total += len(skips)
        total, first = self.skips_in_total, skips[0]
        what = printable(f"{first.shard}: sample {first.key}: {first.reason}")
        self.say(f"skipped {len(skips)} sample(s), {total} in total; {what}")
        samples = [skip.model_dump() for skip in new.values()]
        self.event(step, {"event": "skipped_samples", "count": len(skips), "total": total, "samples": samples})

    def reconstruction(self, pixels_HWC: np.ndarray, step: int) -> None:
        """A uint8 picture, for the trackers that show pictures."""
        for tracker in self.accelerator.trackers if self.tracking else ():
            if hasattr(tracker, "log_images"):
                form = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                self._try(lambda t=tracker, f=form: t.log_images({"reconstruction": pixels_HWC[None]}, step=step, **f))  # type: ignore[misc]

    def _start_trackers(self, step: int, recipe: dict[str, Any]) -> None:
        """Through Accelerate, which names the project after the run directory."""
        assert self.path
        run, accelerator = self.path.parent.resolve(), self.accelerator  # "." is no name of a project
        keywords = dict(self.settings)
        if "tensorboard" in keywords:
            keywords["tensorboard"] = {"purge_step": step + 1, **keywords["tensorboard"]}
        accelerator.log_with = list(keywords)
        accelerator.project_configuration.set_directories(str(run.parent))
        accelerator.init_trackers(run.name, init_kwargs=keywords)
        for tracker in accelerator.trackers:
            if tracker.name != "tensorboard":  # TensorBoard would create extra folders beside recipe.yaml
                tracker.store_init_configuration(without_credentials(recipe))

    def _try(self, act: Callable[[], Any]) -> None:
        """Training is worth more than a tracker: one that fails ends tracking."""
        try:
            act()
        except Exception as error:
            self.tracking = False
            text = str(error).strip().splitlines() or [type(error).__name__]
            self.say(f"tracking is disabled after a tracker error ({text[0]}); metrics.jsonl has everything")


def describe(values: dict[str, float]) -> str:
    """A log line's values in words; the keys are those of `metrics.jsonl`."""
    shown = []
    for name, form in (("loss", ".4f"), ("accuracy", ".1%"), ("feature_rank", ".1f")):
        if name in values:
            constant = f"constant_{name}"
            baseline = f" (constant baseline {values[constant]:{form}})" if constant in values else ""
            shown.append(f"{name.replace('_', ' ')} {values[name]:{form}}{baseline}")
    return "  ".join([*shown, f"{values['images_per_second']:,.0f} images/s", f"data wait {values['data_wait']:.0%}"])
