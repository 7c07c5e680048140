"""The HTML page: whole, safe, self-contained, the same every time."""

from __future__ import annotations

import base64
import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ssl_vit import records, results
from ssl_vit.files import write_json
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.records import ComparisonRecord, ReferenceRecord, TaskRecord, TaskResult
from ssl_vit.report import plots
from ssl_vit.report.export import export
from ssl_vit.report.page import write_report
from ssl_vit.report.read import read
from ssl_vit.report.statistics import Estimate
from tests.report.made import ARMS, SUMMARY, SWEEP, row, two_arms, write_comparison, write_run

HOSTILE = '<script>alert("1")</script> $x_1$ & Co ![](http://e/p)'
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Collects tags, attributes and ids, and checks that what is opened is closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(self.text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def values(self, *names: str) -> list[str]:
        return [value for name, value in self.attributes if name in names]


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    arms = (ARMS[0].model_copy(update={"label": HOSTILE}), ARMS[1])
    rows = [replace(one, notes=(HOSTILE,)) for one in two_arms()]
    folder = write_comparison(tmp_path / "c", rows, arms=arms, sweeps={"ssl": SWEEP}, title=HOSTILE)
    write_run(folder / "ssl", HOSTILE, 0.6)
    (folder / "ssl/recipe.yaml").write_text(f"# {HOSTILE}\nseed: 0\n")
    (folder / "ssl/inspect").mkdir()
    for name in ("filters", "attention_rollout", "feature_map"):
        (folder / "ssl/inspect" / f"{name}.png").write_bytes(PNG)
    return folder


def test_markup_is_escaped_in_markdown(comparison: Path) -> None:
    text = export(read([comparison]), "markdown")
    assert "&lt;script>" in text.splitlines()[0] and "<" not in text and "![" not in text


def test_the_page_is_whole_and_fetches_nothing(comparison: Path, tmp_path: Path) -> None:
    out = write_report([comparison], tmp_path / "deep/report.html")
    page = Page(out)
    assert out == tmp_path / "deep/report.html"
    links = page.values("src", "href", "xlink:href")
    assert all(link.startswith(("data:", "#")) for link in links)
    assert not re.search(r"url\((?!#)|@import", page.text)
    assert page.tags.count("svg") == 5, "accuracy, difference, loss, two confusion matrices"
    assert "currentColor" in page.text and plots.INK not in page.text, "figures take the color of the page"
    assert page.tags.count("img") == 3
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)


def test_contents_verdict_and_curves_come_first(comparison: Path, tmp_path: Path) -> None:
    text = Page(write_report([comparison], tmp_path / "report.html")).text
    parts = ("<h1>", "<nav", "Masked patch prediction is better than", "<svg", "Test accuracy, %", "Label efficiency: ")
    places = [text.index(part) for part in (*parts, 'id="cost"', 'id="repeat"')]
    assert places == sorted(places)
    assert text.count("\u00a0±\u00a0") > 8, "a number and its interval stay on one line"
    assert "ssl-vit compare c\n" in text
    assert "constant baseline" in text


def test_an_arm_has_one_color_everywhere(comparison: Path, tmp_path: Path) -> None:
    text = Page(write_report([comparison], tmp_path / "report.html")).text
    for color in plots.PALETTE[:2]:
        assert f"background:{color}" in text and f"stroke: {color}" in text


def test_curves_name_an_arm_that_begins_with_an_underscore() -> None:
    style, estimates = (
        plots.styles_of(["a"])["a"],
        [Estimate(mean, 0.1, 0.05, 7.0, 0.0, 0.0, 0.0, 8, 100) for mean in (0.5, 0.6)],
    )
    drawn = plots.accuracy_curve([plots.Curve("_mine", style, [1, 10], estimates)], "x", "y", {"_hidden": 50.0})
    assert "_mine" in drawn and "_hidden" not in drawn


def test_pictures_of_an_arm_without_a_run_are_shown(tmp_path: Path) -> None:
    """Given weights have no run directory, and that of a run may have been deleted."""
    folder = write_comparison(tmp_path / "c", two_arms())
    plan = records.read(folder / "plan.json", ComparisonRecord)
    task = TaskRecord(id="pictures-ssl", kind="pictures", arm="ssl", fingerprint="f")
    plan = plan.model_copy(update={"tasks": (*plan.tasks, task)})
    write_json(folder / "plan.json", plan.model_dump(mode="json"))
    done = TaskResult(fingerprint="f", pictures="drawn")
    results.save(folder / "tasks" / f"{task.id}.json", [], **done.model_dump(mode="json"))
    (folder / "drawn").mkdir()
    (folder / "drawn" / "filters.png").write_bytes(PNG)
    assert Page(write_report([folder], tmp_path / "report.html")).tags.count("img") == 1


