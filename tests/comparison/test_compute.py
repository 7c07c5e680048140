"""Training from scratch with another arm's compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssl_vit.comparison.checks import check
from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.dry_run import dry_run_comparison
from ssl_vit.comparison.plan import Plan
from ssl_vit.evaluators.classifier import TrainedConfig
from ssl_vit.interfaces import UserError
from ssl_vit.report.costs import costs

from .conftest import STEPS, TUNING, Mini, quietly

ARMS: dict[str, Any] = {
    "ssl": {"label": "SSL", "recipe": "digits_ssl", "overrides": [*STEPS, "training.steps=40"]},
    "scratch": {"label": "scratch"},
    "longer": {"label": "scratch with the compute of SSL", "compute_of": "ssl"},
}
ONE = {"fine_tune": TUNING | {"sweep": {"optim.lr": [0.003]}, "training": {"batch_size": 8, "steps": 4}}}


def test_an_arm_trains_with_another_ones_total_compute(mini: Mini) -> None:
    recipe = mini(arms=ARMS, evaluators=ONE, seeds=[0])
    dry = dry_run_comparison(load_comparison(recipe))
    found = quietly(recipe)
    assert [arm.evaluators for arm in found.record.arms[:2]] == [{}, {}]
    assert [arm.compute_of for arm in found.record.arms] == [None, None, "ssl"]
    (extra,) = found.record.arms[2].evaluators["fine_tune"].values()
    spent = costs(found)["flops"]
    total = {arm: spent["Total", arm] for arm in ("ssl", "longer")}
    step = spent["Evaluation", "scratch"] / 4
    assert total["longer"] == pytest.approx(total["ssl"], abs=step)
    assert extra > 4
    trained = {row.arm: row.images_seen for row in found.table.results}
    assert trained == {"ssl": 32, "scratch": 32, "longer": 8 * (4 + extra)}
    hours = {arm: dry.arms[arm].fine_tuning_hours for arm in ("scratch", "longer")}
    assert hours["longer"] > 5 * hours["scratch"] > 0


def extra(mini: Mini, ssl: dict[str, Any], **more: int) -> int:
    """The steps that scratch with the compute of this arm trains longer."""
    study = load_comparison(mini(arms=ARMS | {"ssl": ssl}, evaluators={"fine_tune": ONE["fine_tune"] | more}))
    found = check(study).plan.study.evaluators["data", "fine_tune", "longer"]
    assert isinstance(found, TrainedConfig)
    return found.extra_steps


def test_the_compute_of_all_views_is_given(mini: Mini) -> None:
    def lejepa(views: int) -> dict[str, Any]:
        return {"recipe": "digits_lejepa", "overrides": [*STEPS, "training.steps=40", f"data.views={views}"]}

    two = extra(mini, lejepa(2))
    assert extra(mini, lejepa(4)) == pytest.approx(2 * two, rel=0.02)
    assert extra(mini, lejepa(2), extra_steps=7) == two + 7


def test_the_compute_of_the_images_that_pretraining_draws_from_is_given(mini: Mini) -> None:
    keys = ["training.epochs=8", *(key for key in STEPS if "steps" not in key)]
    few, many = (
        {"label": "SSL", "recipe": "digits_ssl", "overrides": [*keys, f"data.samples={samples}"]}
        for samples in (160, 320)
    )
    assert extra(mini, many) == pytest.approx(2 * extra(mini, few), rel=0.02)


def test_scratch_has_the_architecture_of_the_arm_with_its_compute(mini: Mini) -> None:
    wider = {"recipe": "digits_ssl", "overrides": [*STEPS, "encoder.width=32"]}
    study = load_comparison(mini(arms={"wider": wider, **ARMS}, evaluators=ONE))
    rows = Plan(study).rows
    assert (rows["scratch"].like, rows["longer"].like) == ("wider", "ssl")


def test_compute_is_not_equal_where_the_sweep_changes_the_cost_of_a_step(mini: Mini) -> None:
    for sweep, words in (
        ({"training.batch_size": [8, 16]}, r"arms\.longer\.compute_of: .*different FLOPs"),
        ({"extra_steps": [0, 5]}, r"sweep\.extra_steps"),
    ):
        with pytest.raises(UserError, match=words):
            study = load_comparison(mini(arms=ARMS, evaluators={"fine_tune": TUNING | {"sweep": sweep}}))
            check(study)


@pytest.mark.parametrize("name", ["trains_alone:Evaluator", "trains_alone:Staged"])
def test_an_evaluator_of_another_package_may_be_unable_to_train_longer(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "trains_alone.py").write_text(
        "from ssl_vit.evaluators import base, fine_tune\n"
        "class Config(base.LabeledConfig, base.SweepConfig): ...\n"
        "class Evaluator(base.Evaluator):\n"
        "    title, trains_encoder = 'Alone', True\n"
        "    def fit(self, train, seed): ...\n"
        "class Staged(Evaluator):\n"
        "    def stage(self, *arguments):\n"
        "        return fine_tune.Evaluator(fine_tune.Config(sweep={})).stage(*arguments)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    study = load_comparison(mini(arms=ARMS, evaluators={name: {}}))
    with pytest.raises(UserError, match=rf"arms\.longer\.compute_of: evaluators\.{name} cannot train longer; remove"):
        check(study)


def test_an_arm_without_a_recipe_has_no_steps_to_count(
    mini: Mini, make_encoder: Callable[..., Any], saved: Callable[..., Path], tmp_path: Path
) -> None:
    given = {"label": "given", "weights": str(saved(tmp_path / "given", make_encoder()))}
    arms = {**ARMS, "given": given, "longer": {"label": "longer", "compute_of": "ssl", "like": "given"}}
    with pytest.raises(UserError, match=r"arms\.longer\.compute_of: arms\.given has no recipe"):
        check(load_comparison(mini(arms=arms, evaluators=ONE)))
