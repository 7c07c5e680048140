"""The tasks of a comparison: which there are, in which order, and what their results depend on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.plan import Plan
from ssl_vit.interfaces import UserError
from ssl_vit.report.read import Comparison

SHARDS = {"ssl pretrain": "a", "supervised pretrain": "b"}
ARMS = ["ssl", "scratch", "supervised"]


BASE = (
    "run=nowhere",
    "controls=false",
    "labels_per_class=[1,10,50]",
    "data={train: a, test: b, folds: []}",
    "pretrainings=1",
    "seeds=[0,1,2]",
    "evaluators.fine_tune.sweep_labels_per_class=null",
)


def plan_of(*overrides: str, **shards: str) -> Plan:
    study = load_comparison("demo_digits", ["controls=false", *BASE, *overrides])
    return Plan(study, SHARDS | {key.replace("_", " "): v for key, v in shards.items()})


def prints(plan: Plan) -> dict[str, str]:
    return {task.id: task.fingerprint for task in plan.tasks}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name, value in after.items() if before.get(name) != value}


def rows_of(plan: Plan, names: set[str]) -> set[str]:
    return {task.arm for task in plan.tasks if task.id in names}


def test_a_chosen_baseline_makes_fine_tuning_the_headline_without_scratch() -> None:
    for keys, trains in (([], False), (["baseline=supervised"], True)):
        plan = plan_of("arms.scratch=null", *keys)
        assert plan.study.headline_trains_encoder == trains


def test_scratch_has_no_sweep_of_layer_decay() -> None:
    tasks = plan_of("evaluators.fine_tune.sweep={optim.lr: 0.1, optim.layer_decay: [0.5, 0.75]}").tasks
    assert {task.arm for task in tasks if task.kind == "sweep"} == {"ssl", "supervised"}


def test_tasks_come_after_what_they_need_and_long_ones_first() -> None:
    plan = plan_of("pretrainings=3")
    done: set[str] = set()
    for task in plan.tasks:
        assert set(task.after) <= done, task
        assert task.id not in done
        done.add(task.id)
    for seed in (0, 1, 2):
        assert {f"pretrain-ssl-{seed}", f"few_shot-untrained-{seed}"} <= done, "each has its own initialization"
    assert "few_shot-pixels-0" in done
    assert "few_shot-pixels-1" not in done
    first = [task.id for task in plan.tasks if task.kind == "sweep" and not task.after]
    assert first == [f"sweep_fine_tune-scratch-{budget}" for budget in (1, 10, 50)]
    assert [task.id for task in plan.tasks[:3]] == first
    kinds = [task.kind for task in plan.tasks[3:]]
    assert kinds == sorted(kinds, key=["pretrain", "sweep", "measure", "pictures"].index)
    evaluators = [task.evaluator for task in plan.tasks if task.kind == "measure"]
    assert evaluators == sorted(evaluators, key=["fine_tune", "few_shot"].index)
    assert set(plan.levels) == {0, 1, 2}


def test_a_pretraining_is_in_the_directory_of_its_seed() -> None:
    plans = [plan_of(f"seeds={seeds}") for seeds in ("[0,1,2]", "[1,0,2]", "[1,2]")]
    assert len({plan.weights("ssl", 1, 0) for plan in plans}) == 1


def test_more_label_budgets_of_an_evaluator_change_no_finished_training() -> None:
    fewer, more = (prints(plan_of(f"evaluators.fine_tune.labels_per_class={budgets}")) for budgets in ("[5]", "[5,20]"))
    assert not changed(fewer, {name: more[name] for name in fewer}) and len(more) > len(fewer)


def test_keys_of_an_evaluators_training_that_change_no_result() -> None:
    key, plan = "evaluators.fine_tune.training", plan_of()
    assert prints(plan_of(f"{key}.checkpoint_activations=true")) == prints(plan)
    for other in ("accumulate=2", "auto_batch=true", "batch_size=9"):
        assert rows_of(plan, changed(prints(plan), prints(plan_of(f"{key}.{other}")))) >= {"ssl", "scratch"}, other


def test_finished_work_stays_finished() -> None:
    """Where these change, the comparisons that users have finished train everything again."""
    found = prints(plan_of())
    assert (found["pretrain-ssl-0"], found["few_shot-ssl-0"]) == ("31aff3846a1bcb75", "29430d0ea85684dd")
    augmented = prints(plan_of("arms.ssl.overrides=[data.augment.rand_augment=rand-m9]"))
    assert {"pretrain-ssl-0", "few_shot-ssl-0"} <= set(changed(found, augmented))


def test_seeds_use_the_pretrainings_in_turn() -> None:
    plan = plan_of("pretrainings=2", "seeds=[5,6,7]", "frozen_seeds=[1,2,3,4]", "arms.ssl.overrides=[seed=100]")
    tasks = {task.id: task for task in plan.tasks}
    assert [task.seed for task in plan.tasks if task.kind == "pretrain" and task.arm == "ssl"] == [5, 6]
    runs = [plan.pretraining(tasks[f"pretrain-ssl-{seed}"]) for seed in (5, 6)]
    assert [(recipe.seed, recipe.run) for recipe in runs] == [(105, "nowhere/ssl-5"), (106, "nowhere/ssl-6")]
    budget = plan.study.comparison.labels_per_class[0]
    needs = [set(tasks[f"fine_tune-ssl-{budget}-{seed}"].after) for seed in (5, 6, 7)]
    pretrained = [sorted(name for name in need if name.startswith("pretrain")) for need in needs]
    assert pretrained == [["pretrain-ssl-5"], ["pretrain-ssl-6"], ["pretrain-ssl-5"]]
    assert plan.budgets_and_seeds(tasks["few_shot-ssl-5"])[1] == {1: 5, 3: 5}
    assert plan.budgets_and_seeds(tasks["few_shot-ssl-6"])[1] == {2: 6, 4: 6}
    assert plan.budgets_and_seeds(tasks["few_shot-pixels-5"])[1] == dict.fromkeys((1, 2, 3, 4), 5)


def test_more_pretrainings_than_seeds_are_refused() -> None:
    for key in ("seeds", "frozen_seeds"):
        with pytest.raises(UserError, match=rf"3 pretrainings need at least as many {key}; there are 2"):
            plan_of("pretrainings=3", f"{key}=[0,1]")


def test_null_removes_an_evaluator_and_other_values_are_refused() -> None:
    assert set(load_comparison("demo_digits", ["evaluators.few_shot=null"]).comparison.evaluators) == {"fine_tune"}
    for override, facts in (
        ("evaluators.knn=null", "evaluators.knn=null: there are only "),
        ("evaluators.knn=5", "evaluators.knn=5: give settings"),
        ("evaluators=[knn]", "evaluators: a list cannot replace settings"),
        ("evaluators=5", "evaluators: "),
        ("evaluators.fine_tune.sweep=[1]", "evaluators.fine_tune.sweep: a list cannot"),
        ("arms.scratch.evaluators.fine_tune.optim=[1]", "evaluators.fine_tune: optim: a list cannot"),
        ("arms.ssl.training=[1]", "training: a list cannot"),
    ):
        with pytest.raises(UserError, match=facts):
            load_comparison("demo_digits", [override])


def test_added_pretrainings_are_evaluated() -> None:
    """As `looks.extend` adds one: the new seeds use it, and those measured before keep theirs."""
    plan = plan_of("pretrainings=2", "seeds=[0,1,2,3]", "frozen_seeds=[0,1,2,3]")
    seeds = tuple(range(6))
    more = plan.study.comparison.model_copy(update={"pretrainings": 3, "seeds": seeds, "frozen_seeds": seeds})
    plan = replace(plan, study=replace(plan.study, comparison=more, assigned=(0, 1, 0, 1, 2, 2)))
    frozen = {task.seed: task for task in plan.tasks if (task.arm, task.evaluator) == ("ssl", "few_shot")}
    covered = {seed: [*plan.budgets_and_seeds(task)[1]] for seed, task in frozen.items()}
    assert covered == {0: [0, 2], 1: [1, 3], 2: [4, 5]}
    assert {task.after for task in frozen.values()} == {(f"pretrain-ssl-{seed}",) for seed in (0, 1, 2)}


def test_every_fold_has_its_own_pretrainings_sweeps_and_evaluations() -> None:
    plan = plan_of("data={train: null, test: null, folds: [x,y,z]}")
    splits = [plan.split("data", fold) for fold in plan.folds]
    assert [(split.train, split.test) for split in splits] == [(("y", "z"), "x"), (("x", "z"), "y"), (("x", "y"), "z")]
    tasks = {task.id: task for task in plan.tasks}
    counts = {fold: sum(task.fold == fold for task in plan.tasks if task.kind != "pictures") for fold in plan.folds}
    assert len(set(counts.values())) == 1 and sum(counts.values()) == len(tasks) - 2
    for task in plan.tasks:
        assert {tasks[need].fold for need in task.after} <= {task.fold}, "no fold sees what another one trained"
    recipes = [plan.pretraining(tasks[f"pretrain-ssl-0-fold{fold}"]) for fold in plan.folds]
    trains = [[part.shards for part in recipe.data.train if not isinstance(part, str)] for recipe in recipes]
    assert trains == [["y", "z"], ["x", "z"], ["x", "y"]]
    assert len({recipe.run for recipe in recipes}) == 3
    other = plan_of("data={train: null, test: null, folds: [x,y,z]}", **{"data test of fold 1": "new"})
    assert {tasks[name].fold for name in changed(prints(plan), prints(other))} == {1}


def test_each_budget_has_one_sweep_and_one_sweep_may_serve_all() -> None:
    def sweeps(*overrides: str) -> list[str]:
        return [task.id for task in plan_of(*overrides).tasks if task.kind == "sweep" and task.arm == "ssl"]

    assert sweeps() == [f"sweep_fine_tune-ssl-{budget}" for budget in (1, 10, 50)]
    assert sweeps("evaluators.fine_tune.sweep_labels_per_class=10") == ["sweep_fine_tune-ssl-10"]
    single = "evaluators.fine_tune.sweep={optim.lr: [0.003], training.steps: [10]}"
    assert sweeps(single) == [], "one candidate needs no sweep"
    assert len([task for task in plan_of(single).tasks if task.evaluator == "fine_tune"]) == 3 * 3 * 3


def test_what_has_no_pretraining_does_not_depend_on_how_others_pretrain() -> None:
    """Scratch, the untrained reference and raw pixels share an arm's architecture and image preparation, no more."""
    base = plan_of()

    def differ(*overrides: str) -> set[str]:
        plan = plan_of(*overrides)
        return rows_of(plan, changed(prints(base), prints(plan)))

    assert differ("arms.ssl.overrides=[training.steps=9,optim.lr=1e-3,data.augment.crop=inception,seed=5]") == {"ssl"}
    assert differ("arms.ssl.overrides=[training.log_every=7,data.workers=2,training.keep_last=9]") == set()
    every = {"ssl", "scratch", "untrained", "pixels", "untrained_supervised"}
    assert differ("arms.ssl.overrides=[data.evaluation_resize=1.2]") == every
    assert differ("frozen_seeds=[0,1]") == {"ssl", "supervised", "untrained", "pixels"}, "a task covers all of them"
    assert differ("seeds=[0,1]") == set()
    assert differ("jobs=4", "scheduler=tcp://host:1") == set()
    assert differ("arms.ssl.evaluators={few_shot: {pooling: mean}}") == {"ssl"}, "an arm's settings are its own"


