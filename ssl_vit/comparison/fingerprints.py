"""What the results of tasks depend on: what is finished and unchanged is not run again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ssl_vit import plugins, runs
from ssl_vit.comparison.design import Design, digest
from ssl_vit.evaluators import runner
from ssl_vit.files import WEIGHTS, sha256
from ssl_vit.models import factory
from ssl_vit.recipe import flatten
from ssl_vit.records import TaskRecord
from ssl_vit.training import checkpoint

_FORMAT = 5  # of the results of tasks
# Keys of an evaluator's training that change no result; batch norm, mixup and CutMix see one micro-batch at a time.
_MICRO_BATCH = ("training.accumulate", "training.auto_batch")
_NO_RESULT = [key for key in runs.MAY_CHANGE if key.startswith("training.") and key not in _MICRO_BATCH]


def fingerprint(design: Design, task: TaskRecord) -> str:
    """Hash of everything a task's result depends on, and of nothing else. Of evaluators and objectives of another
    package, the file that defines them."""
    content: list[Any] = [_FORMAT, task.kind, task.seed, _origin(design, task)]
    if task.data:
        content += [design.shards.get(design.part(task.data, part, task.fold)) for part in ("train", "test")]
    if task.evaluator:
        evaluator = design.evaluator(task.data, task.evaluator, task.arm)
        budgets, seeds = design.budgets_and_seeds(task)
        given = evaluator.config.model_dump(mode="json", exclude={"labels_per_class", "seeds"})
        settings = _learned(given, _NO_RESULT)
        content += [task.evaluator, settings, budgets, [*seeds.items()]]
        content += [design.study.sets[task.data].metric]  # settings are selected by it
        content += filter(None, [plugins.checksum("evaluators", task.evaluator)])
        if runner.has_sweep(evaluator):
            content += [design.study.comparison.seeds[0]]
    return digest(content)[:16]


def _origin(design: Design, task: TaskRecord) -> list[Any]:
    """What the encoder that a task trains or evaluates is made from."""
    row = design.rows[task.arm]
    if row.kind == "pretrained":
        recipe = design.study.recipes[row.name]
        learned = _learned(recipe.model_dump(mode="json", exclude={"name"}), runs.MAY_CHANGE)
        if changed := plugins.checksum("objectives", recipe.objective.name):
            learned["objective.file"] = changed
        start = recipe.init_from
        learned["init_from"] = _checksum(design, factory.find_weights(start) / WEIGHTS) if start else None
        seed = next(iter(design.budgets_and_seeds(task)[1].values())) if task.evaluator else task.seed
        return [learned, design.shards.get(design.part(row.name, "pretrain", task.fold)), seed]
    origin: list[Any] = [row.kind == "pixels", design.sizes(row.like, dropout=True)]
    if row.kind == "weights":
        given = str(design.study.comparison.arms[row.name].weights)
        files = [factory.find_weights(given) / name for name in (WEIGHTS, factory.CONFIG)]
        reads_head = not task.evaluator or design.evaluator(task.data, task.evaluator, task.arm).needs_head
        head = checkpoint.newest_of(Path(given)) if reads_head else None
        origin += (_checksum(design, path) for path in [*files, *([head / checkpoint.OBJECTIVE] if head else [])])
    return origin


def _learned(settings: dict[str, Any], ignored: Iterable[str]) -> dict[str, Any]:
    """Settings by dotted key, without the ignored ones and those below them."""
    without = tuple(f"{key}." for key in ignored)
    return {key: value for key, value in flatten(settings).items() if not f"{key}.".startswith(without)}


def _checksum(design: Design, path: Path) -> str:
    """A file's checksum; weights matter to many tasks and are read once."""
    if path not in design.checksums:
        design.checksums[path] = sha256(path)
    return design.checksums[path]
