"""Recipe -> objects -> loop or evaluators: the one place where the rooms are wired together."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import is_torch_xla_available, set_seed
from filelock import FileLock, Timeout
from torch import nn

from ssl_vit import plugins, recipe
from ssl_vit.analysis import reconstruction
from ssl_vit.data import DataConfig
from ssl_vit.data.samples import View
from ssl_vit.data.shards import open_shards
from ssl_vit.data.stream import train_source
from ssl_vit.data.transforms import train_transform
from ssl_vit.environment import environment
from ssl_vit.evaluators.features import Task
from ssl_vit.interfaces import Batch, UserError
from ssl_vit.models import BackboneConfig, backbone
from ssl_vit.recipe import Recipe
from ssl_vit.training import checkpoint, loop

MAY_CHANGE = (
    "run",
    "training.log_every",
    "training.checkpoint_every",
    "training.picture_every",
    "training.keep_last",
    "data.workers",
    "data.cache_mb",
    "data.on_bad_sample",
)
_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def make_accelerator(precision: str = "fp32") -> Accelerator:
    """Accelerate's engine, as `accelerate launch` or torchrun set it up; the data plan shards, the loop accumulates.

    Raises UserError when several processes were launched and Accelerate would let each train alone.
    """
    # Without cpu=True, Accelerate 1.15 ignores the launcher's processes on a machine that has no accelerator.
    no_device = not torch.accelerator.is_available() and not is_torch_xla_available()
    accelerator = Accelerator(mixed_precision=_PRECISION[precision], cpu=no_device)
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes < launched:
        raise UserError(
            f"{launched} processes were launched but Accelerate formed a world of {accelerator.num_processes}"
        )
    return accelerator


def build_backbone(config: BackboneConfig, init_from: str | None) -> backbone.Backbone:
    """A new backbone, with the weights of `init_from` where given (positions resampled to the new image size)."""
    model = backbone.build(config)
    if init_from:
        backbone.initialise(model, backbone.load(init_from), init_from)
    return model


def is_main_process() -> bool:
    """Whether this process is the one that prints and writes; needs no process group."""
    return os.environ.get("RANK", "0") == "0"


def wait_for_everyone() -> None:
    """Wait until all processes are here (one process alone does not wait)."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


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
    view = View(
        train_transform(settings.backbone.image_size, settings.data.augment),
        settings.backbone.channels,
        getattr(settings.objective, "classes", None) or classes,
        noise=objective.noise_per_sample(),  # type: ignore[operator]
        flip=settings.data.augment.flip,
        seed=settings.seed,
        needs_labels=getattr(objective, "needs_labels", False),
    )
    batches = train_source(
        shards,
        view,
        settings.data,
        batch_size=settings.training.batch_size,
        accumulate=settings.training.accumulate,
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
        device=accelerator.device,
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
            data=shards.fingerprint,
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


def make_task(
    weights: Path | str | None,
    settings: Recipe | None,
    train: str,
    test: str,
    *,
    data: DataConfig | None = None,
    accelerator: Accelerator | None = None,
    seed: int = 0,
) -> Task:
    """What evaluators judge: the backbone at `weights` (None: the settings' architecture, untrained) on two shard sets.

    data: image preparation; the run's own recipe says it where None. Raises UserError for what cannot be loaded.
    """
    if weights is None:
        assert settings is not None
        trained = build_backbone(settings.backbone, None)
    else:
        trained = backbone.load(weights)
    preparation = data or (settings.data if settings else DataConfig(train=train))
    return Task(
        trained=trained,
        untrained=backbone.fresh(trained, seed),
        train=open_shards(train),
        test=open_shards(test),
        data=preparation,
        accelerator=accelerator or make_accelerator(),
        workers=preparation.workers,
        weights=str(weights) if weights else None,
    )


def run_recipe(weights: Path) -> Recipe | None:
    """The recipe of the run that a run directory or one of its checkpoints belongs to, if there is one."""
    for folder in (weights, weights.parent.parent):
        if (folder / "recipe.yaml").is_file():
            return recipe.load_recipe(folder / "recipe.yaml")
    return None


def evaluate(weights: Path, name: str, train: str, test: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Run one evaluator on a run or checkpoint; the result is also added to `results.json` beside the weights.

    Returns {"evaluator", "settings", "data", "backbone", "values", "skipped", "seconds"}. Raises UserError.
    """
    module = plugins.load("evaluators", name)
    config = recipe.validate(module.Config, recipe.parse_overrides(overrides), f"{name}: ")
    settings = run_recipe(weights)
    task = make_task(weights, settings, train, test)
    start = time.perf_counter()
    values = dict(module.Evaluator(config).run(task))
    result = {
        "evaluator": name,
        "settings": config.model_dump(mode="json"),
        "data": {"train": train, "test": test},
        "backbone": str(weights),
        "values": values,
        "skipped": [{"shard": s.shard, "key": s.key, "reason": s.reason} for s in task.skipped],
        "seconds": round(time.perf_counter() - start, 2),
    }
    if task.accelerator.is_main_process:
        path = weights / "results.json"
        kept = read_json(path)["evaluations"] if path.exists() else []
        same = ("evaluator", "settings", "data")
        kept = [old for old in kept if any(old[key] != result[key] for key in same)]
        write_json(path, {"kind": "evaluations", "evaluations": [*kept, result]})
    return result


def _pictures(run: Path) -> loop.Picture:
    def draw(objective: nn.Module, batch: Batch, step: int) -> np.ndarray:
        path = run / "pictures" / f"reconstruction_step_{step:08d}.png"
        return reconstruction.save_sheet(reconstruction.reconstructions(objective, batch), path)  # type: ignore[arg-type]

    return draw


def _open_run(run: Path, settings: Recipe, accelerator: Accelerator) -> None:
    """Create the run directory, or check that the run in it is of the same recipe."""
    path = run / "recipe.yaml"
    if path.exists():
        changed = recipe.differences(recipe.load_recipe(path), settings, ignore=MAY_CHANGE)
        if changed:
            raise UserError(
                f"{run} holds a run of another recipe ({'; '.join(changed[:3])}): "
                "give this one another directory with run=PATH, or delete that one"
            )
    elif run.exists() and any(entry.name != ".lock" for entry in run.iterdir()):
        raise UserError(f"{run} is not empty and holds no run: give this run another directory with run=PATH")
    try:
        run.mkdir(parents=True, exist_ok=True)
        _lock(run)
        recipe.save(settings, path)
        write_json(run / "environment.json", environment(accelerator))
    except OSError as error:
        raise UserError(f"run={run}: cannot write there: {error}") from None


_locks: dict[Path, FileLock] = {}


def _lock(run: Path) -> None:
    """Hold the run directory until this process ends; UserError when another one holds it."""
    if run.resolve() in _locks:
        return
    lock = FileLock(run / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"{run}: another process is training in this directory; wait for it or use run=PATH") from None
    _locks[run.resolve()] = lock


def write_json(path: Path, content: Any) -> None:
    """Write JSON beside, then rename: a reader never sees half a file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(path)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
