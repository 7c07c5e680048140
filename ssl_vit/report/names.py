"""The names that people read for arms and evaluators, and the orders they come in."""

from __future__ import annotations

from typing import Any

LABELS = {
    "ssl": "SSL pretraining",
    "scratch": "training from scratch",
    "supervised": "supervised pretraining",
    "untrained": "the untrained encoder",
    "pixels": "raw pixels",
}


def arm_names(results: dict[str, Any]) -> list[str]:
    """The arms in the order of `results["arms"]`, then the reference rows that only measurements name."""
    listed = [arm["name"] for arm in results.get("arms") or []]
    measured = dict.fromkeys(found["arm"] for found in results.get("measurements") or [])
    known = [name for name in LABELS if name in measured]
    return list(dict.fromkeys([*listed, *known, *measured]))


def arm_label(results: dict[str, Any], name: str) -> str:
    """What a person reads for an arm: its own label, or a plain word for the reference rows."""
    labels = {arm["name"]: arm.get("label") for arm in results.get("arms") or []}
    if name.startswith("untrained_"):
        return f"the untrained encoder of {arm_label(results, name.removeprefix('untrained_'))}"
    return labels.get(name) or LABELS.get(name) or name


def spoken(results: dict[str, Any], name: str) -> str:
    """An arm inside a sentence: plain words for the usual arms, the label of any other, and both for one SSL arm of
    several."""
    if name == "ssl" and len(subjects(results)) > 1:
        return f"{LABELS[name]} ({arm_label(results, name)})"
    return LABELS.get(name) or arm_label(results, name)


def evaluator_names(results: dict[str, Any]) -> list[str]:
    """Evaluators in the comparison's order, then those that only measurements name."""
    measured = [found["evaluator"] for found in results.get("measurements") or []]
    return list(dict.fromkeys([*(results.get("evaluators") or {}), *measured]))


def evaluator_title(results: dict[str, Any], name: str) -> str:
    return str(((results.get("evaluators") or {}).get(name) or {}).get("title") or name)


def trains_encoder(results: dict[str, Any], name: str) -> bool:
    return bool(((results.get("evaluators") or {}).get(name) or {}).get("trains_encoder"))


def subjects(results: dict[str, Any]) -> list[str]:
    """The arms under test: `ssl` first, then any other arm that pretrained without labels."""
    arms = results.get("arms") or []
    unlabeled = [arm["name"] for arm in arms if arm.get("pretraining") and arm.get("labels_used") == 0]
    found = [name for name in arm_names(results) if name == "ssl" or name in unlabeled]
    return sorted(found, key=lambda name: name != "ssl")
