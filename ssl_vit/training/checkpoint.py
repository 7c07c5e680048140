"""Checkpoints: one folder per step, written under another name, flushed to disk, then renamed: none is ever half-made.

config.json, encoder.safetensors: the encoder, which timm loads as it is.
objective.safetensors: mask token and heads.
training.safetensors: the weights that training continues from, where the two above hold averaged ones.
optimizer/: one file per process where the model is sharded.
random.safetensors: random states by process.
state.json: the state of the small components by name.
SHA256SUMS: `sha256sum -c` reads it.

Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from ssl_vit.files import atomic_file, flush, read_json, sha256
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.models import factory
from ssl_vit.results import RESULTS
from ssl_vit.training import distributed
from ssl_vit.training.distributed import shared_errors
from ssl_vit.training.state import State, Tensors, placed, random_state, set_random_state

OBJECTIVE = "objective.safetensors"
_TRAINING, _RANDOM, _OPTIMIZER = "training.safetensors", "random.safetensors", "optimizer"
_STATE, _SUMS = "state.json", "SHA256SUMS"
_REPLACED = ".replaced_"  # the checkpoint of a step that is being saved again
_ENCODER = "encoder."  # the prefix of its tensors in the objective


def folders(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step_*") if (path / _STATE).is_file())


def check_data(run: Path, data: str) -> None:
    """Raises UserError where the run's newest checkpoint was trained on shards with another fingerprint."""
    for folder in folders(run)[-1:]:
        with suppress(ValueError, LookupError):  # a broken one is renamed when it is loaded
            if json.loads((folder / _STATE).read_text())["progress"]["data"] != data:
                raise UserError(
                    f"{folder} was trained on other shards than data.train names now (repacked?): "
                    "start again with run=PATH, or restore the old shards"
                )


def newest_of(weights: Path) -> Path | None:
    """The newest checkpoint of a run, or the checkpoint itself; None for a weights folder."""
    if (weights / OBJECTIVE).is_file():
        return weights
    return next(iter(folders(weights)[-1:]), None)


def last_saved(run: Path | None) -> str:
    """Which checkpoint an error message should name."""
    kept = folders(run) if run else []
    return f"last good checkpoint: {kept[-1] if kept else 'none'}"


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint, and notes for the user about broken ones, which are renamed to
    `broken_step_NNNNNNNN`. Every process must call it; the main one looks."""
    found, notes = None, list[str]()
    if distributed.is_main():
        for unfinished in (run / "checkpoints").glob(_unfinished("step_*")):  # a kill came while it was written
            shutil.rmtree(unfinished)
        for replaced in (run / "checkpoints").glob(f"{_REPLACED}step_*"):  # a kill came between two renames
            target = replaced.with_name(replaced.name.removeprefix(_REPLACED))
            shutil.rmtree(replaced) if target.exists() else replaced.rename(target)
        for folder in reversed(folders(run)):
            defect = _defect(folder)
            if defect is None:
                found = folder
                break
            broken = folder.with_name(f"broken_{folder.name}")
            shutil.rmtree(broken, ignore_errors=True)  # of an earlier break at this step
            folder.rename(broken)
            notes.append(f"{folder} is broken ({defect}) and was renamed to {broken.name}")
    return distributed.gather((found, notes))[0]


def _unfinished(name: str) -> str:
    """What a checkpoint is called while it is written."""
    return f".{name}.tmp"


def _defect(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files by its checksums; None: nothing."""
    try:
        sums = [line.split("  ", 1) for line in (folder / _SUMS).read_text().splitlines()]
        for expected, name in sums:
            if sha256(folder / name) != expected:
                return f"{name} is not what was written"
        return None if sums else f"{_SUMS} is empty"
    except (OSError, ValueError) as error:
        return str(error)


def save(run: Path, step: int, state: State, keep_last: int) -> Path:
    """Write a checkpoint of all processes' state, then drop all but the newest `keep_last` and those that were
    evaluated. Every process must call it.

    Raises RunError, on every process, when a disk refuses; older checkpoints are untouched then.
    """
    target = run / "checkpoints" / f"step_{step:08d}"
    unfinished, main = target.with_name(_unfinished(target.name)), distributed.is_main()
    weights = state.weights(averaged=True)
    training = state.weights(averaged=False) if state.average else {}
    random = distributed.gather(random_state(state.device))
    with shared_errors(), _disk_errors(run, target, unfinished):
        if main:
            if not run.is_dir():
                raise RunError(f"{run} was removed or moved during the training: restore it and run the command again")
            shutil.rmtree(unfinished, ignore_errors=True)
            (unfinished / _OPTIMIZER).mkdir(parents=True)
            _write_weights(state.objective, weights, unfinished)
            if training:
                save_file(training, unfinished / _TRAINING)
            named = {f"{rank}/{kind}": tensor for rank, own in enumerate(random) for kind, tensor in own.items()}
            save_file(named, unfinished / _RANDOM)
            content = {name: part.state_dict() for name, part in state.parts.items()}
            (unfinished / _STATE).write_text(json.dumps(content) + "\n")
    with shared_errors(), _disk_errors(run, target, unfinished):
        if state.sharded or main:
            state.save_optimizer(unfinished / _OPTIMIZER)
    with shared_errors(), _disk_errors(run, target, unfinished):
        if main:
            _seal(unfinished)
            _replace(unfinished, target)
    if main:
        for old in folders(run)[:-keep_last]:
            if not (old / RESULTS).exists():
                shutil.rmtree(old, ignore_errors=True)
    return target


