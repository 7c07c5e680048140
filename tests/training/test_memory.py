"""Micro-batches that fit, activations computed again, the average of the weights: none changes what is learned."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import Block
from torch import nn

from ssl_vit import api, recipe
from ssl_vit.interfaces import UserError
from ssl_vit.training.logging import RunLogger
from ssl_vit.training.memory import first_that_fits
from ssl_vit.training.optim import WeightAverage

Settings = Callable[..., recipe.Recipe]
Train = Callable[..., Path]
Lines = Callable[[Path], list[dict[str, Any]]]


def weights(run: Path, name: str = "encoder.safetensors") -> dict[str, torch.Tensor]:
    return load_file(sorted((run / "checkpoints").iterdir())[-1] / name)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_first_number_of_micro_batches_that_fits_is_taken() -> None:
    tried: list[int] = []

    def attempt(count: int, room: int = 10) -> None:
        tried.append(count)
        if 48 // count > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    assert first_that_fits([1, 2, 3, 4, 6, 12], attempt) == 6 and tried == [1, 2, 3, 4, 6]
    assert first_that_fits([1, 2], lambda count: None) == 1
    with pytest.raises(UserError, match="not even 2 micro-batches"):
        first_that_fits([1, 2], attempt)
    with pytest.raises(ValueError, match="a mistake"):
        first_that_fits([1, 2], lambda count: (_ for _ in ()).throw(ValueError("a mistake")))


# While it searches, this process may map 100 MB more than it has mapped by then: a real refusal by the kernel.
SHORT_OF_MEMORY = """
import resource, sys
from pathlib import Path
import torch
from ssl_vit import api, recipe
from ssl_vit.training import loop

search = loop.find_accumulation

def limited(*arguments):
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (100 << 20), hard))
    try:
        return search(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

loop.find_accumulation = limited
torch.backends.mkldnn.enabled = False
torch.set_num_threads(1)
api.train(recipe.load_recipe(sys.argv[1]), quiet=True)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit is Linux's")
def test_auto_batch_finds_what_the_memory_holds_and_keeps_the_batch(
    settings: Settings, train: Train, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # it has other words for a refusal
    keys = ["training.batch_size=2048", "data.lanes=16", "training.steps=3", "encoder.dropout=0.1", "encoder.depth=4"]
    recipe.save(settings(tmp_path / "auto", *keys, "training.auto_batch=true"), tmp_path / "auto.yaml")
    # A process of its own, not a fork: that would have the memory which the tests before have freed.
    subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY, tmp_path / "auto.yaml"], check=True, timeout=100)
    first, *rows = lines(tmp_path / "auto")
    count = first["accumulate"]
    assert first == {"step": 0, "event": "auto_batch", "accumulate": count, "micro_batch": 2048 // count} and count > 1
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[-1]["images_seen"] == 3 * 2048
    # The search left nothing behind: with that number from the start, the same weights come out, bit for bit.
    plain = train(tmp_path / "plain", *keys, f"training.accumulate={count}")
    assert same(weights(tmp_path / "auto"), weights(plain))


def test_the_search_leaves_running_statistics_alone_and_begins_where_the_last_one_ended(
    train: Train, lines: Lines, tmp_path: Path
) -> None:
    keys = ["objective.head=probe", "training.steps=2"]
    plain = train(tmp_path / "plain", *keys, name="digits_supervised")
    searched = train(tmp_path / "auto", *keys, "training.auto_batch=true", name="digits_supervised")
    assert same(weights(searched, "objective.safetensors"), weights(plain, "objective.safetensors"))
    again = ["training.steps=4", "training.auto_batch=true"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunLogger, "values", interrupted_at(3))
        train(tmp_path / "run", *again, "training.checkpoint_every=1")
    train(tmp_path / "run", *again, "training.accumulate=2", "training.checkpoint_every=1")
    found = [(row["step"], row["accumulate"]) for row in lines(tmp_path / "run") if row.get("event") == "auto_batch"]
    assert found == [(0, 1), (2, 2)]


def interrupted_at(step: int) -> Callable[..., None]:
    values = RunLogger.values

    def interrupted(self: RunLogger, at: int, *arguments: Any) -> None:
        if at == step:
            raise KeyboardInterrupt
        values(self, at, *arguments)

    return interrupted


def test_activation_checkpointing_is_refused_where_it_would_change_running_statistics(
    digits: Path, tmp_path: Path
) -> None:
    keys = [f"data.train={digits}", f"run={tmp_path}/run", "data.lanes=4", "encoder.name=resnet18"]
    keys += ["encoder.channels=1", "encoder.image_size=32", "training.checkpoint_activations=true"]
    with pytest.raises(UserError, match="batch norm would count every image twice"):
        api.train(recipe.load_recipe("supervised_resnet50", keys), quiet=True)


def test_activation_checkpointing_changes_nothing(train: Train, lines: Lines, tmp_path: Path) -> None:
    """Not even dropout; and it does happen: blocks run twice a step."""
    calls = 0

    def count(*arguments: Any) -> None:
        nonlocal calls
        calls += 1

    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: count() if isinstance(module, Block) and inputs[0].device.type == "cpu" else None
    )
    runs = {}
    try:
        for again in ("false", "true"):
            calls = 0
            keys = ["encoder.dropout=0.1", "encoder.depth=3", f"training.checkpoint_activations={again}"]
            runs[again] = train(tmp_path / again, *keys), calls
    finally:
        hook.remove()
    (plain, once), (checkpointed, twice) = runs["false"], runs["true"]
    assert (once, twice) == (12 * 3, 12 * (3 + 2))  # the last block's are kept: the backward pass begins with them
    assert same(weights(checkpointed), weights(plain))
    assert [row["loss"] for row in lines(checkpointed)] == [row["loss"] for row in lines(plain)]


def test_the_average_follows_its_recurrence() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    average, generator = WeightAverage(model, 0.9), torch.Generator().manual_seed(0)
    expected = model.weight.detach().numpy().astype(np.float64)
    for step in range(100):
        with torch.no_grad():
            model.weight.copy_(torch.randn(2, 3, generator=generator))
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach().numpy()
    assert average.values.keys() == {"weight"}
    np.testing.assert_allclose(average.values["weight"].numpy(), expected, rtol=1e-5)


def test_the_average_is_what_is_published_and_trains_nothing(train: Train, lines: Lines, tmp_path: Path) -> None:
    plain, averaged = train(tmp_path / "plain"), train(tmp_path / "averaged", "training.ema=0.5")
    assert [row["loss"] for row in lines(averaged)] == [row["loss"] for row in lines(plain)]
    trained = {n.removeprefix("encoder.network."): t for n, t in weights(averaged, "training.safetensors").items()}
    assert same(trained, weights(plain)) and not same(weights(averaged), weights(plain))
    assert same(load_file(averaged / "encoder.safetensors"), weights(averaged))
