"""What the page of a comparison shows: verdict, curves and tables of each data set and evaluator, costs, pictures."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from ssl_vit.report import cells, plots, tables
from ssl_vit.report.names import arm_label, arm_names, evaluator_title
from ssl_vit.report.tables import Table

_STUDY = {"samples": "images in the pretraining set", "flops": "pretraining compute, FLOPs"}


def values(found: dict[str, Any]) -> dict[str, Any]:
    """The template's values for a comparison as `read_comparison` gives it."""
    results = found["results"]
    summary = tables.summarize(results)
    styles = plots.arm_styles(arm_names(results))
    data = {name: part for name, part in (results.get("data") or {}).items() if part}
    hardware = results.get("hardware") or []
    environment = results.get("environment") or found["environment"] or {}
    several = {f"machine {n}": machine for n, machine in enumerate(hardware, 1)} if len(hardware) > 1 else {}
    return {
        "title": results.get("title") or results.get("name") or str(found["path"]),
        "colors": {arm: color for arm, (color, _) in styles.items()},
        "sentences": summary["sentences"],
        "studies": _studies(results, summary),
        "evaluators": [section(results, summary, styles, *place) for place in tables.sections(summary)],
        "runs": [
            {
                "name": arm_label(results, arm),
                "color": styles[arm][0],
                "figure": plots.embed(plots.loss_curves([(arm_label(results, arm), styles[arm][0], run["metrics"])])),
                "pictures": [cells.image(path) for path in run["pictures"]],
                "remarks": cells.remarks(run),
            }
            for arm, run in found["runs"].items()
        ],
        "tables": [tables.cost_table(results)],
        "choices": _choices(results),
        "seeds": results.get("seeds") or [],
        "seeds_vary": results.get("seeds_vary") or "",
        "notes": [*(results.get("notes") or []), *tables.measurement_notes(results)],
        "skipped": tables.skipped_note(results),
        "data": cells.columns("Data", list(data), [cells.flat(part) for part in data.values()]) if data else None,
        "environment": cells.columns("Environment", [str(found["path"])], [cells.flat(environment | several)]),
        "recipes": [(arm_label(results, arm), run["recipe"]) for arm, run in found["runs"].items() if run["recipe"]],
        "raw": [cells.document("results.json", results)],
    }


def section(
    results: dict[str, Any], summary: dict[str, Any], styles: dict[str, tuple[str, str]], data: str, evaluator: str
) -> dict[str, Any]:
    """One data set under one evaluator."""

    def label(arm: str) -> str:
        return arm_label(results, arm)

    accuracy = [row for row in summary["accuracy"] if (row["data"], row["evaluator"]) == (data, evaluator)]
    gains = [row for row in summary["differences"] if (row["data"], row["evaluator"]) == (data, evaluator)]
    curves = [
        _curve(label(arm), styles[arm], [row for row in accuracy if row["arm"] == arm])
        for arm in dict.fromkeys(row["arm"] for row in accuracy)
    ]
    first = gains[0]["arm"] if gains else ""  # of several arms under test; the table has all
    ours = [row for row in gains if row["arm"] == first]
    pairs = [
        # In the color of what it is measured against: the arm under test is in all of them.
        _curve(f"minus {label(other)}", styles[other], [row for row in ours if row["against"] == other])
        for other in dict.fromkeys(row["against"] for row in ours)
    ]
    shown = [
        tables.accuracy_table(results, summary, data, evaluator),
        tables.difference_table(results, summary, data, evaluator),
    ]
    classes = ((results.get("sets") or {}).get(data) or {}).get("classes")
    chance = 100 / classes if classes else None
    axis = "labels a class"
    return {
        "title": tables.section_title(results, data, evaluator),
        "note": "",
        "settings": "",
        "curve": plots.embed(plots.accuracy_curve(curves, axis, "test accuracy, %", chance=chance)),
        "gain": plots.embed(plots.accuracy_curve(pairs, axis, "difference, points", zero=True)) if pairs else None,
        "under_test": label(first),
        "one_seed": all(row["n"] == 1 for row in accuracy),
        "tables": [table for table in shown if table.rows],
    }


