"""Steps on a CUDA device that need not be there: torch's fake tensors have devices and shapes but no numbers, so that
whatever mixes devices or asks for a number, for which a real device would make the host wait, raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssl_vit.interfaces import Batch
from ssl_vit.objectives import classification, lejepa, masked_autoencoder, masked_patch
from ssl_vit.training import OptimConfig, TrainingConfig
from ssl_vit.training.logging import Window
from ssl_vit.training.loop import Job, Trainer

CUDA = torch.device("cuda", 0)


class Crossings(TorchDispatchMode):
    """Refuses operations with tensors on two devices: copies, for which the host waits, among them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        assert len({tensor.device for tensor in tensors}) < 2, f"{func} goes from device to device"
        return result


@contextmanager
def fake() -> Iterator[None]:
    with FakeTensorMode(), Crossings():
        yield


@pytest.fixture(autouse=True)
def _torch_can() -> None:
    try:
        with fake():
            torch.zeros(4, device=CUDA)[1:]
    except RuntimeError as error:
        pytest.skip(f"this torch asks the CUDA driver even about fake tensors: {str(error).splitlines()[0]}")


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """By hand: `torch.autocast` does nothing where there is no device."""
    if dtype:
        torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", dtype is not None)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def engine(dtype: torch.dtype | None = None) -> Any:
    """Accelerate's, as far as a step uses it. Gradients appear without a backward pass, which fake tensors of a device
    that is not there do not have."""

    def prepare(objective: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        optimizer.optimizer = optimizer
        return objective, optimizer

    return SimpleNamespace(
        device=CUDA,
        precision="fp32",
        distributed_type=DistributedType.NO,
        is_fsdp2=False,
        is_main_process=True,
        num_processes=1,
        prepare=prepare,
        unwrap_model=lambda model: model,
        autocast=lambda: autocast(dtype),
        no_sync=lambda _: nullcontext(),
    )


class Scaler(torch.amp.GradScaler):
    """Scales nothing; a backward pass through it sets gradients."""

    def __init__(self, objective: nn.Module) -> None:
        super().__init__("cpu", enabled=False)
        self.objective = objective

    def scale(self, outputs: Any) -> Any:
        def backward() -> None:
            for parameter in self.objective.parameters():
                parameter.grad = torch.empty_like(parameter)

        return SimpleNamespace(backward=backward)


def to_cuda(objective: nn.Module, count: int, columns: int, views: int) -> Batch:
    """Put the objective there, and make a batch for it."""
    objective._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA))
    height, width = objective.encoder.image_size  # type: ignore[union-attr, misc]
    return Batch(
        torch.empty(count, 3, height, width, dtype=torch.uint8, device=CUDA),
        torch.empty(count, dtype=torch.int64, device=CUDA),
        torch.empty(count, objective.noise_per_sample(), device=CUDA),  # type: ignore[operator]
        torch.empty(count, dtype=torch.bool, device=CUDA),
        torch.empty(count, dtype=torch.int64, device=CUDA),
        torch.empty(count, dtype=torch.bool, device=CUDA),
        [""] * count,
        lane_size=2,
        jitter=torch.empty(count, columns, device=CUDA),
        views=views,
    )


def step(
    objective: nn.Module, optim: str = "adamw", dtype: torch.dtype | None = None, columns: int = 3, views: int = 1
) -> None:
    """One of the real loop, and its row in the window. Not by SGD, whose fused kernel knows no fake tensors."""
    with fake():
        batch = to_cuda(objective, 8, columns, views)
        training = TrainingConfig(steps=9, batch_size=8, ema=0.9)
        config = OptimConfig(name=optim, lr=0.1)
        trainer = Trainer(Job(objective, iter, 2, 9, training, config, engine(dtype), quiet=True))  # type: ignore[arg-type]
        trainer.scaler, trainer.progress.accumulate = Scaler(objective), 2
        window, result = Window(0), trainer.train_step(batch)
        window.add(1, result)
        outputs = [*(output.loss for output in result.outputs), *result.outputs[0].metrics.values(), *window.rows]
        assert {output.device for output in outputs} == {CUDA} and {output.dtype for output in outputs} == {
            torch.float32
        }


@pytest.mark.parametrize(
    ("target", "source", "dtype", "kind"),
    [
        ("mean_color", "batch", torch.bfloat16, {"dropout": 0.1, "drop_path": 0.1}),
        ("downsized", "image", torch.float16, {"name": "vit_medium_patch16_reg4_gap_256"}),
        ("l1", "batch", None, {}),
        ("pixels", "batch", None, {"positions": "sincos2d", "mean": (0.1, 0.2, 0.3), "std": (0.2, 0.2, 0.3)}),
    ],
)
def test_a_pretraining_step_waits_for_nothing(
    make_encoder: Callable[..., Any], target: Any, source: Any, dtype: torch.dtype | None, kind: dict[str, Any]
) -> None:
    kinds: dict[str, Any] = {"target": "pixels", "loss": "l1", "mask_size": 8} if target == "l1" else {"target": target}
    config = masked_patch.Config(**kinds, random_from=source, bits=2)
    step(masked_patch.Objective(make_encoder(**kind), config), dtype=dtype)


@pytest.mark.parametrize("kind", [{"dropout": 0.1}, {"name": "vit_medium_patch16_reg4_gap_256"}])
def test_a_masked_autoencoder_step_waits_for_nothing(make_encoder: Callable[..., Any], kind: dict[str, Any]) -> None:
    step(masked_autoencoder.Objective(make_encoder(**kind), masked_autoencoder.Config()), dtype=torch.bfloat16)


def test_a_supervised_step_waits_for_nothing(make_encoder: Callable[..., Any]) -> None:
    config = classification.Config(head="probe", pooling="mean", classes=5, label_smoothing=0.1)
    step(classification.Objective(make_encoder(), config), "lars", torch.bfloat16)


def test_a_lejepa_step_waits_for_nothing(make_encoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directions are drawn on the host and copied from pinned memory, which fake tensors do not know."""
    directions = lambda self, batch: torch.empty(16, 8, device=CUDA)  # noqa: E731
    monkeypatch.setattr(lejepa.Objective, "directions", directions)
    step(lejepa.Objective(make_encoder(), lejepa.Config(projector_width=32)), columns=6, views=2)
