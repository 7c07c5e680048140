"""Tables for papers: what is read back is what the report says."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ssl_vit.interfaces import RunError, UserError
from ssl_vit.report.export import escaped, write_tables


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    scores = {"ssl": [0.5, 0.7], "scratch": [0.25, 0.35]}
    results: dict[str, Any] = {
        "kind": "comparison",
        "seeds": [0, 1],
        "arms": [
            {"name": "ssl", "label": "SSL_1 | 50% & more", "pretraining": {"seconds": 1.0}, "labels_used": 0},
            {"name": "scratch", "label": "scratch"},
        ],
        "evaluators": {"fine_tune": {"title": "Fine-tuning", "trains_encoder": True}},
        "measurements": [
            {"arm": arm, "evaluator": "fine_tune", "labels_per_class": 5, "seed": seed, "accuracy": accuracy}
            | {"chosen": {"lr": 0.1, "steps": 3}}
            for arm, accuracies in scores.items()
            for seed, accuracy in enumerate(accuracies)
        ],
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    return tmp_path


def test_csv_has_a_line_a_measurement(comparison: Path) -> None:
    rows = list(csv.DictReader(write_tables([comparison], comparison / "deep" / "t.csv", "csv").open()))
    assert [(r["arm"], r["seed"], float(r["accuracy"])) for r in rows] == [
        ("ssl", "0", 0.5),
        ("ssl", "1", 0.7),
        ("scratch", "0", 0.25),
        ("scratch", "1", 0.35),
    ]
    assert rows[0]["chosen"] == "lr=0.1, steps=3"


def test_markdown_rows_have_as_many_cells_as_the_head(comparison: Path) -> None:
    text = write_tables([comparison], comparison / "t.md", "markdown").read_text()
    lines = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("|")]
    assert "| SSL_1 \\| 50% & more | 60.0 ± 14.1 |" in text
    assert "| SSL_1 \\| 50% & more minus scratch | +30.0 ± 63.5 |" in text
    assert [len(line) for line in lines[:4]] == [4, 4, 4, 4]
    assert text.startswith("Fine-tuning. Accuracy, %")


def test_latex_is_escaped_and_balanced(comparison: Path) -> None:
    text = write_tables([comparison], comparison / "t.tex", "latex").read_text()
    assert r"SSL\_1 | 50\% \& more & 60.0 $\pm$ 14.1 \\" in text
    for environment in ("table", "tabular"):
        assert text.count(f"\\begin{{{environment}}}") == text.count(f"\\end{{{environment}}}") == 3
    for line in text.splitlines():
        if line.endswith(r"\\"):
            assert len(re.findall(r"(?<!\\)&", line)) in (1, 2)
        assert line.startswith("% ") or not re.search(r"(?<!\\)[%#_]", line)
    assert "\n% ± after a difference is the half-width of its 95% interval" in text
    assert escaped("a\\b {x} ~^") == r"a\textbackslash{}b \{x\} \textasciitilde{}\textasciicircum{}"


@pytest.mark.parametrize("form", ["csv", "markdown", "latex"])
def test_a_disk_that_refuses_tables_is_named(comparison: Path, form: str) -> None:
    with pytest.raises(RunError, match="could not be written"):
        write_tables([comparison], comparison, form)


def test_a_note_of_several_lines_stays_a_comment(comparison: Path) -> None:
    results = json.loads((comparison / "results.json").read_text()) | {"notes": ["one\n100% of two"]}
    (comparison / "results.json").write_text(json.dumps(results))
    assert "\n% one 100% of two\n" in write_tables([comparison], comparison / "t.tex", "latex").read_text()


def test_runs_give_the_tables_of_their_evaluations(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    measured = [
        {"source": s, "labels_per_class": 10, "seed": 0, "accuracy": a} for s, a in (("trained", 0.6), ("pixels", 0.7))
    ]
    evaluation = {"evaluator": "few_shot", "title": "Few-shot", "settings": {}, "data": {"test": "t"}}
    evaluation |= {"values": {"trained/10-shot/mean": 0.6}, "measurements": measured}
    (run / "results.json").write_text(json.dumps({"kind": "evaluations", "evaluations": [evaluation]}))
    rows = list(csv.DictReader(write_tables([run], run / "t.csv", "csv").open()))
    assert [(r["arm"], r["data"], r["accuracy"]) for r in rows] == [("trained", "t", "0.6"), ("pixels", "t", "0.7")]
    text = write_tables([run], run / "t.md", "markdown").read_text()
    assert "| run | 60.0 (1 seed) |" in text and "| run minus raw pixels | -10.0 (1 seed) |" in text


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a run nor a comparison"):
        write_tables([tmp_path], tmp_path / "t.md", "markdown")
