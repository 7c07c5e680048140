"""The same training on one, two and three real CPU processes, with and without accumulation, whole and sharded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.processes import every_process as one
from tests.processes.reading import Weights, rows, same, weights, world_size


def done(processes: list[Any]) -> None:
    codes = [process.wait(250) for process in processes]
    assert codes == [0] * len(codes), "\n\n".join(process.text[-3000:] for process in processes)


@pytest.fixture(scope="module")
def runs(world: Callable[..., Any], digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs: OUT/PROCESSES/STAGE-ACCUMULATE, and the sharded ones (see every_process.py)."""
    out = tmp_path_factory.mktemp("distribution")
    first = out / "1" / "pretraining-1"
    one.same_training(str(digits), out / "1", first, 1)
    done(world(2, "two", digits, out, first))
    done(world(3, "three", digits, out, first))
    one.train(str(digits), out / "whole", "pretraining", *one.SHARDED)
    one.back_before(20, out / "sharded", out / "one")
    one.train(str(digits), out / "one", "pretraining", *one.SHARDED)
    return out


def differ_by(found: Weights, expected: Weights) -> float:
    """The largest difference of two models' weights, but for the biases of attention's keys: softmax does not see
    those, their gradient is rounding noise alone, and Adam makes steps of full size of it."""
    assert found.keys() == expected.keys()
    largest = 0.0
    for name, value in expected.items():
        difference = np.abs(found[name].astype(np.float64) - value)
        if name.endswith("qkv.bias"):
            difference = np.delete(difference, np.s_[len(value) // 3 : 2 * len(value) // 3])
        largest = max(largest, difference.max())
    return largest


@pytest.mark.parametrize("stage", one.STAGES)
def test_the_training_is_the_same_on_any_number_of_processes(runs: Path, stage: str) -> None:
    expected = rows(runs / "1" / f"{stage}-1")
    names = [n for n in ("loss", "accuracy", "constant_loss", "constant_accuracy") if n in expected[0]]
    assert [row["step"] for row in expected] == list(range(1, 21)) and len(names) > 1
    others = sorted(runs.glob(f"[123]/{stage}-[12]"))
    assert len(others) == 3
    for run in others:
        environment = json.loads((run / "environment.json").read_text())
        assert environment["world_size"] == int(run.parent.name)
        assert environment["distribution"] == ("NO" if run.parent.name == "1" else "MULTI_CPU")
        assert f"accumulate: {run.name[-1]}\n" in (run / "recipe.yaml").read_text()
        found = rows(run)
        for name in names:
            assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], abs=1e-5), name
        norms = [row["grad_norm"] for row in found]
        assert norms == pytest.approx([row["grad_norm"] for row in expected], rel=1e-3)
        assert differ_by(weights(run), weights(runs / "1" / f"{stage}-1")) < 1e-4


def test_a_sharded_run_exports_what_a_whole_one_does(runs: Path) -> None:
    assert world_size(runs / "sharded") == 2
    assert differ_by(weights(runs / "sharded"), weights(runs / "whole")) < 1e-6
    trained = weights(runs / "sharded", "training")
    assert differ_by(trained, weights(runs / "whole", "training")) < 1e-6
    published = load_file(runs / "sharded" / "encoder.safetensors")
    assert differ_by(published, load_file(runs / "whole" / "encoder.safetensors")) < 1e-6
    # The average is published; it lags behind the weights that training continues from.
    assert differ_by(published, {name: trained[f"encoder.network.{name}"] for name in published}) > 1e-5


def test_a_sharded_network_is_fine_tuned_and_evaluated(runs: Path) -> None:
    """Its predictions are those of a training with the same weights in one process."""
    accuracies = json.loads((runs / "fine_tuned.json").read_text())
    digits = one.recipe.load_recipe(runs / "sharded" / "recipe.yaml").data.places[0]
    whole = one.execution.evaluate(
        runs / "sharded", "fine_tune", digits, digits.removesuffix("train") + "test", list(one.FINE_TUNE)
    )
    assert min(accuracies) > 0.4, "both have learned: chance is 0.1"
    assert accuracies == pytest.approx([row.accuracy for row in whole.results], abs=0.01)


def test_a_sharded_probe_predicts_with_the_same_statistics_everywhere(runs: Path) -> None:
    means = json.loads((runs / "same_statistics.json").read_text())
    assert means and all(means)


def test_a_network_without_the_class_that_the_launch_file_wraps_is_refused(runs: Path) -> None:
    assert "no layer Block" in (runs / "one_block.txt").read_text()


def test_a_sharded_run_may_scale_its_loss(runs: Path) -> None:
    assert differ_by(weights(runs / "scaled"), weights(runs / "sharded")) < 1e-6
    state = json.loads(max((runs / "scaled" / "checkpoints").iterdir()).joinpath("state.json").read_text())
    assert state["scaler"]["scale"] > 1


def test_a_sharded_run_resumes_bit_for_bit(runs: Path) -> None:
    for name in ("encoder", "objective", "training", "optimizer"):
        assert same(weights(runs / "again", name), weights(runs / "sharded", name))
    assert [row["loss"] for row in rows(runs / "again")] == [row["loss"] for row in rows(runs / "sharded")]


@pytest.mark.parametrize(("run", "processes"), [("one", 1), ("three", 3)])
def test_a_sharded_run_resumes_with_another_number_of_processes(runs: Path, run: str, processes: int) -> None:
    """On one process whole, on three in other shards; no sample is lost or repeated, so the losses continue."""
    assert world_size(runs / run) == processes
    losses = [row["loss"] for row in rows(runs / run)]
    assert losses == pytest.approx([row["loss"] for row in rows(runs / "sharded")], abs=1e-5)
    assert differ_by(weights(runs / run), weights(runs / "sharded")) < 1e-6