def test_hostile_names_stay_text(comparison: Path, tmp_path: Path) -> None:
    for paths in ([comparison], [comparison / "ssl", write_run(tmp_path / "other", "b", 0.5)]):
        page = Page(write_report(paths, tmp_path / "report.html"))
        assert "script" not in page.tags
        assert "&lt;script&gt;" in page.text
        assert "$x_1$" in page.text, "neither mathematics nor lost"


def test_a_single_budget_is_drawn_as_bars(tmp_path: Path) -> None:
    one = write_comparison(tmp_path / "one", two_arms(budgets=(5,)))
    text = Page(write_report([one], tmp_path / "report.html")).text
    assert "(logarithmic)" not in text and text.count("<svg") == 4
    two = write_comparison(tmp_path / "two", two_arms(budgets=(5, 10)))
    assert "(logarithmic)" in Page(write_report([two], tmp_path / "report.html")).text


def test_runs_side_by_side(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name, 0.6, objective=objective) for name, objective in ("ax", "bx", "cy")]
    page = Page(write_report(runs, tmp_path / "report.html"))
    assert page.tags.count("svg") == 2 + 3 + 2, "losses of different objectives never share axes"
    assert "3 runs side by side" in page.text and ">0</td>" not in page.text.split('id="data"')[1]
    assert 'class="verdict"' not in page.text
    assert f"ssl-vit report {tmp_path}/a {tmp_path}/b {tmp_path}/c" in page.text


def test_losses_of_unfinished_runs_with_other_objectives_do_not_share_axes(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name, 0.6, objective=objective) for name, objective in ("ax", "bx")]
    for run, objective in zip(runs, ("masked_patch", "lejepa"), strict=True):
        (run / "summary.json").unlink()
        (run / "recipe.yaml").write_text(f"objective:\n  name: {objective}\n")
    text = Page(write_report(runs, tmp_path / "report.html")).text
    assert "Objective: masked patch prediction" in text and "Objective: LeJEPA" in text


def test_little_still_makes_a_page(tmp_path: Path) -> None:
    one = write_comparison(tmp_path / "one", two_arms(seeds=1, budgets=(5,)))
    assert "Undecided" in Page(write_report([one], tmp_path / "report.html")).text
    none = write_comparison(tmp_path / "none", [], metrics={"digits": "accuracy"})
    assert "No headline" in Page(write_report([none], tmp_path / "report.html")).text
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/recipe.yaml").write_text("seed: 0\n")
    assert "<h1>empty</h1>" in Page(write_report([tmp_path / "empty"], tmp_path / "report.html")).text


def test_the_same_input_gives_the_same_bytes(comparison: Path, tmp_path: Path) -> None:
    first = write_report([comparison], tmp_path / "1.html").read_bytes()
    assert write_report([comparison], tmp_path / "2.html").read_bytes() == first


def test_a_report_that_cannot_be_written_is_named(comparison: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"report\.html: the report could not be written"):
        write_report([comparison], tmp_path / "file" / "report.html")
    with pytest.raises(UserError, match="is a directory"):
        write_report([comparison], tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_scaling_study_has_a_line_per_series_and_levels(tmp_path: Path) -> None:
    sizes = {"ssl": ("wide", 2e12), "wide_short": ("wide", 5e11), "small": (None, 1e10)}
    arms = [
        ARMS[0].model_copy(
            update={
                "name": name,
                "label": f"{name} arm",
                "series": series,
                "kind": "weights",
                "architecture": str(series),
            }
            | {"summary": SUMMARY.model_copy(update={"flops": flops})}
        )
        for name, (series, flops) in sizes.items()
    ]
    scores = {"ssl": 0.7, "wide_short": 0.6, "small": 0.5, "untrained": 0.4, "pixels": 0.35}
    rows = [
        row(arm, 5, seed, score + seed / 50, evaluator="few_shot") for arm, score in scores.items() for seed in (0, 1)
    ]
    folder = write_comparison(tmp_path / "c", rows, arms=arms, study="flops")
    text = write_report([folder], tmp_path / "report.html").read_text()
    figure = text[text.index("pretraining</h2>") : text.index('id="cost"')]
    names = " ".join(html.unescape(name) for name in re.findall(r"<text[^>]*>([^<]*)</text>", figure))
    for name in ("wide", "small arm", "the untrained encoder", "raw pixels", "10G", "500G", "2T"):
        assert names.count(name) == 1, (name, names)


def test_controls_that_were_measured_first_do_not_stop_the_report(tmp_path: Path) -> None:
    """As in a job array, where the tasks of an evaluator finish in any order."""
    control = ReferenceRecord(name="control", kind="control", like="ssl")
    rows = [*two_arms(), *(row("control", 5, seed, 0.5, evaluator="few_shot") for seed in (0, 1))]
    folder = write_comparison(tmp_path / "c", rows, references=(control,))
    page = write_report([folder], tmp_path / "page.html", "html").read_text()
    assert "Fine-tuning" in page
