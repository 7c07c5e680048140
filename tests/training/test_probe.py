"""The probe during training: it changes nothing but when training ends, and survives a kill."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ssl_vit import execution, recipe, stage
from ssl_vit.analysis import loaded
from ssl_vit.data.shards import open_shards
from ssl_vit.evaluators.features import FeatureConfig, ImageSet
from ssl_vit.evaluators.few_shot import few_shot_accuracy
from ssl_vit.evaluators.online import OnlineProbe
from ssl_vit.interfaces import Stopped
from ssl_vit.models import factory
from ssl_vit.records import SkippedSample
from ssl_vit.training import ProbeConfig, checkpoint, signals
from ssl_vit.training.distributed import make_accelerator
from ssl_vit.training.optim import WeightAverage
from tests.processes.reading import rows as lines

Train = Callable[..., Path]


def test_probing_leaves_the_training_as_it_is(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "without", "encoder.dropout=0.1")
    keys = ["encoder.dropout=0.1", "probe.every=5", "probe.images=50", "probe.labels_per_class=2"]
    rows = lines(train(tmp_path / "with", *keys))
    probed = {row["step"]: row["probe_accuracy"] for row in rows if "probe_accuracy" in row}
    assert list(probed) == [5, 10, 12], "every five steps and at the end"
    assert all(0 <= value <= 1 for value in probed.values())
    best = [row["probe_best"] for row in rows if "probe_best" in row]
    assert best == np.maximum.accumulate(list(probed.values())).tolist()
    one, two = (load_file(tmp_path / name / "encoder.safetensors") for name in ("without", "with"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_the_seconds_of_a_run_include_checkpoints_and_probes_but_those_of_a_step_no_probe(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, now, later = checkpoint.save, time.perf_counter, list[int]()

    def slow(*arguments: Any) -> Any:
        later.append(1000)  # seconds
        return save(*arguments)

    def probe(self: OnlineProbe, objective: torch.nn.Module) -> float:
        later.append(1000)
        return 0.5

    monkeypatch.setattr(time, "perf_counter", lambda: now() + sum(later))
    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(OnlineProbe, "accuracy", probe)
    keys = ["probe.every=4", "probe.images=20", "probe.labels_per_class=1", "training.checkpoint_every=4"]
    run = train(tmp_path / "run", *keys)
    assert json.loads((run / "summary.json").read_text())["seconds"] > 3 * (1000 + 1000)
    assert max(row.get("seconds_per_step", 0) for row in lines(run)) < 1000


def test_the_probe_is_few_shot_on_other_images_of_the_same_shards(train: Train, digits: Path, tmp_path: Path) -> None:
    train(tmp_path / "run")
    settings = recipe.run_recipe(tmp_path / "run")
    assert settings
    model = factory.load(tmp_path / "run")
    config = ProbeConfig(every=1, labels_per_class=3, images=200, pooling="patches", l2=7.0)
    probe = OnlineProbe(config, open_shards(str(digits)), settings.data, model, make_accelerator())
    assert not set(probe.labeled) & set(probe.scored)
    assert (len(probe.labeled), len(probe.scored)) == (30, 200)
    objective = stage.build_objective(settings, model, None).train()
    context = execution.make_context(loaded.load(tmp_path / "run"), str(digits), str(digits))
    whole = ImageSet(context, "trained", "train").features(FeatureConfig(pooling="patches"))
    few, scored = (np.sort(part) for part in (probe.labeled, probe.scored))
    fit, asked = (whole.vectors[few], whole.labels[few]), (whole.vectors[scored], whole.labels[scored])
    found = few_shot_accuracy(*fit, *asked, shots=(3,), seeds=(0,), l2=7.0)
    assert probe.accuracy(objective) == pytest.approx(found[3, 0])


def test_a_probe_sees_the_averaged_weights_that_are_published(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def measure(self: OnlineProbe, objective: torch.nn.Module) -> float:
        seen.append({name: tensor.clone() for name, tensor in objective.encoder.network.state_dict().items()})  # type: ignore[union-attr]
        return 0.5

    monkeypatch.setattr(OnlineProbe, "accuracy", measure)
    keys = ["training.ema=0.5", "optim.lr=0.01"]
    train(tmp_path / "run", *keys, "probe.every=12", "probe.images=20", "probe.labels_per_class=1")
    published = load_file(tmp_path / "run" / "encoder.safetensors")
    assert all(torch.equal(seen[0][name], tensor) for name, tensor in published.items())
    train(tmp_path / "without", *keys)
    again = load_file(tmp_path / "without" / "checkpoints" / "step_00000012" / "training.safetensors")
    kept = load_file(tmp_path / "run" / "checkpoints" / "step_00000012" / "training.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in again.items()), "training continues from its own"


@pytest.mark.parametrize("during", ["probe", "apply", "restore"])
def test_a_signal_ends_a_long_probe_and_the_next_start_repeats_it(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    """Also one that comes while the averaged weights are swapped in or out."""

    def endless(*_: Any) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)
        return 0.5

    def half(average: WeightAverage) -> None:
        with torch.no_grad():
            next(iter(average.parameters.values())).zero_()
        patch.undo()
        endless()

    keys = ["training.ema=0.5", "encoder.dropout=0.1", "probe.every=5", "probe.images=20", "probe.labels_per_class=1"]
    monkeypatch.setattr(OnlineProbe, "accuracy", lambda self, objective: 0.5)
    train(tmp_path / "whole", *keys)
    monkeypatch.setattr(signals, "_GRACE_SECONDS", 0.1)
    patch = pytest.MonkeyPatch()
    if during == "probe":
        patch.setattr(OnlineProbe, "accuracy", endless)
    else:
        patch.setattr(WeightAverage, during, half)
    with pytest.raises(Stopped) as stop:
        train(tmp_path / "run", *keys)
    assert stop.value.code == 75
    assert [path.name for path in checkpoint.folders(tmp_path / "run")] == ["step_00000005"]
    patch.undo()
    train(tmp_path / "run", *keys)
    assert [row["step"] for row in lines(tmp_path / "run") if "probe_accuracy" in row] == [5, 10, 12]
    for name in ("encoder", "training"):
        one, two = (
            load_file(tmp_path / run / "checkpoints" / "step_00000012" / f"{name}.safetensors")
            for run in ("whole", "run")
        )
        assert one.keys() == two.keys() and all(torch.equal(tensor, two[key]) for key, tensor in one.items())


def test_a_probe_that_does_not_rise_ends_the_run_and_it_stays_ended(train: Train, tmp_path: Path) -> None:
    keys = ["probe.every=2", "probe.images=20", "probe.labels_per_class=1", "probe.patience=2", "training.steps=400"]
    rows = lines(train(tmp_path / "run", *keys))
    values = [row["probe_accuracy"] for row in rows if "probe_accuracy" in row]
    end = next(row for row in rows if row.get("event") == "early_stop")
    highest = values.index(max(values))
    assert len(values) == highest + 3, "two without a new best, and no more"
    assert end["step"] == 2 * len(values) < 400
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == end["step"]
    assert lines(train(tmp_path / "run", *keys)) == rows, "the same command again does nothing"


def test_a_resumed_probe_knows_the_evaluations_without_a_rise_and_what_it_reported(digits: Path) -> None:
    settings = recipe.load_recipe("digits_ssl")
    state = {"step": 4, "best": 0.5, "since_best": 1, "reported": [["000000.tar", "7"], ["000000.tar", "9"]]}
    encoder, config = factory.build(settings.encoder), ProbeConfig(every=1, patience=2)
    probe = OnlineProbe(config, open_shards(str(digits)), settings.data, encoder, make_accelerator())
    probe.load_state_dict(state)
    assert json.loads(json.dumps(probe.state_dict())) == state

    def cut(key: str) -> SkippedSample:
        return SkippedSample(shard="000000.tar", key=key, reason="cut")

    probe.context.skipped += [cut("7"), cut("8")]
    assert [sample.key for sample in probe._skipped()] == ["8"]
