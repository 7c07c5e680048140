"""Statistics over seeds of a comparison: means, paired differences and their intervals, and what they are against."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from scipy.special import stdtrit

from ssl_vit.report.names import arm_names, evaluator_names, subjects
from ssl_vit.report.verdict import verdict

Row = dict[str, Any]
_ROUNDING = 1e-9  # equal shares of right answers may differ by less, once subtracted
Place = tuple[str, str, int | str]  # data set, evaluator, label budget


def summarize(results: dict[str, Any]) -> dict[str, Any]:
    """Statistics over seeds of a comparison's `results.json`; a pure function, accuracies as fractions 0..1.

    Returns {"accuracy": rows, "differences": rows, "study": rows, "ends": rows, "sentences": [...], "verdict": them as
    one text}.
    An accuracy row: data, evaluator, labels_per_class (the budget), x (labels a class as a number), arm, n (seeds),
    mean, std (ddof=1), half_width (of the 95% interval of the mean, Student t). std is None for n=1; half_width too,
    and where all values are equal: seeds without variation make no interval. A difference row has the same statistics
    of `arm` minus `against`, paired by seed (n: seeds that both have), arm_mean and against_mean over those seeds, and
    `role`, what `against` is: baseline, supervised, pixels or variant (another arm without labels). A study row is an
    accuracy row with the arm's `size` (pretraining images or FLOPs) and its `series`; a row of ends is the difference
    of a series' largest and smallest, paired by seed, with their sizes and means. The number is the data set's metric.
    Where a measurement was made twice, the later one counts; without a finite accuracy it counts as missing.
    The verdict is about the smallest label budget measured, a rule fixed before any number is seen.
    """
    found, sizes = scores(results)
    accuracy: list[Row] = []
    differences: list[Row] = []
    for data, evaluator, budget in places(results, found, sizes):
        cells = found[data, evaluator, budget]
        place = {"data": data, "evaluator": evaluator, "labels_per_class": budget, "x": sizes[data, evaluator, budget]}
        arms = [arm for arm in arm_names(results) if arm in cells]
        accuracy += [place | {"arm": arm} | spread(list(cells[arm].values())) for arm in arms]
        for subject in [arm for arm in subjects(results) if arm in cells]:
            for role, against in _against(results, subject, arms):
                if row := paired(cells[subject], cells[against]):
                    differences.append(place | {"arm": subject, "against": against, "role": role} | row)
    study = list(_study(results, accuracy))
    summary = {"accuracy": accuracy, "differences": differences, "study": study, "ends": list(_ends(study, found))}
    sentences = verdict(results, summary)
    return summary | {"sentences": sentences, "verdict": " ".join(sentences)}


def paired(ours: dict[int, float], theirs: dict[int, float]) -> Row:
    """Statistics of the differences between scores by seed, over the seeds that both have; empty where they share
    none."""
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        return {}
    means = {
        name: statistics.fmean(by_seed[seed] for seed in seeds)
        for name, by_seed in (("arm_mean", ours), ("against_mean", theirs))
    }
    return spread([ours[seed] - theirs[seed] for seed in seeds]) | means


def scores(
    results: dict[str, Any],
) -> tuple[dict[Place, dict[str, dict[int, float]]], dict[Place, float]]:
    """Scores by place, arm and seed; and how many labels a class a place's budget is."""
    scores: dict[Place, dict[str, dict[int, float]]] = {}
    sizes: dict[Place, float] = {}
    sets = results.get("sets") or {}
    for found in results.get("measurements") or []:
        data, budget = found.get("data", ""), found["labels_per_class"]
        value = found.get(sets.get(data, {}).get("metric") or "accuracy")
        if isinstance(value, (int, float)) and math.isfinite(value):
            arms = scores.setdefault((data, found["evaluator"], budget), {})
            arms.setdefault(found["arm"], {})[found["seed"]] = float(value)
            classes = sets.get(data, {}).get("classes") or 1
            labels = float(budget) if isinstance(budget, int) else found["labels"] / classes
            sizes[data, found["evaluator"], budget] = labels
    return scores, sizes


def places(results: dict[str, Any], scores: Any, sizes: dict[Place, float]) -> list[Place]:
    """Data sets and evaluators in the comparison's order, budgets from small to large."""
    data = list(dict.fromkeys([*(results.get("sets") or {}), *(place[0] for place in scores)]))
    names = evaluator_names(results)
    return sorted(scores, key=lambda place: (data.index(place[0]), names.index(place[1]), sizes[place]))


def _against(results: dict[str, Any], subject: str, measured: list[str]) -> Iterator[tuple[str, str]]:
    """(role, arm) of what a subject is held against, as far as measured: no pretraining, then supervised arms, then raw
    pixels; the first subject also against the others, unless a study draws them over their size."""
    if start := _baseline(results, subject, measured):
        yield "baseline", start
    for arm in results.get("arms") or []:
        if arm.get("labels_used") and arm["name"] in measured and arm["name"] != subject:
            yield "supervised", arm["name"]
    if "pixels" in measured:
        yield "pixels", "pixels"
    first, *others = subjects(results)
    if subject == first and not results.get("study"):
        yield from (("variant", other) for other in others if other in measured)


def _baseline(results: dict[str, Any], subject: str, measured: list[str]) -> str | None:
    """What "no pretraining" means: training from scratch, or the untrained encoder where features are frozen; of the
    subject's architecture where there are several."""
    arms = results.get("arms") or []
    architectures = {arm["name"]: arm.get("architecture") for arm in arms} | (results.get("references") or {})
    scratch = [arm["name"] for arm in arms if not arm.get("pretraining") and not arm.get("run")]
    untrained = [name for name in measured if name.startswith("untrained")]
    found = [name for name in [*scratch, *untrained] if name in measured]
    alike = [name for name in found if architectures.get(name) == architectures.get(subject)]
    return next(iter(alike or found), None)


def _study(results: dict[str, Any], accuracy: list[Row]) -> Iterator[Row]:
    sizes = {
        arm["name"]: (arm.get("pretraining") or {}).get(results.get("study") or "") for arm in results.get("arms") or []
    }
    series = {arm["name"]: arm.get("series") or arm.get("architecture") or "" for arm in results.get("arms") or []}
    for row in accuracy:
        if sizes.get(row["arm"]):
            yield row | {"size": sizes[row["arm"]], "series": series[row["arm"]]}


def _ends(study: list[Row], scores: dict[Place, dict[str, dict[int, float]]]) -> Iterator[Row]:
    names = ("data", "evaluator", "labels_per_class", "series")
    for key in dict.fromkeys(tuple(row[name] for name in names) for row in study):
        line = sorted((r for r in study if tuple(r[name] for name in names) == key), key=lambda row: row["size"])
        small, large = line[0], line[-1]
        one, two = (scores[key[0], key[1], key[2]][row["arm"]] for row in (small, large))
        found = paired(two, one)
        if small["size"] < large["size"] and found:
            means = [found.pop("against_mean"), found.pop("arm_mean")]
            yield dict(zip(names, key, strict=True)) | found | {"sizes": [small["size"], large["size"]], "means": means}


def spread(values: list[float]) -> Row:
    count = len(values)
    std = statistics.stdev(values) if count > 1 else None
    half_width = None
    if std is not None and std > _ROUNDING:
        half_width = float(stdtrit(count - 1, 0.975)) * std / math.sqrt(count)
    return {"n": count, "mean": statistics.fmean(values), "std": std, "half_width": half_width}
