"""Attention in bf16 on a CPU: another kernel, the same function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssl_vit.models import blocks
from ssl_vit.training.distributed import make_accelerator


class Kernels(TorchDispatchMode):
    """Counts calls of torch's fused attention on CPUs."""

    fused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fused += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def engine() -> Iterator[Any]:
    yield make_accelerator("bf16")


@pytest.mark.parametrize(
    ("how", "fused"), [("bf16", False), ("fp32", True), ("evaluation", True), ("long", True), ("pruned", False)]
)
def test_only_short_sequences_that_train_in_bf16_go_without_the_fused_kernel(
    make_encoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, how: str, fused: bool
) -> None:
    encoder = make_encoder()
    if how == "long":
        monkeypatch.setattr(blocks, "_LONGEST", 16)  # there are 17 tokens
    keep = torch.zeros(2, 3, dtype=torch.int64) if how == "pruned" else None
    precision = nullcontext() if how == "fp32" else torch.autocast("cpu", torch.bfloat16)
    gradients = torch.no_grad() if how == "evaluation" else nullcontext()
    with Kernels() as kernels, precision, gradients:
        encoder.encode(encoder.embed(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)), keep)
    assert kernels.fused == (2 if fused else 0)


def test_outputs_and_gradients_are_as_close_to_float32_as_those_of_the_fused_kernel(
    make_encoder: Callable[..., Any], make_batch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, images = make_encoder(), make_batch(8).images

    def step(dtype: torch.dtype) -> list[torch.Tensor]:
        encoder.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = encoder(images).float()
        (output * torch.linspace(-1, 1, output.shape[-1])).sum().backward()
        return [output.detach(), *(p.grad.clone() for p in encoder.parameters() if p.grad is not None)]

    def error(found: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(a - b).norm() / b.norm().clamp(min=1e-6) for a, b in zip(found, exact, strict=True)])

    exact = step(torch.float32)
    products = error(step(torch.bfloat16))
    monkeypatch.setattr(blocks, "_LONGEST", 0)
    assert step(torch.float32)[0].equal(exact[0])
    assert products.max() < 0.1 and products.mean() < 2 * error(step(torch.bfloat16)).mean()


def test_activations_that_are_computed_again_use_the_same_kernel(
    make_encoder: Callable[..., Any], make_batch: Callable[..., Any]
) -> None:
    found = []
    for again in (False, True):
        encoder = make_encoder(depth=3)
        encoder.network.set_grad_checkpointing(again)
        with torch.autocast("cpu", torch.bfloat16):
            output = encoder(make_batch(2).images).float()
        with Kernels() as kernels:  # outside of autocast, as in a training step
            output.sum().backward()
        assert not kernels.fused
        found.append([p.grad for p in encoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
