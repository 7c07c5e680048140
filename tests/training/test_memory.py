"""Activations computed again, the average of the weights: neither changes what is learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import Block
from torch import nn

from ssl_vit import execution, recipe
from ssl_vit.interfaces import Batch, RunError, StepOutput, UserError
from ssl_vit.objectives import masked_patch
from ssl_vit.training import memory
from tests.processes.reading import losses, rows

Train = Callable[..., Path]


def weights(run: Path, name: str = "encoder.safetensors") -> dict[str, torch.Tensor]:
    return load_file(sorted((run / "checkpoints").iterdir())[-1] / name)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_activation_checkpointing_is_refused_where_it_would_change_running_statistics(
    digits: Path, tmp_path: Path
) -> None:
    keys = [f"data.train={digits}", f"run={tmp_path}/run", "data.lanes=4", "encoder.name=resnet18"]
    keys += ["encoder.channels=1", "encoder.image_size=32", "training.checkpoint_activations=true"]
    with pytest.raises(UserError, match="batch norm would count every image twice"):
        execution.train(recipe.load_recipe("supervised_resnet50", keys), quiet=True)


def test_activation_checkpointing_is_refused_where_timm_has_none(digits: Path, tmp_path: Path) -> None:
    keys = [f"data.train={digits}", f"run={tmp_path}/run", "data.lanes=4", "encoder.name=crossvit_9_240"]
    keys += ["encoder.channels=1", "encoder.image_size=240", "training.checkpoint_activations=true"]
    with pytest.raises(UserError, match="checkpoint_activations: not supported by crossvit_9_240"):
        execution.train(recipe.load_recipe("supervised_resnet50", keys), quiet=True)


@pytest.mark.parametrize("fits", [2, 8])
def test_a_dry_run_measures_a_micro_batch_that_the_memory_holds(
    settings: Callable[..., recipe.Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: int
) -> None:
    original, sizes = memory.forward_backward, list[int]()

    def limited(module: nn.Module, part: Any, accelerator: Any) -> tuple[float, int]:
        if len(part.images) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        sizes.append(len(part.images))
        return original(module, part, accelerator)

    monkeypatch.setattr(memory, "forward_backward", limited)
    with pytest.raises(UserError, match=r"training\.auto_batch=true"):
        execution.dry_run(settings(tmp_path))
    if fits == 8:  # a quarter of the batch: one lane of four
        execution.dry_run(settings(tmp_path, "training.auto_batch=true"))
        assert set(sizes) == {8}
    else:
        with pytest.raises(UserError, match=r"micro-batch of 8 images; set a lower training\.batch_size"):
            execution.dry_run(settings(tmp_path, "training.auto_batch=true"))


def test_a_dry_run_counts_the_memory_of_the_optimizer(
    settings: Callable[..., recipe.Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    # Counts the FLOPs, which uses zeros_like, too; they are counted once per process.
    execution.dry_run(settings(tmp_path))
    monkeypatch.setattr(torch, "zeros_like", full)
    with pytest.raises(UserError, match=r"does not hold a micro-batch"):
        execution.dry_run(settings(tmp_path))


def test_auto_batch_takes_the_largest_micro_batch_that_fits_and_leaves_no_trace(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With that number from the start, the same weights come out; dropout draws from the same random state."""
    forward, keys = masked_patch.Objective.forward, ("training.steps=2", "encoder.dropout=0.1")
    plain = train(tmp_path / "plain", "training.accumulate=4", *keys)

    def limited(self: Any, batch: Batch) -> StepOutput:
        output = forward(self, batch)
        if len(batch.images) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return output

    monkeypatch.setattr(masked_patch.Objective, "forward", limited)
    run = train(tmp_path / "run", "training.auto_batch=true", *keys)
    assert rows(run)[0] == {"step": 0, "event": "auto_batch", "accumulate": 4, "micro_batch": 8}
    assert same(weights(run), weights(plain))