def _seal(folder: Path) -> None:
    """Write the checksums and flush everything to the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    (folder / _SUMS).write_text("".join(f"{sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files))
    for path in (*files, folder / _SUMS, folder / _OPTIMIZER, folder):
        flush(path)


def _replace(unfinished: Path, target: Path) -> None:
    """Rename to `target`; results of the same weights that an earlier save of the step has are kept."""
    replaced = target.with_name(f"{_REPLACED}{target.name}")
    if target.exists():
        if (target / RESULTS).exists() and _same_encoder(target, unfinished):
            shutil.copytree(target / RESULTS, unfinished / RESULTS)
        target.rename(replaced)
    unfinished.rename(target)
    flush(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _same_encoder(one: Path, other: Path) -> bool:
    return sha256(one / factory.WEIGHTS) == sha256(other / factory.WEIGHTS)


@contextmanager
def _disk_errors(run: Path, target: Path, unfinished: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise RunError(
            f"could not save checkpoint {target}: {cause}\n{last_saved(run)}; fix that and run the command again"
        ) from error


def _write_weights(objective: nn.Module, weights: Tensors, folder: Path) -> None:
    encoder, network = _encoder(objective), _network(objective)
    factory.write_config(encoder, folder / factory.CONFIG)
    own = {name.removeprefix(network): tensor for name, tensor in weights.items() if name.startswith(network)}
    save_file(own, folder / factory.WEIGHTS)
    save_file({name: t for name, t in weights.items() if not name.startswith(_ENCODER)}, folder / OBJECTIVE)


def publish_encoder(run: Path) -> None:
    """Put the newest checkpoint's encoder at the top of the run directory, by rename."""
    for name in (factory.WEIGHTS, factory.CONFIG):
        with (folders(run)[-1] / name).open("rb") as source, atomic_file(run / name) as published:
            shutil.copyfileobj(source, published)


def load(folder: Path, state: State) -> None:
    """Restore the state in place. Every process must call it.

    Raises UserError when a file is damaged or belongs to another recipe.
    """
    objective, network = state.objective, _network(state.objective)
    try:
        content = json.loads((folder / _STATE).read_text())
        for name, part in state.parts.items():
            if content.get(name):
                part.load_state_dict(content[name])
        random = load_file(folder / _RANDOM)
        saved = {f"{network}{name}": tensor for name, tensor in load_file(folder / factory.WEIGHTS).items()}
        saved |= load_file(folder / OBJECTIVE)
        trained = load_file(folder / _TRAINING) if state.average else saved
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise _unreadable(folder, error) from None
    inside = {name.removeprefix(network): t for name, t in trained.items() if name.startswith(network)}
    encoder = _encoder(objective)
    factory.load_state(encoder, placed(inside, encoder.network), str(folder))
    _load_rest(folder, objective, {name: t for name, t in trained.items() if not name.startswith(network)})
    state.load_average(saved)
    try:
        state.load_optimizer(folder / _OPTIMIZER)
    except (OSError, ValueError, LookupError, SafetensorError, CheckpointException) as error:
        raise _unreadable(folder, error) from None
    own = f"{distributed.rank()}/"
    mine = {name.removeprefix(own): tensor for name, tensor in random.items() if name.startswith(own)}
    if mine:  # with more processes than before, the new ones start from their seed
        set_random_state(mine, state.device)


def classes_of(folder: Path) -> list[str]:
    """The class names that a checkpoint's head was trained with; empty where it names none."""
    return list(read_json(folder / _STATE).get("progress", {}).get("classes") or ())


def load_head(folder: Path, objective: nn.Module) -> None:
    """Restore in place what the objective has beside its encoder. Raises UserError as `load` does."""
    try:
        head = load_file(folder / OBJECTIVE)
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder, error) from None
    _load_rest(folder, objective, head)


def _load_rest(folder: Path, objective: nn.Module, tensors: Tensors) -> None:
    try:
        missing = objective.load_state_dict(placed(tensors, objective), strict=False)
    except RuntimeError as error:
        raise UserError(f"{folder}: from another recipe: {str(error).splitlines()[-1].strip()}") from None
    unknown = [*missing.unexpected_keys, *(k for k in missing.missing_keys if not k.startswith(_ENCODER))]
    if unknown:
        raise UserError(f"{folder}: from another recipe: {', '.join(unknown[:4])} do not fit its objective")


def _unreadable(folder: Path, error: BaseException) -> UserError:
    return UserError(f"{folder}: not a readable checkpoint ({error}); delete it to fall back to the one before")


def _encoder(objective: nn.Module) -> factory.Encoder:
    assert isinstance(objective.encoder, factory.Encoder)
    return objective.encoder


def _network(objective: nn.Module) -> str:
    """The prefix of timm's own names among the objective's."""
    encoder = _encoder(objective)
    return f"{_ENCODER}{next(name for name, module in encoder.named_modules() if module is encoder.network)}."
