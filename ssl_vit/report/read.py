"""Read what a run or a comparison left on disk: plain JSON and text, nothing executed or unpickled."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ssl_vit.files import read_json, sha256
from ssl_vit.interfaces import UserError
from ssl_vit.report.merge import PLAN, merge

RUN_FILES = ("metrics.jsonl", "recipe.yaml", "summary.json")
_WEIGHTS = "encoder.safetensors"
# What `ssl-vit inspect` draws, in the order of a page.
PICTURES = (
    "reconstructions",
    "attention_rollout",
    "attention_distance",
    "feature_map",
    "filters",
    "position_similarity",
)


def read_directory(path: str | Path) -> dict[str, Any]:
    """Read one run directory or one comparison directory.

    Returns a dict with the keys
    `kind` ("run" or "comparison"), `path` (Path as given), `results`, `environment`, `summary` (parsed JSON objects or
    None where the file is missing), `metrics` (list of dicts in file order; lines a killed run left broken are left
    out), `broken_lines` (how many such lines there were), `recipe` (text, "" where missing) and `pictures` (Paths: of
    `ssl-vit inspect` where it was run, else the newest of training). A comparison's results are put together from the
    pieces that are finished by now; it also has `runs`: {arm name: run dict} for the arms whose run directory exists.

    Raises UserError when the directory is missing, is neither of the two, or holds a damaged JSON file.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such directory. Give the directory that a run or a comparison wrote.")
    if not path.is_dir():
        raise UserError(f"{path}: this is a file. Give the directory that holds it: {path.parent}")
    results = _read_json(path / "results.json")
    kind = (results or {}).get("kind")
    if kind == "comparison" or (path / PLAN).is_file():
        return read_comparison([path])
    if kind == "evaluations" or any((path / name).is_file() for name in RUN_FILES):
        return _read_common(path, results) | {"kind": "run"}
    raise UserError(
        f"{path}: neither a run nor a comparison directory (no results.json, {', '.join(RUN_FILES)}).\n"
        "Give the directory itself, not the folder above it."
    )


def read_comparison(paths: list[Path]) -> dict[str, Any]:
    """A comparison as `read_directory` gives it, from one directory or several that hold parts of the same one."""
    found = _read_common(paths[0], _read_json(paths[0] / "results.json")) | {"kind": "comparison"}
    if all((path / PLAN).is_file() for path in paths):
        kept = (found["results"] or {}).get("environment")
        found["results"] = merge(paths) | ({"environment": kept} if kept else {})
    elif len(paths) > 1:
        without = next(path for path in paths if not (path / PLAN).is_file())
        raise UserError(f"{without}: no {PLAN} there, so it cannot be merged with others: report it alone")
    found["runs"] = {}
    for path in reversed(paths):
        found["runs"] |= _read_arms(path, found["results"])
    return found


def of_weights(results: dict[str, Any] | None, folder: Path) -> dict[str, Any] | None:
    """The results of evaluators without those of weights that lay in this folder before; `outdated` counts these."""
    weights, found = folder / _WEIGHTS, (results or {}).get("evaluations") or []
    if not results or not weights.is_file() or not any("sha256" in evaluation for evaluation in found):
        return results
    here = sha256(weights)
    kept = [evaluation for evaluation in found if evaluation.get("sha256", here) == here]
    return results | {"evaluations": kept, "outdated": results.get("outdated", 0) + len(found) - len(kept)}


def _read_common(path: Path, results: dict[str, Any] | None) -> dict[str, Any]:
    metrics, broken = _read_metrics(path / "metrics.jsonl")
    recipe = path / "recipe.yaml"
    return {
        "path": path,
        "results": of_weights(results, path),
        "metrics": metrics,
        "broken_lines": broken,
        "environment": _read_json(path / "environment.json"),
        "summary": _read_json(path / "summary.json"),
        "recipe": recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else "",
        "pictures": _pictures(path / "inspect") or _newest_picture(path / "pictures"),
    }


def _read_arms(path: Path, results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = {}
    for arm in results.get("arms") or []:
        if not arm.get("run"):
            continue
        try:
            run = read_directory(path / arm["run"])
        except UserError:
            # The arm may not have started yet, or its run was deleted to save space: the comparison still has numbers.
            continue
        if run["kind"] == "run":
            drawn = _pictures(path / arm["pictures"]) if arm.get("pictures") else []
            runs[arm["name"]] = run | {"pictures": drawn or run["pictures"]}
    return runs


def _read_json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    if not path.is_file():
        return [], 0
    metrics: list[dict[str, Any]] = []
    broken = 0
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        # A kill cuts the last line short; when the run then resumes, that line is no longer the last one.
        if isinstance(record, dict):
            metrics.append(record)
        else:
            broken += 1
    return metrics, broken


def _pictures(folder: Path) -> list[Path]:
    """What `ssl-vit inspect` drew into a folder, in its order."""
    return [path for name in PICTURES if (path := folder / f"{name}.png").is_file()]


def _newest_picture(folder: Path) -> list[Path]:
    def step(picture: Path) -> tuple[int, str]:
        number = re.search(r"(\d+)$", picture.stem)
        return (int(number.group(1)) if number else -1, picture.name)

    return sorted(folder.glob("reconstruction*.png"), key=step)[-1:]
