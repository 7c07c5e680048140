"""Runs in processes of their own, for the tests that need a CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STEPS = 200
# Prints the most memory that the training had allocated, in bytes, as its last line.
TRAIN = """
import sys, torch
from ssl_vit import execution, recipe

name, *keys = sys.argv[1:]
execution.train(recipe.load_recipe(name, keys), quiet=True)
print(torch.cuda.max_memory_allocated())
"""


def keys(pictures: Path, run: Path, *more: str, recipe: str = "pretrain_vit_tiny") -> list[str]:
    """A recipe and overrides that train a ViT-S/16 on these images."""
    fixed = [f"data.train={pictures}", f"run={run}", "encoder.name=vit_small_patch16_224", "encoder.image_size=224"]
    fixed += ["data.lanes=8", "data.workers=2", "training.batch_size=32", f"training.steps={STEPS}"]
    fixed += ["training.log_every=20", "training.picture_every=0", "training.checkpoint_every=100"]
    fixed += ["optim.warmup_steps=20", "optim.lr=5e-4", "training.trackers={}", "training.epochs=null"]
    return [recipe, *fixed, *more]


def run(*command: str, gpu: bool = True, fails: bool = False) -> str:
    """Run Python with these arguments, with or without the GPU. Returns its output: stdout, or stderr if it fails."""
    environment = os.environ | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=500, check=False, env=environment
    )
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return done.stderr if fails else done.stdout


def train(*arguments: str) -> int:
    """Train by `keys`. Returns the peak memory in bytes."""
    return int(run("-c", TRAIN, *arguments).split()[-1])


def ssl_vit(*arguments: str, gpu: bool = True, fails: bool = False) -> str:
    return run("-m", "ssl_vit", *arguments, gpu=gpu, fails=fails)