def test_the_gradients_of_earlier_micro_batches_are_counted(
    settings: Callable[..., recipe.Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, copies = settings(tmp_path, "training.auto_batch=true"), list[int]()

    def fits(objective: nn.Module, part: Any, accelerator: Any, held: int, reserve: float) -> bool:
        copies.append(held)
        return len(copies) == 2

    monkeypatch.setattr(memory, "_fits", fits)
    execution.dry_run(given)
    assert copies == [2, 3], "AdamW's two, and the gradients"


def test_auto_batch_begins_where_the_session_before_ended_and_counts_no_copy_twice(
    settings: Callable[..., recipe.Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[tuple[int, int]]()

    def fits(objective: nn.Module, part: Any, accelerator: Any, held: int, reserve: float) -> bool:
        tried.append((len(part.images), held))
        return True

    monkeypatch.setattr(memory, "_fits", fits)
    given = settings(tmp_path, "training.auto_batch=true")
    engine: Any = SimpleNamespace(device=torch.device("cpu"))
    batch: Any = SimpleNamespace(images=range(8), lane_size=1)
    batch.split = lambda count: [SimpleNamespace(images=range(8 // count))]
    objective: Any = nn.Linear(2, 2)
    objective.whole_batch = False
    found = memory.find_accumulation(objective, batch, engine, given.training, given.optim, least=4, begun=True)
    assert (found, tried) == (4, [(2, 1)]), "the optimizer holds its copies already, and no gradients"


def test_a_trial_leaves_running_statistics_as_they_are() -> None:
    objective: Any = nn.BatchNorm1d(3)
    engine: Any = SimpleNamespace(device=torch.device("cpu"))
    before = [buffer.clone() for buffer in objective.buffers()]
    with memory.undisturbed(objective, engine):
        objective(torch.randn(8, 3)).sum().backward()
    assert all(torch.equal(one, kept) for one, kept in zip(objective.buffers(), before, strict=True))
    assert objective.weight.grad is None


@pytest.mark.parametrize(
    ("message", "recognized"),
    [
        ("MPS backend out of memory (MPS allocated: 1 GiB)", True),
        ("CUDA error: out of memory\nCUDA kernel errors might be reported later", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_errors_outside_of_pytorchs_allocator_are_recognized(message: str, recognized: bool) -> None:
    """The texts are CUDA's and PyTorch's own."""
    with pytest.raises(RunError if recognized else RuntimeError, match=r"memory|assert"), memory.out_of_memory(str):
        raise RuntimeError(message)


def test_the_advice_is_one_that_the_objective_allows(
    settings: Callable[..., recipe.Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_fits", lambda *arguments: False)
    engine: Any = SimpleNamespace(device=torch.device("cpu"))
    batch: Any = SimpleNamespace(images=range(8), lane_size=1)
    batch.split = lambda count: [SimpleNamespace(images=range(8 // count))]

    def advice(objective: Any, *keys: str, whole_batch: bool = False) -> str:
        objective.whole_batch = whole_batch
        given = settings(tmp_path, *keys)
        with pytest.raises(UserError, match="the memory does not hold a micro-batch") as found:
            memory.find_accumulation(objective, batch, engine, given.training, given.optim)
        return str(found.value)

    assert "set training.auto_batch=true" in advice(nn.Linear(2, 2))
    assert "of 1 images; set a lower training.batch_size" in advice(nn.Linear(2, 2), "training.auto_batch=true")
    assert "of 2 images; set a lower training.batch_size" in advice(nn.BatchNorm1d(2), "training.auto_batch=true")
    whole = advice(nn.Linear(2, 2), whole_batch=True)  # as LeJEPA, which refuses auto_batch
    assert "set a lower training.batch_size" in whole


def test_what_communicates_is_not_tried(
    settings: Callable[..., recipe.Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several processes without the memory would leave the others waiting in the pass of LeJEPA."""
    monkeypatch.setattr(memory.distributed, "several", lambda: True)
    monkeypatch.setattr(memory, "_fits", None)
    batch: Any = SimpleNamespace(images=range(8), lane_size=8, split=lambda count: [SimpleNamespace(images=range(8))])
    objective: Any = nn.Linear(2, 2)
    objective.whole_batch = True
    engine: Any = None
    given = settings(tmp_path)
    assert memory.find_accumulation(objective, batch, engine, given.training, given.optim) == 1
    objective.append = nn.BatchNorm1d(2)
    batch.split = lambda count: [SimpleNamespace(images=range(1))]
    with pytest.raises(UserError, match="batch norm"):
        memory.find_accumulation(objective, batch, engine, given.training, given.optim)


@pytest.mark.parametrize(("name", "stacks"), [("digits_ssl", 1), ("digits_mae", 2)], ids=["encoder", "and decoder"])
def test_activation_checkpointing_changes_nothing(train: Train, tmp_path: Path, name: str, stacks: int) -> None:
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
            keys += ["objective.decoder_depth=3"] * (stacks - 1)
            runs[again] = train(tmp_path / again, *keys, name=name), calls
    finally:
        hook.remove()
    (plain, once), (checkpointed, twice) = runs["false"], runs["true"]
    # The last block's are kept: the backward pass begins with them.
    assert (once, twice) == (12 * 3 * stacks, 12 * (3 + 2) * stacks)
    assert same(weights(checkpointed), weights(plain))
    assert losses(checkpointed) == losses(plain)


def test_the_average_is_what_is_published_and_trains_nothing(train: Train, tmp_path: Path) -> None:
    plain, averaged = train(tmp_path / "plain"), train(tmp_path / "averaged", "training.ema=0.5")
    assert losses(averaged) == losses(plain)
    trained = {n.removeprefix("encoder.network."): t for n, t in weights(averaged, "training.safetensors").items()}
    assert same(trained, weights(plain)) and not same(weights(averaged), weights(plain))
    assert same(load_file(averaged / "encoder.safetensors"), weights(averaged))


def test_deterministic_algorithms_learn_the_same(train: Train, tmp_path: Path) -> None:
    found = weights(train(tmp_path / "deterministic", "training.deterministic=true"))
    assert torch.are_deterministic_algorithms_enabled()
    expected = weights(train(tmp_path / "usual"))
    assert not torch.are_deterministic_algorithms_enabled()
    assert same(found, expected)


def test_batch_norm_needs_two_images(digits: Path, tmp_path: Path) -> None:
    keys = [f"data.train={digits}", f"run={tmp_path}/run", "data.lanes=8", "encoder.name=resnet10t"]
    keys += ["encoder.channels=1", "encoder.image_size=32", "training.batch_size=8", "training.accumulate=8"]
    with pytest.raises(UserError, match="batch norm needs at least two images per micro-batch"):
        execution.train(recipe.load_recipe("supervised_resnet50", keys), quiet=True)
