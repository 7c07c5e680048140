"""The probe during training: it changes nothing but when training ends, and survives a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ssl_vit import api, recipe
from ssl_vit.data.packing import pack
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.shards import open_shards
from ssl_vit.evaluators.features import FeatureConfig, ImageSet
from ssl_vit.evaluators.few_shot import few_shot_accuracy
from ssl_vit.evaluators.online import OnlineProbe
from ssl_vit.interfaces import Stopped, UserError
from ssl_vit.models import factory
from ssl_vit.training import ProbeConfig
from ssl_vit.training.callbacks import EarlyStopping
from ssl_vit.training.distributed import make_accelerator


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "train"
    pack(open_source("digits", split="train"), folder, Options(shards=4), progress=False)
    return folder


def train(digits: Path, run: Path, *keys: str) -> list[dict[str, Any]]:
    sizes = ["training.steps=12", "training.batch_size=16", "training.log_every=4", "encoder.dropout=0.1"]
    settings = recipe.load_recipe("digits_ssl", [f"data.train={digits}", f"run={run}", *sizes, *keys])
    api.train(settings, quiet=True)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_probing_leaves_the_training_as_it_is(digits: Path, tmp_path: Path) -> None:
    train(digits, tmp_path / "without")
    lines = train(digits, tmp_path / "with", "probe.every=5", "probe.images=50", "probe.shots=2")
    probed = {line["step"]: line["probe_accuracy"] for line in lines if "probe_accuracy" in line}
    assert list(probed) == [5, 10, 12], "every five steps and at the end"
    assert all(0 <= value <= 1 for value in probed.values())
    best = [line["probe_best"] for line in lines if "probe_best" in line]
    assert best == np.maximum.accumulate(list(probed.values())).tolist()
    one, two = (load_file(tmp_path / name / "encoder.safetensors") for name in ("without", "with"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_the_probe_is_few_shot_on_other_images_of_the_same_shards(digits: Path, tmp_path: Path) -> None:
    train(digits, tmp_path / "run")
    settings = api.run_recipe(tmp_path / "run")
    assert settings
    model = factory.load(tmp_path / "run")
    config = ProbeConfig(every=1, shots=3, images=200, pooling="patches", l2=7.0)
    probe = OnlineProbe(config, open_shards(str(digits)), settings.data, model, make_accelerator())
    assert not set(probe.shots) & set(probe.scored)
    assert (len(probe.shots), len(probe.scored)) == (30, 200)
    holder = torch.nn.Module()
    holder.encoder = model.train()
    context = api.make_context(tmp_path / "run", settings, str(digits), str(digits))
    whole = ImageSet(context, "trained", "train").features(FeatureConfig(pooling="patches"))
    few, scored = (np.sort(part) for part in (probe.shots, probe.scored))
    found = few_shot_accuracy(
        whole.vectors[few],
        whole.labels[few],
        whole.vectors[scored],
        whole.labels[scored],
        shots=(3,),
        seeds=(0,),
        l2=7.0,
    )
    assert probe(holder) == pytest.approx(found[3, 0])


def test_a_probe_sees_the_averaged_weights_that_are_published(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def measure(self: OnlineProbe, objective: torch.nn.Module) -> float:
        seen.append({name: tensor.clone() for name, tensor in objective.encoder.network.state_dict().items()})  # type: ignore[union-attr]
        return 0.5

    monkeypatch.setattr(OnlineProbe, "__call__", measure)
    keys = ["training.ema=0.5", "optim.lr=0.01"]
    train(digits, tmp_path / "run", *keys, "probe.every=12", "probe.images=20", "probe.shots=1")
    published = load_file(tmp_path / "run" / "encoder.safetensors")
    assert all(torch.equal(seen[0][name], tensor) for name, tensor in published.items())
    train(digits, tmp_path / "without", *keys)
    again = load_file(tmp_path / "without" / "checkpoints" / "step_00000012" / "training.safetensors")
    kept = load_file(tmp_path / "run" / "checkpoints" / "step_00000012" / "training.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in again.items()), "training goes on from its own"


def test_a_probe_that_does_not_rise_ends_the_run_and_it_stays_ended(digits: Path, tmp_path: Path) -> None:
    keys = ["probe.every=2", "probe.images=20", "probe.shots=1", "probe.patience=2", "training.steps=400"]
    lines = train(digits, tmp_path / "run", *keys)
    values = [line["probe_accuracy"] for line in lines if "probe_accuracy" in line]
    end = next(line for line in lines if line.get("event") == "early_stop")
    highest = values.index(max(values))
    assert len(values) == highest + 3, "two without a new best, and no more"
    assert end["step"] == 2 * len(values) < 400
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == end["step"]
    assert train(digits, tmp_path / "run", *keys) == lines, "the same command again does nothing"


def test_patience_goes_on_counting_after_a_stop(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["probe.every=2", "probe.images=20", "probe.shots=1", "probe.patience=3", "training.steps=100"]
    scores = iter([0.5, 0.4, 0.3, 0.2])

    def measure(self: OnlineProbe, objective: torch.nn.Module) -> float:
        return next(scores)

    monkeypatch.setattr(OnlineProbe, "__call__", measure)
    taken = EarlyStopping.after_step

    def stop_after_the_second(self: EarlyStopping, trainer: Any) -> Any:
        decision = taken(self, trainer)
        if trainer.progress.step == 4:
            raise KeyboardInterrupt
        return decision

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, Stopped)):
        patch.setattr(EarlyStopping, "after_step", stop_after_the_second)
        train(digits, tmp_path / "run", *keys, "training.checkpoint_every=2")
    scores = iter([0.4, 0.3, 0.2, 0.9])
    lines = train(digits, tmp_path / "run", *keys, "training.checkpoint_every=2")
    assert [line["probe_accuracy"] for line in lines if "probe_accuracy" in line] == [0.5, 0.4, 0.3, 0.2]
    assert lines[-1]["event"] == "early_stop"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["probe.every=0"], "probe.every"),
        (["probe.shots=3"], "probe.every: this key is missing"),
        (["probe.every=1", "probe.shots=500"], "lower probe.shots"),
        (["probe.every=1", "probe.data=nowhere"], "nowhere"),
    ],
)
def test_wrong_probes_are_named(digits: Path, tmp_path: Path, keys: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(digits, tmp_path / "run", *keys)
