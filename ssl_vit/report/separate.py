"""Runs that were made separately: what evaluators found for each of them, measured alike, and how they differ."""

from __future__ import annotations

import json
from typing import Any

from ssl_vit.report import cells, compared, plots, tables
from ssl_vit.report.statistics import paired, places, scores, spread
from ssl_vit.report.tables import Table

NOTE = (
    "Each run is one training: the intervals cover what an evaluator's seeds vary (which images are labeled, and what "
    "it trains), not another training of the same recipe."
)
_REFERENCES = {"untrained": "the untrained encoder", "pixels": "raw pixels"}
_COLORS = tuple(color for color in plots.PALETTE if color not in map(plots.COLORS.get, _REFERENCES))
_MARKERS = ("o", "s", "^", "P", "X")


def styles(names: list[str]) -> dict[str, tuple[str, str]]:
    """{run: (color, marker)}; none has a reference's color."""
    return {name: (_COLORS[n % len(_COLORS)], _MARKERS[n % len(_MARKERS)]) for n, name in enumerate(names)}


def sections(names: list[str], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The page's values for every evaluator and data set: only numbers measured alike stand in one figure."""
    shown = []
    for results, note, settings in _groups(names, found):
        summary = _summary(results)
        for place in tables.sections(summary):
            section = compared.section(results, summary, _all_styles(names, results), *place)
            shown.append(section | {"note": note, "settings": settings})
    return shown


def evaluation_tables(names: list[str], found: list[dict[str, Any]]) -> list[Table]:
    """The same as tables alone, with their settings in the first caption of each."""
    shown = []
    for results, note, settings in _groups(names, found):
        summary = _summary(results)
        for place in tables.sections(summary):
            title = tables.section_title(results, *place)
            accuracy = tables.accuracy_table(results, summary, *place)
            accuracy.title = f"{title}. {accuracy.title}. {note} Settings: {settings}."
            differences = tables.difference_table(results, summary, *place)
            differences.title = f"{title}. {differences.title}"
            shown += [accuracy, *([differences] if differences.rows else [])]
    return shown


def _groups(names: list[str], found: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str, str]]:
    """(results in the form of a comparison's, what a reader must know, settings) of what was measured alike."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for name, run in zip(names, found, strict=True):
        for evaluation in (run["results"] or {}).get("evaluations") or []:
            alike = {key: evaluation.get(key) for key in ("evaluator", "settings", "metric")}
            alike["data"] = evaluation.get("shards") or evaluation.get("data")
            groups.setdefault(json.dumps(alike, sort_keys=True), {})[name] = evaluation
    return [(_results(runs), _note([*runs.values()]), _settings(next(iter(runs.values())))) for runs in groups.values()]


def _results(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Evaluations of several runs as the arms of one comparison, the first run first; a reference that is the same for
    all of them is one row."""
    first = next(iter(measured.values()))
    arms = [{"name": name, "label": name} for name in measured]
    rows = []
    for source in ("trained", *_REFERENCES):
        by_run = {name: _rows(evaluation, source) for name, evaluation in measured.items()}
        alike = source != "trained" and all(rows == next(iter(by_run.values())) for rows in by_run.values())
        for name, own in [(source, by_run[next(iter(by_run))])] if alike else by_run.items():
            arm = name if alike or source == "trained" else f"{source} of {name}"
            if own and arm not in measured:
                arms.append({"name": arm, "label": _REFERENCES[source] + arm.removeprefix(source)})
            rows += [row | {"arm": arm} for row in own]
    classes = len(first.get("classes") or ()) or max((len(row.get("per_class") or ()) for row in rows), default=1)
    return {
        "arms": arms,
        "seeds": sorted({row["seed"] for row in rows}),
        "sets": {"": {"metric": first.get("metric") or "accuracy", "classes": classes}},
        "evaluators": {first["evaluator"]: {"title": f"{first['title']}: {first['data']['test']}"}},
        "measurements": [row | {"data": "", "evaluator": first["evaluator"]} for row in rows],
    }


def _rows(evaluation: dict[str, Any], source: str) -> list[dict[str, Any]]:
    """What counts of a source: one measurement for each label budget and seed, without its times."""
    measured = [
        row for row in evaluation.get("measurements") or [] if row["source"] == source and row.get("main", True)
    ]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in measured]


def _note(alike: list[dict[str, Any]]) -> str:
    first = alike[0]
    several = any(not row.get("main", True) for row in first.get("measurements") or [])
    shown = ["Of settings with several values reported one by one, the first is shown"] if several else []
    said = dict.fromkeys(note for evaluation in alike for note in tables.measurement_notes(evaluation))
    return " ".join(f"{text}." for text in [f"Labeled images: {first['data'].get('train', 'unknown')}", *shown, *said])


def _settings(evaluation: dict[str, Any]) -> str:
    return cells.settings({key: value for key, value in evaluation["settings"].items() if value is not None})


def _summary(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows as `statistics.summarize` gives them: every arm, and the first arm minus each other, paired by seed."""
    found, sizes = scores(results)
    accuracy, differences = [], []
    for place in places(results, found, sizes):
        where = dict(zip(("data", "evaluator", "labels_per_class"), place, strict=True)) | {"x": sizes[place]}
        arms = [arm["name"] for arm in results["arms"] if arm["name"] in found[place]]
        accuracy += [where | {"arm": arm} | spread([*found[place][arm].values()]) for arm in arms]
        for other in arms[1:]:
            if row := paired(found[place][arms[0]], found[place][other]):
                differences.append(where | {"arm": arms[0], "against": other} | row)
    return {"accuracy": accuracy, "differences": differences}


def _all_styles(names: list[str], results: dict[str, Any]) -> dict[str, tuple[str, str]]:
    found = styles(names)
    for arm in results["arms"]:
        for source in _REFERENCES:
            if arm["name"] not in found and arm["name"].startswith(source):
                found[arm["name"]] = (plots.COLORS[source], plots.MARKERS[source])
    return found
