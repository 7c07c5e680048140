"""A report's tables as Markdown and LaTeX, every measured row as CSV, and everything as JSON."""

from __future__ import annotations

import json
from collections import Counter

import pandas as pd
from pydantic import JsonValue
from pydantic_core import to_json

from ssl_vit.interfaces import without_credentials
from ssl_vit.report.costs import costs
from ssl_vit.report.intervals import interval
from ssl_vit.report.read import Comparison
from ssl_vit.report.runs import flat, text, used
from ssl_vit.report.summary import summarize
from ssl_vit.report.tables import Shown, all_tables, sweep_table
from ssl_vit.report.verdict import notes, verdict

SUFFIXES = {"html": ".html", "markdown": ".md", "latex": ".tex", "csv": ".csv", "json": ".json"}
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
_LATEX |= {"[": "{[}", "*": "{*}"}  # at the start of a row they would be arguments of the command before it
_ESCAPED = str.maketrans(_LATEX | {character: f"\\{character}" for character in "&%$#_{}"})


def export(comparison: Comparison, form: str) -> str:
    """All tables, also those of the sweeps, as `markdown` or `latex`, all rows as `csv`, everything as `json`."""
    if form == "csv":
        shared = rows(comparison).map(without_credentials)
        return str(shared.to_csv(index=False))
    if form == "json":
        return json.dumps(without_credentials(as_json(comparison)), indent=1) + "\n"
    summary = summarize(comparison)
    shown, mark = {"markdown": (markdown, ""), "latex": (latex, "% ")}[form]
    plain = escaped if form == "markdown" else str
    tables = [*all_tables(comparison, summary), sweep_table(comparison)]
    texts = [shown(table) for table in tables if len(table.frame)]
    title = comparison.record.title or comparison.record.name
    first = [
        f"# {title}" if form == "markdown" else title,
        *verdict(comparison, summary),
        interval(comparison, summary),
    ]
    last = [*notes(comparison), *provenance(comparison)]
    before, after = ([f"{mark}{plain(' '.join(note.split()))}\n" for note in part] for part in (first, last))
    return without_credentials("\n".join([*before, *texts, *after]))


def as_json(comparison: Comparison) -> JsonValue:
    """The plan, the statistics, the sweeps, what each arm cost and every row, for other programs. In label efficiencies
    "Infinity" is more than the largest label budget, 0 fewer than the smallest and "NaN" no interval."""
    summary = summarize(comparison)
    content = {
        "record": comparison.record,
        "finished": not comparison.missing,
        "missing": comparison.missing,
        "verdict": verdict(comparison, summary),
        "summary": summary,
        "sweeps": [task.model_dump() | sweep.model_dump() for task, sweep in comparison.sweeps],
        "costs": costs(comparison).reset_index().to_dict(orient="records"),
        "skipped": comparison.skipped,
        "rows": rows(comparison).to_dict(orient="records"),
    }
    plain: JsonValue = json.loads(to_json(content, inf_nan_mode="strings"))
    return plain


def rows(comparison: Comparison) -> pd.DataFrame:
    """Every measured row, with names, settings, and its file."""
    frame = comparison.measured.frame.copy()
    record = comparison.record
    frame["arm_label"] = frame["arm"].map(comparison.label)
    frame["evaluator_title"] = frame["evaluator"].map(lambda name: record.evaluators[name].title)
    where = list(zip(frame["data"], frame["evaluator"], strict=True))
    arms = {arm.name: arm for arm in record.arms}
    frame.insert(0, "comparison", record.name)
    frame["settings"] = [json.dumps(record.evaluators[name].settings.get(data, {})) for data, name in where]
    own = [arms[arm].own_settings(*at) if arm in arms else {} for arm, at in zip(frame["arm"], where, strict=True)]
    frame["settings_of_arm"] = [json.dumps(settings) for settings in own]
    frame["selected"] = frame["selected"].map(json.dumps)
    frame["notes"] = frame["notes"].map(" ".join)
    frame["file"] = [str(file) for file in comparison.measured.files]
    frame["saved"] = comparison.saved
    return frame


def environments(comparison: Comparison) -> dict[str, dict[str, str]]:
    """Versions, hardware and commit of the finished tasks, as far as they are known."""
    tasks = [json.dumps(task.environment, sort_keys=True) for task in comparison.tasks.values()]
    counts = Counter(task for task in tasks if task != "{}")
    known = {
        "all tasks" if count == len(tasks) else f"{count} of {len(tasks)} tasks ({number})": flat(json.loads(task))
        for number, (task, count) in enumerate(counts.items(), 1)
    }
    if known and (unknown := len(tasks) - counts.total()):
        known[f"{unknown} of {len(tasks)} tasks"] = {"environment": "not recorded"}
    return known


def seeds(comparison: Comparison) -> list[str]:
    """The seeds of a comparison, a sentence per use."""
    record = comparison.record
    kinds = {evaluator.trains_encoder for evaluator in record.evaluators.values()}
    used_for = {"of fine-tuning": record.seeds} if True in kinds else {}
    if not used_for and record.pretrainings > 1:
        used_for = {"of pretraining": record.seeds[: record.pretrainings]}
    if False in kinds:
        used_for["on frozen features"] = record.frozen_seeds
    return [f"Seeds {use}: {', '.join(map(str, numbers))}." for use, numbers in used_for.items()]


def provenance(comparison: Comparison) -> list[str]:
    """What was compared by which command, when, where, and by which settings."""
    record, times = comparison.record, sorted(filter(None, comparison.saved))
    lines = [f"{record.title} ({record.name}). {record.command}".strip()]
    lines += [f"Results were saved from {times[0]} to {times[-1]}."] if times else []
    read = [f"{name}: {text(one.samples)} images, {one.source or one.path}" for name, one in record.data.items()]
    lines += [f"Images: {'; '.join(read)}."] if read else []
    lines += seeds(comparison)
    for name, values in environments(comparison).items():
        lines.append(f"Environment of {name}: " + ", ".join(f"{key} {value}" for key, value in values.items()))
    for evaluator in record.evaluators.values():
        lines += [
            f"Settings of {evaluator.title} on {data}: {json.dumps(used(settings))}"
            for data, settings in evaluator.settings.items()
        ]
    return lines


def markdown(shown: Shown) -> str:
    """A caption and a pipe table."""
    cells = [list(shown.frame.columns), ["---"] * len(shown.frame.columns), *shown.frame.to_numpy().tolist()]
    lines = [" | ".join(escaped(" ".join(cell.split())).replace("|", "\\|") for cell in row) for row in cells]
    return "\n".join([f"**{escaped(shown.title)}**\n", *(f"| {line} |" for line in lines), ""])


def escaped(text: str) -> str:
    """Text for Markdown without tags and pictures, which a viewer would load."""
    return text.replace("<", "&lt;").replace("![", "!\\[")


def latex(shown: Shown) -> str:
    """A `table` for a document that uses the package booktabs."""
    frame = shown.frame.rename(columns=lambda name: name.translate(_ESCAPED))
    frame = frame.map(lambda cell: without_credentials(cell).translate(_ESCAPED))
    return str(frame.to_latex(index=False, caption=shown.title.translate(_ESCAPED), position="htb"))
