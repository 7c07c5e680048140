"""Finished parts of an evaluation or a sweep, stored so that it resumes after it was stopped."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from ssl_vit.evaluators.features import EvalContext
from ssl_vit.interfaces import is_main_process
from ssl_vit.records import SweepRecord, TaskResult
from ssl_vit.results import Result, finished, save
from ssl_vit.training import distributed

Part = tuple[list[Result], SweepRecord | None]
Run = Callable[[str, Callable[[], Part]], Part]  # calls a function, or returns what it returned earlier under this name

UNFINISHED = ".unfinished"  # the folder of the parts, instead of .json


def unstored(_: str, run: Callable[[], Part]) -> Part:
    return run()


class Parts:
    """Runs the parts that are not stored, and stores them. Parts may have parts.

    folder: where they are stored (None: nowhere).
    depends_on: hash of what they depend on, such as the weights; parts with another one run again.
    earlier_seconds: wall time of the parts that were stored before.
    """

    def __init__(self, folder: Path | None, depends_on: str, context: EvalContext) -> None:
        self.folder, self.depends_on, self.context = folder, depends_on, context
        self.earlier_seconds = 0.0

    def __call__(self, name: str, run: Callable[[], Part]) -> Part:
        """The stored part of this name, or what `run` returns. All processes call this together."""
        path = self.folder / f"{name.replace('%', ' percent')}.json" if self.folder else None
        stored = distributed.from_main(finished(path, self.depends_on) if path and is_main_process() else None)
        skips = self.context.skipped
        if stored:
            rows, about = stored
            self.context.say(f"{name.replace('_', ' ')}: already finished")
            skips += about.skipped
            self.earlier_seconds += about.seconds
        else:
            before, start, earlier = len(skips), time.perf_counter(), self.earlier_seconds
            rows, sweep = run()
            about = TaskResult(
                fingerprint=self.depends_on,
                seconds=time.perf_counter() - start + self.earlier_seconds - earlier,
                sweep=sweep,
                skipped=tuple(skips[before:]),
            )
            with distributed.shared_errors(f"{path}: cannot write"):
                if path and is_main_process():
                    path.parent.mkdir(exist_ok=True)
                    save(path, rows, **about.model_dump(mode="json"))
        return rows, about.sweep

    def remove(self) -> None:
        """Delete the stored parts, once the whole is stored."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
