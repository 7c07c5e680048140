"""`training.precision=auto`: a measured choice, kept by the run and shared by the arms of a comparison."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ssl_vit import precision, recipe
from ssl_vit.comparison.checks import check
from ssl_vit.comparison.config import load_comparison
from ssl_vit.interfaces import UserError
from tests.processes.reading import rows as lines

AUTO = "training.precision=auto"
Train = Callable[..., Path]


def faster(chosen: str) -> Callable[..., dict[str, float]]:
    return lambda *arguments: {name: 1.0 + (name != chosen) for name in ("fp32", "bf16")}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"fp32": 1.0, "bf16": 0.4}, "bf16"),
        ({"fp32": 1.0, "bf16": 2.2}, "fp32"),
        ({"fp32": 1.0, "bf16": 0.95}, "fp32"),  # not worth 16 bits
        ({"tf32": 1.0, "bf16": 0.5}, "bf16"),
    ],
)
def test_the_faster_one_wins_by_a_tenth_at_least(seconds: dict[Any, float], expected: str) -> None:
    assert precision.fastest(seconds) == expected


def test_the_trial_runs_in_each_precision_and_changes_no_weight(
    train: Train, settings: Callable[..., recipe.Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, products = [], list[torch.dtype]()
    original = precision.measure

    def measure(*arguments: Any) -> dict[Any, float]:
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, _, output: products.append(output.dtype) if isinstance(module, torch.nn.Linear) else None
        )
        measured.append(original(*arguments))
        hook.remove()
        return {"fp32": 1.0, "bf16": 1.0}

    monkeypatch.setattr(precision, "measure", measure)
    runs = [train(tmp_path / "auto", AUTO), train(tmp_path / "fp32")]
    assert list(measured[0]) == ["fp32", "bf16"]
    assert all(took > 0 for took in measured[0].values())
    assert {torch.float32, torch.bfloat16} <= set(products)
    auto, fixed = (load_file(run / "encoder.safetensors") for run in runs)
    assert all(torch.equal(auto[name], fixed[name]) for name in fixed)
    assert recipe.load_recipe(runs[0] / "recipe.yaml").training.precision == "fp32"


def test_bfloat16_learns_as_float32_does(train: Train, tmp_path: Path) -> None:
    """Its losses differ by less than those of another seed do."""

    def losses(name: str, *keys: str) -> torch.Tensor:
        rows = lines(train(tmp_path / name, "training.steps=80", *keys))
        return torch.tensor([row["loss"] for row in rows if "loss" in row])

    reference = losses("fp32")
    assert reference[-10:].mean() < 0.9 * reference[:10].mean()
    difference = (losses("bf16", "training.precision=bf16") - reference).abs().mean()
    assert 0 < difference < 0.5 * (losses("seed", "seed=1") - reference).abs().mean()


def test_a_run_keeps_its_precision(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "measure", faster("bf16"))
    run = train(tmp_path, AUTO)
    monkeypatch.setattr(precision, "measure", faster("fp32"))
    assert train(tmp_path, AUTO) == run
    assert recipe.load_recipe(run / "recipe.yaml").training.precision == "bf16"
    assert json.loads((run / "environment.json").read_text())["precision"] == "bf16"


def test_a_saved_recipe_that_says_auto_is_measured(
    settings: Callable[..., recipe.Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "measure", faster("bf16"))
    recipe.save(settings(tmp_path, AUTO), tmp_path / "recipe.yaml")
    resolved = precision.resolve(settings(tmp_path, AUTO), lambda text: None)
    assert resolved.training.precision == "bf16"


def test_the_arms_of_a_comparison_share_one(few_digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"run={tmp_path}", f"data={{train: {few_digits}/train, test: {few_digits}/test, folds: []}}"]
    keys += [f"arms.{arm}.overrides=[{AUTO}]" for arm in ("ssl", "supervised")]
    keys += ["evaluators.fine_tune=null", "seeds=[0]", "frozen_seeds=[0]", "pretrainings=1"]
    study = load_comparison("demo_digits", keys)
    asked = []

    def measure(settings: recipe.Recipe, *arguments: Any) -> dict[str, float]:
        asked.append(settings.name)
        return faster("bf16")()

    monkeypatch.setattr(precision, "measure", measure)
    check(study)
    assert not list(tmp_path.iterdir()), "a dry run stores nothing"
    check(study, trial=False)
    assert asked == ["digits_ssl"], "a list of the tasks needs no trial"
    checked = check(study, keep_precision=True)
    assert asked == ["digits_ssl"] * 2
    assert {settings.training.precision for settings in checked.plan.study.recipes.values()} == {"bf16"}
    monkeypatch.setattr(precision, "measure", faster("fp32"))
    again = check(study, keep_precision=True).plan
    assert [task.fingerprint for task in again.tasks] == [task.fingerprint for task in checked.plan.tasks]


def test_a_precision_whose_micro_batch_does_not_fit_is_not_chosen(
    settings: Callable[..., recipe.Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, fits = precision.find_accumulation, {"bf16"}

    def limited(module: Any, step: Any, accelerator: Any, *arguments: Any) -> int:
        if accelerator.precision not in fits:
            raise UserError("the memory does not hold a micro-batch")
        return original(module, step, accelerator, *arguments)

    monkeypatch.setattr(precision, "find_accumulation", limited)
    assert list(precision.measure(settings(tmp_path, AUTO))) == ["bf16"]
    fits.clear()
    with pytest.raises(UserError, match="does not hold a micro-batch"):
        precision.measure(settings(tmp_path, AUTO))


def test_what_the_device_cannot_do_is_not_tried(
    settings: Callable[..., recipe.Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_OTHERWISE", ("tf32", "bf16"))  # the candidates of a GPU
    assert list(precision.measure(settings(tmp_path, AUTO))) == ["bf16"]  # no tf32 on a CPU
    monkeypatch.setattr(precision, "_OTHERWISE", ("tf32",))
    assert list(precision.measure(settings(tmp_path, AUTO))) == ["fp32"]
