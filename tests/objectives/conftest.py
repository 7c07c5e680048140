"""Builders for tests of objectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def make_objective(make_encoder: Callable[..., Any]) -> Callable[..., Any]:
    """A masked-patch objective: `encoder` overrides the small ViT's configuration, other keywords the objective's."""

    def build(*, encoder: dict[str, Any] | None = None, **config: Any) -> Any:
        import torch

        from ssl_vit.objectives.masked_patch import Config, Objective

        built = make_encoder(**(encoder or {}))
        torch.manual_seed(0)
        return Objective(built, Config(**config))

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
