"""Accelerate's trackers by name (TensorBoard, W&B, MLflow, ClearML, Trackio, ...); none of them can stop a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from ssl_vit.interfaces import UserError

Settings = Mapping[str, dict[str, Any]]


def check_trackers(settings: Settings) -> None:
    """Raises UserError for a tracker that Accelerate does not know or that is not installed."""
    for name in settings:
        if name not in LOGGER_TYPE_TO_CLASS:
            near = get_close_matches(name, LOGGER_TYPE_TO_CLASS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            raise UserError(f"training.trackers.{name}: Accelerate has no such tracker; {hint}")
        if name not in map(str, get_available_trackers()):
            raise UserError(
                f"training.trackers.{name}: it is not installed: pip install {name}, or pip install 'ssl-vit[trackers]'"
            )


class Trackers:
    """The trackers of one run, on the main process: the project is named after the run directory.

    settings: keywords of each tracker's own initialization. recipe: flat, for those that store one. A tracker that
    fails is left out from there on, and `say` is told why.
    """

    def __init__(
        self, run: Path, settings: Settings, recipe: dict[str, Any], resumed_step: int, say: Callable[[str], None]
    ) -> None:
        self.say = say
        self.trackers: list[GeneralTracker] = []
        for name, keywords in settings.items():

            def start(name: str = name, keywords: dict[str, Any] = keywords) -> None:
                kind = LOGGER_TYPE_TO_CLASS[name]
                if name == "tensorboard" and resumed_step:
                    keywords = {"purge_step": resumed_step + 1, **keywords}
                folder = [str(run.parent)] if kind.requires_logging_directory else []
                tracker = kind(run.name, *folder, **keywords)
                tracker.start()
                self.trackers.append(tracker)
                if name != "tensorboard":  # it would make folders of its own beside recipe.yaml
                    tracker.store_init_configuration(recipe)

            self._tried(name, start)

    def log(self, step: int, values: dict[str, float]) -> None:
        for tracker in list(self.trackers):
            self._tried(tracker.name, partial(tracker.log, values, step=step))

    def picture(self, name: str, pixels_HWC: np.ndarray, step: int) -> None:
        """A uint8 picture, for the trackers that show pictures."""
        for tracker in list(self.trackers):
            if hasattr(tracker, "log_images"):
                form = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                pictures = pixels_HWC if tracker.name in ("clearml", "aim") else pixels_HWC[None]
                self._tried(tracker.name, partial(tracker.log_images, {name: pictures}, step=step, **form))

    def close(self) -> None:
        for tracker in list(self.trackers):
            self._tried(tracker.name, tracker.finish)

    def _tried(self, name: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # whatever it is: the training is worth more
            self.trackers = [tracker for tracker in self.trackers if tracker.name != name]
            text = str(error).strip().splitlines() or [type(error).__name__]
            self.say(f"tracker {name} failed and is left out from here on ({text[0]}); metrics.jsonl holds everything")
