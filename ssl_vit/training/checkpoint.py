"""Checkpoints: a folder a step, written beside, flushed to disk, then renamed, so that a kill leaves none half-made.

A folder holds `config.json` + `backbone.safetensors` (timm loads them as they are), `objective.safetensors` (mask token
and heads), `training.pt` (optimiser, scaler, random states; read with `weights_only`) and `state.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ssl_vit.data.plan import LanePosition
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.models import backbone as backbones

_PREFIX = "backbone.vit."


@dataclass
class Progress:
    """Where a run stands: optimiser steps done, seconds trained, each lane's position in which shards."""

    step: int = 0
    seconds: float = 0.0
    lanes: list[LanePosition] = field(default_factory=list)
    data: str = ""


def folders(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step_*") if (path / "state.json").is_file())


def save(run: Path, progress: Progress, objective: nn.Module, training: dict[str, Any], keep_last: int) -> Path:
    """Write a checkpoint of the unwrapped objective; then drop all but the newest `keep_last`.

    Raises RunError when the disk refuses; older checkpoints are untouched then.
    """
    target = run / "checkpoints" / f"step_{progress.step:08d}"
    beside = target.with_name(f".{target.name}.tmp")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        write_backbone(_backbone(objective), beside)
        rest = {
            n: t.detach().cpu().contiguous() for n, t in objective.state_dict().items() if not n.startswith(_PREFIX)
        }
        save_file(rest, beside / "objective.safetensors")
        torch.save(training, beside / "training.pt")
        (beside / "state.json").write_text(json.dumps(asdict(progress)) + "\n")
        for path in [*beside.iterdir(), beside]:
            _flush(path)
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        _flush(target.parent)
    # torch reports a full disk as RuntimeError, safetensors as SafetensorError
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        kept = folders(run)
        last = f"the last good one is {kept[-1]}" if kept else "there is no earlier one"
        raise RunError(
            f"could not save checkpoint {target}: {error}\n{last}; free the disk and run it again"
        ) from error
    for old in folders(run)[:-keep_last]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def write_backbone(backbone: backbones.Backbone, folder: Path) -> None:
    """`config.json` + `backbone.safetensors`: what `timm.create_model("local-dir:FOLDER", pretrained=True)` loads."""
    backbones.write_config(backbone, folder / backbones.CONFIG)
    save_file(backbones.state(backbone), folder / backbones.WEIGHTS)


def publish_backbone(backbone: backbones.Backbone, run: Path) -> None:
    """Put the backbone at the top of the run directory, by rename."""
    beside = run / ".backbone.tmp"
    beside.mkdir(exist_ok=True)
    write_backbone(backbone, beside)
    for path in list(beside.iterdir()):
        _flush(path)
        path.rename(run / path.name)
    beside.rmdir()


def load(folder: Path, objective: nn.Module) -> tuple[Progress, dict[str, Any]]:
    """Restore the objective in place; returns the progress and the training state (optimiser, scaler, random states).

    Raises UserError when a file is damaged or the weights belong to another recipe.
    """
    try:
        state = json.loads((folder / "state.json").read_text())
        lanes = [LanePosition(**lane) for lane in state["lanes"]]
        weights = load_file(folder / backbones.WEIGHTS)
        rest = load_file(folder / "objective.safetensors")
        training = torch.load(folder / "training.pt", map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, SafetensorError) as error:
        raise UserError(
            f"{folder}: not a readable checkpoint ({error}); delete it to fall back to the one before"
        ) from None
    backbones.load_state(_backbone(objective), weights, str(folder))
    try:
        missing = objective.load_state_dict(rest, strict=False)
    except RuntimeError as error:
        raise UserError(f"{folder}: from another recipe: {str(error).splitlines()[-1].strip()}") from None
    unknown = [*missing.unexpected_keys, *(k for k in missing.missing_keys if not k.startswith(_PREFIX))]
    if unknown:
        raise UserError(f"{folder}: from another recipe: {', '.join(unknown[:4])} do not fit its objective")
    return Progress(state["step"], state["seconds"], lanes, state["data"]), training


def _backbone(objective: nn.Module) -> backbones.Backbone:
    assert isinstance(objective.backbone, backbones.Backbone)
    return objective.backbone


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
