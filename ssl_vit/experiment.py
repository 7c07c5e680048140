"""Recipe -> objects -> loop or evaluators: the one place where the rooms are wired together."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from ssl_vit import plugins, recipe
from ssl_vit.analysis import reconstruction
from ssl_vit.data import DataConfig
from ssl_vit.data.decode import check_channels
from ssl_vit.data.plan import LanePosition, check_topology
from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.data.stream import Chunk, TrainStream, View, train_batches
from ssl_vit.data.transforms import train_transform
from ssl_vit.interfaces import Batch, Config, UserError
from ssl_vit.models import BackboneConfig, backbone, position
from ssl_vit.recipe import Recipe
from ssl_vit.training import checkpoint, loop

_MAY_CHANGE = ("run", "training.log_every", "training.checkpoint_every", "training.picture_every", "training.keep_last",
               "data.workers", "data.cache_mb", "data.on_bad_sample")
_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def make_accelerator(precision: str = "fp32") -> Accelerator:
    """Accelerate's engine, as `accelerate launch` set it up; the data plan shards and the loop accumulates by itself."""
    return Accelerator(mixed_precision=_PRECISION[precision])


def build_backbone(config: BackboneConfig, init_from: str | None) -> backbone.Backbone:
    """A new backbone, with the weights of `init_from` where given (positions resampled to the new image size)."""
    model = backbone.build(config)
    if init_from:
        source = backbone.load(init_from)
        weights = backbone.state(source)
        old, new = source.vit.patch_embed.grid_size, model.vit.patch_embed.grid_size
        weights["pos_embed"] = position.resample(weights["pos_embed"], old, new, model.vit.num_prefix_tokens)
        backbone.load_state(model, weights, init_from)
    return model


def stream_factory(
    shards: ShardSet,
    *,
    data: DataConfig,
    image_size: int,
    channels: int,
    noise: int,
    seed: int,
    batch_size: int,
    accumulate: int,
    accelerator: Accelerator,
    classes: int | None,
    needs_labels: bool,
    keep: Sequence[np.ndarray] | None = None,
) -> Callable[[list[LanePosition]], Iterator[tuple[Batch, Chunk]]]:
    """From lane positions to this rank's endless training batches. Raises UserError for an impossible topology."""
    check_channels(channels)
    check_topology(
        shards=len(shards.urls),
        samples=shards.samples if keep is None else sum(len(members) for members in keep),
        lanes=data.lanes,
        batch_size=batch_size,
        ranks=accelerator.num_processes,
        workers=data.workers,
        accumulate=accumulate,
    )
    transform = train_transform(image_size, data.augment)
    view = View(transform, channels, classes, noise, data.augment.flip, seed, needs_labels)

    def batches(positions: list[LanePosition]) -> Iterator[tuple[Batch, Chunk]]:
        stream = TrainStream(
            shards,
            view,
            batch_size=batch_size,
            lanes=data.lanes,
            workers=data.workers,
            rank=accelerator.process_index,
            ranks=accelerator.num_processes,
            positions=positions,
            keep=keep,
            cache_mb=data.cache_mb,
            strict=data.on_bad_sample == "fail",
        )
        return train_batches(stream, accelerator.device)

    return batches


@dataclass(frozen=True)
class Trained:
    """A training run as it stands: its directory, and whether every step was done."""

    run: Path
    finished: bool


