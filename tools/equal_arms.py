"""How often two equal arms are called better or worse on real images: untrained encoders against untrained encoders.

    python tools/equal_arms.py [REPETITIONS]

Each repetition has two arms of 8 untrained encoders of `digits_ssl`, freshly initialized; both arms see the same
labeled digits. Prints a row per evaluator of frozen features with the outcomes of the mean over its label budgets, at
the default margin of 1 point.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from ssl_vit import execution, recipe
from ssl_vit.analysis.loaded import Loaded
from ssl_vit.data.packing import pack
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import open_source
from ssl_vit.evaluators import few_shot, knn, runner
from ssl_vit.models import factory
from ssl_vit.report import statistics
from ssl_vit.results import Result, Table

SEEDS, MARGIN = 8, 0.01
EVALUATORS = {
    "few_shot": few_shot.Evaluator(
        few_shot.Config.model_validate({"labels_per_class": [1, 5, 10], "pooling": "patches"})
    ),
    "knn": knn.Evaluator(knn.Config.model_validate({"labels_per_class": [10], "pooling": "patches"})),
}


def measured(folder: Path, initialization: int, seed: int) -> dict[str, list[Result]]:
    """Rows by evaluator of a new untrained encoder and the labeled digits of a seed."""
    settings = recipe.load_recipe("digits_ssl", [f"data.train={folder}/train"])
    model = Loaded(factory.build(settings.encoder), settings.data, settings)
    context = execution.make_context(model, f"{folder}/train", f"{folder}/test", seed=initialization)
    accuracies = {}
    for name, evaluator in EVALUATORS.items():
        budgets = runner.budgets(evaluator, evaluator.config.labels_per_class)
        rows = list(runner.measure(evaluator, context, "untrained", budgets, [seed]))
        accuracies[name] = [row for row in rows if row.primary]
    return accuracies


def correct(rows: list[Result]) -> np.ndarray:
    """Share of label budgets at which each test digit was classified correctly, float64 (M,)."""
    return np.asarray(Table(rows).cells(range(len(rows)))[1].mean(axis=0))


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in EVALUATORS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for split in ("train", "test"):
            pack(open_source("digits", split=split), folder / split, Options(shards=1), progress=False)
        for repetition in range(repetitions):
            arms = [
                [
                    measured(folder, 2 * (repetition * SEEDS + seed) + arm, repetition * SEEDS + seed)
                    for seed in range(SEEDS)
                ]
                for arm in (0, 1)
            ]
            for name in EVALUATORS:
                ours, theirs = (np.stack([correct(rows[name]) for rows in arm]) for arm in arms)
                outcomes[name][statistics.outcome(statistics.crossed_mean(ours - theirs), MARGIN)] += 1
    print(f"{repetitions} repetitions\n\n| evaluator | better or worse | equivalent | undecided |\n|---|---|---|---|")
    for name, outcome in outcomes.items():
        print(f"| {name} | {outcome['better'] + outcome['worse']} | {outcome['equivalent']} | {outcome['undecided']} |")


if __name__ == "__main__":
    main()
