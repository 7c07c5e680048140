"""One self-contained HTML page from run and comparison directories: no script, no request to anywhere."""

from __future__ import annotations

import base64
import json
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ssl_vit.interfaces import RunError, UserError
from ssl_vit.report import plots, tables
from ssl_vit.report.read import read_directory
from ssl_vit.report.tables import MISSING, Table
from ssl_vit.report.verdict import EVALUATORS, arm_label, arm_names

FACTS = {
    "objective": "Objective",
    "steps": "Steps",
    "images_seen": "Images seen",
    "seconds": "Seconds",
    "parameters": "Parameters",
}
LOSSES = {"loss": "Last training loss", "constant_loss": "Best constant guess"}
# What the template reads; a page of runs and a page of a comparison each fill in what they have.
EMPTY: dict[str, Any] = {
    "sentences": [],
    "evaluators": [],
    "losses": [],
    "tables": [],
    "choices": [],
    "seeds": [],
    "seeds_vary": "",
    "interval": tables.INTERVAL,
    "notes": [],
    "data": None,
    "recipes": [],
    "skipped": "",
}


def write_report(paths: list[Path], out: Path) -> Path:
    """Write the report of one comparison directory, or of one or several run directories side by side, to the file
    `out` (its folders are made; an existing file is replaced). Returns `out`. The same input gives the same bytes.

    Raises UserError for no path, a directory that cannot be read as either, or a comparison given with others;
    RunError when the file cannot be written.
    """
    if not paths:
        raise UserError("No directory given. Give one comparison directory, or one or several run directories.")
    found = [read_directory(path) for path in paths]
    comparisons = [item for item in found if item["kind"] == "comparison"]
    if comparisons and len(found) > 1:
        raise UserError(f"{comparisons[0]['path']} is a comparison; report it alone, or give run directories only.")
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html.j2")
    html = template.render(EMPTY | (_comparison(found[0]) if comparisons else _side_by_side(found)))
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(html, encoding="utf-8", errors="replace", newline="\n")
    except OSError as error:
        raise RunError(f"{out}: the report could not be written ({error.strerror}).") from error
    return out


def _comparison(found: dict[str, Any]) -> dict[str, Any]:
    results = found["results"]
    summary = tables.summarise(results)
    styles = plots.arm_styles(arm_names(results))
    runs = {arm_label(results, arm): run for arm, run in found["runs"].items()}
    colours = [styles[arm][0] for arm in found["runs"]]
    command = [results["command"]] if results.get("command") else []
    data = {name: part for name, part in (results.get("data") or {}).items() if part}
    return {
        "title": results.get("title") or results.get("name") or str(found["path"]),
        "colours": {arm: colour for arm, (colour, _) in styles.items()},
        "sentences": summary["sentences"],
        "evaluators": [
            _evaluator(results, summary, styles, name)
            for name in dict.fromkeys(row["evaluator"] for row in summary["accuracy"])
        ],
        "runs": [
            _run(name, colour, run) | {"figure": plots.embed(plots.loss_curves([(name, colour, run["metrics"])]))}
            for (name, run), colour in zip(runs.items(), colours, strict=True)
        ],
        "tables": [tables.cost_table(results)],
        "choices": _choices(results),
        "seeds": results.get("seeds") or [],
        "seeds_vary": results.get("seeds_vary") or "",
        "notes": results.get("notes") or [],
        "skipped": tables.skipped_note(results),
        "data": _columns("Data", list(data), [_flat(part) for part in data.values()]) if data else None,
        "environment": _columns(
            "Environment", [str(found["path"])], [_flat(results.get("environment") or found["environment"] or {})]
        ),
        "commands": [*command, *_commands([found], list(runs.values()))],
        "recipes": [(name, run["recipe"]) for name, run in runs.items() if run["recipe"]],
        "raw": [("results.json", _json(results))],
    }