def train(settings: Recipe, *, quiet: bool = False) -> Trained:
    """Run (or resume, or leave alone when finished) the training stage of a recipe.

    Raises UserError for input that cannot work, before the first step wherever that can be seen, and RunError for a
    failure on the way (non-finite loss, full disk).
    """
    accelerator = make_accelerator(settings.training.precision)
    run = settings.run_directory
    shards = open_shards(settings.data.train)
    total = settings.training.total_steps(shards.samples)
    if accelerator.is_main_process:
        _open_run(run, settings, accelerator)
    accelerator.wait_for_everyone()
    set_seed(settings.seed)
    module = plugins.load("objectives", str(settings.objective.name))  # type: ignore[attr-defined]
    encoder = build_backbone(settings.backbone, settings.init_from)
    classes = len(shards.classes) if shards.classes else None
    objective: nn.Module = module.Objective(encoder, settings.objective, classes)
    parameters = sum(p.numel() for p in objective.parameters())
    batches = stream_factory(
        shards,
        data=settings.data,
        image_size=settings.backbone.image_size,
        channels=settings.backbone.channels,
        noise=objective.noise_per_sample(),  # type: ignore[operator]
        seed=settings.seed,
        batch_size=settings.training.batch_size,
        accumulate=settings.training.accumulate,
        accelerator=accelerator,
        classes=getattr(settings.objective, "classes", None) or classes,
        needs_labels=getattr(objective, "needs_labels", False),
    )
    # From here on each rank draws its own dropout; the initialisation above was the same on all.
    set_seed(settings.seed + 1 + accelerator.process_index)
    outcome = loop.train(
        loop.Job(
            name=settings.name,
            objective=objective,
            batches=batches,
            lanes=settings.data.lanes,
            total_steps=total,
            training=settings.training,
            optim=settings.optim,
            accelerator=accelerator,
            run=run,
            picture=_pictures(run) if hasattr(module, "mean_colour_classes") else None,
            quiet=quiet,
        )
    )
    if accelerator.is_main_process and outcome.finished:
        checkpoint.publish_backbone(encoder, run)
        summary = {
            "name": settings.name,
            "objective": settings.objective.name,  # type: ignore[attr-defined]
            "steps": outcome.steps,
            "images_seen": outcome.steps * settings.training.batch_size,
            "seconds": round(outcome.seconds, 2),
            "parameters": parameters,
            "samples": shards.samples,
            "processes": accelerator.num_processes,
        }
        write_json(run / "summary.json", summary)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return Trained(run, outcome.finished)


def _pictures(run: Path) -> loop.Picture:
    def draw(objective: nn.Module, batch: Batch, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = run / "pictures" / f"reconstruction_step_{step:08d}.png"
        sheet = reconstruction.save_sheet(reconstruction.reconstructions(objective, batch), path)  # type: ignore[arg-type]
        with SummaryWriter(str(run)) as board:
            board.add_image("reconstruction", sheet, step, dataformats="HWC")

    return draw


def _open_run(run: Path, settings: Recipe, accelerator: Accelerator) -> None:
    """Create the run directory, or check that the run in it is of the same recipe."""
    path = run / "recipe.yaml"
    if path.exists():
        changed = recipe.differences(recipe.load_recipe(path), settings, ignore=_MAY_CHANGE)
        if changed:
            raise UserError(
                f"{run} holds a run of another recipe ({'; '.join(changed[:3])}): "
                "give this one another directory with run=PATH, or delete that one"
            )
    elif run.exists() and any(run.iterdir()):
        raise UserError(f"{run} is not empty and holds no run: give this run another directory with run=PATH")
    try:
        run.mkdir(parents=True, exist_ok=True)
        recipe.save(settings, path)
        write_json(run / "environment.json", environment(accelerator))
    except OSError as error:
        raise UserError(f"run={run}: cannot write there: {error}") from None


def environment(accelerator: Accelerator | None = None) -> dict[str, Any]:
    """Versions, hardware, git commit and world size: what a reader needs to judge a number."""
    packages = ("torch", "torchvision", "timm", "accelerate", "webdataset", "datasets", "ssl-vit")
    hardware = {
        "machine": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
    }
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "hardware": hardware,
        "git": _git_commit(),
        "world_size": accelerator.num_processes if accelerator else 1,
        "device": str(accelerator.device) if accelerator else "cpu",
        "precision": accelerator.mixed_precision if accelerator else "no",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _git_commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def write_json(path: Path, content: Any) -> None:
    """Write JSON beside, then rename: a reader never sees half a file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(path)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def _settings_of(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")
