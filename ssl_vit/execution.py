"""Runs one training or one evaluation, from typed settings."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save as safetensors
from torch import nn

from ssl_vit import plugins, precision, progress, recipe, runs, stage
from ssl_vit.analysis import loaded
from ssl_vit.data.overlap import overlaps, saw_images
from ssl_vit.data.shards import ShardSet, check_same_classes, dropped_from, open_shards, open_training
from ssl_vit.dry_run import DryRun, measure
from ssl_vit.environment import environment
from ssl_vit.evaluators import runner
from ssl_vit.evaluators.features import EvalContext
from ssl_vit.evaluators.labels import invalid_labels, set_notes
from ssl_vit.evaluators.online import OnlineProbe
from ssl_vit.evaluators.parts import UNFINISHED, Parts
from ssl_vit.evaluators.real_labels import read_real_labels, rescored
from ssl_vit.files import WEIGHTS, sha256, writable, write_json
from ssl_vit.interfaces import Metric, UserError, is_main_process
from ssl_vit.models import factory
from ssl_vit.progress import Say, silent
from ssl_vit.recipe import Recipe
from ssl_vit.records import EvaluationRecord, RunSummary
from ssl_vit.results import Evaluation, Result, Table, save
from ssl_vit.runs import SUMMARY, check_holdout, open_run
from ssl_vit.training import checkpoint, distributed, loop
from ssl_vit.training.callbacks import Dropped
from ssl_vit.training.distributed import make_accelerator, others_watched, shared_errors
from ssl_vit.training.flops import training_flops
from ssl_vit.training.logging import check_trackers
from ssl_vit.training.memory import out_of_memory
from ssl_vit.training.signals import stopped


def train(settings: Recipe, *, quiet: bool = False) -> Path:
    """See `ssl_vit.train`; returns the run directory."""
    settings = precision.resolve(settings, print if is_main_process() and not quiet else silent)
    training, run = settings.training, settings.run_directory
    accelerator = make_accelerator(training.precision, training.timeout)
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", training.precision) and accelerator.is_main_process:
        note = f"note: the launcher's mixed_precision={asked} is ignored: training.precision is {training.precision}"
        print(note, file=sys.stderr)
    with others_watched(partial(checkpoint.last_saved, run)):
        return _trained(settings, accelerator, quiet=quiet)


def _trained(settings: Recipe, accelerator: distributed.Engine, *, quiet: bool) -> Path:
    training, run = settings.training, settings.run_directory
    shards, job = _job(settings, accelerator, quiet=quiet)
    lock, finished = None, False
    try:
        with shared_errors(f"run={run}: cannot start"):
            if accelerator.is_main_process:
                lock, finished = open_run(run, settings, accelerator, job.data)
        if distributed.from_main(finished):
            if accelerator.is_main_process and not quiet:
                print(f"{run} has already finished: nothing to train")
            return run
        parameters = sum(p.numel() for p in job.objective.parameters())
        flops = training_flops(job.objective, settings.data.views)
        outcome = loop.train(job)
        images_seen = outcome.steps * training.batch_size
        summary = RunSummary(
            name=settings.name,
            objective=settings.objective.name,
            steps=outcome.steps,
            images_seen=images_seen,
            flops=images_seen * flops,
            seconds=round(outcome.seconds, 2),
            parameters=parameters,
            samples=settings.data.samples or shards.samples,
            processes=accelerator.num_processes,
            data=job.data,
            classes=job.classes,
        )
        with shared_errors(f"{run}: cannot write the encoder or {SUMMARY}"):
            if accelerator.is_main_process:
                checkpoint.publish_encoder(run)
                write_json(run / SUMMARY, summary.model_dump(mode="json"))
    finally:
        if lock:
            lock.release()
    if outcome.signal:
        raise stopped(outcome.signal)
    return run


def dry_run(settings: Recipe) -> DryRun:
    """What `train` would do and cost, as `measure` finds it. Raises UserError for what `train` refuses; bad samples are
    seen where packing, or the batches that are timed, find them."""
    settings = precision.resolve(settings, progress.say)
    accelerator = make_accelerator(settings.training.precision, settings.training.timeout)
    with others_watched(lambda: "nothing was written"):
        shards, job = _job(settings, accelerator, quiet=True)
        with shared_errors():
            if accelerator.is_main_process:
                runs.check(settings.run_directory, settings, job.data)
        return measure(settings, shards, job=job)


def _job(settings: Recipe, accelerator: distributed.Engine, *, quiet: bool) -> tuple[ShardSet, loop.Job]:
    """The training images of a recipe and the job to train on them, with all callbacks. Nothing is written."""
    with shared_errors():
        check_trackers(settings.training.trackers)
        shards = open_training(settings.data)
        dropped = dropped_from([shards], settings.data)
        job = stage.build(settings, shards, accelerator, run=settings.run_directory, quiet=quiet)
        own = Dropped(dropped if accelerator.is_main_process else [])
        job.callbacks = [*job.callbacks, own, *_probe(settings, shards, job)]
    with shared_errors():
        if len({*distributed.gather(job.data)}) > 1:
            raise UserError(f"{shards.spec}: the processes see different shards; give all machines the same files")
    return shards, job


def _probe(settings: Recipe, shards: ShardSet, job: loop.Job) -> list[OnlineProbe]:
    if settings.probe is None:
        return []
    if job.accelerator.is_fsdp2:
        raise UserError("probe: not available for a sharded model; remove it from the recipe")
    if settings.probe.patience and recipe.needs_labels(settings) and not settings.probe.data:
        raise UserError("probe.patience: the run trains on the labels that the probe is scored on; set probe.data")
    labeled = open_shards(settings.probe.data, settings.data.remote) if settings.probe.data else shards
    unused = dropped_from([labeled], settings.data) if settings.probe.data else []
    unused += invalid_labels(labeled, settings.data)
    return [OnlineProbe(settings.probe, labeled, settings.data, job.objective.encoder, job.accelerator, unused)]


def make_context(
    model: loaded.Loaded,
    train: str | Sequence[str],
    test: str,
    *,
    seed: int = 0,
    cache: Path | None = None,
    metric: Metric = "accuracy",
) -> EvalContext:
    """Build the input of evaluators from an encoder and labeled shards.

    model: the encoder, which may lie on the meta device if only untrained ones of its architecture are measured.
    train, test: labeled shards, as `open_shards` names them.
    seed: seed of the untrained encoder.
    cache: folder for extracted features; None: no cache.
    metric: see `EvalContext`.

    Raises UserError for shards that cannot be opened or have no labels.
    """
    settings, data = model.settings, model.data
    shards = open_shards(train, data.remote), open_shards(test, data.remote)
    check_same_classes(shards[0].classes, shards[1].classes, f"{train} and {test}")
    return EvalContext(
        trained=model.encoder,
        train=shards[0],
        test=shards[1],
        skipped=dropped_from(shards, data) + invalid_labels(shards[0], data),
        data=data,
        accelerator=model.accelerator(),
        weights=str(model.folder) if model.folder else None,
        cache=cache,
        objective=settings.objective if settings else None,
        metric=metric,
        seed=seed,
    )


def evaluate(
    model: Path | nn.Module,
    name: str,
    train: str | Sequence[str],
    test: str,
    overrides: recipe.Overrides = (),
    *,
    data: str = "",
    metric: Metric = "accuracy",
    real_labels: Path | None = None,
    say: Say = silent,
) -> Evaluation:
    """See `ssl_vit.evaluate`, whose `evaluator` is `name` here, and whose `name` is `data`.

    The name of the file contains the evaluator and a hash of its settings, the shards and the metric, so that repeating
    an evaluation replaces its file. Finished sweeps and trainings are stored meanwhile; it resumes after a kill.

    train, test: labeled shards. overrides: settings of the evaluator.
    """
    given, run = loaded.load(model), model if isinstance(model, Path) else None
    module, settings = plugins.load("evaluators", name), given.settings
    places = recipe.training_places(settings) if settings else []
    seen = f"{run or 'this network'} was trained, or stopped early, on images of the test set {test}; use another one"
    if saw_images(places, test):
        raise UserError(seen)
    if settings and run:
        check_holdout(settings, recipe.run_of(run), test)
    config = recipe.validate(module.Config, recipe.parse_overrides(overrides), f"{name}: ")
    folder = writable(run / checkpoint.RESULTS, "copy the weights to a writable folder") if run else None
    context = make_context(given, train, test, cache=run / "features" if run else None, metric=metric)
    if overlaps(places, context.test):
        raise UserError(seen)
    context.say, context.title = say if context.accelerator.is_main_process else silent, name
    notes = set_notes(context.train, context.test)
    for note in notes:
        context.say(f"note: {note}")
    if real_labels and metric == "mean_per_class":
        raise UserError("metric=mean_per_class: an image with several reassessed labels has no one class; use accuracy")
    real = read_real_labels(real_labels, context.test) if real_labels else None
    evaluator = module.Evaluator(config)
    content: dict[str, Any] = {
        "evaluator": name,
        "title": evaluator.title,
        "trains_encoder": evaluator.trains_encoder,
        "settings": config.model_dump(mode="json"),
        "data": {"train": train, "test": test},
        "shards": {"train": context.train.fingerprint, "test": context.test.fingerprint},
        "classes": list(context.train.classes or context.test.classes or ()),
        "metric": metric,
        "weights": str(run or f"{type(model).__name__} in memory"),
        # Before measuring: a run that is still training replaces its weights meanwhile.
        "sha256": _weights_digest(given),
        "notes": notes,
        "environment": environment(context.accelerator),
    }
    path = folder / _results_name(EvaluationRecord.model_validate(content)) if folder else None
    depends_on = content["sha256"] + plugins.checksum("evaluators", name)
    parts, start = Parts(path.with_suffix(UNFINISHED) if path else None, depends_on, context), time.perf_counter()
    kept = f"{folder} holds what was measured" if folder else "nothing is stored"
    with others_watched(lambda: kept), out_of_memory(lambda: f"end other programs that use it; {kept}"):
        rows, sweeps = runner.evaluate(evaluator, context, parts)
    if real:
        rows += [rescored(row, real) for row in rows]
    seconds = round(time.perf_counter() - start + parts.earlier_seconds, 2)
    content |= {"sweeps": sweeps, "skipped": context.skipped_names(), "seconds": seconds}
    about = EvaluationRecord.model_validate(content)
    seed = settings.seed if settings else 0
    rows = [replace(row, data=data or test, evaluator=name, pretraining_seed=seed) for row in rows]
    if run and path and context.accelerator.is_main_process:
        save(path, rows, **about.model_dump(mode="json"))
        parts.remove()
        if settings and "tensorboard" in settings.training.trackers:
            _log(path.parent, name, metric, [row for row in rows if row.primary], checkpoint.newest_of(run))
    return Evaluation(path, rows, about)


def _weights_digest(model: loaded.Loaded) -> str:
    """sha256 of the weights file; of a network in memory, of the file that its weights would give."""
    if model.folder:
        return sha256(model.folder / WEIGHTS)
    return hashlib.sha256(safetensors(factory.state(model.encoder))).hexdigest()


def _results_name(about: EvaluationRecord) -> str:
    """File name of an evaluation: the evaluator and a hash of its settings, shards and metric."""
    key = json.dumps([about.settings, about.shards, about.metric], sort_keys=True)
    return f"{about.evaluator.replace(':', '.')}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


def _log(folder: Path, name: str, metric: Metric, rows: Sequence[Result], saved: Path | None) -> None:
    """Means of the metric over seeds as TensorBoard scalars `EVALUATOR/ARM/BUDGET`, at the step of the weights."""
    from torch.utils.tensorboard import SummaryWriter  # every command would wait for it

    step = checkpoint.step_of(saved) if saved else 0
    frame = Table(list(rows)).frame
    with SummaryWriter(str(folder)) as writer:
        for (arm, budget), group in frame.groupby(["arm", frame["labels_per_class"].astype(str)], sort=False):
            writer.add_scalar(f"{name}/{arm}/{budget.replace('%', ' percent')}", group[metric].mean(), step)
