"""Run directories: opened for one training at a time, resumed by the same recipe only."""

from __future__ import annotations

import filecmp
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ssl_vit import plugins, recipe, records
from ssl_vit.data.overlap import redrawn
from ssl_vit.data.places import check_outside
from ssl_vit.data.shards import open_training
from ssl_vit.environment import environment
from ssl_vit.files import WEIGHTS, read_json, sha256, write_json
from ssl_vit.interfaces import UserError
from ssl_vit.models import factory
from ssl_vit.recipe import Recipe
from ssl_vit.records import RunSummary
from ssl_vit.training import checkpoint
from ssl_vit.training.distributed import Engine

# Keys that a resumed run may change: how it is computed, logged, kept and guarded, not what it learns (except where
# batch norm, mixup or CutMix see a micro-batch at a time).
MAY_CHANGE = (
    "run",
    "data.train",  # its content counts, which the checkpoints know
    "init_from",  # likewise, which `environment.json` knows
    "training.accumulate",
    "training.auto_batch",
    "training.checkpoint_activations",
    "training.timeout",
    "training.trackers",
    "training.log_every",
    "training.checkpoint_every",
    "training.picture_every",
    "training.keep_last",
    "data.workers",
    "data.worker_timeout",
    "data.cache_mb",
    "data.remote",
    "data.on_bad_sample",
)
SUMMARY, ENVIRONMENT = "summary.json", "environment.json"


def open_run(run: Path, settings: Recipe, accelerator: Engine, data: str) -> tuple[FileLock, bool]:
    """Create the run directory, or check that the run in it is of the same recipe.

    data: fingerprint of the shards.

    Returns the lock that keeps other processes out until it is released, and whether the run is finished, with its
    encoder intact and its last checkpoint intact or deleted. Raises UserError when the directory is another recipe's or
    another process's.
    """
    check(run, settings, data)
    run.mkdir(parents=True, exist_ok=True)
    lock = _lock(run)
    try:
        check(run, settings, data)  # again: another process may have ended just now
        recipe.save(settings, run / "recipe.yaml")  # of a finished run too: its data may have moved
        finished = _finished(run)
        if not finished:
            _note_session(run, settings, accelerator)
    except BaseException:
        lock.release()
        raise
    return lock, finished


