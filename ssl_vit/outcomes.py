"""What the functions of the Python API return: a run, a comparison."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ssl_vit import records
from ssl_vit.files import expanded
from ssl_vit.records import RunSummary

if TYPE_CHECKING:
    from ssl_vit.report.read import Comparison

PathInput = str | PathLike[str]


@dataclass(frozen=True)
class TrainingRun(PathLike[str]):
    """A run directory. Every function that takes a path takes it.

    dir: the directory.
    """

    dir: Path

    def __fspath__(self) -> str:
        return str(self.dir)

    @property
    def metrics(self) -> pd.DataFrame:
        """`metrics.jsonl`: a row per logged step or event, a column per metric."""
        rows = []
        for line in (self.dir / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):  # a kill cuts a line short
                rows.append(json.loads(line))
        return pd.DataFrame(rows)

    @property
    def summary(self) -> RunSummary:
        """Steps, images, FLOPs and seconds of the finished run."""
        return records.read(self.dir / "summary.json", RunSummary)


@dataclass(frozen=True)
class ComparisonRun(PathLike[str]):
    """A comparison's directory with what was measured.

    dir: the directory.
    comparison: its record and results.
    """

    dir: Path
    comparison: Comparison

    def __fspath__(self) -> str:
        return str(self.dir)

    @property
    def table(self) -> pd.DataFrame:
        """A row per result: evaluator, arm, labels_per_class, seed, accuracy, cost."""
        return self.comparison.table.frame

    @property
    def headline(self) -> str:
        """The verdict on the headline, of the first dataset where there are several."""
        from ssl_vit.report.summary import summarize
        from ssl_vit.report.verdict import verdict

        return verdict(self.comparison, summarize(self.comparison))[0]

    def report(self, out: PathInput | None = None) -> Path:
        """Write the HTML page (default: report.html in the directory); returns its path."""
        from ssl_vit.report.page import write_report

        return write_report([self.dir], expanded(out or self.dir / "report.html"))
