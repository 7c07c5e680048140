"""`results.json` beside the weights that were judged: one entry an evaluator, its settings and its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from ssl_vit.files import read_json, write_json
from ssl_vit.interfaces import UserError
from ssl_vit.training.checkpoint import RESULTS

_SAME = ("evaluator", "settings", "data", "metric")  # of two entries with these the later one counts


def check(weights: Path) -> None:
    """Raises UserError where the folder may not be written, or holds such a file of another kind."""
    _read(weights / RESULTS)
    try:
        with _lock(weights):
            pass
    except OSError as error:
        raise UserError(
            f"{weights}: {RESULTS} cannot be written there ({error.strerror}): copy the weights to where it can"
        ) from None


def add(weights: Path, result: dict[str, Any], say: Callable[[str], None]) -> None:
    """Put a result beside those of the same weights (`sha256`); it takes the place of an earlier one of its kind."""
    path = weights / RESULTS
    with _lock(weights):
        others = [old for old in _read(path) if any(old.get(key) != result[key] for key in _SAME)]
        kept = [old for old in others if old.get("sha256", result["sha256"]) == result["sha256"]]
        if len(kept) < len(others):
            say(f"{path}: {len(others) - len(kept)} result(s) of weights that are no longer there left out")
        write_json(path, {"kind": "evaluations", "evaluations": [*kept, result]})


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return list(read_json(path)["evaluations"]) if path.exists() else []
    except (UserError, LookupError, TypeError):
        raise UserError(f"{path}: not what `ssl-vit eval` wrote; put it aside, and its place is taken anew") from None


def _lock(weights: Path) -> FileLock:
    return FileLock(weights / ".results.lock")
