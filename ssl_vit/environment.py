"""What a reader needs to interpret a number: versions, hardware, commit, world size."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from ssl_vit.training.distributed import Engine

_PACKAGES = ("torch", "torchvision", "timm", "accelerate", "simplejpeg", "datasets", "ssl-vit")


def environment(accelerator: Engine | None = None) -> dict[str, Any]:
    """Versions, hardware and git commit; of one training or evaluation also its processes, device and precision."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "hardware": {
            "machine": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        },
        "git": _git_commit(Path(__file__).parents[1]),
        **(_computation(accelerator) if accelerator else {}),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _computation(accelerator: Engine) -> dict[str, Any]:
    return {
        "world_size": accelerator.num_processes,
        "distribution": accelerator.distributed_type.value,
        "device": str(accelerator.device),
        "precision": accelerator.precision,
        "float32_products": torch.get_float32_matmul_precision(),
    }


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout without being installed
        return "not installed"


@cache
def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor())


@cache
def _git_commit(checkout: Path) -> str | None:
    """Commit of the checkout when this process first asks. None where the package is installed: the commit would be
    another project's."""
    try:
        command = ["git", "--git-dir", str(checkout / ".git"), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:  # no git
        return None
