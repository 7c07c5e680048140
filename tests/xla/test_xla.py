"""All three stages through torch_xla on a CPU: `tools/test_xla.sh` installs it and runs this."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.xla
torch_xla = pytest.importorskip("torch_xla")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch_xla.debug import metrics  # noqa: E402

from ssl_vit import execution, recipe  # noqa: E402
from ssl_vit.data.evaluation import evaluation_batches  # noqa: E402
from ssl_vit.evaluators import features  # noqa: E402
from ssl_vit.training.loop import Trainer  # noqa: E402
from tests.tars import packed  # noqa: E402

STEPS = 24
STAGES = {
    "pretraining": ("digits_ssl", ()),
    "supervised": ("digits_supervised", ()),
    "fine_tuning": ("digits_supervised", ("objective.head=linear", "optim.lr=0.01")),
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed("digits", tmp_path_factory.mktemp("digits"), "train", shards=4)


def settings(digits: Path, run: Path, stage: str, *more: str) -> list[str]:
    """24 steps of 32 digits, a log line every 3 and a checkpoint every 6."""
    name, keys = STAGES[stage]
    fixed = [f"data.train={digits}", f"run={run}", "data.lanes=4", "training.batch_size=32", "training.picture_every=0"]
    fixed += [f"training.steps={STEPS}", "training.log_every=3", "training.checkpoint_every=6", "training.keep_last=9"]
    fixed += ["encoder.width=32", "encoder.depth=2", "encoder.heads=2", "optim.warmup_steps=5"]
    return [name, *fixed, *keys, *more]


def train(digits: Path, run: Path, stage: str, *more: str) -> Path:
    name, *keys = settings(digits, run, stage, *more)
    return execution.train(recipe.load_recipe(name, keys), quiet=True)


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(3, STEPS + 1, 3))
    return [row["loss"] for row in rows]


def weights(run: Path) -> dict[str, torch.Tensor]:
    last = run / "checkpoints" / f"step_{STEPS:08d}"
    return {**load_file(last / "encoder.safetensors"), **load_file(last / "objective.safetensors")}


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many programs had been compiled before each optimizer step."""
    counts: list[int] = []
    step = Trainer.train_step

    def counted(self, *arguments):  # type: ignore[no-untyped-def]
        data = metrics.metric_data("CompileTime")
        counts.append(data[0] if data else 0)
        return step(self, *arguments)

    monkeypatch.setattr(Trainer, "train_step", counted)
    yield counts


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_compiles_while_it_warms_up_and_never_again(
    digits: Path, tmp_path: Path, stage: str, compilations: list[int]
) -> None:
    """Over half an epoch, with two log lines and a checkpoint in the warm-up and several of each after it."""
    start = [f"init_from={train(digits, tmp_path / 'start', 'pretraining')}"] if stage == "fine_tuning" else []
    compilations.clear()
    run = train(digits, tmp_path / "run", stage, "encoder.dropout=0.1", *start)
    assert len(compilations) == STEPS and compilations[0] < compilations[2]
    assert len(set(compilations[7:])) == 1, compilations
    assert losses(run)[-1] < losses(run)[0]


def test_it_trains_as_a_cpu_does_without_it(digits: Path, tmp_path: Path) -> None:
    """With accumulation on XLA's side; to what float32 leaves after 24 steps."""
    on_xla = losses(train(digits, tmp_path / "xla", "pretraining", "training.accumulate=2"))
    command = [sys.executable, "-m", "ssl_vit", "train", *settings(digits, tmp_path / "cpu", "pretraining")]
    subprocess.run(command, env={**os.environ, "USE_TORCH_XLA": "0"}, check=True, capture_output=True, timeout=200)
    assert json.loads((tmp_path / "cpu" / "environment.json").read_text())["device"] == "cpu"
    assert on_xla == pytest.approx(losses(tmp_path / "cpu"), abs=1e-4)


def test_a_resumed_run_is_bit_identical(digits: Path, tmp_path: Path) -> None:
    """Dropout too: the device's generator is part of a checkpoint."""
    more = ("encoder.dropout=0.1", "data.augment.flip=true", "training.ema=0.9")
    whole = train(digits, tmp_path / "whole", "pretraining", *more)
    broken = tmp_path / "broken"
    gone = [f"step_{step:08d}" for step in range(18, STEPS + 1)]
    shutil.copytree(whole, broken, ignore=shutil.ignore_patterns(*gone, ".lock"))
    train(digits, broken, "pretraining", *more)
    assert losses(broken) == losses(whole)
    found, expected = weights(broken), weights(whole)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_evaluators_compile_for_the_first_batches_alone(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,415 images in batches of 256 the last is padded; knn extracts features, own_head predicts."""
    run = train(digits, tmp_path / "run", "supervised")
    images = str(packed("digits", tmp_path / "other", "train", shards=4, seed=1))  # not those of the training
    counts: list[int] = []

    def counted(*arguments):  # type: ignore[no-untyped-def]
        for found in evaluation_batches(*arguments):
            counts.append(metrics.metric_data("CompileTime")[0])
            yield found

    monkeypatch.setattr(features, "evaluation_batches", counted)
    for name, keys in (("knn", ["ks=[5]"]), ("own_head", [])):
        counts.clear()
        result = execution.evaluate(run, name, images, images, keys)
        assert max(row.accuracy for row in result.results) > 0.2  # of ten classes
        assert len(counts) % 6 == 0
        for first in range(0, len(counts), 6):  # one model on one split each
            assert len(set(counts[first + 2 : first + 6])) == 1, counts
