"""Builders for tests of objectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def make_objective(make_encoder: Callable[..., Any]) -> Callable[..., Any]:
    """An objective: `encoder` overrides the small ViT's configuration, other keywords the objective's."""

    def build(name: str = "masked_patch", *, encoder: dict[str, Any] | None = None, **config: Any) -> Any:
        import torch

        from ssl_vit import plugins

        module, built = plugins.load("objectives", name), make_encoder(**(encoder or {}))
        torch.manual_seed(0)
        return module.Objective(built, module.Config(**config))

    return build


@pytest.fixture
def spread() -> Callable[..., Any]:
    """Give an objective's head weights so large that predictions differ between patches: a mix-up cannot hide."""

    def widen(objective: Any) -> Any:
        import torch

        with torch.no_grad():
            objective.head.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
            objective.head.bias.normal_(std=0.5, generator=torch.Generator().manual_seed(2))
        return objective

    return widen


@pytest.fixture
def learned(make_batch: Callable[..., Any]) -> Callable[..., Any]:
    """Train an objective on 128 digits per step, each step `stride` digits further. Returns a batch of unseen ones."""

    def learn(objective: Any, steps: int, stride: int) -> Any:
        import torch
        from sklearn.datasets import load_digits

        digits = torch.from_numpy((load_digits().images * 255 / 16).round()).to(torch.uint8)[:, None]
        optimizer = torch.optim.AdamW(objective.parameters(), lr=4e-3)

        def batch(images: Any, seed: int) -> Any:
            still = torch.zeros(len(images), dtype=torch.bool)
            return make_batch(len(images), noise=objective.noise_per_sample(), seed=seed, images=images, flip=still)

        for step in range(steps):
            optimizer.zero_grad()
            objective(batch(digits[step * stride : step * stride + 128], step)).loss.backward()
            optimizer.step()
        return batch(digits[1408:], 99)

    return learn
