"""A compiled step is the plain step in one graph, compiled once."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ssl_vit import recipe, stage
from ssl_vit.data.shards import open_training
from ssl_vit.interfaces import UserError
from ssl_vit.models import factory
from ssl_vit.training.distributed import Engine, make_accelerator
from tests.processes.reading import losses

Train = Callable[..., Path]
Settings = Callable[..., recipe.Recipe]
STAGES = {
    "masked patches": ("digits_ssl", "training.picture_every=2", "training.accumulate=2"),
    "relative positions": ("digits_ssl", "objective.name=masked_autoencoder", "encoder.positions=relative"),
    "supervised, bf16": ("digits_supervised", "training.precision=bf16"),
    "LeJEPA": ("digits_ssl", "objective.name=lejepa", "data.views=2", "data.augment.brightness=0.4"),
}
SHORT = ("training.steps=4", "encoder.depth=1")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was compiled before does not count."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compile_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and differentiate as for inductor, whose kernels take minutes to build on a CPU; run them one by one."""
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compiled(self, backend="aot_eager", **how))
    monkeypatch.setenv("CXX", sys.executable)  # a compiler that is not called


@pytest.mark.parametrize("stage", STAGES)
def test_one_graph_without_breaks_or_recompilation(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The same losses, and weights under the same names."""
    name, *keys = (*STAGES[stage], *SHORT)
    plain = dict(losses(train(tmp_path / "plain", *keys, name=name)))
    compile_without_kernels(monkeypatch)
    run = train(tmp_path / "compiled", "training.compile=true", *keys, name=name)
    found = dict(losses(run))
    breaks = [*counters["graph_break"]]  # LeJEPA draws its directions outside of the graph
    assert len(breaks) == ("LeJEPA" in stage) and all("directions" in why for why in breaks)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["frames"]["ok"] == counters["frames"]["total"] == 1 + len(breaks)
    assert len(found) == 4
    assert found == pytest.approx(plain, rel=2e-2 if "bf16" in stage else 1e-5)
    saved = [factory.load(tmp_path / run).state_dict() for run in ("plain", "compiled")]
    assert saved[0].keys() == saved[1].keys()


@pytest.mark.parametrize(("device", "wanted"), [("cpu", r"g\+\+"), ("cuda", "gcc")])
def test_compiling_without_a_compiler_is_refused(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, wanted: str
) -> None:
    asked = settings(tmp_path / "run", "training.compile=true")
    shards, engine = open_training(asked.data), make_accelerator()
    monkeypatch.setattr(Engine, "device", torch.device(device))
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UserError, match=f"training.compile: .* install {wanted}, or set it to false"):
        stage.build(asked, shards, engine)
    monkeypatch.setenv({"cpu": "CXX", "cuda": "CC"}[device], sys.executable)  # some program
    stage.build(asked, shards, engine)


@pytest.mark.parametrize(("key", "message"), [("compile", "not for sharded models"), ("auto_batch", "not for FSDP")])
def test_what_a_sharded_model_cannot_do_is_refused(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, message: str
) -> None:
    asked = settings(tmp_path / "run", f"training.{key}=true")
    shards, engine = open_training(asked.data), make_accelerator()
    monkeypatch.setattr(Engine, "is_fsdp2", True)
    with pytest.raises(UserError, match=rf"training\.{key}: {message}"):
        stage.build(asked, shards, engine)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ on this machine")
def test_inductor_trains_and_resumes(train: Train, tmp_path: Path) -> None:
    keys = ("training.checkpoint_every=6",)
    plain = dict(losses(train(tmp_path / "plain", *keys)))
    run = train(tmp_path / "compiled", "training.compile=true", *keys)
    found = dict(losses(run))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert found == pytest.approx(plain, rel=1e-4)
    (run / "checkpoints" / "step_00000012" / "encoder.safetensors").unlink()
    again = dict(losses(train(run, "training.compile=true", *keys)))
    assert again == pytest.approx(found, rel=1e-6)
