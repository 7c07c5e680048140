"""The sentences that the statistics of a comparison allow."""

from __future__ import annotations

from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

from ssl_vit.evaluators import budget_words
from ssl_vit.report.names import evaluator_title, spoken, subjects, trains_encoder

Row = dict[str, Any]
_SURE = {
    "none": ", which these seeds cannot tell from none",
    "one": ", on one seed",
    "same": ", the same at every seed",
}


def outcome(row: Row) -> str:
    """What a difference says: gain, loss, none (its interval holds 0), one (a single seed) or same (the same at every
    seed); the last two have no interval."""
    if row["half_width"] is None:
        return "one" if row["n"] == 1 else "same"
    if abs(row["mean"]) <= row["half_width"]:
        return "none"
    return "gain" if row["mean"] > 0 else "loss"


def signed_points(row: Row) -> str:
    """A difference row as text: signed points and the half-width of its 95% interval (where there is one)."""
    mean = f"{round(100 * row['mean'], 1) + 0.0:+.1f}"  # adding 0.0 turns -0.0 into 0.0
    return mean if row["half_width"] is None else f"{mean} ± {100 * row['half_width']:.1f}"


def verdict(results: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    """Sentences on the first arm under test, data set by data set: at the smallest label budget, over the others,
    against supervised pretraining, and each reference that it loses to; then what may be wrong with the numbers."""
    ours = [row for row in summary["differences"] if row["arm"] in subjects(results)[:1]]
    sentences = []
    for data in dict.fromkeys(row["data"] for row in ours if row["role"] == "baseline"):
        found = _of_one_set(results, [row for row in ours if row["data"] == data])
        several = len(results.get("sets") or ()) > 1
        sentences += [f"{data}: {text}" if several else text for text in found]
    if not sentences:
        sentences.append("No verdict yet: no seed has been measured both with SSL pretraining and without it.")
    sentences += _study(results, summary["ends"]) + _edges(results)
    tried = {
        spoken(results, arm["name"]): sum(len(choice["tried"]) for choice in arm.get("choices") or [])
        for arm in results.get("arms") or []
    }
    if results.get("finished") is False:
        missing = len(results.get("missing") or [])
        count = f": {missing} piece(s) are missing" if missing else ""
        sentences.append(f"The comparison has not finished{count}, so the numbers may still change.")
    elif len(set(tried.values())) > 1:
        listed = _listed([f"{name} {count}" for name, count in tried.items()])
        sentences.append(f"Caution: the arms were not tuned alike (settings tried: {listed}).")
    return sentences


def _of_one_set(results: dict[str, Any], ours: list[Row]) -> list[str]:
    """ours: the rows of the arm under test on one data set, at least one of them against the baseline."""
    curve = [row for row in ours if row["role"] == "baseline"]
    head = curve[0]
    curve = [row for row in curve if row["evaluator"] == head["evaluator"]]
    name, where = spoken(results, head["arm"]), _budgets([head])
    kind = "" if trains_encoder(results, head["evaluator"]) else f"{evaluator_title(results, head['evaluator'])}: "
    claim = _claim(head, name, spoken(results, head["against"]))
    sentences = [_capital(f"{kind}{where}, {claim.removesuffix('.')}{_end(curve)}.")]
    sentences.append(_over_budgets(curve, name))
    used = {arm["name"]: arm.get("labels_used") for arm in results.get("arms") or []}
    for row in ours:
        same = all(row[key] == head[key] for key in ("evaluator", "labels_per_class"))
        if same and row["role"] == "supervised":
            other = f"{spoken(results, row['against'])} on {used[row['against']]:,} labels"
            sentences.append(_capital(f"{where}, {_claim(row, name, other)}"))
    beaten = [row for row in ours if row not in curve and row["role"] != "supervised" and _is_beaten(row)]
    beaten.sort(key=itemgetter("evaluator", "against"))
    for (evaluator, against), rows in groupby(beaten, key=itemgetter("evaluator", "against")):
        where, title = _budgets(list(rows)), evaluator_title(results, evaluator)
        sentences.append(f"Caution: {title}, {where}: better with {spoken(results, against)} than with {name}.")
    return sentences


def _is_beaten(row: Row) -> bool:
    return outcome(row) == "loss" or (outcome(row) == "same" and row["mean"] < 0)


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
        "same": f"{subject} is at {means} for {other} ({size} points), the same at all {row['n']} seeds: they show no "
        "variation, so there is no interval and this may be chance.",
    }[outcome(row)]


