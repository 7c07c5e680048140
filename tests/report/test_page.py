"""The HTML page: whole, harmless, the same bytes each time, and without anything fetched from elsewhere."""

from __future__ import annotations

import base64
import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ssl_vit.interfaces import RunError, UserError
from ssl_vit.report import plots
from ssl_vit.report.page import write_report

HOSTILE = '<script>alert("1")</script> $x_1$ & Co'
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


def skips(first: int, end: int) -> list[dict[str, str]]:
    return [{"shard": "000001.tar", "key": f"{k:08d}", "reason": "image cannot be decoded"} for k in range(first, end)]


def write_run(folder: Path, name: str, objective: str = "masked_patch") -> Path:
    (folder / "pictures").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"# {HOSTILE}\nseed: 0\n")
    (folder / "summary.json").write_text(json.dumps({"name": name, "objective": objective, "steps": 20}))
    (folder / "environment.json").write_text(json.dumps({"versions": {"torch": "2.9.1"}}))
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": 2 / step, "constant_loss": 1.9, "images_seen": 8 * step} for step in range(1, 21)
    ]
    lines.insert(7, {"step": 7, "event": "skipped_samples", "total": 4, "samples": skips(0, 4)})
    lines.append({"step": 20, "event": "skipped_samples", "total": 11, "samples": skips(0, 7)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "pictures/reconstruction_step_00000020.png").write_bytes(PNG)
    rows = [
        {
            "source": source,
            "labels_per_class": 10,
            "seed": seed,
            "accuracy": accuracy + seed / 50,
            "per_class": [0.5] * 4,
        }
        for source, accuracy in (("trained", 0.61), ("pixels", 0.7))
        for seed in (0, 1)
    ]
    evaluation = {"evaluator": "few_shot", "title": HOSTILE, "settings": {"l2": 1024.0}, "data": {"test": HOSTILE}}
    evaluation |= {"metric": "accuracy", "values": {}, "measurements": rows}
    (folder / "results.json").write_text(json.dumps({"kind": "evaluations", "evaluations": [evaluation]}))
    return folder


def write_comparison(folder: Path, seeds: int = 3) -> Path:
    write_run(folder / "ssl", HOSTILE)
    tried = [{"lr": 0.001, "held_out_accuracy": 0.912}, {"lr": 0.003, "held_out_accuracy": 0.5}]
    choices = [
        {"data": "data", "evaluator": "fine_tune", "labels_per_class": 10, "tried": tried, "chosen": {"lr": 0.001}}
    ]
    results = {
        "kind": "comparison",
        "title": HOSTILE,
        "command": "ssl-vit demo",
        "seeds": list(range(seeds)),
        "seeds_vary": "A seed draws the labeled images.",
        "notes": [HOSTILE],
        "data": {"test": {"path": "data/test", "classes": 10}},
        "sets": {"": {"classes": 10, "metric": "accuracy"}},
        "evaluators": {"fine_tune": {"title": "Fine-tuning", "trains_encoder": True}},
        "arms": [
            {"name": "ssl", "label": HOSTILE, "run": "ssl", "labels_used": 0, "pretraining": {"seconds": 80.25}}
            | {"choices": choices, "tuning": {"images_seen": 43210, "seconds": 7.5}},
            {"name": "scratch", "label": "From scratch", "run": None, "labels_used": 0, "pretraining": None},
        ],
        "measurements": [
            {"arm": arm, "evaluator": "fine_tune", "labels_per_class": b, "seed": s, "accuracy": a + s / 100 + b / 200}
            | ({"accuracy": 0.69 + s / 50 + b / 200} if arm == "ssl" else {})
            for arm, a in (("ssl", 0.7), ("scratch", 0.3), (HOSTILE, 0.5))
            for b in (5, 10)
            for s in range(seeds)
        ],
    }
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_comparison_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    out = write_report([write_comparison(tmp_path / "c")], tmp_path / "deep/report.html")
    page = Page(out)
    assert out == tmp_path / "deep/report.html"
    links = page.values("src", "href", "xlink:href")
    assert len(links) > 3
    assert all(link.startswith(("data:", "#")) for link in links)
    assert not re.search(r"url\((?!#)|@import", page.text)
    assert page.tags.count("svg") == 3  # accuracy, difference, loss
    assert base64.b64encode(PNG).decode() in page.text
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)


