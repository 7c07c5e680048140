"""Typed records: what a run, a comparison (`plan.json`) and a finished task write about themselves. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, JsonValue, ValidationError

from ssl_vit.files import read_json
from ssl_vit.interfaces import Budget, Config, Metric, UserError

Model = TypeVar("Model", bound=BaseModel)

ArmKind = Literal["scratch", "pretrained", "weights"]
ReferenceKind = Literal["untrained", "pixels", "control", "scratch"]
TaskKind = Literal["pretrain", "pictures", "sweep", "measure"]


class Cost(Config):
    """The cost of a training. images_seen: repeats counted. flops: forward and backward. seconds: wall time."""

    images_seen: int = 0
    flops: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in Cost.model_fields})


class RunSummary(Config):
    """Summary of a finished training run (`summary.json`). data: fingerprint of the shards."""

    name: str
    objective: str
    steps: int
    images_seen: int
    flops: float
    seconds: float
    parameters: int
    samples: int
    processes: int = 1
    data: str = ""
    classes: tuple[str, ...] = ()

    @property
    def cost(self) -> Cost:
        return Cost(images_seen=self.images_seen, flops=self.flops, seconds=self.seconds)


class SweepRecord(Config):
    """A sweep on held-out training images: once per arm and label budget.

    candidates: settings, each with its `held_out_accuracy`, the mean over the first `held_out_parts` held-out parts
        (diverged: 0.0 and 0).
    best: the settings of the winner.
    cost: cost of all candidates together.
    labels: number of different labeled images, of all held-out parts and of the trainings that they scored.
    held_out: how many of them were held out.
    source: what was trained: `trained`, `untrained` or `pixels`. labels_per_class: the label budget.
    """

    candidates: tuple[dict[str, bool | float | int | str | None], ...]
    best: dict[str, bool | float | int | str | None]
    cost: Cost = Cost()
    labels: int = 0
    held_out: int = 0
    source: str = ""
    labels_per_class: Budget = 0


class SkippedSample(Config):
    """A sample that could not be used: its image cannot be read, or its label is not valid."""

    shard: str
    key: str
    reason: str

    def error(self) -> UserError:
        """What to raise where no sample may be skipped."""
        return UserError(f"{self.shard}: sample {self.key}: {self.reason} (data.on_bad_sample=fail)")


class EvaluationRecord(Config, extra="ignore"):
    """What a results file of `ssl-vit eval` says beside its rows.

    data: train, which may be several sets, and test. shards: their fingerprints. notes: on these two sets.
    weights, sha256: folder and checksum of the evaluated weights. saved: time (UTC, ISO 8601), set by `results.save`.
    """

    evaluator: str
    title: str
    trains_encoder: bool = False
    settings: dict[str, JsonValue] = Field({})
    data: dict[Literal["train", "test"], str | tuple[str, ...]] = Field(min_length=2)
    shards: dict[str, str] = Field({})
    classes: tuple[str, ...] = ()
    metric: Metric = "accuracy"
    weights: str = ""
    sha256: str = ""
    sweeps: tuple[SweepRecord, ...] = ()
    skipped: tuple[SkippedSample, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    environment: dict[str, JsonValue] = Field({})
    saved: str = ""

    @property
    def protocol(self) -> str:
        """The same for what was measured alike."""
        return self.model_dump_json(include={"evaluator", "settings", "metric", "shards" if self.shards else "data"})

    @property
    def processes(self) -> int:
        count = self.environment.get("world_size")
        return count if isinstance(count, int) else 1


class TaskRecord(Config):
    """One independent unit of work of a comparison.

    fold: fold of a cross-validation that is tested; 0 without. after: ids of the tasks whose results it needs.
    """

    id: str
    kind: TaskKind
    arm: str
    data: str = ""
    evaluator: str = ""
    labels_per_class: Budget = 0
    seed: int = 0
    fold: int = 0
    after: tuple[str, ...] = ()
    fingerprint: str = ""


class TaskResult(Config, extra="ignore"):
    """What a finished task, or a part of `eval`, stores in a file beside its rows (`results.load` returns both).

    environment: versions, machine and commit. saved: time of saving (UTC, ISO 8601); `results.save` sets it.
    sweep: sweep of a `sweep` task. Its winner, trained at the sweep's seed, is a row of results too.
    run: summary of a `pretrain` task.
    pictures: folder of a `pictures` task, relative to the comparison; None: there are none.
    """

    fingerprint: str
    processes: int = 1
    environment: dict[str, Any] = Field({})
    seconds: float = 0.0
    saved: str = ""
    run: RunSummary | None = None
    sweep: SweepRecord | None = None
    pictures: str | None = None
    skipped: tuple[SkippedSample, ...] = ()


class ArmRecord(Config):
    """An arm as the report sees it.

    run: run directory (or given weights), relative to the comparison; None for training from scratch.
    architecture: hash of sizes and image preparation: arms that share it may be compared directly.
    encoder: sizes and image preparation; empty for weights without a recipe.
    uses_labels: whether its pretraining used labels.
    evaluators: settings that this arm alone has, by evaluator, or by "SET EVALUATOR" with several datasets; None where
        the others have a key that it lacks.
    starts_from: downloaded or given weights that it started from; what they cost to train is unknown.
    trained_on: the dataset whose whole training set it was pretrained on. saw: those of whose training sets it may have
        seen images.
    compute_of: for training from scratch: the arm whose pretraining compute is spent on longer fine-tuning.
    """

    name: str
    label: str
    kind: ArmKind
    run: str | None = None
    objective: str | None = None
    architecture: str = ""
    encoder: dict[str, Any] = Field({})
    uses_labels: bool = False
    evaluators: dict[str, dict[str, Any]] = Field({})
    series: str | None = None
    starts_from: str | None = None
    trained_on: str | None = None
    saw: tuple[str, ...] = ()
    compute_of: str | None = None
    summary: RunSummary | None = None

    def own_settings(self, data: str, evaluator: str) -> dict[str, Any]:
        """Settings of an evaluator on a dataset that this arm alone has, by dotted key."""
        return self.evaluators.get(f"{data} {evaluator}") or self.evaluators.get(evaluator) or {}


class ReferenceRecord(Config):
    """A row of results beside the arms.

    kind: an encoder as initialized, raw pixels, training from scratch, or a repetition of a row that it must equal.
    like: the arm whose architecture and image preparation it has. architecture: as in `ArmRecord`.
    repeats: for a control, the row that it repeats; "" for the control that is repeated.
    """

    name: str
    kind: ReferenceKind
    like: str
    architecture: str = ""
    repeats: str = ""


class DataRecord(Config):
    """Shards that a comparison or an evaluation reads. samples, labeled_classes: None where they were not counted."""

    path: str
    samples: int | None = None
    classes: tuple[str, ...] | None = None
    labeled_classes: int | None = None
    source: str | None = None


class EvaluatorRecord(Config):
    """An evaluator. title: for people. settings: by dataset."""

    title: str
    trains_encoder: bool = False
    settings: dict[str, dict[str, Any]] = Field({})


class Look(Config):
    """A look at the headlines of a comparison that adds seeds until they are decided.

    seeds: number of seeds of each headline. pretrainings: number of pretrainings of each pretrained arm.
    outcomes: outcome of the headline by dataset.
    """

    seeds: int
    pretrainings: int
    outcomes: dict[str, str]


class ComparisonRecord(Config, extra="ignore"):
    """A comparison and its tasks (`plan.json`).

    metrics: by dataset, `accuracy` or `mean_per_class`.
    data: by "SET train", "SET test" and "pretraining of ARM"; in a cross-validation "SET train of fold N" and so on.
    seeds: for evaluators that train the encoder. frozen_seeds: for evaluators on frozen features.
    folds: folds of a cross-validation; 1 without. pretrainings: of each pretrained arm (in each fold).
    references: rows beside the arms, in the order of the tables.
    assigned: index of the pretraining of seed n, where it is not n modulo `pretrainings`.
    max_seeds, looks: of a comparison that adds seeds until its headlines are decided.
    margin: differences within it count as equivalent (fraction, 0.01: one point).
    baseline: arm that the headline compares with (None: see `report.summary.baseline_of`).
    quick: whether it is a trial with a tenth of the steps and two seeds.
    """

    name: str
    title: str
    command: str
    seeds: tuple[int, ...]
    frozen_seeds: tuple[int, ...]
    pretrainings: int = 1
    assigned: tuple[int, ...] = ()
    folds: int = Field(1, ge=1)
    margin: float = 0.01
    baseline: str | None = None
    max_seeds: int | None = Field(None, ge=1)
    looks: tuple[Look, ...] = ()
    notes: tuple[str, ...] = ()
    jobs: int = 1
    study: Literal["samples", "flops"] | None = None
    quick: bool = False
    metrics: dict[str, Metric]
    data: dict[str, DataRecord] = Field({})
    arms: tuple[ArmRecord, ...] = Field(min_length=1)
    references: tuple[ReferenceRecord, ...] = ()
    evaluators: dict[str, EvaluatorRecord] = Field({})
    tasks: tuple[TaskRecord, ...] = ()

    @property
    def rows(self) -> tuple[ArmRecord | ReferenceRecord, ...]:
        """Arms, then references."""
        return (*self.arms, *self.references)

    @property
    def encoders(self) -> set[str]:
        """Names of the rows whose seeds may share encoders: an untrained encoder has as many initializations as arms
        have pretrainings."""
        return {row.name for row in self.rows if row.kind in ("pretrained", "weights", "untrained")}


def read(file: Path, model: type[Model], content: object = None) -> Model:
    """Read the record in a JSON file. Raises UserError for a damaged file.

    content: content of the file, if it was read already.
    """
    try:
        return model.model_validate(read_json(file) if content is None else content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{file}: written by another version of ssl-vit ({key}: {first['msg']}); run its command again"
        ) from None
