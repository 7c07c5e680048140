"""What of this machine and these shards would stop a run or slow it down: `ssl-vit doctor`."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ssl_vit.data.shards import open_shards
from ssl_vit.environment import environment
from ssl_vit.interfaces import RunError, UserError

_LITTLE_SPACE = 5  # GiB: some checkpoints of a ViT-B with its optimizer state
_LITTLE_SHARED = 1  # GiB: batches travel from loader processes through shared memory
_LARGE_IMAGE = 300  # KiB, about a megapixel of JPEG: four times the pixels of an ImageNet picture


@dataclass(frozen=True)
class Finding:
    """level: `ok`, `slow` (a run works, but slower than it need be) or `stop` (a run would not start or not end)."""

    level: Literal["ok", "slow", "stop"]
    about: str
    text: str


def examine(data: str | None, run: str) -> list[Finding]:
    """Look at packages, devices, memory, disk and, where named, the shards."""
    return [*_packages(), *_devices(), *_disk(Path(run)), *(_shards(data) if data else [])]


def _packages() -> list[Finding]:
    about = environment()
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    found = [Finding("ok", "versions", versions)]
    try:
        import timm
        import torchvision

        del timm, torchvision
    except Exception as error:
        mend = "install torch and torchvision together: pip install --upgrade torch torchvision"
        found.append(Finding("stop", "versions", f"timm and torchvision do not import ({error}); {mend}"))
    return found


def _devices() -> list[Finding]:
    hardware = environment()["hardware"]
    cores, memory = hardware["cores"], hardware["memory_gib"]
    found = [Finding("ok", "processor", f"{hardware['processor']}, {cores} cores, {memory} GiB")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old driver is a finding below, not a wall of text
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        size = properties.total_memory / 2**30
        found.append(Finding("ok", "device", f"cuda:{number}: {properties.name}, {size:.0f} GiB"))
        if properties.major >= 8:
            found.append(Finding("ok", "device", "bf16 is fast here: training.precision=bf16"))
        if cores < 4 * count:
            found.append(Finding("slow", "processor", f"{cores} cores for {count} GPU(s): decoding may not keep up"))
    if count == 0 and torch.backends.mps.is_available():
        found.append(Finding("ok", "device", "mps: an Apple GPU"))
    elif count == 0:
        found.append(Finding("slow", "device", "no GPU: small models and small images only (the demo takes minutes)"))
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads and threads.split(",")[0].isdigit() and int(threads.split(",")[0]) < cores and count == 0:
        found.append(Finding("slow", "processor", f"OMP_NUM_THREADS={threads} leaves cores of {cores} idle"))
    return found


def _disk(run: Path) -> list[Finding]:
    folder = next(path for path in [run.absolute(), *run.absolute().parents] if path.is_dir())
    found = []
    if not os.access(folder, os.W_OK):
        found.append(Finding("stop", "disk", f"{folder} cannot be written: name another folder with run=PATH"))
    free = shutil.disk_usage(folder).free / 2**30
    level: Literal["ok", "slow", "stop"] = "ok" if free > _LITTLE_SPACE else "stop"
    found.append(Finding(level, "disk", f"{free:.0f} GiB free at {folder}"))
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total / 2**30) < _LITTLE_SHARED:
        text = f"/dev/shm holds {size:.2f} GiB: loader workers may fail; start the container with --shm-size=8g"
        found.append(Finding("stop", "memory", text))
    return found


def _shards(data: str) -> list[Finding]:
    try:
        shards = open_shards(data)
    except (UserError, RunError) as error:
        return [Finding("stop", "shards", str(error))]
    count, cores = len(shards.urls), os.cpu_count() or 1
    classes = f"{len(shards.classes)} classes" if shards.classes else "no classes"
    found = [Finding("ok", "shards", f"{shards.samples} samples in {count} shards, {classes}")]
    if count < cores:
        again = f"ssl-vit shards make SOURCE OUT --overwrite --shards {cores}"
        text = f"{count} shard(s) feed at most {count} loader worker(s), and this machine has {cores} cores: {again}"
        found.append(Finding("slow", "shards", text))
    largest = max((size for size in shards.sizes if size), default=0)
    if largest > 4 << 30:
        text = (
            f"a shard has {largest / 2**30:.0f} GiB: pack smaller ones (--shard-size), to resume and to share out well"
        )
        found.append(Finding("slow", "shards", text))
    known = [size for size in shards.sizes if size]
    each = sum(known) / max(shards.samples, 1) / 1024
    if each > _LARGE_IMAGE:
        text = (
            f"{each:.0f} KiB an image: large pictures; `shards make --resize 256` makes decoding several times cheaper"
        )
        found.append(Finding("slow", "shards", text))
    return found