def test_comparison_page_says_what_a_reader_needs(tmp_path: Path) -> None:
    text = Page(write_report([write_comparison(tmp_path / "c")], tmp_path / "report.html")).text
    assert "gains +40.0\u00a0±\u00a02.5 points over training from scratch" in text
    assert text.index("<h1>") < text.index("gains +40.0") < text.index("<svg")
    assert "A seed draws the labeled images." in text
    assert "ssl-vit demo" in text
    assert f"ssl-vit train {tmp_path}/c/ssl/recipe.yaml" in text
    assert "best constant guess" in text
    assert "<td>lr 0.001</td><td>91.2</td>" in text
    assert "Training skipped unreadable samples 11 time(s), first by step 7: 000001.tar: 00000000 (image cannot" in text
    assert "00000004 (image cannot be decoded); and 2 more." in text
    assert "00000005 (" not in text
    assert "evaluations left out" not in text
    for arm in ("ssl", "scratch"):
        assert text.count(f"background:{plots.COLORS[arm]}") >= 2
        assert f"stroke: {plots.COLORS[arm]}" in text


def test_comparison_page_shows_costs_by_arm_and_what_the_evaluations_left_out(tmp_path: Path) -> None:
    comparison = write_comparison(tmp_path / "c")
    results = json.loads((comparison / "results.json").read_text())
    results |= {"jobs": 4, "skipped": [*skips(0, 5), skips(5, 6)[0] | {"reason": "<b>"}]}
    (comparison / "results.json").write_text(json.dumps(results))
    text = Page(write_report([comparison], tmp_path / "report.html")).text
    costs = text[text.index("What each arm cost") :]
    costs = costs[: costs.index("</table>")]
    assert "Seconds were measured with 4 pieces running side by side" in costs
    assert re.findall(r"([\w-]+) seconds</th><td>([^<]*)</td><td>([^<]*)</td>", costs) == [
        ("Pretraining", "80.2", "–"),
        ("Sweep", "7.5", "–"),
        ("Fine-tuning", "–", "–"),
    ]
    assert '<th scope="row">Sweep images</th><td>43,210</td>' in costs
    marks = re.findall(r'<th scope="col"><span class="dot" style="background:(#\w+)"></span>', costs)
    assert marks == [plots.COLORS["ssl"], plots.COLORS["scratch"]]
    before = text[: text.index("<h2>")]
    assert "the evaluations left out 6 unreadable sample(s): 000001.tar: 00000000 (image cannot be decoded); " in before
    assert "and 1 more." in before


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    comparison = write_comparison(tmp_path / "c")
    for paths in ([comparison], [comparison / "ssl", write_run(tmp_path / "other", "b")]):
        page = Page(write_report(paths, tmp_path / "report.html"))
        assert "script" not in page.tags
        assert "<script" not in page.text
        assert "&lt;script&gt;" in page.text
        assert "$x_1$" in page.text  # neither mathematics nor lost


def test_runs_side_by_side(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name, objective) for name, objective in (("a", "x"), ("b", "x"), ("c", "y"))]
    results = json.loads((runs[0] / "results.json").read_text())
    results["evaluations"][0]["skipped"] = skips(8, 9)
    (runs[0] / "results.json").write_text(json.dumps(results))
    page = Page(write_report(runs, tmp_path / "report.html"))
    # Accuracy and difference; losses of different objectives are never drawn on the same axes.
    assert page.tags.count("svg") == 2 + 2
    assert page.tags.count("img") == 3
    assert page.text.count("<td>62.0\u00a0±\u00a01.4</td>") == 3
    assert page.text.count("<td>71.0\u00a0±\u00a01.4</td>") == 1, "raw pixels are the same for all"
    assert page.text.count(">+0.0<") == 2 and page.text.count(">-9.0<") == 1, "the same at both seeds: no interval"
    assert "3 runs side by side" in page.text
    assert page.text.count("the evaluations left out 1 unreadable sample(s): 000001.tar: 00000008 (image cannot") == 1
    assert f"ssl-vit report {tmp_path}/a {tmp_path}/b {tmp_path}/c" in page.text


def test_one_seed_one_budget_and_an_empty_run_still_make_a_page(tmp_path: Path) -> None:
    comparison = write_comparison(tmp_path / "c", seeds=1)
    results = json.loads((comparison / "results.json").read_text())
    results["measurements"] = [found for found in results["measurements"] if found["labels_per_class"] == 5]
    (comparison / "results.json").write_text(json.dumps(results))
    assert "one seed, so no interval" in Page(write_report([comparison], tmp_path / "report.html")).text
    (comparison / "results.json").write_text('{"kind": "comparison", "finished": false}')
    assert "No verdict yet" in Page(write_report([comparison], tmp_path / "report.html")).text
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/recipe.yaml").write_text("seed: 0\n")
    assert "<h1>empty</h1>" in Page(write_report([tmp_path / "empty"], tmp_path / "report.html")).text


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    comparison = write_comparison(tmp_path / "c")
    first = write_report([comparison], tmp_path / "1.html").read_bytes()
    assert write_report([comparison], tmp_path / "2.html").read_bytes() == first


