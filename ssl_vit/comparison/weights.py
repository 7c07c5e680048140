"""Imports the weights of arms that are no run or weights folder, once, before anything is evaluated with them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from ssl_vit.comparison.checks import check_directory
from ssl_vit.comparison.config import Arm, Study
from ssl_vit.files import read_json, sha256, weights_file, write_json
from ssl_vit.interfaces import RunError, errors_about
from ssl_vit.models.exchange.hub import Unreachable
from ssl_vit.models.exchange.imports import import_weights
from ssl_vit.progress import Say, silent

FOLDER = "weights"  # in the run directory of the comparison
_REQUEST = "request.json"  # beside an arm's weights: what they were imported from


def import_arms(study: Study, say: Say = silent) -> Study:
    """The same study with the weights of every arm in a folder that `factory.load` reads.

    Weights from elsewhere are imported into `RUN/weights/ARM` unless they are there; other processes wait. Arms with
    `optional` whose weights cannot be downloaded are skipped; `say` and a note of the comparison name them.

    Raises UserError for weights that cannot be read and for a run directory that holds something else, RunError where
    the hub is out of reach and the arm is needed.
    """
    check_directory(study)
    c, arms, notes = study.comparison, dict(study.comparison.arms), list(study.comparison.notes)
    for name, arm in c.arms.items():
        if arm.weights is None or weights_file(Path(arm.weights)):
            continue
        folder = c.run_directory / FOLDER / name
        try:
            with errors_about(f"arms.{name}"):
                _import(arm, folder, say)
        except RunError as error:
            others = {key: other for key, other in arms.items() if key != name}
            needed = name == c.baseline or any(other.like == name for other in others.values())
            needed |= all(other.kind == "scratch" or key == c.baseline for key, other in others.items())
            if not isinstance(error, Unreachable) or not arm.optional or needed:
                raise RunError(f"arms.{name}: {error}") from error
            del arms[name]
            notes.append(f"The arm {arm.label} was skipped: its weights ({arm.weights}) could not be downloaded.")
            say(f"note: arms.{name} is skipped: {error}")
        else:
            arms[name] = arm.model_copy(update={"weights": str(folder), "architecture": None})
    return replace(study, comparison=c.model_copy(update={"arms": arms, "notes": tuple(notes)}))


def _import(arm: Arm, folder: Path, say: Say) -> None:
    request = {"weights": arm.weights, "architecture": arm.architecture, "files": _digests(Path(str(arm.weights)))}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if (folder / _REQUEST).is_file() and read_json(folder / _REQUEST) == request:
            return
        shutil.rmtree(folder, ignore_errors=True)
        say(f"importing {arm.weights} into {folder}")
        _, imported = import_weights(str(arm.weights), folder, name=arm.architecture)
        for note in imported.notes:
            say(f"note: {arm.weights}: {note}")
        write_json(folder / _REQUEST, request)


def _digests(path: Path) -> dict[str, Any]:
    """Checksums of the local files that weights are read from; nothing for weights of the hub."""
    if path.is_file():
        return {path.name: sha256(path)}
    kinds = (".json", ".safetensors", ".bin")
    return {file.name: sha256(file) for file in sorted(path.glob("*.*")) if file.suffix in kinds}