def test_a_training_depends_on_the_seed_that_its_settings_were_selected_with() -> None:
    first, other = (prints(plan_of("pretrainings=2", f"seeds={seeds}")) for seeds in ("[0,1]", "[1,0]"))
    assert first["fine_tune-ssl-10-1"] != other["fine_tune-ssl-10-1"]


def test_results_depend_on_their_shards_and_metric() -> None:
    base = plan_of()
    test = changed(prints(base), prints(plan_of(data_test="x")))
    assert {task.kind for task in base.tasks if task.id not in test} == {"pretrain"}
    assert rows_of(base, changed(prints(base), prints(plan_of(ssl_pretrain="x")))) == {"ssl"}

    def by(metric: str) -> Plan:
        return plan_of(f"data={{train: null, test: null, sets: {{d: {{train: a, test: b, metric: {metric}}}}}}}")

    one, other = by("accuracy"), by("mean_per_class")
    measured = {task.id for task in one.tasks if task.evaluator}
    assert changed(prints(one), prints(other)) == measured, "settings are selected by the metric"
    alone = plan_of("data.metric=mean_per_class")
    assert {chosen.metric for chosen in alone.study.sets.values()} == {"mean_per_class"}
    assert {task.id for task in base.tasks if task.evaluator} == changed(prints(base), prints(alone))
    with pytest.raises(UserError, match="set the metric of each dataset"):
        plan_of("data={train: null, test: null, metric: mean_per_class, sets: {d: {train: a, test: b}}}")