def _curve(label: str, style: tuple[str, str], rows: list[dict[str, Any]], x: str = "x") -> plots.Curve:
    rows = sorted(rows, key=lambda row: row[x])
    mean = [100 * row["mean"] for row in rows]
    half = [100 * (row["half_width"] or 0.0) for row in rows]
    low = [middle - width for middle, width in zip(mean, half, strict=True)]
    high = [middle + width for middle, width in zip(mean, half, strict=True)]
    return plots.Curve(label, *style, [row[x] for row in rows], mean, low, high)


def _studies(results: dict[str, Any], summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Accuracy over what the arms' pretraining differs in, a figure for each data set, evaluator and label budget."""
    rows = summary["study"]
    figures = []
    for place in dict.fromkeys((row["data"], row["evaluator"], row["labels_per_class"]) for row in rows):
        here = [row for row in rows if (row["data"], row["evaluator"], row["labels_per_class"]) == place]
        series = list(dict.fromkeys(row["series"] for row in here))
        styles = dict(zip(series, zip(cycle(plots.PALETTE), cycle(plots.MARKERS.values()), strict=False), strict=False))
        if len({row["size"] for row in here}) < 2:
            continue
        curves = [_curve(s, styles[s], [row for row in here if row["series"] == s], "size") for s in series]
        compared = {row["arm"] for row in here}
        levels = [
            (*_level(results, row["arm"], styles), 100 * row["mean"])
            for row in summary["accuracy"]
            if (row["data"], row["evaluator"], row["labels_per_class"]) == place and row["arm"] not in compared
        ]
        axis = _STUDY[results["study"]]
        svg = plots.accuracy_curve(curves, axis, "test accuracy, %", levels=levels)
        figures.append({"title": tables.budget_title(results, *place), "figure": plots.embed(svg), "axis": axis})
    return figures


def _level(results: dict[str, Any], arm: str, styles: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """Name and color of a dashed line: an untrained encoder has those of the series of its architecture."""
    made = (results.get("references") or {}).get(arm)
    alike = {one.get("series") or made for one in results.get("arms") or [] if one.get("architecture") == made}
    if arm.startswith("untrained") and len(styles) > 1 and len(alike) == 1 and alike <= styles.keys():
        (series,) = alike
        return f"{series}, untrained", styles[str(series)][0]
    return arm_label(results, arm), plots.COLORS.get(arm, "#808080")


def _choices(results: dict[str, Any]) -> list[Table]:
    """What each arm chose on held-out data, and every setting that it tried to get there."""
    names = ["Arm", "Data and evaluator", "Labels a class"]
    chosen = Table("Settings chosen on held-out data", [*names, "Tried", "Chosen", "Held-out %"])
    tried = Table("Every setting tried", [*names, "Setting", "Held-out accuracy, %"])
    several = len(results.get("sets") or ()) > 1
    for arm in results.get("arms") or []:
        label = arm_label(results, arm["name"])
        for choice in arm.get("choices") or []:
            title = evaluator_title(results, choice.get("evaluator", ""))
            where = f"{choice['data']}: {title}" if several else title
            place = (arm["name"], label, where, cells.text(choice.get("labels_per_class")))
            best = choice.get("chosen") or {}
            score = None
            for setting in choice.get("tried") or []:
                accuracy = setting.get("held_out_accuracy")
                tried.add(*place, cells.settings(setting), cells.percent(accuracy))
                score = accuracy if cells.settings(setting) == cells.settings(best) else score
            count = len(choice.get("tried") or [])
            found = best.get("held_out_accuracy", score)
            chosen.add(*place, str(count), cells.settings(best), cells.percent(found))
    return [chosen, tried] if chosen.rows else []
