"""Quick runs: a tenth of every length, with a name of their own, marked wherever their numbers are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ssl_vit import cli, plugins
from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.quick import tenth
from ssl_vit.evaluators import runner
from tests.comparison.conftest import Mini


def test_a_quick_run_is_a_tenth() -> None:
    whole, quick = load_comparison("own_images_cpu"), load_comparison("own_images_cpu", ["quick=true"])
    for arm, recipe in whole.recipes.items():
        own = quick.recipes[arm]
        assert recipe.training.steps and own.training.steps == -(-recipe.training.steps // 10)
        assert own.optim.warmup_steps == -(-recipe.optim.warmup_steps // 10)
        assert own.encoder == recipe.encoder and own.data == recipe.data
    for name, config in quick.comparison.evaluators.items():
        evaluator = plugins.load("evaluators", name).Evaluator
        assert runner.budgets(evaluator(config), (7,)) == runner.budgets(
            evaluator(whole.comparison.evaluators[name]), (7,)
        )
    key = next(key for key in whole.evaluators if key[1] == "fine_tune")
    before: Any = whole.evaluators[key]
    after: Any = quick.evaluators[key]
    assert after.sweep["training.steps"] == tuple(value // 10 for value in before.sweep["training.steps"])
    assert after.sweep["optim.lr"] == before.sweep["optim.lr"]
    assert (len(quick.comparison.seeds), len(quick.comparison.frozen_seeds)) == (2, 2)
    assert quick.comparison.run_directory != whole.comparison.run_directory
    assert quick.comparison.name != whole.comparison.name, "so that it is refused in the directory of the whole one"
    about, *notes = quick.comparison.notes
    assert tuple(notes) == whole.comparison.notes and "whole comparison" in about
    assert tenth(quick.comparison) == quick.comparison, "the saved recipe repeats the run"


def test_quick_with_an_arm_from_weights_and_another_architecture_on_the_command_line(
    mini: Mini, tmp_path: Path
) -> None:
    own = ["arms.*.training.steps=10", "arms.deep={recipe: digits_ssl}", "arms.deep.overrides=[training.batch_size=16]"]
    run = [str(mini()), *own, "arms.deep.encoder.depth=3", "arms.scratch=null", "--quick"]
    found = CliRunner().invoke(cli.app, ["compare", *run])
    assert found.exit_code == 0, found.output
    page = (tmp_path / "run" / "report.html").read_text()
    for text in (found.output, page):
        flat = " ".join(text.split())
        assert "Quick run, a tenth of the steps with two seeds" in flat
        assert "deep: encoder.depth 3 (SSL: 4)" in flat
    assert "(quick run)</h1>" in page
    given = f"arms.given.weights={tmp_path / 'run' / 'ssl'}"
    added = CliRunner().invoke(cli.app, ["compare", *run, given, "--dry-run"])
    assert added.exit_code == 0, added.output
    assert "deep: encoder.depth 3 (SSL: 4)" in " ".join(added.output.split())
    assert "given" in added.output