def test_each_architecture_has_its_own_untrained_reference_and_scratch() -> None:
    wide = "arms.supervised.overrides=[encoder.width=32]"
    plan = plan_of(wide, "arms.small={label: small scratch, like: supervised}")
    assert [one.name for one in plan.references] == ["untrained", "untrained_supervised", "pixels"]
    sizes = {row: plan.sizes(one.like) for row, one in plan.rows.items()}
    assert sizes["small"] == sizes["supervised"] == sizes["untrained_supervised"]
    assert sizes["scratch"] == sizes["ssl"] == sizes["untrained"] != sizes["supervised"]
    assert {t.arm for t in plan.tasks if t.evaluator == "few_shot"} == {
        "ssl",
        "supervised",
        *(one.name for one in plan.references),
    }
    assert {t.arm for t in plan.tasks if t.evaluator == "fine_tune"} == {*ARMS, "small"}


def test_dropout_makes_no_other_untrained_encoder_but_another_scratch() -> None:
    plan, other = plan_of("arms.supervised.overrides=[encoder.dropout=0.1]"), plan_of()
    assert [one.name for one in plan.references] == ["untrained", "pixels"]
    with_dropout = plan_of("arms.ssl.overrides=[encoder.dropout=0.1]")
    assert prints(other)["fine_tune-scratch-1-0"] != prints(with_dropout)["fine_tune-scratch-1-0"]


