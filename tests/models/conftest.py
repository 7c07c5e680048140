"""Builders for tests of backbones: weights away from their start, images that fit, folders of saved weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def shaken() -> Callable[..., Any]:
    """Move weights away from their initial values, so that biases, norms and tokens take part; evaluation mode."""

    def shake(backbone: Any) -> Any:
        import torch

        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in backbone.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        return backbone.eval()

    return shake


@pytest.fixture
def pixels() -> Callable[..., Any]:
    """Random uint8 images of the backbone's size and channels."""

    def draw(backbone: Any, images: int = 2) -> Any:
        import torch

        shape = (images, backbone.channels, *backbone.image_size)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    return draw


@pytest.fixture
def saved() -> Callable[..., Path]:
    """Write a backbone's config.json and weights into a folder; returns the folder."""

    def write(folder: Path, backbone: Any) -> Path:
        from safetensors.torch import save_file

        from ssl_vit.models.backbone import CONFIG, WEIGHTS, state, write_config

        folder.mkdir(parents=True, exist_ok=True)
        write_config(backbone, folder / CONFIG)
        save_file(state(backbone), folder / WEIGHTS)
        return folder

    return write
