"""Recipe -> objects -> loop or evaluators: the one place where the rooms are wired together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf

from ssl_vit import plugins, recipe, stage
from ssl_vit.data import DataConfig
from ssl_vit.data.shards import ShardSet, check_same_classes, open_shards, open_training
from ssl_vit.evaluators import Metric, results
from ssl_vit.evaluators.base import named
from ssl_vit.evaluators.features import Task
from ssl_vit.evaluators.online import OnlineProbe
from ssl_vit.files import sha256, write_json
from ssl_vit.models import factory
from ssl_vit.recipe import Recipe
from ssl_vit.runs import SUMMARY, open_run
from ssl_vit.training import checkpoint, distributed, loop
from ssl_vit.training.callbacks import EarlyStopping
from ssl_vit.training.distributed import make_accelerator, shared_errors
from ssl_vit.training.flops import training_flops
from ssl_vit.training.trackers import check_trackers

if TYPE_CHECKING:
    from ssl_vit.analysis import inspection


def train(settings: Recipe, *, quiet: bool = False) -> Path:
    """Run (or resume, or leave alone when finished) the training stage of a recipe; returns the run directory.

    Raises UserError for input that cannot work, before the first step wherever that can be seen, RunError for a failure
    on the way (non-finite loss, full disk), and Stopped, with all saved, after a signal.
    """
    training, run = settings.training, settings.run_directory
    accelerator = make_accelerator(training.precision, training.timeout, training.compile)
    with shared_errors():
        check_trackers(training.trackers)
        shards = open_training(settings.data)
        job = stage.build(settings, shards, accelerator, run=run, quiet=quiet)
        job.watch = _probe(settings, shards, job)
        if accelerator.is_main_process:
            open_run(run, settings, accelerator, job.data)
    parameters, flops = sum(p.numel() for p in job.objective.parameters()), training_flops(job.objective)
    outcome = loop.train(job)
    with shared_errors():
        if accelerator.is_main_process:
            checkpoint.publish_encoder(run)
            images_seen = (outcome.steps + outcome.undone) * training.batch_size
            summary = {
                "name": settings.name,
                "objective": settings.objective.name,  # type: ignore[attr-defined]
                "steps": outcome.steps,
                "images_seen": images_seen,
                "flops": images_seen * flops,
                "seconds": round(outcome.seconds, 2),
                "parameters": parameters,
                "samples": settings.data.samples or shards.samples,
                "processes": accelerator.num_processes,
                "left_out_steps": outcome.left_out,
                "classes": list(job.classes),
            }
            if not (run / SUMMARY).exists():  # what finished is not told anew by whoever asks again
                write_json(run / SUMMARY, summary)
    accelerator.free_memory()
    return run


def _probe(settings: Recipe, shards: ShardSet, job: loop.Job) -> EarlyStopping | None:
    if settings.probe is None:
        return None
    labeled = open_shards(settings.probe.data, settings.data.remote) if settings.probe.data else shards
    probe = OnlineProbe(settings.probe, labeled, settings.data, job.objective.encoder, job.accelerator)  # type: ignore[arg-type]
    return EarlyStopping(probe, settings.probe.every, settings.probe.patience, probe.skipped)


def make_task(
    weights: Path | str | None,
    settings: Recipe | None,
    train: str,
    test: str,
    *,
    seed: int = 0,
    cache: Path | None = None,
    metric: Metric = "accuracy",
) -> Task:
    """What evaluators judge: the encoder at `weights` (None: the settings' architecture, untrained) on two shard sets.

    The settings say how images are prepared and the precision. seed: of the untrained encoder. cache: where extracted
    features are kept. metric: see `Task`. Raises UserError for what cannot be loaded.
    """
    if weights is None:
        assert settings is not None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            trained = stage.build_encoder(settings.encoder, None)
    else:
        trained = factory.load(weights)
    preparation = settings.data if settings else DataConfig(train=train)
    shards = open_shards(train, preparation.remote), open_shards(test, preparation.remote)
    check_same_classes(shards[0].classes, shards[1].classes, f"{train} and {test}")
    return Task(
        trained=trained,
        untrained=factory.fresh(trained, seed),
        train=shards[0],
        test=shards[1],
        data=preparation,
        accelerator=make_accelerator(settings.training.precision if settings else "fp32"),
        workers=preparation.workers,
        weights=str(weights) if weights else None,
        cache=cache,
        objective=settings.objective if settings else None,
        metric=metric,
    )


def run_recipe(weights: Path) -> Recipe | None:
    """The recipe of the run that a run directory or one of its checkpoints belongs to, if there is one."""
    checkpoints = weights.resolve().parent
    run = checkpoints.parent if checkpoints.name == "checkpoints" else weights
    path = run / "recipe.yaml"
    return recipe.load_recipe(path) if path.is_file() else None


def evaluate(
    weights: Path,
    name: str,
    train: str,
    test: str,
    overrides: Sequence[str] = (),
    *,
    defaults: Mapping[str, Any] | None = None,
    metric: Metric = "accuracy",
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run one evaluator on a run or checkpoint; the result is also added to `results.json` beside the weights.

    defaults: settings under the overrides. metric: the number that the values are. say: told what is done, where that
    takes long. Returns {"evaluator", "title", "settings", "data", "classes", "metric", "encoder", "sha256", "values",
    "measurements", "skipped", "seconds"}; values: see `evaluators.base.named`; measurements: every `Measurement` with
    its `source`; sha256: of the weights. Raises UserError.
    """
    found = factory.find_weights(weights)  # once: a run that trains on goes on saving
    results.check(weights)  # what cannot be added to is known before anything is measured
    module = plugins.load("evaluators", name)
    given = OmegaConf.merge(dict(defaults or {}), recipe.parse_overrides(overrides))
    config = recipe.validate(module.Config, OmegaConf.to_container(given), f"{name}: ")
    digest = sha256(found / factory.WEIGHTS)
    task = make_task(found, run_recipe(weights), train, test, cache=weights / "features", metric=metric)
    if say and task.accelerator.is_main_process:
        task.say = say
    start = time.perf_counter()
    evaluator = module.Evaluator(config)
    with distributed.others_watched(lambda: f"{weights / checkpoint.RESULTS} holds what was measured before"):
        measured = list(evaluator.measurements(task))
    result = {
        "evaluator": name,
        "title": evaluator.title,
        "settings": config.model_dump(mode="json"),
        "data": {"train": train, "test": test},
        "shards": {"train": task.train.fingerprint, "test": task.test.fingerprint},
        "classes": list(task.train.classes or task.test.classes or ()),
        "metric": metric,
        "encoder": str(weights),
        "sha256": digest,
        "values": dict(named(measured, metric)),
        "measurements": [{"source": source, **asdict(found)} for source, found in measured],
        "skipped": task.skipped_names(),
        "seconds": round(time.perf_counter() - start, 2),
    }
    if task.accelerator.is_main_process:
        results.add(weights, result, task.say)
    return result


def inspect(weights: Path, shards: str, out: Path, options: inspection.Options) -> Path:
    """Write the pictures of a trained encoder into `out`; returns the page. See `inspection.inspect`."""
    from ssl_vit.analysis import inspection

    settings = run_recipe(weights)
    preparation = settings.data if settings else DataConfig(train=shards)
    return inspection.inspect(
        weights,
        open_shards(shards, preparation.remote),
        out,
        options,
        objective=settings.objective if settings else None,
        preparation=preparation,
        resampling=settings.encoder.position_resampling if settings else "timm",
        device=make_accelerator().device,
    )
