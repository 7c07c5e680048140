"""The self-test of a comparison, and what the report says where it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssl_vit.records import ArmRecord, ReferenceRecord
from ssl_vit.report.read import Comparison, read
from ssl_vit.report.self_test import BETTER, SAME, self_tests
from ssl_vit.report.summary import summarize
from ssl_vit.report.tables import self_test_table
from ssl_vit.report.verdict import verdict

from .made import ARMS, SUPERVISED, row, two_arms, write_comparison

REPEATED = ReferenceRecord(name="control", kind="control", like="ssl", repeats="scratch")


def made(folder: Path, repeated: float, supervised: float, **changes: Any) -> Comparison:
    """Scratch at 50%, and these accuracies above it."""
    rows = two_arms(budgets=(5,), seeds=4)
    for seed in range(4):
        rows.append(row("control", 5, seed, 0.5 + 0.01 * seed + repeated, images=100))
        rows.append(row("supervised", 5, seed, 0.5 + 0.01 * seed + supervised, images=100))
    given = {"arms": (*ARMS, SUPERVISED), "references": (REPEATED,)} | changes
    return read([write_comparison(folder, rows, **given)])


def test_a_repetition_is_no_better_and_all_labels_are(tmp_path: Path) -> None:
    found = made(tmp_path, repeated=0.0, supervised=0.3)
    same, better = self_tests(found)
    assert (same.expected, same.difference.arm, same.difference.against) == (SAME, "control", "scratch")
    assert (better.expected, better.difference.arm, better.difference.against) == (BETTER, "supervised", "scratch")
    assert (same.result, better.result) == ("pass", "pass")
    assert list(self_test_table(found).frame["Result"]) == ["pass", "pass"]
    assert not any("self-test" in sentence for sentence in verdict(found, summarize(found)))


def test_failed_tests_are_cautions(tmp_path: Path) -> None:
    found = made(tmp_path, repeated=0.3, supervised=-0.3)
    assert [test.result for test in self_tests(found)] == ["fail", "fail"]
    assert list(self_test_table(found).frame["Result"]) == ["fail", "fail"]
    assert sum("self-test failed" in sentence for sentence in verdict(found, summarize(found))) == 2


def test_too_few_seeds_do_not_fail_a_test(tmp_path: Path) -> None:
    rows = [*two_arms(budgets=(5,), seeds=2), *(row("supervised", 5, seed, 0.5 + 0.3 * seed) for seed in (0, 1))]
    found = read([write_comparison(tmp_path, rows, arms=(*ARMS, SUPERVISED))])
    (better,) = self_tests(found)
    assert (better.difference.outcome, better.result) == ("undecided", "undecided")
    assert not any("self-test" in sentence for sentence in verdict(found, summarize(found)))


def test_one_seed_has_no_interval_and_passes_no_test(tmp_path: Path) -> None:
    rows = [*two_arms(budgets=(5,), seeds=1), row("control", 5, 0, 0.9)]
    (same,) = self_tests(read([write_comparison(tmp_path, rows, references=(REPEATED,))]))
    assert (same.difference.estimate.half_width, same.result) == (None, "undecided")


def test_labels_need_not_help_where_the_baseline_has_all_of_them(tmp_path: Path) -> None:
    rows = [
        *two_arms(budgets=(5, "all")),
        *(row("supervised", size, seed, 0.6) for size in (5, "all") for seed in (0, 1, 2)),
    ]
    (better,) = self_tests(read([write_comparison(tmp_path / "both", rows, arms=(*ARMS, SUPERVISED))]))
    assert better.difference.labels_per_class == 5
    rows = [one for one in rows if one.labels_per_class == "all"]
    assert not self_tests(read([write_comparison(tmp_path / "all", rows, arms=(*ARMS, SUPERVISED))]))


def test_labels_need_not_help_against_scratch_with_the_compute_of_pretraining(tmp_path: Path) -> None:
    longer = tuple(arm.model_copy(update={"compute_of": "ssl"}) if arm.kind == "scratch" else arm for arm in ARMS)
    (same,) = self_tests(made(tmp_path / "longer", repeated=0.0, supervised=0.0, arms=(*longer, SUPERVISED)))
    assert same.expected == SAME
    first = ArmRecord(name="longer", label="longer", kind="scratch", compute_of="ssl")
    found = made(tmp_path / "both", repeated=0.0, supervised=0.3, arms=(first, *ARMS, SUPERVISED))
    rows = [*(row("longer", 5, seed, 0.9, images=100) for seed in range(4)), *found.measured.results]
    path = write_comparison(tmp_path / "first", rows, arms=(first, *ARMS, SUPERVISED), references=(REPEATED,))
    tests = self_tests(read([path]))
    assert [(one.expected, one.difference.against) for one in tests] == [(SAME, "scratch"), (BETTER, "scratch")]


def test_labels_of_other_images_need_not_help(tmp_path: Path) -> None:
    for trained_on in (None, "another dataset of this comparison"):
        other = SUPERVISED.model_copy(update={"trained_on": trained_on})
        (same,) = self_tests(made(tmp_path / str(trained_on), repeated=0.0, supervised=0.0, arms=(*ARMS, other)))
        assert same.expected == SAME


def test_controls_are_in_no_other_table(tmp_path: Path) -> None:
    summary = summarize(made(tmp_path, repeated=0.0, supervised=0.3))
    named = {one.arm for one in (*summary.accuracies, *summary.means)} | {one.against for one in summary.means}
    assert named == {"ssl", "scratch", "supervised"}
