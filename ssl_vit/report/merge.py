"""Whatever pieces of a comparison are finished, put together as its `results.json`. Reads JSON alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ssl_vit.files import read_json, write_json
from ssl_vit.interfaces import UserError

PLAN, RESULTS = "plan.json", "results.json"
# Of a measurement, what results.json leaves to the pieces: a number for every class is too much of a page.
_LEFT_OUT = ("per_class", "main", "name")
_COSTS = ("images_seen", "flops", "seconds")


def merge(runs: Sequence[Path]) -> dict[str, Any]:
    """The results of a comparison from its directory, or from several directories that hold parts of the same one.

    `finished` says whether every piece is there; `missing` names those that are not. Raises UserError where the
    directories are of different comparisons.
    """
    plans = [read_json(run / PLAN) for run in runs]
    plan = plans[0]
    wanted = {piece["id"]: piece["fingerprint"] for piece in plan["pieces"]}
    for run, other in zip(runs, plans, strict=True):
        differ = [p["id"] for p in other["pieces"] if wanted.get(p["id"]) != p["fingerprint"]]
        if differ or len(other["pieces"]) != len(wanted):
            raise UserError(
                f"{run} and {runs[0]} are not of the same comparison (piece {(differ or ['?'])[0]} differs): "
                "merge directories of one recipe, or report each alone"
            )
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        found |= {key: value for key, value in _finished(run, wanted).items() if key not in found}
    results = {key: found[key]["result"] for key in wanted if key in found}
    missing = [key for key in wanted if key not in found]
    header = plan["header"]
    merged: dict[str, Any] = {
        "kind": "comparison",
        **header,
        "sets": {name: chosen | {"classes": _classes(plan, name, results)} for name, chosen in header["sets"].items()},
        "finished": not missing,
        "missing": missing,
        "arms": [_arm(plan, arm, results) | {"total": _total(plan, arm, found)} for arm in plan["arms"]],
        "references": plan["references"],
        "measurements": [
            _row(piece, measured)
            for piece in plan["pieces"]
            if piece["kind"] == "measure" and piece["id"] in results
            for measured in results[piece["id"]]["measurements"]
        ],
        "skipped": _skipped(results),
        "hardware": _distinct([found[key]["hardware"] for key in wanted if key in found]),
    }
    return merged


def update(run: Path, environment: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write `results.json` of whatever is finished by now, by rename; returns the results. The environment is that of
    the process that runs the comparison; without one, what the file says stays."""
    path = run / RESULTS
    kept = None
    if path.is_file():
        with suppress(UserError):  # cut short: it is written anew
            kept = read_json(path).get("environment")
    results = merge([run]) | {"environment": environment or kept}
    write_json(path, results)
    return results


def _finished(run: Path, wanted: dict[str, str]) -> dict[str, dict[str, Any]]:
    pieces = {}
    for identifier, fingerprint in wanted.items():
        if piece := finished(run / "pieces" / f"{identifier}.json", fingerprint):
            pieces[identifier] = piece
    return pieces


def finished(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """A piece's file, if it is there, whole, and made from what the fingerprint says."""
    with suppress(UserError):
        if path.is_file() and (piece := read_json(path)).get("fingerprint") == fingerprint:
            return piece
    return None


def _row(piece: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    place = {key: piece[key] for key in ("data", "arm", "evaluator")}
    return place | {key: value for key, value in measured.items() if key not in _LEFT_OUT}


def _classes(plan: dict[str, Any], data: str, results: dict[str, Any]) -> int | None:
    """How many classes a data set names or, where it names none, how many its measurements tell."""
    if named := plan["header"]["sets"][data]["classes"]:
        return int(named)
    for piece in plan["pieces"]:
        if piece["kind"] == "measure" and piece["data"] == data and results.get(piece["id"], {}).get("measurements"):
            return len(results[piece["id"]]["measurements"][0]["per_class"])
    return None


def _arm(plan: dict[str, Any], arm: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    own = [piece for piece in plan["pieces"] if piece["arm"] == arm["name"] and piece["id"] in results]
    pretrained = [results[piece["id"]] for piece in own if piece["kind"] == "pretrain"]
    first = pretrained[0] if pretrained else arm.get("summary")
    pretraining = None
    if first:
        names = ("steps", "images_seen", "flops", "seconds", "parameters", "samples", "processes")
        pretraining = {name: first.get(name) for name in names} | {"runs": max(len(pretrained), 1)}
        pretraining["device_hours"] = first["seconds"] * first.get("processes", 1) / 3600
    sweeps = [
        (piece, results[piece["id"]]["choice"])
        for piece in own
        if piece["kind"] == "choose" and results[piece["id"]]["choice"]
    ]
    choices = [
        {"data": p["data"], "evaluator": p["evaluator"], "labels_per_class": p["budget"]}
        | {key: choice[key] for key in ("tried", "chosen")}
        for p, choice in sweeps
    ]
    tuning = {key: sum(choice[key] for _, choice in sweeps) for key in _COSTS} if sweeps else None
    pictures = [results[piece["id"]].get("folder") for piece in own if piece["kind"] == "pictures"]
    return {
        **{key: value for key, value in arm.items() if key not in ("needs_labels", "summary")},
        "labels_used": _labels_used(arm, pretraining),
        "pretraining": pretraining,
        "choices": choices,
        "tuning": tuning,
        "pictures": next(iter(pictures), None),
    }


def _labels_used(arm: dict[str, Any], pretraining: dict[str, Any] | None) -> int | None:
    """How many labels an arm's pretraining saw; None for weights that nothing tells the making of."""
    if pretraining is None:
        return None if arm.get("starts_from") else 0
    return int(pretraining["samples"]) if arm["needs_labels"] else 0


def _total(plan: dict[str, Any], arm: dict[str, Any], found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What an arm's pretrainings, sweeps and fine-tunings cost together; a model that its sweep trained counts once."""
    spent = [(arm["summary"], 1)] if arm.get("summary") else []
    swept = set()
    for piece in plan["pieces"]:
        if piece["arm"] != arm["name"] or piece["id"] not in found:
            continue
        result, processes = found[piece["id"]]["result"], found[piece["id"]].get("processes", 1)
        place = tuple(piece[key] for key in ("data", "evaluator", "budget", "seed"))
        if piece["kind"] == "pretrain":
            spent.append((result, processes))
        elif piece["kind"] == "choose" and result["choice"]:
            spent.append((result["choice"], processes))
            swept |= {place} if result["choice"]["measured"] else set()
        elif piece["kind"] == "measure" and place not in swept:
            spent += [(measured, processes) for measured in result["measurements"]]
    total: dict[str, float] = {name: sum(cost[name] for cost, _ in spent) for name in _COSTS}
    hours = (cost["seconds"] * cost.get("processes", processes) / 3600 for cost, processes in spent)
    return total | {"device_hours": sum(hours)}


def _skipped(results: dict[str, Any]) -> list[dict[str, str]]:
    """Every sample that some evaluation or fine-tuning could not read, once."""
    found = [skip for result in results.values() for skip in result.get("skipped", [])]
    return list({(skip["shard"], skip["key"]): skip for skip in found}.values())


def _distinct(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())
