"""Checkpoints: one folder per step, written under another name, flushed to disk, then renamed: none is ever half-made.

config.json, encoder.safetensors: the encoder, which timm loads as it is.
objective.safetensors: mask token and heads.
training.safetensors: the weights that training continues from, where the two above hold averaged ones.
optimizer.safetensors: its state by parameter.
random.safetensors: random states by process.
state.json: the state of the small components by name.
SHA256SUMS: `sha256sum -c` reads it.

Tensors are whole, also of a model whose parameters are sharded (FSDP), and nothing is a pickle.
"""

from __future__ import annotations

import json
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ssl_vit.files import WEIGHTS, atomic_file, checkpoints, flush, read_json, sha256
from ssl_vit.interfaces import RunError, UserError, is_main_process
from ssl_vit.models import factory
from ssl_vit.models.position import own_format
from ssl_vit.results import RESULTS
from ssl_vit.training import distributed
from ssl_vit.training.distributed import shared_errors
from ssl_vit.training.state import (
    ENCODER,
    NETWORK,
    OBJECTIVE,
    OPTIMIZER,
    RANDOM,
    TRAINING,
    State,
    Tensors,
    part,
    placed,
    set_random_state,
)

_STATE, _SUMS = "state.json", "SHA256SUMS"


def folders(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return [path for path in checkpoints(run) if (path / _STATE).is_file()]


def data_of(run: Path) -> str | None:
    """Fingerprint of the shards that the run's newest readable checkpoint was trained on; None: there is none."""
    for folder in reversed(folders(run)):
        with suppress(ValueError, LookupError, TypeError):  # a broken one is renamed when it is loaded
            return str(json.loads((folder / _STATE).read_text())["progress"]["data"])
    return None


def newest_of(weights: Path) -> Path | None:
    """The newest checkpoint of a run, or the checkpoint itself; None for a weights folder."""
    if (weights / OBJECTIVE).is_file():
        return weights
    return next(iter(folders(weights)[-1:]), None)


def step_of(folder: Path) -> int:
    """The step of a checkpoint, wherever it lies."""
    return int(read_json(folder / _STATE)["progress"]["step"])


def last_saved(run: Path | None) -> str:
    """The last good checkpoint, as text for an error message."""
    checkpoints = folders(run) if run else []
    return f"last good checkpoint: {checkpoints[-1] if checkpoints else 'none'}"


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint, and notes for the user about broken ones, which are renamed to
    `broken_step_NNNNNNNN`. Every process must call it; only the main process reads the disk."""
    intact, notes = None, list[str]()
    with shared_errors():
        if is_main_process():
            for unfinished in (run / "checkpoints").glob(".step_*.tmp"):  # a kill came while it was written
                shutil.rmtree(unfinished)
            for folder in reversed(folders(run)):
                broken_by = defect(folder)
                if broken_by is None:
                    intact = folder
                    break
                broken = folder.with_name(f"broken_{folder.name}")
                shutil.rmtree(broken, ignore_errors=True)  # of an earlier break at this step
                folder.rename(broken)
                notes.append(f"{folder} is broken ({broken_by}) and was renamed to {broken.name}")
    return distributed.from_main((intact, notes))


def defect(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files by its checksums; None: nothing. Raises RunError where they cannot be
    read."""
    try:
        sums = [line.split("  ", 1) for line in (folder / _SUMS).read_text().splitlines()]
        for expected, name in sums:
            if Path(name).name != name or not stat.S_ISREG((folder / name).stat().st_mode):
                return f"{name} of {_SUMS} is not a file in it"
            if sha256(folder / name) != expected:
                return f"{name} does not match its checksum"
        return None if sums else f"{_SUMS} is empty"
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    except OSError as error:  # it may be intact: a disk or a server that does not answer
        hint = "run the command again, or delete it to fall back to the one before"
        raise RunError(f"{folder}: cannot be read ({error}); {hint}") from None


def save(run: Path, step: int, state: State, keep_last: int, resize: float = 1.0) -> Path:
    """Write a checkpoint of all processes' state, then drop all but the newest `keep_last` and those that were
    evaluated. Every process must call it.

    resize: `data.evaluation_resize`, for timm.

    Raises RunError, on every process, when it cannot be written; older checkpoints are untouched.
    """
    target, files = run / "checkpoints" / f"step_{step:08d}", state.tensors()
    with shared_errors():
        if is_main_process():
            unfinished = target.with_name(f".{target.name}.tmp")
            try:
                _write(unfinished, state, files, resize)
                shutil.rmtree(target, ignore_errors=True)  # incomplete: no run reads it
                unfinished.rename(target)
                flush(target.parent)
            except (OSError, SafetensorError) as error:
                shutil.rmtree(unfinished, ignore_errors=True)
                where = f"{last_saved(run)}; fix that and run the command again"
                raise RunError(f"could not save checkpoint {target}: {error}\n{where}") from error
            kept = folders(run)[-keep_last:]
            for old in checkpoints(run):  # also one that a kill left half deleted
                if old not in kept and not (old / RESULTS).exists():
                    shutil.rmtree(old, ignore_errors=True)
    return target


def _write(folder: Path, state: State, files: dict[str, Tensors], resize: float) -> None:
    """All files with their checksums, flushed to the disk."""
    if not folder.parents[1].is_dir():
        raise RunError(f"{folder.parents[1]} was removed during the training: restore it and run the command again")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pooling = getattr(getattr(state.objective, "config", None), "pooling", None)
    factory.write_config(state.objective.encoder, folder / factory.CONFIG, resize=resize, pooling=pooling)
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    (folder / _STATE).write_text(
        json.dumps({name: component.state_dict() for name, component in state.parts.items()}) + "\n"
    )
    written = sorted(folder.iterdir())
    (folder / _SUMS).write_text("".join(f"{sha256(path)}  {path.name}\n" for path in written))
    for path in (*written, folder / _SUMS, folder):
        flush(path)


def publish_encoder(run: Path) -> None:
    """Put the newest checkpoint's encoder at the top of the run directory, by rename."""
    for name in (WEIGHTS, factory.CONFIG):
        with (folders(run)[-1] / name).open("rb") as source, atomic_file(run / name) as published:
            shutil.copyfileobj(source, published)


def load(folder: Path, state: State) -> None:
    """Restore the state in place, from any number of processes. Every process must call it.

    Raises UserError when a file is damaged or belongs to another recipe, RunError when it cannot be read.
    """
    encoder = state.objective.encoder
    try:
        content = json.loads((folder / _STATE).read_text())
        for name, component in state.parts.items():
            if content[name]:
                component.load_state_dict(content[name])
        weights = own_format(encoder.network, load_file(folder / WEIGHTS))
        saved = {f"{NETWORK}{name}": tensor for name, tensor in weights.items()}
        saved |= load_file(folder / OBJECTIVE)
        trained = load_file(folder / TRAINING) if state.average else saved
        optimizer, random = load_file(folder / OPTIMIZER), load_file(folder / RANDOM)
    except OSError as error:  # the main process has just verified its checksums
        where = f"{folder}: cannot be read on this machine ({error})"
        raise RunError(f"{where}; every machine must see the run directory; run the same command again") from None
    except (ValueError, LookupError, TypeError, SafetensorError) as error:
        raise _unreadable(folder, error) from None
    factory.load_state(encoder, placed(part(trained, NETWORK), encoder.network.state_dict()), str(folder))
    rest = {name: tensor for name, tensor in trained.items() if not name.startswith(NETWORK)}
    _load_rest(folder, state.objective, rest)
    if state.average:
        for name, tensor in placed(saved, state.average.values).items():
            if name in state.average.values:
                state.average.values[name].copy_(tensor)
    _load_optimizer(folder, state, optimizer)
    if mine := part(random, f"{distributed.rank()}/"):  # with more processes than before, new ones start from the seed
        set_random_state(mine, state.device)


def _load_optimizer(folder: Path, state: State, tensors: Tensors) -> None:
    parameters, by_number = state.optimized(), dict[int, Tensors]()
    numbers = {name: number for number, name in enumerate(parameters)}
    for key, tensor in tensors.items():
        name, _, item = key.rpartition("/")
        if name not in parameters:
            raise UserError(f"{folder}: from another recipe: its optimizer knows {name}, this one does not")
        by_number.setdefault(numbers[name], {})[item] = placed({name: tensor}, parameters)[name]
    state.optimizer.load_state_dict({**state.optimizer.state_dict(), "state": by_number})


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
        missing = objective.load_state_dict(placed(tensors, objective.state_dict()), strict=False)
    except RuntimeError as error:
        raise UserError(f"{folder}: from another recipe: {str(error).splitlines()[-1].strip()}") from None
    unknown = [*missing.unexpected_keys, *(k for k in missing.missing_keys if not k.startswith(ENCODER))]
    if unknown:
        raise UserError(f"{folder}: from another recipe: {', '.join(unknown[:4])} do not fit its objective")


def _unreadable(folder: Path, error: BaseException) -> UserError:
    return UserError(f"{folder}: not a readable checkpoint ({error}); delete it to fall back to the one before")
