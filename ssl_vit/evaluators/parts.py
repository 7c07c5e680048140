"""Finished parts of an evaluation, stored so that an evaluation that was stopped resumes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ssl_vit import records
from ssl_vit.evaluators.features import EvalContext
from ssl_vit.interfaces import UserError, is_main_process
from ssl_vit.records import SweepRecord, TaskResult
from ssl_vit.results import Result, load, save
from ssl_vit.training import distributed

Part = tuple[list[Result], SweepRecord | None]


class Parts:
    """Runs the parts of an evaluation that are not stored, and stores them.

    folder: where they are stored (None: nowhere).
    weights: sha256 of the evaluated weights; parts of other weights run again.
    seconds: wall time of all parts, those of earlier processes included.
    """

    def __init__(self, folder: Path | None, weights: str, context: EvalContext) -> None:
        self.folder, self.weights, self.context = folder, weights, context
        self.seconds = 0.0

    def __call__(self, name: str, run: Callable[[], Part]) -> Part:
        """The stored part of this name, or what `run` returns. All processes call this together."""
        path = self.folder / f"{name.replace('%', ' percent')}.json" if self.folder else None
        rows, about = distributed.gather(self._read(path) if path and is_main_process() else None)[0] or (None, None)
        if rows is None or about is None:
            before, start = len(self.context.skipped), time.perf_counter()
            rows, sweep = run()
            skipped = [skip for rank in distributed.gather(self.context.skipped[before:]) for skip in rank]
            seconds = time.perf_counter() - start
            about = TaskResult(id=name, fingerprint=self.weights, seconds=seconds, sweep=sweep, skipped=tuple(skipped))
            if path and is_main_process():
                path.parent.mkdir(exist_ok=True)
                save(path, rows, **about.model_dump(mode="json"))
        else:
            self.context.say(f"{name.replace('_', ' ')}: finished before")
            self.context.skipped += about.skipped
        self.seconds += about.seconds
        return rows, about.sweep

    def _read(self, path: Path) -> tuple[list[Result], TaskResult] | None:
        with suppress(UserError):  # damaged, or of another version
            if path.is_file():
                rows, content = load(path)
                about = records.read(path, TaskResult, content)
                return (rows, about) if about.fingerprint == self.weights else None
        return None

    def remove(self) -> None:
        """Delete the stored parts, once the whole evaluation is stored."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