def _evaluator(
    results: dict[str, Any], summary: dict[str, Any], styles: dict[str, tuple[str, str]], name: str
) -> dict[str, Any]:
    def label(arm: str) -> str:
        return arm_label(results, arm)

    classes = ((results.get("data") or {}).get("test") or {}).get("classes")
    classes = len(classes) if isinstance(classes, list) else classes
    accuracy = [row for row in summary["accuracy"] if row["evaluator"] == name]
    gains = [row for row in summary["differences"] if row["evaluator"] == name]
    curves = [
        _curve(label(arm), styles[arm], [row for row in accuracy if row["arm"] == arm])
        for arm in dict.fromkeys(row["arm"] for row in accuracy)
    ]
    pairs = [
        # In the colour of what it is measured against: the arm under test is in all of them.
        _curve(f"minus {label(other)}", styles[other], [r for r in gains if (r["arm"], r["against"]) == (arm, other)])
        for arm, other in dict.fromkeys((row["arm"], row["against"]) for row in gains)
    ]
    under_test = " / ".join(dict.fromkeys(label(row["arm"]) for row in gains))
    shown = [tables.accuracy_table(results, summary, name), tables.difference_table(results, summary, name)]
    chance = 100 / classes if classes else None
    return {
        "title": EVALUATORS.get(name, name),
        "curve": plots.embed(plots.label_curve(curves, "test accuracy, %", chance=chance)),
        "gain": plots.embed(plots.label_curve(pairs, "difference, points", zero=True)) if pairs else None,
        "under_test": under_test,
        "one_seed": all(row["n"] == 1 for row in accuracy),
        "tables": [table for table in shown if table.rows],
    }


def _curve(label: str, style: tuple[str, str], rows: list[dict[str, Any]]) -> plots.Curve:
    mean = [100 * row["mean"] for row in rows]
    half = [100 * (row["half_width"] or 0.0) for row in rows]
    low = [middle - width for middle, width in zip(mean, half, strict=True)]
    high = [middle + width for middle, width in zip(mean, half, strict=True)]
    return plots.Curve(label, *style, [row["labels_per_class"] for row in rows], mean, low, high)


def _choices(results: dict[str, Any]) -> list[Table]:
    """What each arm chose on held-out data, and every setting that it tried to get there."""
    chosen = Table("Settings chosen on held-out data", ["Arm", "Labels a class", "Tried", "Chosen", "Held-out %"])
    tried = Table("Every setting tried", ["Arm", "Labels a class", "Setting", "Held-out accuracy, %"])
    for arm in results.get("arms") or []:
        label = arm_label(results, arm["name"])
        for choice in arm.get("choices") or []:
            place = (arm["name"], label, _text(choice.get("labels_per_class")))
            best = choice.get("chosen") or {}
            score = None
            for setting in choice.get("tried") or []:
                accuracy = setting.get("held_out_accuracy")
                tried.add(*place, _settings(setting), _percent(accuracy))
                score = accuracy if _settings(setting) == _settings(best) else score
            count = len(choice.get("tried") or [])
            chosen.add(*place, str(count), _settings(best), _percent(best.get("held_out_accuracy", score)))
    return [chosen, tried] if chosen.rows else []


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in _flat(values).items() if key != "held_out_accuracy") or MISSING


def _percent(fraction: float | None) -> str:
    return MISSING if fraction is None else f"{100 * fraction:.1f}"


def _side_by_side(found: list[dict[str, Any]]) -> dict[str, Any]:
    names = _names(found)
    colours = [plots.PALETTE[place % len(plots.PALETTE)] for place in range(len(found))]
    runs = list(zip(names, colours, found, strict=True))
    groups: dict[str, list[tuple[str, str, list[dict[str, Any]]]]] = {}
    for name, colour, run in runs:
        # Losses of different objectives are different quantities: they never share axes.
        objective = str((run["summary"] or {}).get("objective") or "training")
        groups.setdefault(objective, []).append((name, colour, run["metrics"]))
    losses = [(objective, plots.embed(plots.loss_curves(group))) for objective, group in groups.items()]
    return {
        "title": names[0] if len(found) == 1 else f"{len(found)} runs side by side",
        "colours": dict(zip(names, colours, strict=True)),
        "runs": [_run(*run) | {"figure": None} for run in runs],
        "losses": [(objective, figure) for objective, figure in losses if figure],
        "tables": [*_evaluations(names, found), _facts(names, found)],
        "environment": _columns("Environment", names, [_flat(run["environment"] or {}) for run in found]),
        "commands": _commands(found, found),
        "recipes": [(name, run["recipe"]) for name, _, run in runs if run["recipe"]],
        "raw": [
            (f"{name}: {key}.json", _json(run[key]))
            for name, _, run in runs
            for key in ("results", "summary")
            if run[key]
        ],
    }


