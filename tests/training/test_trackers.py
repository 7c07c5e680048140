"""Trackers by name through Accelerate; the training continues when they fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.tracking
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ssl_vit.interfaces import UserError
from ssl_vit.recipe import load_recipe
from ssl_vit.training import logging
from ssl_vit.training.distributed import make_accelerator
from ssl_vit.training.logging import RunLogger, check_trackers
from tests.processes.reading import rows as lines

Train = Callable[..., Path]


def scalars(run: Path, name: str) -> dict[int, float]:
    events = EventAccumulator(str(run)).Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_tensorboard_gets_what_the_log_holds(train: Train, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "training.trackers={tensorboard: {}}")
    expected = {row["step"]: row["loss"] for row in lines(run)}
    assert scalars(run, "loss") == pytest.approx(expected)
    assert {path.name.split(".")[0] for path in run.iterdir() if path.is_dir()} == {"checkpoints"}  # no clutter
    assert load_recipe(run).training.trackers == {"tensorboard": {}}
    assert load_recipe(run, ["training.trackers={}"]).training.trackers == {}


def test_a_resumed_run_overwrites_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for resumed, value in ((0, 1.0), (3, 2.0)):
        with RunLogger(6, tmp_path / "run", make_accelerator(), {"tensorboard": {}}, quiet=True) as log:
            log.begin(resumed, [], {})
            for step in range(resumed + 1, 6):
                log.values(step, {"accuracy": value})
            log.reconstruction(np.zeros((4, 6, 3), dtype=np.uint8), 5)
        time.sleep(1.1)  # TensorBoard reads the files in the order of their names, which begin with the second
    assert scalars(tmp_path / "run", "accuracy") == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 2.0}
    assert EventAccumulator(str(tmp_path / "run")).Reload().Images("reconstruction")[0].height == 4


def test_a_tracker_gets_the_recipe_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Remote(accelerate.tracking.GeneralTracker):
        name, requires_logging_directory = "remote", False

        def __init__(self) -> None:
            super().__init__()
            self.stored: list[dict[str, Any]] = []

        @property
        def tracker(self) -> Any:
            return self

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.stored.append(values)

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None: ...

    remote, accelerator, projects = Remote(), make_accelerator(), list[str]()

    def start(project: str, **keywords: Any) -> None:
        projects.append(project)
        accelerator.trackers = [remote]

    monkeypatch.setattr(accelerator, "init_trackers", start)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    with RunLogger(6, Path(), accelerator, {"tensorboard": {}}, quiet=True) as log:
        log.begin(
            0, [], {"data": {"train": ["https://host/a.tar?sig=SECRET", "https://host/b.tar?x=SECRET"]}, "seed": 0}
        )
    assert projects == ["run"], "also of a run that is resumed in its own directory"
    assert remote.stored == [{"data": {"train": ["https://host/a.tar?...", "https://host/b.tar?..."]}, "seed": 0}]


def test_a_tracker_that_cannot_start_or_breaks_stops_no_training(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(RunLogger, "say", lambda self, text: said.append(text))
    train(tmp_path / "a", "training.trackers={tensorboard: {nonsense: 1}}")
    assert "tracking is disabled" in said[0] and "nonsense" in said[0]
    calls = []

    def breaks(self: Any, values: Any, step: int) -> None:
        calls.append(step)
        if step == 3:
            raise ConnectionError("the server is gone")

    monkeypatch.setattr(accelerate.tracking.TensorBoardTracker, "log", breaks)
    run = train(tmp_path / "run", "training.trackers={tensorboard: {}}")
    assert [row["step"] for row in lines(run)] == list(range(1, 13)) and calls == [1, 2, 3]
    assert any("the server is gone" in text for text in said)


def test_an_unknown_or_missing_tracker_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"training.trackers.wandbb: .*did you mean 'wandb'"):
        check_trackers({"wandbb": {}})
    monkeypatch.setattr(logging, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(UserError, match=r"trackers.wandb: not installed: pip install wandb, or .*\[trackers\]"):
        check_trackers({"tensorboard": {}, "wandb": {}})
