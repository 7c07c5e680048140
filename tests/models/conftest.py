"""Builders for tests of encoders: weights away from their start, images that fit, folders of saved weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def shaken() -> Callable[..., Any]:
    """Move weights away from their initial values, so that biases, norms and tokens take part; evaluation mode."""

    def shake(encoder: Any) -> Any:
        import torch

        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        return encoder.eval()

    return shake


@pytest.fixture
def pixels() -> Callable[..., Any]:
    """Random uint8 images of the encoder's size and channels."""

    def draw(encoder: Any, images: int = 2) -> Any:
        import torch

        shape = (images, encoder.channels, *encoder.image_size)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    return draw
