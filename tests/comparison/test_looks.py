"""Adding seeds and pretrainings until the headline is decided."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssl_vit.comparison import looks, run
from ssl_vit.comparison.checks import check
from ssl_vit.comparison.config import Study, load_comparison
from ssl_vit.comparison.run import compare
from ssl_vit.interfaces import UserError
from ssl_vit.records import Look, TaskRecord
from ssl_vit.report import sequential
from ssl_vit.report.read import Comparison, read
from ssl_vit.report.summary import summarize
from tests.report.made import SUMMARY, row, write_comparison

from .conftest import STEPS, TUNING, Mini, rows

FROZEN: dict[str, Any] = {"frozen_seeds": [0, 1], "seeds": [0, 1], "margin": 0.001}


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of pretraining decide nothing; the planner asks for one more seed each time."""
    monkeypatch.setattr(looks.statistics, "plan", lambda *_: (1, None))


def quiet(recipe: Path, **options: Any) -> Comparison:
    return compare(load_comparison(recipe), say=lambda text: None, **options)


def test_a_look_is_taken_again_after_a_key_has_changed(mini: Mini, undecided: None) -> None:
    assert quiet(mini(**FROZEN), until_decided=True, max_seeds=4).record.looks[-1].outcomes == {"data": "undecided"}
    again = quiet(mini(**FROZEN | {"margin": 0.9}))
    assert [look.seeds for look in again.record.looks] == [2, 3, 4]
    assert again.record.looks[-1].outcomes == {"data": "equivalent"}
    with pytest.raises(UserError, match="its looks tested baseline=null"):
        quiet(mini(**FROZEN, baseline="scratch"))


def test_without_a_headline_no_look_is_taken(mini: Mini, tmp_path: Path) -> None:
    arm = {"label": "SSL", "recipe": "digits_ssl", "overrides": STEPS}
    recipe = mini(arms={"ssl": arm, "other": {**arm, "label": "other"}}, evaluators={"fine_tune": TUNING})
    with pytest.raises(UserError, match="requires a headline"):
        quiet(recipe, until_decided=True)
    with pytest.raises(UserError, match="baseline=scratch requires a headline"):  # which frozen features never have
        quiet(mini(baseline="scratch"))
    assert not (tmp_path / "run/tasks").exists(), "nothing was trained"


def test_the_looks_of_another_process_are_not_overwritten(mini: Mini, tmp_path: Path) -> None:
    study = load_comparison(mini(**FROZEN))
    checked = check(study)
    looked = replace(study, max_seeds=4, looks=(Look(seeds=2, pretrainings=1, outcomes={}),) * 3)
    run._write_plan(replace(checked, plan=replace(checked.plan, study=looked)), "")
    with pytest.raises(UserError, match="another process added seeds"):
        run._write_plan(checked, "")
    assert len(read([tmp_path / "run"]).record.looks) == 3


