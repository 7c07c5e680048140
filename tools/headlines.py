"""The headlines of all comparisons whose report is saved here: their number by outcome, a list, and a picture.

    python tools/headlines.py [PICTURE.png]

Reads the verdict of each report that a recipe in `recipes/` names in its header. The picture has those with the same
compute in both arms.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

RECIPES = Path(__file__).parent.parent / "recipes"
DATA = {"cifar10": "CIFAR-10", "tiny_imagenet": "photographs"}  # else the folder's name
OTHER_DATA = dict.fromkeys(("photos_mae_cpu", "photos_transfer_cpu"), "Imagenette")  # after pretraining on others
NO_VERDICT = {"digits_pooling_study"}  # it has no arm that the headline could be about
EQUAL = {
    "training from scratch with the compute of pretraining": "minus scratch with the same compute",
    "supervised pretraining": "minus supervised pretraining with the same compute",
}
OUTCOMES = {"better": "tab:green", "worse": "tab:red", "equivalent": "tab:blue", "undecided": "tab:gray"}
CUTMIX = re.compile(r'head\.cutmix(?:": |=)(\[[^\]]*\]|[\d.]+)')  # in the settings of all arms, or of one
SENTENCE = re.compile(
    r"^(?:Undecided between )?(?P<ours>.+?) (?:is (?P<outcome>better|worse) than|and) "
    r"(?P<theirs>.+?)(?: \([^)]*\))?(?P<equivalent> are equivalent within .*?)?: "
    r"(?P<points>[-+]\d+\.\d) ± (?P<half>\d+\.\d) points of test accuracy \([^)]*\),? "
    r"(?:with|the mean over) (?P<labels>.+?)(?: labels(?: per class)?)? \(",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Headline:
    """The verdict of one report: a difference in points of test accuracy with the half-width of its 95% interval."""

    report: str
    data: str
    arm: str
    baseline: str
    labels: str
    points: float
    half: float
    outcome: str
    cutmix: bool  # whether a sweep of fine-tuning has CutMix, or CutMix is set

    @property
    def text(self) -> str:
        return f"{self.arm}; {self.data}, {self.labels} labels"


def headline(recipe: Path) -> Headline | None:
    """The headline of the first report that a recipe's header names; None where there is none. ValueError: a verdict
    that cannot be read."""
    header = re.sub(r"\n# ?", " ", recipe.read_text())
    name = re.search(rf"Score \(measured, recipes/results/({recipe.stem}(?:-\w+)?)\.md", header)
    if name is None or recipe.stem in NO_VERDICT:
        return None
    report = (RECIPES / "results" / f"{name[1]}.md").read_text()
    if not (found := SENTENCE.search(report)):
        raise ValueError(f"{name[1]}.md: no verdict that this script can read")
    cell = re.escape(f"{found['points']} ± {found['half']}")
    theirs = next(word for word in ("scratch", "supervised", "untrained") if word in found["theirs"])
    arm = re.search(rf"^\| ([^|]+?) minus [^|]*{theirs}[^|]* \| {cell} \|$", report, re.MULTILINE)  # with its length
    outcome = found["outcome"] or ("equivalent" if found["equivalent"] else "undecided")
    return Headline(
        report=name[1],
        data=OTHER_DATA.get(recipe.stem) or DATA.get(recipe.parent.name, recipe.parent.name),
        arm=arm[1] if arm else found["ours"],
        baseline=found["theirs"],
        labels=found["labels"].replace("1000", "1,000"),
        points=float(found["points"]),
        half=float(found["half"]),
        outcome=outcome,
        cutmix=any(re.search("[1-9]", values) for values in CUTMIX.findall(report)),
    )


def headlines() -> list[Headline]:
    """Those of all recipes, by baseline, method, data and number of labels."""
    found = [known for path in sorted(RECIPES.glob("*/*.yaml")) if (known := headline(path))]

    def order(each: Headline) -> tuple[str, str, str, int, str]:
        labels = re.sub(r"\D", "", each.labels.split(" ")[-1])
        return each.baseline, each.arm.split(",")[0].upper(), each.data, int(labels or 10**9), each.arm

    return sorted(found, key=order)


def counts(of: list[Headline]) -> str:
    """Such as "3 headlines: 2 better, 0 worse, 1 equivalent, 0 undecided"."""
    number = Counter(each.outcome for each in of)
    return f"{len(of)} headlines: " + ", ".join(f"{number[outcome]} {outcome}" for outcome in OUTCOMES)


def listing(found: list[Headline]) -> str:
    """Counts and rows by baseline, as text."""
    lines = []
    for baseline in dict.fromkeys(each.baseline for each in found):
        group = [each for each in found if each.baseline == baseline]
        lines.append(f"minus {baseline}, {counts(group)}")
        if baseline in EQUAL:
            for words, chosen in (("CutMix in a sweep or set", True), ("no CutMix", False)):
                lines.append(f"  {words}, {counts([each for each in group if each.cutmix == chosen])}")
        for each in group:
            lines.append(f"  {each.points:+5.1f} ± {each.half:.1f}  {each.outcome:10}  {each.text} ({each.report})")
    return "\n".join(lines)


def draw(found: list[Headline]) -> Figure:
    """A row per headline with equal compute: the difference and its interval, in color by outcome."""
    groups = [[each for each in found if each.baseline == baseline] for baseline in EQUAL]
    rows = [len(group) for group in groups]
    figure = Figure(figsize=(8, 0.17 * sum(rows) + 1.4), layout="constrained")
    panels = figure.subplots(len(groups), 1, sharex=True, height_ratios=rows)
    for axes, title, group in zip(panels, EQUAL.values(), groups, strict=True):
        for row, each in enumerate(group):
            color = OUTCOMES[each.outcome]
            face = color if each.cutmix else "white"
            axes.errorbar(each.points, -row, xerr=each.half, fmt="o", markersize=4, color=color, mfc=face)
        axes.axvspan(-1, 1, color="0.93")
        axes.axvline(0, color="0.6", linewidth=0.8)
        axes.set_yticks(range(0, -len(group), -1), [each.text for each in group], fontsize=7)
        axes.set_ylim(-len(group) + 0.4, 0.6)
        axes.set_title(title, fontsize=9)
    panels[-1].set_xlabel("difference in test accuracy, points, with its 95% interval", fontsize=8)
    colors = [(color, color, outcome) for outcome, color in OUTCOMES.items()]
    shown = [*colors, ("black", "black", "CutMix in a sweep or set"), ("black", "white", "no CutMix")]
    circles = [Line2D([], [], marker="o", linestyle="", color=edge, mfc=face) for edge, face, _ in shown]
    figure.legend(circles, [label for *_, label in shown], loc="outside lower center", ncols=6, fontsize=7)
    return figure


def main() -> None:
    found = headlines()
    print(listing(found))
    if len(sys.argv) > 1:
        draw(found).savefig(sys.argv[1], dpi=110, metadata={"Description": listing(found)})


if __name__ == "__main__":
    main()
