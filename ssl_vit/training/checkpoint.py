"""Checkpoints: a folder a step, written beside, flushed to disk, then renamed, so that a kill leaves none half-made.

A folder holds `config.json` + `encoder.safetensors` (timm loads them as they are), `objective.safetensors` (mask token
and heads), `training.safetensors` (with an average of the weights, which the two others hold then: the weights that
training goes on from), `optimizer/` (a file a process where the model is sharded), `random.safetensors`, `state.json`
and `SHA256SUMS`, which `sha256sum -c` reads. Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from ssl_vit.data.order import LanePosition
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
_ASIDE = ".replaced_"  # the checkpoint of a step that is being saved again
_BACKBONE = "encoder."  # the prefix of its tensors in the objective


@dataclass
class Progress:
    """Where a run stands: optimizer steps done, seconds trained, each lane's position in which shards.

    classes: the names of those that its head tells apart, where the shards name them. accumulate: micro-batches a
    process's part of a step is made of. recent: the losses of the last steps (see `Guard`). left_out: steps that were
    skipped because they were not finite. rewinds: since the newest checkpoint. undone: steps that rewinds took back.
    probed: the step of the last probe. best, since_best: the highest so far, and how many came after it; done: they
    ended the run (see `Watch`).
    """

    step: int = 0
    seconds: float = 0.0
    lanes: list[LanePosition] = field(default_factory=list)
    data: str = ""
    classes: list[str] = field(default_factory=list)
    accumulate: int = 1
    recent: list[float] = field(default_factory=list)
    left_out: int = 0
    rewinds: int = 0
    undone: int = 0
    probed: int = 0
    best: float = 0.0
    since_best: int = 0
    done: bool = False


def folders(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step_*") if (path / _STATE).is_file())


def check_data(run: Path, data: str) -> None:
    """Raises UserError where the run's newest checkpoint was trained on shards with another fingerprint."""
    for folder in folders(run)[-1:]:
        with suppress(ValueError, LookupError):  # a broken one is put aside when it is loaded
            if json.loads((folder / _STATE).read_text())["data"] != data:
                raise other_data(folder)


