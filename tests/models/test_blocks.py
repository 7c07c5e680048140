"""The last block computed only where it is read gives what the whole block gives, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import Block

from ssl_vit.models.blocks import LastBlock

SIZES: dict[str, dict[str, Any]] = {
    "one block": {"depth": 1},
    "registers and layer scale": {"name": "vit_small_patch14_reg4_dinov2", "image_size": 28, "patch_size": 7},
    "rectangle, dropped paths": {"image_size": (16, 24), "drop_path": 0.5},
}


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("read", ["patches", "token"])
@pytest.mark.parametrize("kind", SIZES)
def test_loss_and_gradients_are_those_of_the_whole_block(
    make_encoder: Callable[..., Any], kind: str, read: str
) -> None:
    model = make_encoder(**SIZES[kind]).double().train()
    assert isinstance(model.network.blocks[-1], LastBlock)
    images = torch.randint(0, 256, (5, 3, *model.image_size), generator=torch.Generator().manual_seed(1))
    keep = torch.stack([torch.randperm(model.patches)[: model.patches // 2] for _ in range(5)])
    model.normalized = lambda pixels: (pixels / 127.5 - 1).double()
    target = torch.randn(model.width, dtype=torch.float64)

    def loss() -> torch.Tensor:
        if read == "token":
            vectors = model.represent(images, "token")
        else:
            vectors = model.encode(model.embed(images), keep_BK=keep)
        return (vectors * target).sin().mean()

    torch.manual_seed(3)
    pruned = loss()
    found = gradients(model, pruned)
    model.network.blocks[-1].__class__ = Block
    torch.manual_seed(3)
    whole = loss()
    expected = gradients(model, whole)
    assert abs(pruned - whole) < 1e-14
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-12, name


def test_blocks_of_other_kinds_compute_everything(make_encoder: Callable[..., Any]) -> None:
    for name in ("vit_base_patch16_rpn_224", "vit_base_patch16_xp_224"):
        model = make_encoder(name=name).eval()
        assert not isinstance(model.network.blocks[-1], LastBlock)
        images = torch.randint(0, 256, (2, 3, *model.image_size), dtype=torch.uint8)
        keep = torch.tensor([[0, 3], [5, 1]])
        outputs = model.encode(model.embed(images))[:, model.prefix_tokens :]
        kept = model.finish(outputs.gather(1, keep[..., None].expand(-1, -1, model.width)))
        assert torch.allclose(model.encode(model.embed(images), keep_BK=keep), kept, atol=1e-6)
