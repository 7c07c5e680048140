"""The headlines that the documents count and draw are those of the saved reports."""

from __future__ import annotations

import re
from pathlib import Path

import headlines
import pytest
from matplotlib.container import ErrorbarContainer
from PIL import Image

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def found() -> list[headlines.Headline]:
    return headlines.headlines()


@pytest.mark.parametrize(
    ("verdict", "outcome", "labels", "baseline"),
    [
        ("Arm one is better than {b}: +4.1 ± 0.5 {p} with 10 labels per class (x", "better", "10", "scratch"),
        ("Arm one is worse than {b} (scratch): +4.1 ± 0.5 {p} with all labels (x", "worse", "all", "scratch"),
        (
            "Undecided between arm one and {b}: +4.1 ± 0.5 {p}, the mean over 5 and 1000 labels per class (x",
            "undecided",
            "5 and 1,000",
            "scratch",
        ),
        (
            "Arm one and {b} are equivalent within 1 point(s): +4.1 ± 0.5 {p} with 25 labels per class (x",
            "equivalent",
            "25",
            "scratch",
        ),
    ],
)
def test_a_verdict_is_read(
    verdict: str, outcome: str, labels: str, baseline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headlines, "RECIPES", tmp_path)
    (tmp_path / "results").mkdir()
    recipe = tmp_path / "study.yaml"
    recipe.write_text("# Score (measured,\n# recipes/results/study-all.md): good.\n")
    sentence = verdict.format(b=baseline, p="points of test accuracy (45.0% against 40.9%)")
    row = "| arm two, 4 epochs minus untrained | +4.1 ± 0.5 |\n| arm one, 6 epochs minus scratch | +4.1 ± 0.5 |"
    report = tmp_path / "results" / "study-all.md"
    for settings, cutmix in (
        ('"head.cutmix": 0.0', False),
        ('"head.mixup": 0.2', False),
        ('"head.cutmix": [0.0]', False),
        ('"head.cutmix": [0.0, 1.0]', True),
        ('"head.cutmix": [0.0] ... of scratch alone: fine_tune: sweep.head.cutmix=[1.0]', True),
        ('"head.cutmix": 1.0', True),
    ):
        report.write_text(f"{row}\n\n{sentence}\n\nSettings: {{{settings}}}\n")
        read = headlines.headline(recipe)
        assert read is not None
        assert (read.outcome, read.labels, read.baseline, read.cutmix) == (outcome, labels, baseline, cutmix)
        assert (read.arm, read.points, read.half, read.report) == ("arm one, 6 epochs", 4.1, 0.5, "study-all")
    report.write_text("Arm one wins.\n")
    with pytest.raises(ValueError, match=r"study-all\.md: no verdict"):
        headlines.headline(recipe)
    recipe.write_text("# Score: not measured.\n")
    assert headlines.headline(recipe) is None


def test_the_documents_count_all_headlines(found: list[headlines.Headline]) -> None:
    results = " ".join((ROOT / "recipes" / "RESULTS.md").read_text().replace("**", "").split())
    scratch, supervised = ([each for each in found if each.baseline == name] for name in headlines.EQUAL)
    with_cutmix, without = ([each for each in scratch if each.cutmix == chosen] for chosen in (True, False))
    assert f"Against scratch, {headlines.counts(scratch)}." in results
    assert f"With CutMix in a sweep or set, {headlines.counts(with_cutmix)}." in results
    assert f"Without, {headlines.counts(without)}." in results
    assert f"Against supervised pretraining, {headlines.counts(supervised)}." in results
    readme = " ".join((ROOT / "README.md").read_text().split())
    sentence = re.search(r"Of all \d+ headlines.*?\d+ against supervised pretraining.*?(?= \()", readme)
    assert sentence is not None
    numbers = re.findall(r"\d+", headlines.counts(scratch) + headlines.counts(supervised))
    assert re.findall(r"\d+", sentence[0]) == numbers


def test_the_picture_has_all_headlines(found: list[headlines.Headline]) -> None:
    with Image.open(ROOT / "recipes" / "pictures" / "headlines.png") as picture:
        assert picture.info["Description"] == headlines.listing(found)


def test_a_picture_has_a_row_per_headline_with_equal_compute(found: list[headlines.Headline]) -> None:
    for axes, baseline in zip(headlines.draw(found).axes, headlines.EQUAL, strict=True):
        group = [each for each in found if each.baseline == baseline]
        assert [label.get_text() for label in axes.get_yticklabels()] == [each.text for each in group]
        for bar, each in zip(axes.containers, group, strict=True):
            assert isinstance(bar, ErrorbarContainer)
            point, _, (segments,) = bar.lines
            (low, _), (high, _) = segments.get_segments()[0]
            assert (low, high) == pytest.approx((each.points - each.half, each.points + each.half))
            assert point.get_color() == headlines.OUTCOMES[each.outcome]
            assert (point.get_markerfacecolor() == "white") is not each.cutmix
