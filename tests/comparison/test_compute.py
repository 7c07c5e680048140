"""Training from scratch with another arm's compute."""

from __future__ import annotations

from typing import Any

import pytest

from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.dry_run import dry_run_comparison
from ssl_vit.report.read import costs

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
    total = {arm: spent["In all", arm] for arm in ("ssl", "longer")}
    step = spent["Evaluation", "scratch"] / 4
    assert total["longer"] == pytest.approx(total["ssl"], abs=step)
    assert extra > 4
    trained = {row.arm: row.images_seen for row in found.table.results}
    assert trained == {"ssl": 32, "scratch": 32, "longer": 8 * (4 + extra)}
    hours = {arm: dry.arms[arm].fine_tuning_hours for arm in ("scratch", "longer")}
    assert hours["longer"] > 5 * hours["scratch"] > 0