def test_what_cannot_be_reported_together_or_written(tmp_path: Path) -> None:
    comparison = write_comparison(tmp_path / "c")
    with pytest.raises(UserError, match="No directory given"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(UserError, match="report it alone"):
        write_report([comparison, comparison / "ssl"], tmp_path / "report.html")
    with pytest.raises(RunError, match="could not be written"):
        write_report([comparison], tmp_path)


def test_a_resumed_run_is_drawn_once_and_without_its_non_finite_losses() -> None:
    records: list[dict[str, Any]] = [{"step": step, "loss": float(step)} for step in (1, 2, 3, 2, 3, 4)]
    broken = [*records, {"step": 5, "loss": float("nan")}, {"step": 6, "event": "skipped_samples"}]
    clean: list[dict[str, Any]] = [{"step": step, "loss": float(step)} for step in (1, 2, 3, 4)]
    assert plots.loss_curves([("a", "#808080", broken)]) == plots.loss_curves([("a", "#808080", clean)])
    assert plots.loss_curves([("a", "#808080", [])]) is None


def test_figures_take_the_color_of_the_page_and_leave_no_global_state() -> None:
    curve = plots.Curve("名前 $a", "#0072b2", "o", [1, 5], [40.0, 60.0], [38.0, 58.0], [42.0, 62.0])
    svg = plots.accuracy_curve([curve], "labels", "accuracy, %", chance=39.0)
    assert "名前 $a" in svg and "chance" in svg
    assert "currentColor" in svg
    assert plots.INK not in svg
    assert not re.search(r"(fill|stroke): (#000000|black|#ffffff|white)", svg)


def test_the_report_does_not_import_torch_or_pyplot() -> None:
    code = "import sys, ssl_vit.report.page; sys.exit(bool({'torch', 'matplotlib.pyplot'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_scaling_study_has_a_line_and_an_untrained_level_for_each_size(tmp_path: Path) -> None:
    sizes = {"ssl": ("wide", 2e12, "w"), "wide_short": ("wide", 5e11, "w"), "small": ("narrow", 1e10, "n")}
    scores = {"ssl": 0.7, "wide_short": 0.6, "small": 0.5, "untrained": 0.4, "untrained_small": 0.3, "pixels": 0.35}
    results = {
        "kind": "comparison",
        "study": "flops",
        "seeds": [0, 1],
        "arms": [
            {"name": name, "label": f"{series}, {flops:.0e}", "series": series, "architecture": made, "labels_used": 0}
            | {"pretraining": {"flops": flops}}
            for name, (series, flops, made) in sizes.items()
        ],
        "references": {"untrained": "w", "untrained_small": "n", "pixels": "w"},
        "evaluators": {"few_shot": {"title": "Few-shot"}},
        "measurements": [
            {"arm": arm, "evaluator": "few_shot", "labels_per_class": 5, "seed": s, "accuracy": a + s * a / 100}
            for arm, a in scores.items()
            for s in (0, 1)
        ],
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    figure = text[text.index("Accuracy over pretraining compute") : text.index("<h2>Few-shot")]
    names = [html.unescape(name) for name in re.findall(r"<text[^>]*>([^<]*)</text>", figure)]
    for name in ("wide", "narrow", "wide, untrained", "narrow, untrained", "raw pixels", "1e10", "5e11", "2e12"):
        assert names.count(name) == 1, (name, names)
    assert "SSL pretraining (wide, 2e+12) gains" in text, "one of several arms is named"
    results["arms"][2]["pretraining"] = None  # it has not pretrained yet; its untrained twin is measured
    results["measurements"] = [row for row in results["measurements"] if row["arm"] != "small"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert "the untrained encoder of narrow" in write_report([tmp_path], tmp_path / "report.html").read_text()


def test_a_study_of_many_series_has_a_page(tmp_path: Path) -> None:
    arms = [
        {"name": f"a{n}", "label": f"a{n}", "series": f"s{n // 2}", "architecture": "w", "labels_used": 0}
        | {"pretraining": {"flops": 1e9 * (n + 1)}}
        for n in range(20)
    ]
    scores = [
        {"arm": arm["name"], "evaluator": "few_shot", "labels_per_class": 5, "seed": s, "accuracy": 0.5 + s / 10}
        for arm in arms
        for s in (0, 1)
    ]
    results = {"kind": "comparison", "study": "flops", "seeds": [0, 1], "arms": arms, "measurements": scores}
    (tmp_path / "results.json").write_text(json.dumps(results | {"evaluators": {"few_shot": {"title": "Few-shot"}}}))
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert all(f">s{n}<" in text for n in range(10))
