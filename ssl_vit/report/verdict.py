"""The sentences that the statistics of a comparison allow, and the names they and the tables call arms by."""

from __future__ import annotations

from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

EVALUATORS = {
    "fine_tune": "Fine-tuning",
    "linear_probe": "Linear probe on frozen features",
    "few_shot": "Few-shot linear classifier on frozen features",
    "knn": "Nearest neighbours on frozen features",
}
LABELS = {
    "ssl": "SSL pretraining",
    "scratch": "training from scratch",
    "supervised": "supervised pretraining",
    "untrained": "the untrained backbone",
    "pixels": "raw pixels",
}

Row = dict[str, Any]


def ordered(first: Any, names: list[str]) -> list[str]:
    """The distinct names: those of `first` in its order, then the others as they come."""
    distinct = list(dict.fromkeys(names))
    return [name for name in first if name in distinct] + [name for name in distinct if name not in first]


def arm_names(results: dict[str, Any]) -> list[str]:
    """The arms in the order of `results["arms"]`, then the reference rows that only measurements name."""
    listed = [arm["name"] for arm in results.get("arms") or []]
    measured = [found["arm"] for found in results.get("measurements") or []]
    return listed + [name for name in ordered(LABELS, measured) if name not in listed]


def arm_label(results: dict[str, Any], name: str) -> str:
    """What a person reads for an arm: its own label, or a plain word for the reference rows."""
    labels = {arm["name"]: arm.get("label") for arm in results.get("arms") or []}
    return labels.get(name) or LABELS.get(name) or name


def subjects(results: dict[str, Any]) -> list[str]:
    """The arms under test: `ssl`, and any other arm that pretrained without labels."""
    arms = results.get("arms") or []
    unlabelled = [arm["name"] for arm in arms if arm.get("pretraining") and arm.get("labels_used") == 0]
    return [name for name in arm_names(results) if name == "ssl" or name in unlabelled]


def baseline(evaluator: str, results: dict[str, Any]) -> str:
    """What "no pretraining" means: training from scratch, or the untrained backbone where features are frozen."""
    measured = {found["arm"] for found in results.get("measurements") or [] if found["evaluator"] == evaluator}
    first, second = ("scratch", "untrained") if evaluator == "fine_tune" else ("untrained", "scratch")
    return first if first in measured or second not in measured else second


def _outcome(row: Row) -> str:
    if row["half_width"] is None:
        return "one"
    if abs(row["mean"]) <= row["half_width"]:
        return "none"
    return "gain" if row["mean"] > 0 else "loss"


def signed_points(row: Row) -> str:
    """A difference row as text: signed points and the half-width of its 95% interval (none for one seed)."""
    mean = f"{round(100 * row['mean'], 1) + 0.0:+.1f}"  # adding 0.0 turns -0.0 into 0.0
    return mean if row["half_width"] is None else f"{mean} ± {100 * row['half_width']:.1f}"


def _claim(row: Row, subject: str, other: str) -> str:
    means = f"{100 * row['arm_mean']:.1f}% against {100 * row['against_mean']:.1f}%"
    size = signed_points(row)
    return {
        "gain": f"{subject} gains {size} points over {other} ({means}, {row['n']} seeds).",
        "loss": f"{subject} loses {size.lstrip('+-')} points against {other} ({means}, {row['n']} seeds).",
        "none": f"there is no difference between {subject} and {other} that these seeds can show "
        f"({size} points; {means}, {row['n']} seeds).",
        "one": f"{subject} is at {means} for {other} ({size} points) on one seed: there is no interval, "
        "so this may be chance.",
    }[_outcome(row)]


def _budgets(numbers: list[int]) -> str:
    unit = "label a class" if numbers == [1] else "labels a class"
    return f"with {_listed([str(number) for number in numbers])} {unit}"


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def verdict(results: dict[str, Any], differences: list[Row]) -> list[str]:
    """Sentences on the first arm under test, from the difference rows of `tables.summarise`: at the smallest label
    budget, over the other budgets, against supervised pretraining, and each reference that it loses to."""
    tested = subjects(results)
    ours = [row for row in differences if row["arm"] in tested[:1]]
    curve = [row for row in ours if row["against"] == baseline(row["evaluator"], results)]
    curve = [row for row in curve if row["evaluator"] == curve[0]["evaluator"]]
    sentences = []
    if curve:
        head = curve[0]
        name = LABELS["ssl"] if tested == ["ssl"] else arm_label(results, tested[0])
        where = _budgets([head["labels_per_class"]])
        kind = "" if head["evaluator"] == "fine_tune" else f"{EVALUATORS.get(head['evaluator'], head['evaluator'])}: "
        sentences.append(_capital(f"{kind}{where}, {_claim(head, name, LABELS[head['against']])}"))
        sentences.append(_over_budgets(curve, name))
        used = {arm["name"]: arm.get("labels_used") for arm in results.get("arms") or []}.get("supervised")
        other = LABELS["supervised"] + (f" on {used:,} labels" if used else "")
        same = [row for row in ours if all(row[key] == head[key] for key in ("evaluator", "labels_per_class"))]
        sentences += [_capital(f"{where}, {_claim(r, name, other)}") for r in same if r["against"] == "supervised"]
    else:
        sentences.append("No verdict yet: no seed has been measured both with SSL pretraining and without it.")
    beaten = [row for row in ours if row not in curve and row["against"] != "supervised" and _outcome(row) == "loss"]
    beaten.sort(key=itemgetter("evaluator", "against"))
    for (evaluator, against), rows in groupby(beaten, key=itemgetter("evaluator", "against")):
        where = _budgets([row["labels_per_class"] for row in rows])
        kind = EVALUATORS.get(evaluator, evaluator)
        sentences.append(f"Caution: {kind}, {where}: better with {LABELS[against]} than with SSL pretraining.")
    if results.get("finished") is False:
        sentences.append("The comparison has not finished: the numbers may still change.")
    return sentences


def _over_budgets(curve: list[Row], name: str) -> str:
    """Where the gain stops, or how it goes on, over the budgets after the first."""
    if len(curve) == 1:
        return "No other label budget was measured, so this says nothing about more labels."
    parts = []
    for outcome, group in groupby(curve[1:], key=_outcome):
        rows = list(group)
        where = _budgets([row["labels_per_class"] for row in rows])
        sizes = _listed([signed_points(row) for row in rows])
        words = {
            "gain": f"{where} {name} gains {sizes} points",
            "loss": f"{where} {name} loses ({sizes} points)",
            "none": f"{where} these seeds show no difference ({sizes} points)",
            "one": f"{where} the difference on one seed is {sizes} points",
        }
        parts.append(words[outcome])
    outcomes = [_outcome(row) for row in curve]
    gains = len(list(takewhile("gain".__eq__, outcomes)))
    first, last = curve[0], curve[-1]
    lead = ""
    if gains == len(curve):
        # "Shrinks" is a claim of its own: it is made only where the first and the last interval do not touch.
        apart = first["mean"] - first["half_width"] > last["mean"] + last["half_width"]
        lead = "The gain shrinks with more labels but holds" if apart else "The gain holds"
        lead += " at every budget measured: "
    elif gains and not {"gain", "one"} & set(outcomes[gains:]):
        lead = f"The gain is last seen {_budgets([curve[gains - 1]['labels_per_class']])}: "
    return _capital(lead + "; ".join(parts) + ".")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