def _lock(run: Path) -> FileLock:
    lock = FileLock(run / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{run}: another process is training in this directory; wait for it or use run=PATH (if there is none, "
            f"delete {lock.lock_file})"
        ) from None
    return lock


def _finished(run: Path) -> bool:
    checkpoints, summary, names = checkpoint.folders(run), run / SUMMARY, (WEIGHTS, factory.CONFIG)
    if not summary.exists():
        return False
    if not checkpoints:
        if all((run / name).exists() for name in names):  # someone deleted the checkpoints
            return True
        raise UserError(f"{run} has been trained, but its checkpoints are gone: delete it, or set run=PATH")
    last = checkpoints[-1]
    try:
        steps = records.read(summary, RunSummary).steps
    except UserError:  # damaged: the run resumes from its last checkpoint, and writes it again
        return False
    if last.name != f"step_{steps:08d}" or checkpoint.defect(last) is not None:
        return False
    return all((run / name).exists() and filecmp.cmp(run / name, last / name, shallow=False) for name in names)


def _note_session(run: Path, settings: Recipe, accelerator: Engine) -> None:
    """Write the environment of this session; that of sessions before it is kept while a checkpoint holds their work."""
    (run / SUMMARY).unlink(missing_ok=True)  # of a training whose last checkpoint is gone
    about, sessions = environment(accelerator), run / ENVIRONMENT
    if code := plugins.checksum("objectives", settings.objective.name):
        about["objective"] = code
    if settings.init_from:
        about["init_from"] = _origin(settings)
    if checkpoint.folders(run) and sessions.exists():
        last = read_json(sessions)
        about["before"] = [*last.pop("before", []), last]
    write_json(sessions, about)


def check(run: Path, settings: Recipe, data: str | None = None) -> None:
    """Raises UserError where the directory holds something else, or a run of another recipe, initial weights or data
    (by its fingerprint, where it is given), or lies inside the images."""
    if run.exists() and not run.is_dir():
        raise UserError(f"run={run} is a file: name a directory")
    check_outside(run, settings.data.places)
    path, metrics = run / "recipe.yaml", run / "metrics.jsonl"
    begun = checkpoint.folders(run) or (run / SUMMARY).exists() or (metrics.is_file() and metrics.stat().st_size)
    if begun and path.exists():
        about = read_json(run / ENVIRONMENT) if (run / ENVIRONMENT).exists() else {}
        ignore = [key for key in MAY_CHANGE if about or key != "init_from"]
        changed = recipe.differences(recipe.load_recipe(path), settings, ignore=ignore)
        if changed:
            raise UserError(
                f"{run} holds a run of another recipe ({'; '.join(changed[:3])}): "
                f"set run=PATH (with init_from={run} to start from its weights), or delete {run}"
            )
        if about and about.get("objective", "") != plugins.checksum("objectives", settings.objective.name):
            raise UserError(
                f"{run} was trained with another version of {settings.objective.name}: set run=PATH, delete {run}, or "
                "restore the old version"
            )
        if about and about.get("init_from") != (_origin(settings) if settings.init_from else None):
            now = f"init_from={settings.init_from} names" if settings.init_from else "now, where init_from is not set"
            raise UserError(
                f"{run} was initialized from other weights than {now}: set run=PATH, delete {run}, or restore the old "
                "weights"
            )
        if data is not None:
            _check_data(run, data)
        return
    # A start that was killed leaves a lock or its environment beside the recipe, or a temporary file.
    ours = path.exists() and any((run / name).exists() for name in (".lock", ENVIRONMENT))
    if not ours and run.exists() and any(p.name != ".lock" and p.suffix != ".tmp" for p in run.iterdir()):
        raise UserError(f"{run} is not empty and holds no run: give this run another directory with run=PATH")


def check_holdout(settings: Recipe, run: Path | None, test: str) -> None:
    """Raises UserError where the holdout that a test set is part of was drawn again after a training: it may contain
    images that the run, or a run that it starts from, was trained on.

    settings, run: a recipe and its run directory (None: it is trained later, so that only the runs that it starts from
        are checked).
    """
    for stage in recipe.stages(settings):
        if run and redrawn(stage.data.places, test):
            try:
                ours = open_training(stage.data).fingerprint
            except UserError as error:
                if "#" in test:  # parts of images, which are gone together
                    raise
                raise UserError(
                    f"{test} is a part of a holdout, and the part that {run} was trained on cannot be read ({error}); "
                    f"restore it to check for common images, or, if {test} has not changed since, move it elsewhere"
                ) from None
            _check_data(run, ours)
        run = recipe.run_of(Path(stage.init_from)) if stage.init_from else None


def own_data(run: Path, settings: Recipe, fix: str) -> str:
    """The dataset that a run was trained on, by the name in its recipe. Raises UserError, with what to do, where that
    name does not lead to these images (any more): a relative one holds for the directory of the training alone."""
    place = settings.data.train
    assert isinstance(place, str)
    try:
        found = open_training(settings.data).fingerprint
    except UserError as error:
        raise UserError(f"the training data of {run} cannot be read: {error} (data.train={place}); {fix}") from None
    if _trained_on(run) not in (None, found):
        raise UserError(f"data.train={place} does not name the images that {run} was trained on (any more); {fix}")
    return place


def _trained_on(run: Path) -> str | None:
    """Fingerprint of the shards that a run was trained on, if it is known."""
    trained, summary = checkpoint.data_of(run), run / SUMMARY
    if trained is None and summary.is_file():  # someone deleted the checkpoints
        with suppress(UserError):  # a damaged one says nothing
            trained = records.read(summary, RunSummary).data or None
    return trained


def _check_data(run: Path, data: str) -> None:
    """Raises UserError where a run was trained on shards with another fingerprint."""
    if _trained_on(run) not in (None, data):
        raise UserError(
            f"{run} was trained on other shards than data.train names now (repacked?): start again with run=PATH, or "
            "restore the old shards"
        )


def _origin(settings: Recipe) -> str:
    """The checksum of the weights that a run starts from."""
    return sha256(factory.find_weights(settings.init_from or "") / WEIGHTS)
