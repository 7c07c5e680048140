"""Read one run directory: its summary, losses, pictures and what evaluators measured. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from ssl_vit import records, results
from ssl_vit.evaluators import UNUSED
from ssl_vit.files import read_json
from ssl_vit.interfaces import Metric, UserError
from ssl_vit.overrides import flatten
from ssl_vit.records import ReferenceKind, RunSummary, SkippedSample
from ssl_vit.results import Evaluation

RUN_FILES = ("summary.json", "recipe.yaml", "environment.json", "metrics.jsonl", "results")
# What `ssl-vit inspect` draws, in the order of a page.
PICTURES = (
    *("reconstructions", "embedding_map", "nearest_neighbors", "attention_rollout", "attention_distance"),
    *("feature_map", "filters", "position_similarity"),
)
_OBJECTIVES = {"masked_patch": "masked patch prediction", "masked_autoencoder": "MAE", "lejepa": "LeJEPA"}
REFERENCES: dict[ReferenceKind, str] = {
    "untrained": "the untrained encoder",
    "pixels": "raw pixels",
    "control": "an untrained encoder per seed",
}
LOSSES = ["step", "loss", "constant_loss", "images_seen"]


def objective_name(objective: str) -> str:
    """An objective as sentences name it."""
    return _OBJECTIVES.get(objective, objective.replace("_", " "))


@dataclass(frozen=True)
class Run:
    """A run directory.

    losses: columns `LOSSES`, a row per step. evaluations: of the weights that lie there now.
    environment: nested keys joined by dots. remarks: what a reader must know about its files.
    """

    name: str
    path: Path
    summary: RunSummary | None
    recipe: str
    losses: pd.DataFrame
    pictures: tuple[Path, ...]
    evaluations: tuple[Evaluation, ...]
    environment: Mapping[str, str]
    remarks: tuple[str, ...]

    @property
    def objective(self) -> str:
        """Of an unfinished run that of its recipe; "" where neither says it."""
        objective = self._settings.get("objective")
        name = objective.get("name", "") if isinstance(objective, dict) else ""
        return self.summary.objective if self.summary else name if isinstance(name, str) else ""

    @property
    def starts_from(self) -> str | None:
        """The weights that its training started from, or its path where nothing says how its weights were trained."""
        start = self._settings.get("init_from")
        if isinstance(start, str) and start:
            return start
        return None if self.recipe or self.summary else str(self.path)

    @property
    def _settings(self) -> dict[str, object]:
        """Its recipe; empty where that is damaged: the page shows it as it is."""
        try:
            settings = yaml.safe_load(self.recipe)
        except (yaml.YAMLError, ValueError, RecursionError):
            return {}
        return settings if isinstance(settings, dict) else {}


def read_run(path: Path) -> Run:
    """Raises UserError where the directory is not of a run, or holds a damaged file."""
    if not any((path / name).exists() for name in RUN_FILES):
        names = ", ".join(RUN_FILES)
        raise UserError(f"{path}: neither a run nor a comparison (no plan.json, {names}). Give the directory itself.")
    file, recipe, environment = (path / name for name in RUN_FILES[:3])
    summary = records.read(file, RunSummary) if file.is_file() else None
    about = read_json(environment) if environment.is_file() else {}
    about.pop("before", None)  # of the sessions before the last one
    losses, remarks = _read_metrics(path / "metrics.jsonl")
    stored, outdated = results.evaluations(path)
    remarks += [
        f"results/{item.name} was measured on other weights and was skipped: run `ssl-vit eval` again."
        for item in outdated
    ]
    remarks += [f"{item.about.title}: {note}." for item in stored.values() for note in item.about.notes]
    return Run(
        name=summary.name if summary else path.resolve().name,
        path=path,
        summary=summary,
        recipe=recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else "",
        losses=losses,
        pictures=pictures(path / "inspect") or tuple(sorted((path / "pictures").glob("reconstruction*.png"))[-1:]),
        evaluations=tuple(stored.values()),
        environment=flat(about),
        remarks=tuple(remarks),
    )


def without_replaced(run: Run) -> Run:
    """The run without evaluations on data that has changed since, under the same names, where newer ones with the same
    settings exist; remarks name them."""
    newest, remarks = dict[str, Evaluation](), list[str]()
    for evaluation in sorted(run.evaluations, key=lambda one: one.about.saved):
        key = evaluation.about.model_dump_json(include={"evaluator", "settings", "metric", "data"})
        if (older := newest.get(key)) and older.path:
            remarks.append(f"results/{older.path.name} was measured on data that has changed since and was skipped.")
        newest[key] = evaluation
    kept = sorted(newest.values(), key=lambda one: str(one.path))
    return replace(run, evaluations=tuple(kept), remarks=(*run.remarks, *remarks))


def flat(settings: Mapping[str, object]) -> dict[str, str]:
    """Nested dictionaries as text by keys joined by dots."""
    return {key: text(value) for key, value in flatten(dict(settings)).items()}


def used(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings of an evaluator by dotted key, without keys that have no effect, or that a sweep sets."""
    given = flatten(dict(settings))
    return {
        key: value
        for key, value in given.items()
        if given.get(f"sweep.{key}") is None
        and not any(key.startswith(f"training.{name}") for name in ("precision", *UNUSED))
    }


def text(value: object) -> str:
    """A value as the text of a cell; "–" for None."""
    if isinstance(value, list | tuple):
        return ", ".join("null" if each is None else text(each) for each in value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 999.95 else f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.2e}"
    if isinstance(value, Integral) and not isinstance(value, bool):
        return f"{int(value):,}"
    return "–" if value is None else str(value)


def metric_name(metric: Metric) -> str:
    """The metric of a dataset in words."""
    return "mean per-class test accuracy" if metric == "mean_per_class" else "test accuracy"


def pictures(folder: Path) -> tuple[Path, ...]:
    """The pictures that `ssl-vit inspect` wrote into a folder."""
    return tuple(path for name in PICTURES if (path := folder / f"{name}.png").is_file())


def _read_metrics(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Finite losses in step order (of a step that a resumed run repeated, the later one), and remarks."""
    losses: dict[int, object] = {}
    skipped: list[SkippedSample] = []
    times = broken = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
            if record.get("event") == "skipped_samples":
                skipped += [SkippedSample.model_validate(sample) for sample in record["samples"]]
                times += int(record["count"])
            elif "loss" in record:
                losses[int(record["step"])] = {key: float(record[key]) for key in LOSSES if record.get(key) is not None}
        except (ArithmeticError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
            broken += 1  # a kill cuts a line short; a resumed run appends after it
    frame = pd.DataFrame([*losses.values()], columns=LOSSES, dtype=float)
    frame = frame[np.isfinite(frame["loss"])].sort_values("step")
    remarks = [f"Training skipped unreadable samples {times:,} time(s): {listed(skipped)}."] if skipped else []
    if broken:
        remarks.append(f"{broken} incomplete line(s) of metrics.jsonl were ignored (a killed run leaves one).")
    return frame, remarks


def listed(samples: list[SkippedSample] | tuple[SkippedSample, ...]) -> str:
    """Up to five of the samples, each once, with the reason."""
    names = list(dict.fromkeys(f"{sample.shard}: {sample.key} ({sample.reason})" for sample in samples))
    return "; ".join(names[:5] + ([f"and {len(names) - 5} more"] if len(names) > 5 else []))


def joined(words: Sequence[str]) -> str:
    """The words of a list in a sentence: `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
