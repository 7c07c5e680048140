"""The page in a real browser (headless Chromium): nothing on its console, figures that are seen, a phone's width."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ssl_vit.report.page import write_report
from tests.report.made import ARMS, SUPERVISED, row, write_comparison, write_run, write_shards

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
# What a page measures of itself once it is laid out, with everything unfolded. Its own policy forbids scripts, so a
# copy without that is asked. Chromium's window is never narrower than 500 pixels, so the copy lies in a frame.
MEASURE = """<script>addEventListener("load", () => {
  const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.right, r.width, r.height]; };
  const all = s => [...document.querySelectorAll(s)];
  all("details").forEach(e => e.open = true);
  const reached = e => { e.scrollLeft = e.scrollWidth; return box([...e.querySelectorAll("th")].pop().closest("table")
    .querySelector("tr").lastElementChild)[1] <= box(e)[1] + 1; };
  const out = parent.document.createElement("pre");
  out.id = "measured";
  out.textContent = JSON.stringify({
    width: innerWidth, content: document.documentElement.scrollWidth,
    figures: all("figure svg, figure img.picture").map(box), cards: all(".cards img").map(box),
    images: all("img.picture").map(i => i.naturalWidth),
    letters: Math.min(...all("figure svg text").map(t => t.getBoundingClientRect().height)),
    regions: all(".scroll").map(box), reached: all(".scroll").map(reached),
    wide: all(".scroll").filter(e => e.scrollWidth > e.clientWidth).length });
  parent.document.body.append(out);
});</script></head>"""


def chromium(page: Path) -> subprocess.CompletedProcess[str]:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1300,2000"]
    command = [str(CHROMIUM), *flags, "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def measured(page: Path, width: int) -> dict[str, Any]:
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    inside = html.escape(text.replace("</head>", MEASURE))
    frame = page.with_name("frame.html")
    frame.write_text(f'<body><iframe style="width:{width}px;height:2000px;border:0" srcdoc="{inside}"></iframe>')
    found = re.search(r'<pre id="measured">(.*?)</pre>', chromium(frame).stdout, re.DOTALL)
    assert found
    return dict(json.loads(html.unescape(found[1])))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of three arms and two references at five budgets, with pictures."""
    folder = tmp_path_factory.mktemp("comparison")
    gain = {"ssl": 0.2, "supervised": 0.3, "pixels": -0.1}
    rows = [
        row(arm, budget, seed, 0.4 + gain.get(arm, 0.0) + 0.05 * place + 0.01 * seed, evaluator=evaluator)
        for evaluator, others in (("fine_tune", ["scratch"]), ("few_shot", ["untrained", "pixels"]))
        for arm in ["ssl", "supervised", *others]
        for place, budget in enumerate((1, 5, 10, 100, 1000))
        for seed in (0, 1, 2)
    ]
    command = "ssl-vit compare recipe.yaml " + " ".join(f"arms.ssl.overrides=[training.steps={n}]" for n in range(9))
    data = write_shards(folder / "test")
    write_comparison(folder, rows, arms=(*ARMS, SUPERVISED), command=command, data=data)
    write_run(folder / "ssl", "ssl", 0.6)
    (folder / "ssl" / "inspect").mkdir()
    generator = np.random.default_rng(0)
    for name in ("reconstructions", "filters"):
        pixels = generator.integers(0, 256, (60, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "ssl" / "inspect" / f"{name}.png")
    return write_report([folder], folder / "report.html")


def test_nothing_is_said_on_the_console(page: Path) -> None:
    said = [line for line in chromium(page).stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    broken = page.with_name("broken.html")
    broken.write_text(page.read_text().replace("</head>", "<script>1</script></head>"))
    assert "CONSOLE" in chromium(broken).stderr, "the page's policy stops scripts, and this test hears it"


@pytest.mark.parametrize("width", [400, 1200])
def test_figures_and_tables_fit_and_can_be_read(page: Path, width: int) -> None:
    found = measured(page, width)
    assert found["width"] == width
    assert found["content"] <= width, "the page itself never scrolls sideways"
    assert len(found["figures"]) == 7 + 5, "curves, losses, pictures; confusion matrices"
    assert len(found["cards"]) == 8, "scratch is never the better one"
    assert all(left >= 0 and right <= width and high > 40 for left, right, _, high in found["cards"])
    for left, right, wide, high in [*found["figures"], *found["regions"]]:
        assert left >= 0 and right <= width, "what is wider scrolls inside its own region"
        assert wide > 0.3 * min(width, 800) and high > 20
    assert all(found["reached"]), "the last column of each table"
    assert found["wide"] or width > 400, "on a phone there is something to scroll"
    assert all(natural == 90 for natural in found["images"])
    assert found["letters"] >= 10