def _budgets(rows: list[Row]) -> str:
    budgets = [row["labels_per_class"] for row in rows]
    if all(isinstance(budget, int) for budget in budgets) and budgets != [1]:
        return f"with {_listed([str(budget) for budget in budgets])} labels a class"
    return f"with {_listed([budget_words(budget) for budget in budgets])}"


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _over_budgets(curve: list[Row], name: str) -> str:
    """Where the gain stops, or how it goes on, over the budgets after the first."""
    if len(curve) == 1:
        return "No other label budget was measured, so this says nothing about more labels."
    parts = []
    for kind, group in groupby(curve[1:], key=outcome):
        rows = list(group)
        where = _budgets(rows)
        sizes = _listed([signed_points(row) for row in rows])
        words = {
            "gain": f"{where} {name} gains {sizes} points",
            "loss": f"{where} {name} loses ({sizes} points)",
            "none": f"{where} these seeds show no difference ({sizes} points)",
            "one": f"{where} the difference on one seed is {sizes} points",
            "same": f"{where} the difference is {sizes} points at every seed, without an interval",
        }
        parts.append(words[kind])
    first, last = curve[0], curve[-1]
    lead = ""
    if _gains(curve) == len(curve):
        # "Shrinks" is a claim of its own: it is made only where the first and the last interval do not touch.
        apart = first["mean"] - first["half_width"] > last["mean"] + last["half_width"]
        lead = "The gain shrinks with more labels but holds" if apart else "The gain holds"
        lead += " at every budget measured: "
    return _capital(lead + "; ".join(parts) + ".")


def _gains(curve: list[Row]) -> int:
    """How many budgets, from the smallest on, show a gain."""
    return len(list(takewhile(lambda row: outcome(row) == "gain", curve)))


def _end(curve: list[Row]) -> str:
    """Where a gain ends that no larger budget shows again: where the lower end of the 95% interval, taken as straight
    over the logarithm of the labels between the two budgets, crosses 0."""
    gains = _gains(curve)
    if gains in (0, len(curve)) or {"gain", "one", "same"}.intersection(map(outcome, curve[gains:])):
        return ""
    last, none = curve[gains - 1], curve[gains]
    above, below = (row["mean"] - row["half_width"] for row in (last, none))
    labels = last["x"] * (none["x"] / last["x"]) ** (above / (above - below))
    about, *between = (_number(value) for value in (float(f"{labels:.2g}"), last["x"], none["x"]))
    unit = f"label{'s' * (about != '1')} a class"
    return f"; the gain ends at about {about} {unit}, between {' and '.join(between)}"


def _study(results: dict[str, Any], ends: list[Row]) -> list[str]:
    """From the smallest to the largest pretraining of each series, at the first evaluator and label budget."""
    unit = {"samples": "pretraining images", "flops": "FLOPs of pretraining"}.get(results.get("study") or "", "")
    same = [row for row in ends if all(row[key] == ends[0][key] for key in ("data", "evaluator", "labels_per_class"))]
    found = []
    for row in same:
        small, large = (
            f"{100 * mean:.1f}% with {_number(n)}" for mean, n in zip(row["means"], row["sizes"], strict=True)
        )
        sure = _SURE.get(outcome(row), "")
        where = _budgets([row]) if len(same) == 1 else f"{row['series']}, {_budgets([row])}"
        change = f"{signed_points(row)} points{sure}"
        found.append(_capital(f"{where}: accuracy goes from {small} {unit} to {large} ({change})."))
    return found


def _edges(results: dict[str, Any]) -> list[str]:
    """Arms that did best with the longest training tried, or the one length that all had: a longer one might change the
    order."""
    found: dict[str, list[str]] = {}
    lengths: set[str] = set()
    for arm in results.get("arms") or []:
        for choice in arm.get("choices") or []:
            for unit in ("steps", "epochs"):
                tried = {row[unit] for row in choice["tried"] if unit in row}
                lengths |= {f"{length:,} {unit}" for length in tried}
                if tried and choice["chosen"].get(unit) == max(tried):
                    found.setdefault(f"{max(tried):,} {unit}", []).append(spoken(results, arm["name"]))
    if len(lengths) == 1:
        return [f"Caution: one length of fine-tuning was tried ({lengths.pop()}); with another the order may change."]
    return [
        f"Caution: the longest fine-tuning tried ({length}) served {_listed(list(dict.fromkeys(names)))} best; with a "
        "longer one the order may change."
        for length, names in found.items()
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e9 else f"{value:.2g}".replace("e+", "e")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