def other_data(folder: Path) -> UserError:
    return UserError(
        f"{folder} was trained on other shards than data.train names now (repacked?): "
        "start again with run=PATH, or put the old shards back"
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
    """The newest checkpoint that holds what was written into it, and what to tell the user about broken ones, which are
    put aside as `broken_step_NNNNNNNN`. Every process must call it; the main one looks."""
    found, notes = None, list[str]()
    if distributed.is_main():
        for unfinished in (run / "checkpoints").glob(_beside("step_*")):  # a kill came while it was written
            shutil.rmtree(unfinished)
        for aside in (run / "checkpoints").glob(f"{_ASIDE}step_*"):  # a kill came between two renames
            target = aside.with_name(aside.name.removeprefix(_ASIDE))
            shutil.rmtree(aside) if target.exists() else aside.rename(target)
        for folder in reversed(folders(run)):
            defect = _defect(folder)
            if defect is None:
                found = folder
                break
            aside = folder.with_name(f"broken_{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)  # of an earlier break at this step
            folder.rename(aside)
            notes.append(f"{folder} is broken ({defect}) and was put aside as broken_{folder.name}")
    return distributed.gather((found, notes))[0]


def _beside(name: str) -> str:
    """What a checkpoint is called while it is written."""
    return f".{name}.tmp"


def _defect(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, as its checksums tell."""
    try:
        sums = [line.split("  ", 1) for line in (folder / _SUMS).read_text().splitlines()]
        for expected, name in sums:
            if sha256(folder / name) != expected:
                return f"{name} is not what was written"
        return None if sums else f"{_SUMS} is empty"
    except (OSError, ValueError) as error:
        return str(error)


def save(run: Path, progress: Progress, state: State, keep_last: int) -> Path:
    """Write a checkpoint of all processes' state, then drop all but the newest `keep_last` and those that were
    evaluated. Every process must call it.

    Raises RunError, on every process, when a disk refuses; older checkpoints are untouched then.
    """
    target = run / "checkpoints" / f"step_{progress.step:08d}"
    beside = target.with_name(_beside(target.name))
    weights = state.weights(averaged=True)
    training = state.weights(averaged=False) if state.average else {}
    random = distributed.gather(random_state(state.device))
    with shared_errors(), _refusals(run, target, beside):
        if distributed.is_main():
            if not run.is_dir():
                raise RunError(f"{run} was removed or moved while it was trained: put it back and run it again")
            shutil.rmtree(beside, ignore_errors=True)
            (beside / _OPTIMIZER).mkdir(parents=True)
            _write_weights(state.objective, weights, beside)
            if training:
                save_file(training, beside / _TRAINING)
            save_file({f"{n}/{kind}": t for n, own in enumerate(random) for kind, t in own.items()}, beside / _RANDOM)
            content = asdict(progress) | {"scaler": state.scaler.state_dict() if state.scaler else {}}
            (beside / _STATE).write_text(json.dumps(content) + "\n")
    sums: dict[str, str] = {}
    with shared_errors(), _refusals(run, target, beside):
        if state.sharded or distributed.is_main():
            state.save_optimizer(beside / _OPTIMIZER)
            files = [path for path in beside.rglob("*") if path.is_file()]
            # Each process knows the sums of its own shards, the main one those of everything else too.
            own = f"shard-{distributed.rank() + 1:05d}-"
            for path in sorted(files):
                if path.name.startswith(own) or (distributed.is_main() and path.parent == beside):
                    sums[path.relative_to(beside).as_posix()] = sha256(path)
                    flush(path)
    parts = distributed.gather(sums)
    with shared_errors(), _refusals(run, target, beside):
        if distributed.is_main():
            lines = [f"{digest}  {name}\n" for part in parts for name, digest in part.items()]
            (beside / _SUMS).write_text("".join(lines))
            for path in (beside / _SUMS, beside / _OPTIMIZER, beside):
                flush(path)
            aside = target.with_name(f"{_ASIDE}{target.name}")
            if target.exists():
                if (target / RESULTS).exists() and _same_encoder(target, beside):
                    shutil.copytree(target / RESULTS, beside / RESULTS)
                target.rename(aside)
            beside.rename(target)
            flush(target.parent)
            shutil.rmtree(aside, ignore_errors=True)
    if distributed.is_main():
        for old in folders(run)[:-keep_last]:
            if not (old / RESULTS).exists():
                shutil.rmtree(old, ignore_errors=True)
    return target


def _same_encoder(one: Path, other: Path) -> bool:
    return sha256(one / factory.WEIGHTS) == sha256(other / factory.WEIGHTS)


@contextmanager
def _refusals(run: Path, target: Path, beside: Path) -> Iterator[None]:
    """What a disk refuses, in plain words."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        shutil.rmtree(beside, ignore_errors=True)
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise RunError(
            f"could not save checkpoint {target}: {cause}\n{last_saved(run)}; mend that and run it again"
        ) from error


def _write_weights(objective: nn.Module, weights: Tensors, folder: Path) -> None:
    encoder, network = _encoder(objective), _network(objective)
    factory.write_config(encoder, folder / factory.CONFIG)
    own = {name.removeprefix(network): tensor for name, tensor in weights.items() if name.startswith(network)}
    save_file(own, folder / factory.WEIGHTS)
    save_file({name: t for name, t in weights.items() if not name.startswith(_BACKBONE)}, folder / OBJECTIVE)


def publish_encoder(run: Path) -> None:
    """Put the newest checkpoint's encoder at the top of the run directory, by rename."""
    for name in (factory.WEIGHTS, factory.CONFIG):
        with (folders(run)[-1] / name).open("rb") as source, atomic_file(run / name) as published:
            shutil.copyfileobj(source, published)


def load(folder: Path, state: State) -> Progress:
    """Restore the state in place; returns the progress. Every process must call it.

    Raises UserError when a file is damaged or belongs to another recipe.
    """
    objective, network = state.objective, _network(state.objective)
    try:
        content = json.loads((folder / _STATE).read_text())
        scaler = content.pop("scaler")
        content.setdefault("probed", content["step"])  # as it was before probes were counted
        progress = Progress(**content | {"lanes": [LanePosition(**lane) for lane in content["lanes"]]})
        random = load_file(folder / _RANDOM)
        saved = {f"{network}{name}": tensor for name, tensor in load_file(folder / factory.WEIGHTS).items()}
        saved |= load_file(folder / OBJECTIVE)
        trained = load_file(folder / _TRAINING) if state.average else saved
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _unreadable(folder, error) from None
    inside = {name.removeprefix(network): t for name, t in trained.items() if name.startswith(network)}
    vit = _encoder(objective).network
    factory.load_state(_encoder(objective), placed(inside, vit), str(folder))
    _load_rest(folder, objective, {n: t for n, t in trained.items() if not n.startswith(network)})
    if state.average:
        state.average.load(saved, objective)
    try:
        state.load_optimizer(folder / _OPTIMIZER)
    except (OSError, ValueError, LookupError, SafetensorError, CheckpointException) as error:
        raise _unreadable(folder, error) from None
    if state.scaler and scaler:
        state.scaler.load_state_dict(scaler)
    own = f"{distributed.rank()}/"
    mine = {name.removeprefix(own): tensor for name, tensor in random.items() if name.startswith(own)}
    if mine:  # with more processes than before, the new ones start from their seed
        set_random_state(mine, state.device)
    return progress


def classes_of(folder: Path) -> list[str]:
    """The class names that a checkpoint's head was trained with; empty where it does not tell."""
    return list(read_json(folder / _STATE).get("classes") or ())


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
    unknown = [*missing.unexpected_keys, *(k for k in missing.missing_keys if not k.startswith(_BACKBONE))]
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
    return f"{_BACKBONE}{next(name for name, module in encoder.named_modules() if module is encoder.network)}."
