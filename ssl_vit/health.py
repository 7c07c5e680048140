"""What on this machine or in these shards would stop a run or slow it down: `ssl-vit doctor`."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from loky import cpu_count

from ssl_vit.data.places import parts_of
from ssl_vit.data.shards import open_shards
from ssl_vit.environment import environment
from ssl_vit.files import expanded
from ssl_vit.interfaces import RunError, UserError

_LITTLE_SPACE = 1  # GiB: a checkpoint of a ViT-B with its optimizer state


@dataclass(frozen=True)
class Finding:
    """level: `ok`, `slow` (a run works, but slower than it could) or `stop` (a run would not start or not finish)."""

    level: Literal["ok", "slow", "stop"]
    about: str
    text: str


def examine(data: str | None, run: str) -> list[Finding]:
    """Look at packages, devices, memory, disk and, where given, the shards.

    data: shards. run: folder that a run would write to.
    """
    return [*_machine(), *_disk(expanded(run)), *(_shards(data) if data else [])]


def _machine() -> Iterator[Finding]:
    about = environment()
    hardware = about["hardware"]
    cores, gpus = cpu_count(), hardware["gpus"]
    yield Finding("ok", "versions", ", ".join(f"{name} {version}" for name, version in about["versions"].items()))
    try:
        importlib.import_module("timm")
    except Exception as error:
        how = "install torch and torchvision together: pip install --upgrade torch torchvision"
        yield Finding("stop", "versions", f"timm and torchvision cannot be imported ({error}); {how}")
    yield Finding("ok", "processor", f"{hardware['processor']}, {cores} cores, {hardware['memory_gib']} GiB")
    for name in gpus:
        yield Finding("ok", "device", name)
    if cores < 4 * len(gpus):
        yield Finding("slow", "processor", f"{cores} cores for {len(gpus)} GPU(s): decoding may be too slow")
    if not torch.accelerator.is_available():
        yield Finding("slow", "device", "no GPU: small models and small images only (the demo takes minutes)")
        threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
        if threads.isdigit() and int(threads) < cores:
            yield Finding("slow", "processor", f"OMP_NUM_THREADS={threads} uses {threads} of {cores} cores")


def _disk(run: Path) -> Iterator[Finding]:
    folder = next(path for path in [run.absolute(), *run.absolute().parents] if path.is_dir())
    if not os.access(folder, os.W_OK):
        yield Finding("stop", "disk", f"{folder} cannot be written; choose another folder with run=PATH")
    free = shutil.disk_usage(folder).free / 2**30
    yield Finding("ok" if free > _LITTLE_SPACE else "stop", "disk", f"{free:.0f} GiB free at {folder}")


def _shards(data: str) -> Iterator[Finding]:
    try:
        for place in parts_of(data):
            shards = open_shards(place)
            classes = f"{len(shards.classes)} classes" if shards.classes else "no classes"
            yield Finding("ok", "shards", f"{place}: {shards.samples} samples in {len(shards.urls)} shards, {classes}")
    except (UserError, RunError) as error:
        yield Finding("stop", "shards", str(error))