def _names(found: list[dict[str, Any]]) -> list[str]:
    """The runs' own names; where two are alike, their paths."""
    names = [str((run["summary"] or {}).get("name") or run["path"].resolve().name) for run in found]
    return [name if names.count(name) == 1 else str(run["path"]) for name, run in zip(names, found, strict=True)]


def _run(name: str, colour: str, run: dict[str, Any]) -> dict[str, Any]:
    remarks = []
    events = [record for record in run["metrics"] if record.get("event") == "skipped_samples"]
    skipped = [sample for record in events for sample in record.get("samples") or []]
    if skipped:
        # A sample is skipped again in each epoch, so there may be fewer names than times.
        times = f"{len(skipped):,} time(s), first by step {events[0].get('step')}"
        remarks.append(f"Training skipped unreadable samples {times}: {tables.skipped_names(skipped)}.")
    notes = [tables.skipped_note(evaluation) for evaluation in (run["results"] or {}).get("evaluations") or []]
    remarks += [note for note in dict.fromkeys(notes) if note]
    if run["broken_lines"]:
        remarks.append(f"{run['broken_lines']} broken line(s) of metrics.jsonl were left out (a killed run leaves one)")
    picture = run["pictures"]
    encoded = base64.b64encode(picture.read_bytes()).decode() if picture else ""
    return {
        "name": name,
        "colour": colour,
        "remarks": remarks,
        "picture": f"data:image/png;base64,{encoded}" if picture else None,
        "picture_name": picture.name if picture else "",
    }


def _facts(names: list[str], found: list[dict[str, Any]]) -> Table:
    table = Table("Runs", ["Run", *FACTS.values(), *LOSSES.values()])
    for name, run in zip(names, found, strict=True):
        summary = run["summary"] or {}
        last: dict[str, Any] = next((record for record in reversed(run["metrics"]) if "loss" in record), {})
        table.add(name, name, *(_text(value) for value in [*map(summary.get, FACTS), *map(last.get, LOSSES)]))
    return table


def _evaluations(names: list[str], found: list[dict[str, Any]]) -> list[Table]:
    """One table for each evaluator, settings and data: only numbers measured alike stand in one row."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for name, run in zip(names, found, strict=True):
        for evaluation in (run["results"] or {}).get("evaluations") or []:
            measured = {key: evaluation.get(key) for key in ("evaluator", "settings", "data")}
            groups.setdefault(json.dumps(measured, sort_keys=True), {})[name] = evaluation["values"]
    shown = []
    for key, values in groups.items():
        measured = json.loads(key)
        evaluator = measured.pop("evaluator")
        title = f"{EVALUATORS.get(evaluator, evaluator)} ({_settings(measured)})"
        table = Table(title, ["Value", *values])
        rows = dict.fromkeys(row for run_values in values.values() for row in run_values)
        for row in rows:
            if row.endswith("/std") and f"{row.removesuffix('std')}mean" in rows:
                continue
            std = f"{row.removesuffix('mean')}std" if row.endswith("/mean") else ""
            spreads = [f" ± {_text(v[std])}" if v.get(std) is not None else "" for v in values.values()]
            cells = [_text(v.get(row)) + spread for v, spread in zip(values.values(), spreads, strict=True)]
            table.add(None, row.removesuffix("/mean") + " (mean ± std)" if any(spreads) else row, *cells)
        shown.append(table)
    return shown


def _columns(title: str, names: list[str], columns: list[dict[str, str]]) -> Table | None:
    """Flat dicts as the columns of one table; None when all are empty."""
    table = Table(title, ["", *names])
    for key in dict.fromkeys(key for column in columns for key in column):
        table.add(None, key, *(column.get(key, MISSING) for column in columns))
    return table if table.rows else None


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, part in value.items():
        flat |= _flat(part, f"{prefix}{key}.") if isinstance(part, dict) else {f"{prefix}{key}": _text(part)}
    return flat


def _text(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _commands(reported: list[dict[str, Any]], runs: list[dict[str, Any]]) -> list[str]:
    train = [f"ssl-vit train {shlex.quote(str(run['path'] / 'recipe.yaml'))}" for run in runs if run["recipe"]]
    return [*train, "ssl-vit report " + " ".join(shlex.quote(str(item["path"])) for item in reported)]


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)
