"""What stays in float32 under autocast, and precisions that a device does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from ssl_vit.interfaces import UserError
from ssl_vit.objectives import classification, masked_autoencoder, masked_patch
from ssl_vit.training.distributed import Engine, make_accelerator

Make = Callable[..., Any]


def targets_of(objective: Any, batch: Any) -> torch.Tensor:
    """Of all patches, where the targets are patches."""
    if isinstance(objective, masked_autoencoder.Objective):
        return objective.targets(batch.images, torch.arange(16).expand(len(batch.images), -1))
    found: torch.Tensor = objective.targets(batch.images)
    return found


@pytest.mark.parametrize("target", ["mean_color", "downsized", "pixels", "labels", "autoencoder"])
def test_norms_losses_and_targets_are_float32_under_autocast(make_encoder: Make, make_batch: Make, target: str) -> None:
    encoder = make_encoder(positions="learned")
    if target == "labels":
        objective: Any = classification.Objective(encoder, classification.Config(classes=5))
    elif target == "autoencoder":
        objective = masked_autoencoder.Objective(encoder, masked_autoencoder.Config())
    else:
        objective = masked_patch.Objective(encoder, masked_patch.Config(target=target, bits=1))
    batch = make_batch(4, noise=objective.noise_per_sample())
    seen: dict[str, set[torch.dtype]] = {"norms": set(), "products": set(), "log_softmax": set()}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        kind = "norms" if isinstance(module, nn.LayerNorm) else "products" if isinstance(module, nn.Linear) else None
        if kind == "norms":
            seen[kind] |= {inputs[0].dtype, output.dtype}
        elif kind:
            seen[kind].add(output.dtype)

    cross_entropy = F.cross_entropy

    def watched(logits: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
        seen["log_softmax"] |= {logits.dtype}
        return cross_entropy(logits, labels, **more)

    hook = nn.modules.module.register_module_forward_hook(look)
    F.cross_entropy = watched  # type: ignore[assignment]
    try:
        with torch.autocast("cpu", torch.bfloat16):
            output = objective(batch)
            targets = targets_of(objective, batch) if target != "labels" else None
    finally:
        hook.remove()
        F.cross_entropy = cross_entropy
    assert seen["products"] == {torch.bfloat16}  # autocast was at work
    assert seen["norms"] == {torch.float32}
    assert seen["log_softmax"] == (set() if target in ("pixels", "autoencoder") else {torch.float32})
    assert output.loss.dtype == torch.float32
    assert all(metric.dtype == torch.float32 for metric in output.metrics.values())
    if targets is not None:
        assert targets.dtype == (torch.float32 if target in ("pixels", "autoencoder") else torch.int64)
        assert torch.equal(targets, targets_of(objective, batch))  # the same as without autocast
    output.loss.backward()
    assert {p.grad.dtype for p in objective.parameters() if p.grad is not None} == {torch.float32}


def test_each_engine_of_a_process_has_its_own_precision() -> None:
    engines, left = [make_accelerator("bf16"), make_accelerator("fp32")], torch.ones(2, 2)
    dtypes = []
    for engine in engines:
        with engine.autocast():
            dtypes.append((left @ left).dtype)
    assert dtypes == [torch.bfloat16, torch.float32]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize(("precision", "fix"), [("fp16", "use bf16 or fp32"), ("tf32", "use fp32")])
def test_a_precision_that_a_cpu_does_not_have_is_refused(precision: Any, fix: str) -> None:
    with pytest.raises(UserError, match=rf"training.precision={precision} needs .*{fix}"):
        make_accelerator(precision)


def test_float32_products_stay_float32_whatever_accelerate_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA its constructor allows TF32 where a compiler is configured (ACCELERATE_DYNAMO_BACKEND)."""
    constructor = Engine.__init__

    def allows_tf32(self: Engine, *arguments: Any, **keywords: Any) -> None:
        constructor(self, *arguments, **keywords)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    monkeypatch.setattr(Engine, "__init__", allows_tf32)
    make_accelerator("fp32")
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_other_ways_to_shard_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(UserError, match=rf"{kind} is not supported: use FSDP2 \(recipes/launch/fsdp2.yaml\)"):
        make_accelerator()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_fsdp_is_not_silently_something_else_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"FSDP was launched, but Accelerate runs NO here: .*cpu\.yaml"):
        make_accelerator()
