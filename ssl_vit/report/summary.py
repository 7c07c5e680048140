"""The statistics of a comparison: accuracies, paired differences, headlines, label efficiency. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ssl_vit.interfaces import Budget
from ssl_vit.records import TaskRecord
from ssl_vit.report import statistics
from ssl_vit.report.read import Comparison
from ssl_vit.report.statistics import Estimate, Outcome
from ssl_vit.results import Table

Role = Literal["baseline", "supervised", "reference", "other"]
Rows = dict[tuple[int, int], int]  # row of the table by pretraining seed and seed
RowsByBudget = dict[Budget, dict[str, Rows]]


@dataclass(frozen=True)
class EvaluationKey:
    """One dataset under one evaluator."""

    data: str
    evaluator: str


@dataclass(frozen=True)
class Accuracy:
    """Test accuracy of an arm. labels: labels per class of the budget, as a number. seeds: number of seeds."""

    place: EvaluationKey
    labels_per_class: Budget
    labels: float
    arm: str
    seeds: int
    estimate: Estimate


@dataclass(frozen=True)
class Difference(Accuracy):
    """Accuracy of an arm minus that of another, paired by seed and test image.

    labels_per_class, labels: "mean" and 0 for the mean over all label budgets.
    role: role of `against`. means: accuracies of both arms over the same seeds and images.
    unit: unit of replication. within_variance: variance over the seeds of a pretraining, if that is the unit.
    fixed: arms with a single pretraining or initialization; the interval does not cover others.
    """

    against: str
    role: Role
    means: tuple[float, float]
    unit: Literal["seed", "pretraining"]
    within_variance: float
    fixed: tuple[str, ...]
    outcome: Outcome


@dataclass(frozen=True)
class Efficiency:
    """`arm` with a label budget is as accurate as `against` with `labels` per class (interval low..high; see
    `statistics.label_efficiency`). measured: labels per class of the smallest and the largest label budget."""

    place: EvaluationKey
    labels_per_class: Budget
    arm: str
    against: str
    labels: float
    low: float
    high: float
    measured: tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """differences: adjusted for the label budgets of a pair of arms. means: over them. headlines: of each dataset."""

    places: tuple[EvaluationKey, ...]
    accuracies: tuple[Accuracy, ...]
    differences: tuple[Difference, ...]
    means: tuple[Difference, ...]
    headlines: tuple[Difference, ...]
    efficiencies: tuple[Efficiency, ...]


def summarize(comparison: Comparison) -> Summary:
    """All statistics of the finished part of a comparison.

    The headline of a dataset is the mean over label budgets of the paired difference between the first arm under test
    and its baseline (the recipe's, else training from scratch, else the untrained encoder), under the first evaluator
    that trains the encoder, else under the first one. The plan alone decides which that is, not what is finished.
    """
    accuracies, efficiencies = list[Accuracy](), list[Efficiency]()
    differences, means = list[Difference](), list[Difference]()
    places = rows_by_place(comparison)
    for place, budgets in places.items():
        measured, tasks = Measured(comparison, place, budgets), _planned(comparison, place.data, place.evaluator)
        trains = comparison.record.evaluators[place.evaluator].trains_encoder  # then each label budget has its tasks
        planned = {*budgets, *(task.labels_per_class for task in tasks if trains)}
        accuracies += measured.accuracies()
        for arm, against, role in _pairs(comparison, measured.arms):
            if len(budgets) == len(planned):
                means += measured.difference([*budgets], arm, against, role)
            single = [row for budget in budgets for row in measured.difference([budget], arm, against, role)]
            differences += _adjusted(comparison, single, len(planned))
            if role == "baseline" and arm == comparison.tested[0]:
                efficiencies += measured.efficiencies(arm, against)
    declared = [found for data in comparison.record.metrics if (found := declared_headline(comparison, data))]
    heads = [row for row in means if (row.place, row.arm, row.against) in declared]
    listed = (accuracies, differences, means, _adjusted(comparison, heads, len(declared)), efficiencies)
    return Summary(tuple(places), *(tuple(rows) for rows in listed))  # type: ignore[arg-type]


def mean_accuracy(
    table: Table, rows: Sequence[int], *, weighted: bool, pretrainings: Sequence[int] | None = None
) -> Estimate:
    """Test accuracy over seeds and test images, with its interval.

    rows: indices in the table, one per seed.
    weighted: whether it is the mean of the per-class accuracies.
    pretrainings: as `statistics.crossed_mean` has.
    """
    classes, correct = table.cells(rows)
    values = statistics.balanced(correct, classes) if weighted else correct
    return statistics.crossed_mean(values, pretrainings=pretrainings)


def declared_headline(comparison: Comparison, data: str) -> tuple[EvaluationKey, str, str] | None:
    """(place, arm, baseline) of the headline of a dataset."""
    record, arm = comparison.record, comparison.tested[0]
    for evaluator in sorted(record.evaluators, key=lambda name: not record.evaluators[name].trains_encoder):  # stable
        planned = [task.arm for task in _planned(comparison, data, evaluator)]
        baseline = record.baseline or (baseline_of(comparison, arm, planned) if arm in planned else None)
        if baseline and {arm, baseline} <= {*planned}:
            return EvaluationKey(data, evaluator), arm, baseline
    return None


def _planned(comparison: Comparison, data: str, evaluator: str) -> list[TaskRecord]:
    return [t for t in comparison.record.tasks if (t.kind, t.data, t.evaluator) == ("measure", data, evaluator)]


def _adjusted(comparison: Comparison, rows: Sequence[Difference], tests: int) -> list[Difference]:
    """The rows with intervals adjusted for the number of planned tests (Holm)."""
    confidence, margin = comparison.confidence, comparison.record.margin
    adjusted = statistics.holm([row.estimate for row in rows], confidence, tests)
    return [
        replace(row, estimate=estimate, outcome=statistics.outcome(estimate, margin, tests, confidence))
        for row, estimate in zip(rows, adjusted, strict=True)
    ]


def rows_by_place(comparison: Comparison, *, controls: bool = False) -> dict[EvaluationKey, RowsByBudget]:
    """Rows of the table by dataset and evaluator, label budget (ascending) and arm; with the controls only if asked."""
    frame = comparison.table.frame
    frame = frame[frame["primary"].astype(bool) & (controls | frame["arm"].isin(comparison.arms))]
    budget = frame["labels_per_class"].astype(str).str.zfill(9)  # "5" before "10"
    frame = frame.assign(budget=budget).sort_values(["labels", "budget"], kind="stable")
    rows: dict[EvaluationKey, RowsByBudget] = {}
    for row in frame.itertuples():
        arms = rows.setdefault(EvaluationKey(row.data, row.evaluator), {}).setdefault(row.labels_per_class, {})
        arms.setdefault(row.arm, {})[row.pretraining_seed, row.seed] = row.Index
    data, evaluators = list(comparison.record.metrics), list(comparison.record.evaluators)
    places = sorted(rows, key=lambda place: (data.index(place.data), evaluators.index(place.evaluator)))
    return {place: rows[place] for place in places}


def _pairs(comparison: Comparison, measured: Sequence[str]) -> Iterator[tuple[str, str, Role]]:
    """Yield (arm, against, role of `against`) for every pair of arms, and for every arm with every reference. A study
    compares the arms under test with supervised arms and references, and all arms with baselines and with the arms of
    the same size. Arms under test come first, training from scratch last."""
    arms, study, sizes = {arm.name: arm for arm in comparison.record.arms}, comparison.record.study, comparison.sizes()

    def rank(name: str) -> int:
        last = name not in arms or arms[name].kind == "scratch"
        return 0 if name in comparison.tested else 2 if last else 1

    ordered = sorted(measured, key=rank)  # stable
    for index, arm in enumerate(ordered):
        if arm not in arms:
            continue
        compared = not study or arm in comparison.tested
        alone = comparison.separate or arms[arm].kind == "scratch"
        chosen = comparison.record.baseline if arm == comparison.tested[0] else None
        baseline = None if alone else chosen if chosen in measured else baseline_of(comparison, arm, measured)
        others = ordered[index + 1 :]
        for other in sorted(others, key=lambda name: name != baseline):
            if other == baseline:
                yield arm, other, "baseline"
            elif other not in arms and compared:
                yield arm, other, "reference"
            elif other in arms and arms[other].uses_labels and compared:
                yield arm, other, "supervised"
            elif other in arms and (not study or sizes.get(arm, -1.0) == sizes.get(other)):
                yield arm, other, "other"


def baseline_of(comparison: Comparison, arm: str, measured: Sequence[str]) -> str | None:
    """Name of the row without pretraining that an arm is compared with: training from scratch, else the untrained
    encoder; of several that of the same architecture, without another arm's compute."""
    (architecture,) = [row.architecture for row in comparison.record.arms if row.name == arm]
    rows = [row for row in comparison.record.rows if row.kind in ("scratch", "untrained") and row.name in measured]
    rows.sort(key=lambda row: (row.architecture != architecture, row.kind, bool(getattr(row, "compute_of", None))))
    return rows[0].name if rows else None


class Measured:
    """The results of one dataset under one evaluator; for the metric `mean_per_class` see `statistics.balanced`."""

    def __init__(self, comparison: Comparison, place: EvaluationKey, budgets: RowsByBudget) -> None:
        self.comparison, self.place, self.budgets = comparison, place, budgets
        self.weighted = comparison.record.metrics[place.data] == "mean_per_class"
        self.arms = [arm for arm in comparison.arms if any(arm in arms for arms in budgets.values())]
        data, counts = comparison.record.data, comparison.table.frame["labels"]
        trained = [data[key].labeled_classes or 0 for key in data if key.startswith(f"{place.data} train")]
        classes = max(trained, default=0) or comparison.classes(place.data)
        self.labels: dict[Budget, float] = {}
        for budget, arms in budgets.items():
            rows = [row for rows_by_seed in arms.values() for row in rows_by_seed.values()]
            given = float(counts[rows].mean() / classes)  # less than the budget where classes have too few images
            self.labels[budget] = min(float(budget), given) if isinstance(budget, int) else given

    def accuracies(self) -> Iterator[Accuracy]:
        for budget, arms in self.budgets.items():
            for arm in (arm for arm in self.arms if arm in arms):
                rows, pretrained = [*arms[arm].values()], arm in self.comparison.record.encoders
                units = [pretraining_seed for pretraining_seed, _ in arms[arm]] if pretrained else None
                estimate = mean_accuracy(self.comparison.table, rows, weighted=self.weighted, pretrainings=units)
                yield Accuracy(self.place, budget, self.labels[budget], arm, len(rows), estimate)

    def difference(self, budgets: Sequence[Budget], arm: str, against: str, role: Role) -> Iterator[Difference]:
        """A minus B, averaged over these label budgets in each cell; nothing where the arms share no seed."""
        if not (cells := self._cells(budgets, arm, against)):
            return
        values, units, fixed = cells
        ours, theirs = values.mean(axis=0)
        estimate = statistics.crossed_mean(ours - theirs, confidence=self.comparison.confidence, pretrainings=units)
        weighted = [statistics.unit_means(side, units) if units else side for side in (ours, theirs)]
        yield Difference(
            place=self.place,
            labels_per_class=budgets[0] if len(budgets) == 1 else "mean",
            labels=self.labels[budgets[0]] if len(budgets) == 1 else 0.0,
            arm=arm,
            seeds=len(ours),
            estimate=estimate,
            against=against,
            role=role,
            means=(float(weighted[0].mean()), float(weighted[1].mean())),
            unit="pretraining" if units else "seed",
            within_variance=statistics.within_variance((ours - theirs).mean(axis=1), units) if units else 0.0,
            fixed=fixed,
            outcome=statistics.outcome(estimate, self.comparison.record.margin),
        )

    def efficiencies(self, arm: str, against: str) -> Iterator[Efficiency]:
        budgets = [budget for budget, arms in self.budgets.items() if arm in arms and against in arms]
        if len(budgets) < 2 or not (cells := self._cells(budgets, arm, against)):
            return
        values, units, _ = cells
        scores = np.moveaxis(values.mean(axis=-1), -1, 0)  # (S, B, 2)
        scores = statistics.unit_means(scores, units) if units else scores
        labels = np.array([self.labels[budget] for budget in budgets])
        measured = float(labels.min()), float(labels.max())
        for index, budget in enumerate(budgets):
            equal = statistics.label_efficiency(scores[:, index, 0], scores[:, :, 1], labels)
            yield Efficiency(self.place, budget, arm, against, *equal, measured)

    def _cells(
        self, budgets: Sequence[Budget], arm: str, against: str
    ) -> tuple[np.ndarray, Sequence[int] | None, tuple[str, ...]] | None:
        """The results that both arms have at all of these budgets; None where they share no seed.

        Returns (values (B, 2, S, M), 1 where correct, by label budget, arm, seed and test image;
        `statistics.units_of` their pretrainings; the arms with a single one).
        """
        pairs = [_paired(self.budgets[n].get(arm, {}), self.budgets[n].get(against, {})) for n in budgets]
        if not (keys := [key for key in pairs[0] if all(key in of_budget for of_budget in pairs)]):
            return None
        rows = [of_budget[key][side] for of_budget in pairs for side in (0, 1) for key in keys]
        classes, correct = self.comparison.table.cells(rows)
        values = correct.reshape(len(budgets), 2, len(keys), -1).astype(np.float64)
        if self.weighted:
            values = statistics.balanced(values, classes)
        arms = [(side, name) for side, name in enumerate((arm, against)) if name in self.comparison.record.encoders]
        pretraining_seeds = [[key[side] for key in keys] for side, _ in arms]
        fixed = tuple(name for (_, name), own in zip(arms, pretraining_seeds, strict=True) if len(set(own)) == 1)
        return values, statistics.units_of(*pretraining_seeds), fixed


def _paired(ours: Rows, theirs: Rows) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Rows of both arms by (their pretraining seeds, seed), where they share the seed."""
    others = {seed: pretraining_seed for pretraining_seed, seed in theirs}
    return {
        (pretraining_seed, others[seed], seed): (ours[pretraining_seed, seed], theirs[others[seed], seed])
        for pretraining_seed, seed in sorted(ours)
        if seed in others
    }
