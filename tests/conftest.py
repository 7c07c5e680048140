"""Small builders that several tests share; torch is imported inside them, so that torch-free tests stay fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

# The models are so small that a second thread only waits for the first, in this process and in those that tests start.
# Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests take minutes on two idle cores; on a busy machine they may take four times as long. The documents come
    first: their long tests would otherwise run alone at the end."""
    items.sort(key=lambda item: "tests/docs" not in item.nodeid)
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(1200))


def few_of(whole: Callable[..., Any]) -> Callable[..., Any]:
    """A source's `open_images` cut to the first 400 digits to train on and the first 100 to test on."""

    def open_images(place: str, split: str) -> Any:
        found, count = whole(place, split), {"train": 400, "test": 100}[split]
        return replace(found, items=found.items[:count], labels=found.labels[:count], groups=found.groups[:count])

    return open_images


@pytest.fixture(scope="session", autouse=True)
def image_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where images that tests name as data are packed, in this process and in those that tests start."""
    folder = tmp_path_factory.mktemp("image_cache")
    os.environ["SSL_VIT_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Files need not survive a power failure here. New processes that tests start do wait, forked ones do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards of 400 digits, `train`, and of 100 of other forms, `test`; not to be written to."""
    from ssl_vit.data.packing import pack
    from ssl_vit.data.packing.plan import Options
    from ssl_vit.data.packing.sources import digits

    folder = tmp_path_factory.mktemp("few_digits")
    for split in ("train", "test"):
        pack(few_of(digits.open_images)("", split), folder / split, Options(shards=4), progress=False)
    return folder


@pytest.fixture
def fewer_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source `digits` has only those of `few_digits`."""
    from ssl_vit.data.packing.sources import digits

    monkeypatch.setattr(digits, "open_images", few_of(digits.open_images))


@pytest.fixture
def make_encoder() -> Callable[..., Any]:
    """Build a ViT of a few thousand parameters; keyword arguments override `EncoderConfig`, `seed` its weights."""

    def build(seed: int = 0, **overrides: Any) -> Any:
        import torch

        from ssl_vit.models import EncoderConfig
        from ssl_vit.models.factory import build as build_encoder

        sizes = {"name": "vit_tiny_patch16_224", "image_size": 16, "channels": 3, "patch_size": 4}
        sizes |= {"width": 16, "depth": 2, "heads": 2}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return build_encoder(EncoderConfig(**(sizes | overrides)))

    return build


@pytest.fixture
def make_batch() -> Callable[..., Any]:
    """A random `Batch`: images (B, C, size, size), `noise` uniform numbers a sample; keywords replace its fields."""

    def build(
        count: int,
        *,
        channels: int = 3,
        size: int = 16,
        noise: int = 0,
        classes: int = 5,
        seed: int = 0,
        **replace: Any,
    ) -> Any:
        import torch

        from ssl_vit.interfaces import Batch

        generator = torch.Generator().manual_seed(seed)
        tensors = {
            "images": torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator),
            "labels": torch.randint(0, classes, (count,), generator=generator),
            "noise": torch.rand(count, noise, generator=generator),
            "flip": torch.rand(count, generator=generator) < 0.5,
            "indices": torch.arange(count),
            "valid": torch.ones(count, dtype=torch.bool),
        }
        return Batch(**(tensors | {"keys": [str(n) for n in range(count)]} | replace))

    return build


@pytest.fixture
def called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process, in a directory of its own: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        from ssl_vit import cli

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["ssl-vit", *map(str, arguments)])
        capfd.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def call(called: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str]]:
    """The same: (exit code, stderr)."""
    return lambda *arguments: called(*arguments)[::2]


@pytest.fixture(scope="session")
def saved() -> Callable[..., Path]:
    """Write an encoder's config.json and weights into a folder; returns the folder."""

    def write(folder: Path, encoder: Any) -> Path:
        from safetensors.torch import save_file

        from ssl_vit.files import WEIGHTS
        from ssl_vit.models.factory import CONFIG, state, write_config

        folder.mkdir(parents=True, exist_ok=True)
        write_config(encoder, folder / CONFIG)
        save_file(state(encoder), folder / WEIGHTS)
        return folder

    return write