def test_seeds_are_added_until_the_maximum_and_a_kill_between_looks_changes_nothing(
    mini: Mini,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undecided: None,
    call: Callable[..., tuple[int, str]],
) -> None:
    found = quiet(mini(**FROZEN), until_decided=True, max_seeds=6)
    record = found.record
    assert record.max_seeds == 6
    assert [look.seeds for look in record.looks] == [2, 4, 6], "in steps of a third of what may be added"
    last = record.looks[-1]
    assert record.frozen_seeds == tuple(range(last.seeds))
    (head,) = summarize(found).headlines
    assert last.outcomes == {"data": head.outcome}
    shares = [look.seeds / 6 for look in record.looks]
    assert head.estimate.confidence == pytest.approx(1 - sequential.levels(shares)[-1])

    recipe, tasks = mini(**FROZEN, run=str(tmp_path / "killed")), run.executor.run
    calls = iter(range(100))

    def killed(*arguments: Any, **options: Any) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        tasks(*arguments, **options)

    monkeypatch.setattr(run.executor, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        quiet(recipe, until_decided=True, max_seeds=6)
    planned = json.loads((tmp_path / "killed" / "plan.json").read_text())
    assert len(planned["looks"]) == 1
    assert len(planned["frozen_seeds"]) > 2
    resumed = quiet(recipe, until_decided=True)
    assert resumed.record.looks == record.looks
    assert rows(resumed) == rows(found)

    again = quiet(recipe)
    assert again.record.looks == record.looks, "a repeated command keeps the looks and their seeds"
    assert rows(again) == rows(found)
    assert call("compare", recipe, "--only", again.record.tasks[-1].id)[0] == 0
    saved = tmp_path / "killed" / "comparison.yaml"
    assert rows(quiet(saved)) == rows(found), "the saved recipe repeats the comparison, its looks included"
    with pytest.raises(UserError, match="--max-seeds"):
        quiet(recipe, until_decided=True, max_seeds=9)
    with pytest.raises(UserError, match="began with frozen_seeds"):
        quiet(mini(**FROZEN | {"frozen_seeds": [0, 5]}, run=str(tmp_path / "killed")))
    with pytest.raises(UserError, match="began with seeds"):
        quiet(mini(**FROZEN | {"seeds": [7, 8]}, run=str(tmp_path / "killed")))

    moved = (tmp_path / "killed").rename(tmp_path / "moved")
    written = {file: file.stat().st_mtime_ns for file in (moved / "tasks").iterdir()}
    assert rows(quiet(moved)) == rows(found), "the directory may have been moved or renamed"
    assert written == {file: file.stat().st_mtime_ns for file in (moved / "tasks").iterdir()}, "nothing runs again"
    assert not (tmp_path / "killed").exists()


def test_a_maximum_must_leave_room(mini: Mini) -> None:
    with pytest.raises(UserError, match=r"--max-seeds=2: the recipe already has 2"):
        looks.resume(load_comparison(mini(**FROZEN)), until_decided=True, max_seeds=2)
    assert looks.resume(load_comparison(mini(**FROZEN)), until_decided=True).max_seeds == 5
    with pytest.raises(UserError, match=r"--max-seeds=0"):
        looks.resume(load_comparison(mini(**FROZEN)), until_decided=True, max_seeds=0)


def measured(folder: Path, study: Study, between: float, within: float) -> Comparison:
    """Headline of `ssl` and `scratch` with two pretrainings of two seeds each, and these spreads."""
    made = []
    for number in range(4):
        gain = 0.02 + between * (number % 2 - 0.5) + within * (number // 2 - 0.5)
        made.append(row("ssl", 5, number, 0.5 + gain, pretraining_seed=number % 2, images=400))
        made.append(row("scratch", 5, number, 0.5, images=400))
    done = (Look(seeds=4, pretrainings=2, outcomes={"digits": "undecided"}),)
    changes: dict[str, Any] = {"max_seeds": study.max_seeds, "looks": done, "seeds": study.comparison.seeds}
    return read([write_comparison(folder, made, **changes)])


def test_what_pays_is_added(mini: Mini, tmp_path: Path) -> None:
    study = load_comparison(mini(seeds=[0, 1, 2, 3], pretrainings=2, evaluators={"fine_tune": {}}))
    done = (Look(seeds=4, pretrainings=2, outcomes={}),)
    study = replace(study, max_seeds=16, looks=done)
    more = looks.extend(study, measured(tmp_path / "between", study, between=0.04, within=0.0))
    assert more
    c = more.comparison
    assert c.pretrainings > 2
    assert len(c.seeds) == 2 * c.pretrainings
    numbers = [more.pretraining_index(number) for number in range(len(c.seeds))]
    assert numbers[:6] == [0, 1, 0, 1, 2, 2], "what was measured keeps its pretraining"
    more = looks.extend(study, measured(tmp_path / "within", study, between=0.0, within=0.08))
    assert more
    assert more.comparison.pretrainings == 2
    assert len(more.comparison.seeds) > 4


def test_what_pays_depends_on_the_time_of_all_arms_in_all_parts_of_resumed_runs(mini: Mini, tmp_path: Path) -> None:
    """Each arm gets what is added, not only the two of the headline."""
    study = load_comparison(mini(seeds=[0, 1, 2, 3], pretrainings=2, evaluators={"fine_tune": {}}))
    found = measured(tmp_path / "c", replace(study, max_seeds=16), between=0.04, within=0.02)
    (head,), (mine, run) = summarize(found).headlines, next((id, one) for id, one in found.tasks.items() if one.run)

    def pays(seconds: float, of_another_arm: float = 0.0) -> bool:
        took = {name: SUMMARY.model_copy(update={"seconds": t}) for name, t in ((mine, seconds), ("x", of_another_arm))}
        tasks = {**found.tasks, **{name: run.model_copy(update={"run": summary}) for name, summary in took.items()}}
        third = TaskRecord(id="x", kind="pretrain", arm="x")
        record = found.record.model_copy(update={"tasks": (*found.record.tasks, third)})
        return looks._new_pretrainings_pay(replace(found, tasks=tasks, record=record), head, 2)

    assert pays(2) and not pays(1800) and not pays(2, of_another_arm=1800)
    for seed_variance, better in ((2.0, False), (3.0, True)):  # 900 seconds, against 4 of a seed, pay above 2.27
        spread = replace(head.estimate, seed_variance=seed_variance)
        other = replace(head, within_variance=0.04, estimate=spread)
        assert looks._new_pretrainings_pay(found, other, 2) == better


def one_more_pretraining(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A comparison with an undecided headline, for which one more pretraining pays."""
    head = SimpleNamespace(outcome="undecided", unit="pretraining", estimate=SimpleNamespace(half_width=0.1))
    monkeypatch.setattr(looks, "summarize", lambda _: SimpleNamespace(headlines=[head]))
    monkeypatch.setattr(looks, "_new_pretrainings_pay", lambda *_: True)
    monkeypatch.setattr(looks.statistics, "plan", lambda *_: (1, None))
    return SimpleNamespace(record=SimpleNamespace(metrics={"data": "accuracy"}), confidence=0.95)


def test_frozen_seeds_are_added_where_the_headline_is_about_frozen_features(mini: Mini, tmp_path: Path) -> None:
    """Without an arm from scratch, fine-tuning has no headline; few-shot against the untrained encoder has one."""
    arms = {"ssl": {"label": "SSL", "recipe": "digits_ssl", "overrides": STEPS}}
    evaluators = {"fine_tune": TUNING, "few_shot": {}}
    study = load_comparison(mini(arms=arms, evaluators=evaluators, seeds=[0, 1], frozen_seeds=[0, 1, 2, 3]))
    resumed = looks.resume(study, until_decided=True)
    assert resumed.max_seeds == 10, "2.5 times those that the headline uses"
    gains = (0.06, -0.02, 0.06, -0.02)
    made = [row("ssl", 5, n, 0.5 + gain, evaluator="few_shot", images=400) for n, gain in enumerate(gains)]
    made += [row("untrained", 5, n, 0.5, evaluator="few_shot", images=400) for n in range(4)]
    made += [row("ssl", 5, n, 0.5) for n in range(2)]
    looked = looks.look(resumed, read([write_comparison(tmp_path / "c", made, max_seeds=10)]))
    assert [look.seeds for look in looked.looks] == [4]
    found = read([write_comparison(tmp_path / "c", made, max_seeds=10, looks=looked.looks)])
    more = looks.extend(looked, found)
    assert more and more.comparison.seeds == (0, 1), "no fine-tuning is added"
    assert len(more.comparison.frozen_seeds) > 4


def test_pretrainings_are_not_added_where_fine_tuned_seeds_would_get_others(
    mini: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {"ssl": {"label": "SSL", "recipe": "digits_ssl", "overrides": STEPS}}
    evaluators = {"fine_tune": TUNING, "few_shot": {}}
    for seeds, grows in ((8, False), (4, True)):
        changes = {"seeds": [*range(seeds)], "frozen_seeds": [0, 1, 2, 3], "pretrainings": 2}
        study = load_comparison(mini(arms=arms, evaluators=evaluators, **changes))
        study = replace(study, max_seeds=10, looks=(Look(seeds=4, pretrainings=2, outcomes={}),))
        more = looks.extend(study, one_more_pretraining(monkeypatch))
        assert more and (more.comparison.pretrainings > 2) == grows
        before, after = ([one.pretraining_index(n) for n in range(seeds)] for one in (study, more))
        assert before == after
        assert len(more.comparison.frozen_seeds) > 4


def test_pretrainings_are_added_in_no_more_than_four_looks(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    study = load_comparison(
        mini(seeds=[*range(7)], frozen_seeds=[0, 1, 2], pretrainings=3, evaluators={"fine_tune": {}})
    )
    study = replace(study, max_seeds=18, looks=(Look(seeds=7, pretrainings=3, outcomes={}),))
    comparison = one_more_pretraining(monkeypatch)
    counts = [7]
    while more := looks.extend(study, comparison):
        study = more
        counts.append(len(study.comparison.seeds))
    assert counts[-1] == 18 and len(counts) <= sequential.MOST_LOOKS
    assert study.comparison.pretrainings > 3


def test_nothing_is_added_to_what_is_decided_or_where_no_seeds_would_decide(mini: Mini, tmp_path: Path) -> None:
    study = replace(load_comparison(mini(evaluators={"fine_tune": {}}, seeds=[0, 1, 2, 3])), max_seeds=16)
    study = replace(study, looks=(Look(seeds=4, pretrainings=1, outcomes={}),))
    decided = [row(arm, 5, seed, accuracy) for arm, accuracy in (("ssl", 0.8), ("scratch", 0.4)) for seed in range(4)]
    assert looks.extend(study, read([write_comparison(tmp_path / "a", decided)])) is None
    gains = (0.1, -0.1, 0.1, -0.1)
    spread = [row("ssl", 5, seed, 0.52 + gain, images=400) for seed, gain in enumerate(gains)]
    spread += [row("scratch", 5, seed, 0.5, images=400) for seed in range(4)]
    found = read([write_comparison(tmp_path / "b", spread)])
    assert looks.extend(study, found) is not None
    assert looks.extend(replace(study, max_seeds=4), found) is None, "the maximum is reached"
    close = [row(arm, 5, n, 0.5 + 0.02 * (n % 2) * (arm == "ssl")) for arm in ("ssl", "scratch") for n in range(4)]
    found = read([write_comparison(tmp_path / "c", close)])
    (head,) = summarize(found).headlines
    assert head.outcome == "undecided" and head.estimate.half_width is not None
    assert looks.extend(study, found) is None, "more test images would decide it, more seeds would not"
    same = [row(arm, 5, seed, float(arm == "ssl")) for arm in ("ssl", "scratch") for seed in range(4)]
    found = read([write_comparison(tmp_path / "d", same)])
    assert looks.extend(study, found) is not None, "there is no interval yet"


def test_a_dataset_that_no_seeds_would_decide_does_not_stop_the_others(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = replace(load_comparison(mini(evaluators={"fine_tune": {}}, seeds=[0, 1, 2, 3])), max_seeds=16)
    study = replace(study, looks=(Look(seeds=4, pretrainings=1, outcomes={}),))
    gains = (0.1, -0.1, 0.1, -0.1)
    rows_of_both = [
        row(arm, 5, seed, 0.5 + (gain if arm == "ssl" else 0), data=data)
        for data in ("a", "b")
        for arm in ("ssl", "scratch")
        for seed, gain in enumerate(gains)
    ]
    found = read([write_comparison(tmp_path / "both", rows_of_both)])
    plans = iter([(None, 1000), (5, None)])
    monkeypatch.setattr(looks.statistics, "plan", lambda *_: next(plans))
    more = looks.extend(study, found)
    assert more and len(more.comparison.seeds) == 9
    monkeypatch.setattr(looks.statistics, "plan", lambda *_: (None, 1000))
    assert looks.extend(study, found) is None