def test_a_head_is_evaluated_only_of_arms_that_have_one() -> None:
    plan = plan_of("evaluators.own_head={}")
    assert [task.id for task in plan.tasks if task.evaluator == "own_head"] == ["own_head-supervised-0"]


def test_keys_of_another_packages_evaluator_count_whatever_their_names(
    mini: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_a_teacher.py").write_text(
        "from ssl_vit.evaluators import knn\n"
        "class Config(knn.Config):\n"
        "    init_from: str = ''\n"
        "class Evaluator(knn.Evaluator): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    one, other = (
        prints(Plan(load_comparison(mini(evaluators={"with_a_teacher:Evaluator": {"init_from": teacher}}))))
        for teacher in ("a", "b")
    )
    assert {name.split("-")[1] for name in changed(one, other)} >= {"ssl", "untrained"}


def test_weights_count_by_their_content(finished: Comparison, mini: Any, tmp_path: Path) -> None:
    """Both those that are given and those that a pretraining starts from."""
    weights, made = tmp_path / "weights", finished.paths[0]
    weights.mkdir()
    for name in ("encoder.safetensors", "config.json"):
        shutil.copy(made / "ssl" / name, weights)
    shutil.copytree(made / "ssl", tmp_path / "copy")
    arms = {
        "ssl": {"label": "SSL", "recipe": "digits_ssl", "overrides": [f"init_from={weights}"]},
        "given": {"label": "given", "weights": str(weights)},
        "run": {"label": "run", "weights": str(tmp_path / "copy")},
    }
    study = load_comparison(mini(arms=arms))

    def now() -> dict[str, str]:
        return prints(Plan(study))

    before = now()
    shutil.copy(made / "supervised" / "encoder.safetensors", weights)
    assert changed(before, now()) == {"pretrain-ssl-0", "few_shot-ssl-0", "few_shot-given-0"}
    before = now()
    shutil.rmtree(tmp_path / "copy" / "checkpoints")
    assert not changed(before, now()), "no evaluator here reads the head that only checkpoints hold"
    config = json.loads((weights / "config.json").read_text())
    config["pretrained_cfg"]["mean"] = [0.25]
    (weights / "config.json").write_text(json.dumps(config))
    assert {"few_shot-given-0"} <= changed(before, now()) <= {"few_shot-given-0", "few_shot-untrained_given-0"}


def test_what_weights_were_imported_from_is_not_of_their_architecture(
    mini: Any, tmp_path: Path, make_encoder: Any, saved: Any
) -> None:
    arms = {}
    for name, width in (("a", 16), ("b", 16), ("wide", 32)):
        config = saved(tmp_path / name, make_encoder(width=width)) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"imported": {"from": name}}))
        arms[name] = {"label": name, "weights": str(config.parent)}
    plan = Plan(load_comparison(mini(arms=arms)))
    assert [one.name for one in plan.references] == ["untrained", "untrained_wide", "pixels"]
    assert plan.sizes("a") == plan.sizes("b") != plan.sizes("wide")
