"""What a reader needs to interpret a number: versions, hardware, commit, world size."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from ssl_vit.training.distributed import Engine


def environment(accelerator: Engine | None = None) -> dict[str, Any]:
    """Versions, hardware, git commit and world size: what a reader needs to interpret a number."""
    packages = ("torch", "torchvision", "timm", "accelerate", "simplejpeg", "datasets", "ssl-vit")
    hardware = {
        "machine": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
    }
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "hardware": hardware,
        "git": _git_commit(),
        "world_size": accelerator.num_processes if accelerator else 1,
        "distribution": accelerator.distributed_type.value if accelerator else "NO",
        "device": str(accelerator.device) if accelerator else "cpu",
        "precision": accelerator.precision if accelerator else "fp32",
        "float32_products": torch.get_float32_matmul_precision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout without being installed
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _git_commit() -> str | None:
    git = shutil.which("git")
    if git is None or not (Path(__file__).parent.parent / ".git").exists():  # installed: another project's commit
        return None
    command = [git, "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
