"""What every evaluator is: settings, a way to measure one source, and the names its numbers get in `results.json`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from ssl_vit.evaluators import ALL, Budgets, Metric, Seeds, budget_words
from ssl_vit.evaluators.features import REFERENCES, Representation, Task
from ssl_vit.interfaces import Config, Measurement
from ssl_vit.models import ImageSize, Resampling
from ssl_vit.models.encoder import Pooling


class FeatureConfig(Config):
    """What an evaluator reads from a frozen encoder.

    pooling: the class `token`, the `mean` of the patches, `both` side by side, or all `patches` side by side.
    block: after which block (1 is the first), with the model's last norm applied; None: the model's output.
    image_size: pixels, a side or [height, width]; another than the encoder's own (None) resamples the positions by
        `position_resampling` (`timm` or `google`). The raw pixels beside it stay at the encoder's own.
    """

    pooling: Pooling = "mean"
    block: int | None = Field(None, ge=1)
    image_size: ImageSize | None = None
    position_resampling: Resampling = "timm"

    @property
    def representation(self) -> Representation:
        return Representation(self.pooling, self.block, self.image_size, self.position_resampling)


class LabeledConfig(FeatureConfig):
    """labels_per_class: label budgets: images a class chosen as few_shot does, shares such as '10%', or all.

    seeds: of the choice of the labeled images and of whatever else an evaluator draws.
    """

    labels_per_class: Budgets = (ALL,)
    seeds: Seeds = (0,)


@dataclass
class Choice:
    """What a sweep on held-out training images found, once for an arm and a label budget.

    tried: every candidate with its `held_out_accuracy`. chosen: the winner's row. measured: the winner's measurement on
    test at the sweep's seed, where the sweep has trained that very model. images_seen, flops, seconds: of the sweep.
    """

    tried: list[dict[str, Any]]
    chosen: dict[str, Any]
    measured: Measurement | None = None
    images_seen: int = 0
    flops: float = 0.0
    seconds: float = 0.0


class Judge(ABC):
    """Base of the evaluators: a subclass named `Evaluator` in its own file needs `title` and `measure`.

    title: a heading for people. references: sources measured beside the judged encoder: `untrained` (the same
    architecture, freshly initialized; where the evaluator trains it, that is training from scratch) and `pixels`.
    trains_encoder: whether judging trains the whole network, so that a comparison measures its scratch arm with it.
    judges_heads: whether it judges the classifier that a run trained, so that a comparison asks it of such arms alone.
    """

    title: ClassVar[str]
    references: ClassVar[tuple[str, ...]] = REFERENCES
    trains_encoder: ClassVar[bool] = False
    judges_heads: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def measure(
        self,
        task: Task,
        source: str,
        budgets: Sequence[int | str],
        seeds: Sequence[int],
        choice: Choice | None = None,
    ) -> Iterator[Measurement]:
        """Measure one source at every budget and seed; `choice` is what `choose` returned, where there is such."""

    def choose(self, task: Task, source: str, budget: int | str, seed: int) -> Choice | None:
        """Sweep settings on held-out training images; None where there is nothing to choose for this source.

        An evaluator that has its own is `tuned`: its `choose` runs before `measure`, once a source and tuning budget.
        """
        return None

    @property
    def tuned(self) -> bool:
        return type(self).choose is not Judge.choose

    def budgets(self, asked: Sequence[int | str]) -> Sequence[int | str]:
        """The label budgets to measure where these are asked for."""
        return asked

    def tuned_at(self, budget: int | str) -> int | str:
        """The label budget whose sweep serves `budget`."""
        return budget

    def stages(self, kind: str, images: int) -> list[dict[str, Any]]:
        """Recipe keys of every training of the whole encoder that a `choose` or a `measure` of one seed does, at most,
        with so many labeled images; none where it stays frozen. A dry run measures them."""
        return []

    def measurements(self, task: Task) -> Iterator[tuple[str, Measurement]]:
        """(source, measurement) of everything that the settings ask for: the judged encoder, then its references."""
        seeds, budgets = self.config.seeds, self.budgets(getattr(self.config, "labels_per_class", ()))
        for source in ("trained", *self.references):
            if not self.tuned:
                yield from ((source, found) for found in self.measure(task, source, budgets, seeds))
                continue
            choices = {at: self.choose(task, source, at, seeds[0]) for at in dict.fromkeys(map(self.tuned_at, budgets))}
            for budget in budgets:
                choice = choices[self.tuned_at(budget)]
                yield from ((source, found) for found in self.measure(task, source, (budget,), seeds, choice))

    def run(self, task: Task) -> Iterator[tuple[str, float]]:
        """`measurements` as (name, accuracy) pairs; see `named`."""
        yield from named(self.measurements(task))


def named(measured: Iterable[tuple[str, Measurement]], metric: Metric = "accuracy") -> Iterator[tuple[str, float]]:
    """SOURCE/NAME/mean, /std (over seeds, ddof 1; 0 for one) and /seedN of every measured name, in order."""
    groups: dict[str, dict[int, float]] = {}
    for source, found in measured:
        groups.setdefault(f"{source}/{found.name}", {})[found.seed] = getattr(found, metric)
    for name, by_seed in groups.items():
        values = list(by_seed.values())
        yield f"{name}/mean", float(np.mean(values))
        yield f"{name}/std", float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        for seed, value in by_seed.items():
            yield f"{name}/seed{seed}", value


def accuracy_name(budget: int | str) -> str:
    """What a budget's only number is called."""
    return "accuracy" if budget == ALL else budget_words(budget)


def score(predicted: np.ndarray, labels: np.ndarray, classes: int | None = None) -> dict[str, Any]:
    """accuracy, mean_per_class and per_class (for `Measurement`) of predicted class indices, both int (n,)."""
    hits = predicted == labels
    number = max(int(labels.max()) + 1, classes or 0)
    counts, right = (np.bincount(labels, weights=w, minlength=number) for w in (None, hits))
    per_class = tuple(round(float(r / c), 6) if c else None for r, c in zip(right, counts, strict=True))
    present = counts > 0
    return {
        "accuracy": float(hits.mean()),
        "mean_per_class": float((right[present] / counts[present]).mean()),
        "per_class": per_class,
    }
