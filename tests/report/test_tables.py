"""Tables for a terminal, a paper and other programs."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from ssl_vit import results
from ssl_vit.cli import app
from ssl_vit.interfaces import UserError, without_credentials
from ssl_vit.records import ArmRecord, EvaluatorRecord, SkippedSample, TaskResult
from ssl_vit.report.costs import costs
from ssl_vit.report.export import environments, export, latex, markdown, provenance
from ssl_vit.report.intervals import interval
from ssl_vit.report.page import write_report
from ssl_vit.report.read import Comparison, read
from ssl_vit.report.summary import summarize
from ssl_vit.report.tables import all_tables, columns, cost_table, place_tables, sweep_table, terminal
from tests.report.made import ARMS, SUMMARY, SUPERVISED, SWEEP, row, two_arms, write_comparison, write_run


def printed(comparison: Comparison, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(terminal(comparison))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("label", ["Cost", "Class", "Test images", "References, self-test", "Arm"])
def test_an_arm_may_have_the_name_of_a_column(tmp_path: Path, label: str) -> None:
    arms = (ARMS[0].model_copy(update={"label": label}), *ARMS[1:])
    rows = [*two_arms(), *(row("untrained", 5, seed, 0.6) for seed in range(3))]
    folder = write_comparison(tmp_path / "c", rows, arms=arms)
    for form in ("html", "markdown", "latex", "csv"):
        assert label in write_report([folder], tmp_path / form, form).read_text()
    costs = cost_table(read([folder])).frame
    assert list(costs.columns) == ["Cost", *(arm.label for arm in arms), "References, self-test"]


def test_the_terminal_shows_names_as_they_are_and_marks_missing_seeds(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path, two_arms(), missing=["digits-fine_tune-ssl-5-0-0"])
    text = printed(read([folder]), 120)
    assert "SSL [50%]" in text, "square brackets are no markup"
    assert "(2 of 3 seeds)" in text
    assert "half-width of a 95% interval" in text


def test_missing_seeds_of_frozen_features_are_counted_by_their_own(tmp_path: Path) -> None:
    frozen = [row(arm, 5, seed, 0.6, evaluator="few_shot") for arm in ("ssl", "untrained") for seed in range(5)]
    missing = ["digits-few_shot-ssl-5-0-0"]
    comparison = read([write_comparison(tmp_path, [*two_arms(), *frozen], seeds=(0, 1, 2), missing=missing)])
    summary = summarize(comparison)
    shown = {place.evaluator: place_tables(comparison, summary, place)[0] for place in summary.places}
    texts = {evaluator: table.frame.to_string() for evaluator, table in shown.items()}
    assert "(4 of 5 seeds)" in texts["few_shot"] and "seeds)" not in texts["fine_tune"]


def test_names_from_data_do_not_reach_the_terminal_as_control_characters(tmp_path: Path) -> None:
    skipped = [SkippedSample(shard="0.tar", key="\x1b]0;x", reason="empty")]
    folder = write_comparison(tmp_path, two_arms(), skipped=skipped)
    assert "\x1b" not in printed(read([folder]), 120)


def test_costs_fit_80_columns(tmp_path: Path) -> None:
    rows = [*two_arms(), *(row("supervised", 5, seed, 0.8) for seed in range(3))]
    folder = write_comparison(tmp_path, rows, arms=(*ARMS, SUPERVISED), sweeps={"ssl": SWEEP}, jobs=3)
    found = read([folder])
    assert max(map(len, printed(found, 80).splitlines())) <= 80
    costs = cost_table(found)
    assert "3 tasks in parallel" in costs.title
    cells = {name: values for name, *values in costs.frame.to_numpy().tolist()}
    assert cells["Pretraining labels"] == ["0", "0", "900"]
    assert cells["Settings tried in sweeps"] == ["2", "–", "–"]
    assert cells["Parameters, with head or decoder"] == ["1,234", "–", "1,234"]
    assert cells["Sweeps, images"] == ["128", "–", "–"]
    assert cells["Evaluation, images"] == ["384", "384", "192"]
    assert cells["Total, images"] == ["1,152", "384", "832"]
    assert cells["Total, FLOPs"] == ["1.40e+10", "6.00e+09", "9.00e+09"]
    # Four processes pretrained for half an hour; the rest ran on one: 6 rows of 2 seconds and a sweep of 3.
    assert cells["Total, process-hours"] == ["2.004", "0.003333", "2.002"]


def test_the_cost_of_references_has_a_column(tmp_path: Path) -> None:
    rows = [*two_arms(), *(row("untrained", 5, seed, 0.6) for seed in range(3))]
    frame = cost_table(read([write_comparison(tmp_path, rows)])).frame.set_index("Cost")
    others = frame["References, self-test"]
    assert others["Evaluation, images"] == others["Total, images"] == "192"
    assert others["Pretraining, images"] == "–"


def test_sweeps_show_every_setting_and_the_best(tmp_path: Path) -> None:
    table = sweep_table(read([write_comparison(tmp_path, two_arms(), sweeps={"ssl": SWEEP})]))
    assert table.frame.to_numpy().tolist() == [
        ["SSL [50%]", "Fine-tuning", "5", "optim.lr 0.1", "90.0 (best)", "1"],
        ["SSL [50%]", "Fine-tuning", "5", "optim.lr 0.2", "50.0", "1"],
    ]
    infinite = {"optim.lr": 0.4, "held_out_accuracy": 0.0, "held_out_parts": 0}
    sweep = SWEEP.model_copy(update={"candidates": (*SWEEP.candidates, infinite)})
    table = sweep_table(read([write_comparison(tmp_path / "infinite", two_arms(), sweeps={"ssl": sweep})]))
    assert [*table.frame["Held-out accuracy, %"]] == ["90.0 (best)", "50.0", "diverged"]


def test_two_pairs_whose_labels_read_alike_keep_a_row_each(tmp_path: Path) -> None:
    labels = {"a": "A", "b": "B minus C", "c": "A minus B", "d": "C"}
    arms = [ArmRecord(name=name, label=label, kind="pretrained") for name, label in labels.items()]
    rows = [row(arm, 5, seed, 0.5 + 0.1 * n) for n, arm in enumerate(labels) for seed in (0, 1, 2)]
    comparison = read([write_comparison(tmp_path / "c", rows, arms=arms)])
    (differences,) = [t for t in all_tables(comparison, summarize(comparison)) if "Difference" in t.title]
    assert [*differences.frame["Arm"]].count("A minus B minus C") == 2


def test_a_run_named_like_a_reference_keeps_its_accuracy(tmp_path: Path) -> None:
    comparison = read([write_run(tmp_path / "run", "raw pixels", 0.9)])
    (accuracies,) = [t for t in all_tables(comparison, summarize(comparison)) if "Test accuracy" in t.title]
    assert [*accuracies.frame["Arm"]] == [str(tmp_path / "run"), "raw pixels"]
    assert columns("", {"": {"k": "1"}}).frame.to_numpy().tolist() == [["k", "1"]]


@pytest.mark.parametrize("name", ["mine", "scratch"])
def test_a_reference_of_fine_tuning_is_training_from_scratch(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", name, 0.9, trains_encoder=True, evaluator="fine_tune", title="Fine-tuning")
    file = run / "results/few_shot-1.json"
    rows, about = results.load(file)
    results.save(file, [replace(one, arm="untrained") if one.arm == "pixels" else one for one in rows], **about)
    comparison = read([run])
    own = str(run) if name == "scratch" else name
    assert comparison.arms == (own, "scratch") and comparison.label("scratch") == "training from scratch"
    said = "\n".join([interval(comparison, summarize(comparison)), *provenance(comparison)])
    assert "untrained encoder" not in said and "frozen features" not in said and "Seeds of fine-tuning: 0, 1." in said


def test_markdown_and_latex_escape_what_would_break_them() -> None:
    shown = columns("50% of_all ~ {x}", {"a|b\nc": {"k_1": "1 ± 2"}})
    assert markdown(shown).splitlines() == [
        "**50% of_all ~ {x}**",
        "",
        "|  | a\\|b c |",
        "| --- | --- |",
        "| k_1 | 1 ± 2 |",
    ]
    text = latex(shown)
    assert r"\caption{50\% of\_all \textasciitilde{} \{x\}}" in text
    assert r"k\_1 & 1 $\pm$ 2 \\" in text
    assert r"\toprule" in text and r"\end{table}" in text
    text = latex(columns("", {"": {"[a] <b>": "*|"}}))
    assert r"{[}a] \textless{}b\textgreater{} & {*}\textbar{} \\" in text


@pytest.mark.parametrize(("form", "mark"), [("markdown", ""), ("latex", "% ")])
def test_tables_for_a_paper_carry_the_verdict(tmp_path: Path, form: str, mark: str) -> None:
    folder = write_comparison(tmp_path / "c", two_arms(), sweeps={"ssl": SWEEP})
    text = write_report([folder], tmp_path / "out", form).read_text()
    assert f"\n{mark}Masked patch prediction is better than training from scratch" in text
    assert f"\n{mark}± is the half-width" in text
    assert text.count("Fine-tuning. Test accuracy") == 1
    assert "90.0 (best)" in text


def test_json_has_no_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    text = export(read([write_comparison(tmp_path / "c", two_arms(0.2))]), "json")
    (first, *_) = json.loads(text, parse_constant=refuse)["summary"]["efficiencies"]
    assert (first["labels"], first["low"]) == ("Infinity", "NaN"), (
        "more accurate than all that was measured; no interval"
    )


def test_everything_is_exported_for_other_programs(tmp_path: Path) -> None:
    missing = ["digits-fine_tune-ssl-5-0-0"]
    folder = write_comparison(tmp_path / "c", two_arms(seeds=4), missing=missing, sweeps={"ssl": SWEEP})
    found = json.loads(write_report([folder], tmp_path / "r.json", "json").read_text())
    assert (found["finished"], found["missing"]) == (False, missing)
    assert [(sweep["arm"], sweep["best"]) for sweep in found["sweeps"]] == [("ssl", {"optim.lr": 0.1})]
    assert found["summary"]["headlines"][0]["outcome"] == "better"
    assert found["summary"]["headlines"][0]["estimate"]["half_width"] > 0
    assert len(found["rows"]) == 15 and found["record"]["name"] == "c"
    spent = {(cost["stage"], cost["arm"]): cost["images_seen"] for cost in found["costs"]}
    assert spent["Total", "ssl"] == 640 + 128 + 7 * 64 and ("Pretraining", "scratch") not in spent


@pytest.mark.parametrize("form", ["html", "markdown", "latex", "csv", "json"])
def test_a_report_shows_no_credentials_of_urls(tmp_path: Path, form: str) -> None:
    sas, login = "https://host/set/{0..3}.tar?sv=1,2&sig=SECRET1", "https://me:SECRET2@host/a.tar"
    command = f"ssl-vit compare c 'data.train=[{sas}]' data.test={login} jobs=2"
    settings = {"digits": {"teacher": sas, "weights": f"{login}?sig=SECRET3"}}
    evaluators = {"fine_tune": EvaluatorRecord(title="Fine-tuning", trains_encoder=True, settings=settings)}
    folder = write_comparison(tmp_path / "c", two_arms(), command=command, evaluators=evaluators)
    write_run(folder / "ssl", "ssl", 0.6)
    (folder / "ssl" / "recipe.yaml").write_text(f"data:\n  train: {sas}\n  test: {login}\nseed: 0\n")
    text = write_report([folder], tmp_path / "out", form).read_text()
    for encoded in re.findall(r"data:text/csv;base64,([^\"]+)", text):
        text += base64.b64decode(encoded).decode()
    assert "SECRET" not in text
    assert text.count("https://host/set/") == text.count("tar?...") - text.count("@host/a.tar?...") > 0
    if form == "markdown":
        assert "https://...@host/a.tar jobs=2" in text
    if form == "csv":
        assert len(pd.read_csv(tmp_path / "out")) == 12
    if form == "json":
        assert json.loads(text)["record"]["name"] == "c"


def test_credentials_are_removed_from_large_pages() -> None:
    picture = "data:image/png;base64," + "Ab+/" * 3_000_000  # minutes for a pattern that is not linear
    text = f'<img src="{picture}"> https://me:SECRET@host/{"x" * 1_000_000}?sig=SECRET'
    assert without_credentials(text) == f'<img src="{picture}"> https://...@host/{"x" * 1_000_000}?...'
    assert without_credentials("https://me:p@ss@host/a@b.tar") == "https://...@host/a@b.tar"


def test_what_imported_weights_cost_is_unknown(tmp_path: Path) -> None:
    given = ArmRecord(name="given", label="given", kind="weights", run="w", starts_from="my.safetensors")
    begun = SUPERVISED.model_copy(update={"starts_from": "weights"})
    rows = [*two_arms(), *(row(arm, 5, seed, 0.9) for arm in ("given", "supervised") for seed in range(3))]
    found = read([write_comparison(tmp_path / "c", rows, arms=(*ARMS, given, begun))])
    cells = cost_table(found).frame.set_index("Cost")
    assert cells.loc["Pretraining labels"].tolist() == ["0", "0", "unknown: pretrained weights", "900 + unknown"]
    assert cells.loc["Pretraining, images"].tolist() == ["640", "–", "unknown: pretrained weights", "640 + unknown"]


def test_every_export_carries_names_settings_and_times(tmp_path: Path) -> None:
    arms = (ARMS[0].model_copy(update={"evaluators": {"fine_tune": {"mixup": 0.5}}}), ARMS[1])
    folder = write_comparison(tmp_path / "c", two_arms(), arms=arms)
    table = pd.read_csv(write_report([folder], tmp_path / "r.csv", "csv"))
    first = table.iloc[0]
    assert (first["comparison"], first["arm_label"], first["evaluator_title"]) == ("c", "SSL [50%]", "Fine-tuning")
    assert json.loads(first["settings"]) == {"steps": 5}
    assert [json.loads(one) for one in table["settings_of_arm"].unique()] == [{"mixup": 0.5}, {}]
    arms = (ARMS[0].model_copy(update={"evaluators": {"digits fine_tune": {"mixup": 0.7}}}), ARMS[1])
    several = pd.read_csv(
        write_report([write_comparison(tmp_path / "s", two_arms(), arms=arms)], tmp_path / "s.csv", "csv")
    )
    assert [json.loads(one) for one in several["settings_of_arm"].unique()] == [{"mixup": 0.7}, {}]
    times = pd.to_datetime(table["saved"])
    assert times.notna().all() and (datetime.now(UTC) - times).max() < timedelta(hours=1)
    rows = json.loads(write_report([folder], tmp_path / "r.json", "json").read_text())["rows"]
    assert [one["saved"] for one in rows] == table["saved"].tolist()
    for form in ("markdown", "latex"):
        text = write_report([folder], tmp_path / "r", form).read_text()
        for part in (
            "A comparison (c). ssl-vit compare c",
            f"Results were saved from {table['saved'].min()}",
            '{"steps": 5}',
            "alone: fine_tune: mixup=0.5",
        ):
            assert part in text, (form, part)
    run = write_run(tmp_path / "run", "a", 0.5)
    assert pd.read_csv(write_report([run], tmp_path / "run.csv", "csv"))["saved"].notna().all()


def test_what_takes_time_alone_and_the_processes_of_a_given_run_have_their_cost(tmp_path: Path) -> None:
    given = ArmRecord(name="ssl", label="given", kind="weights", run="w", summary=SUMMARY)
    rows = [row("ssl", 5, seed, 0.5, evaluator="few_shot", seconds=3.0) for seed in range(2)]
    found = costs(read([write_comparison(tmp_path, rows, arms=(given, ARMS[1]))]))
    assert found.loc[("Evaluation", "ssl")].to_dict() == {
        "images_seen": 0,
        "flops": 0.0,
        "seconds": 6.0,
        "process_hours": pytest.approx(6 / 3600),
    }
    assert found.loc[("Pretraining", "ssl"), "process_hours"] == pytest.approx(4 * 1800 / 3600), "on four processes"
    assert ("Sweeps", "ssl") not in found.index and ("Total", "scratch") not in found.index


def test_tasks_that_ran_elsewhere_are_named_with_their_commit(tmp_path: Path) -> None:
    found = read([write_comparison(tmp_path, two_arms())])
    assert environments(found) == {}, "no task says where it ran"
    last, *others = found.tasks
    tasks = {name: TaskResult(fingerprint="", environment={"git": "a"}) for name in others}
    assert environments(replace(found, tasks=tasks)) == {"all tasks": {"git": "a"}}
    mixed = tasks | {last: TaskResult(fingerprint="", environment={"git": "b"})}
    count = len(found.tasks)
    parts = {f"{count - 1} of {count} tasks (1)": {"git": "a"}, f"1 of {count} tasks (2)": {"git": "b"}}
    assert environments(replace(found, tasks=mixed)) == parts


def test_the_suffix_of_the_file_chooses_its_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, runner = write_run(tmp_path / "run", "a", 0.5), CliRunner()
    assert runner.invoke(app, ["report", str(run), "--out", str(tmp_path / "r.csv")]).exit_code == 0
    assert len(pd.read_csv(tmp_path / "r.csv"))
    assert runner.invoke(app, ["report", str(run), "--out", str(tmp_path / "r.txt"), "--format", "csv"]).exit_code == 0
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        runner.invoke(app, ["report", str(run), "--out=~/home.md"]).exit_code == 0 and (tmp_path / "home.md").is_file()
    )
    assert (tmp_path / "r.txt").read_text() == (tmp_path / "r.csv").read_text()
    assert runner.invoke(app, ["report", str(run)]).exit_code == 0
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    for out in ("r.pdf", ".", ""):
        refused = runner.invoke(app, ["report", str(run), "--out", out and str(tmp_path / out)])
        assert isinstance(refused.exception, UserError) and "ends in one of .html, .md" in str(refused.exception)
