"""Time of few-shot evaluation, compared with scikit-learn's Ridge on the same features in the same run.

    python tools/bench_few_shot.py

6,000 training and 2,000 test features of width 768, 100 classes, 1/5/10/25 shots, 3 seeds, l2 = 1,024;
then 1,000 classes x 25 shots, width 1,280. Prints the best of three runs: wall seconds, and processor
seconds over all cores, which other work on the machine changes less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
from sklearn.linear_model import Ridge

from ssl_vit.evaluators.few_shot import few_shot_accuracy
from ssl_vit.evaluators.labels import choose_labeled

Split = tuple[np.ndarray, np.ndarray]
L2 = 1024.0


def features(count: int, classes: int, width: int, seed: int) -> Split:
    means = np.random.default_rng(0).normal(size=(classes, width))
    labels = np.arange(count) % classes
    noise = np.random.default_rng(seed).normal(size=(count, width))
    return (means[labels] + 6 * noise).astype(np.float32), labels


def ridge(train: Split, test: Split, shots: tuple[int, ...]) -> dict[tuple[int, int], float]:
    """The same protocol with scikit-learn: one fit per (shots, seed)."""
    accuracies = {}
    for seed in (0, 1, 2):
        for count in shots:
            chosen = choose_labeled(train[1], count, seed)
            x = train[0][chosen].astype(np.float64)
            mean, scale = x.mean(0), x.std(0) + 1e-5
            x, queries = (np.column_stack([(part - mean) / scale, np.full(len(part), 100.0)]) for part in (x, test[0]))
            y = np.where(train[1][chosen][:, None] == np.unique(train[1]), 1.0, -1.0)
            predicted = Ridge(alpha=L2, fit_intercept=False).fit(x, y).predict(queries).argmax(1)
            accuracies[count, seed] = float((predicted == test[1]).mean())
    return accuracies


def seconds(do: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds, processor seconds."""
    times = []
    for _ in range(3):
        start = time.perf_counter(), time.process_time()
        do()
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    wall, processor = (min(values) for values in zip(*times, strict=True))
    return wall, processor


def main() -> None:
    train, test, shots = features(6000, 100, 768, 1), features(2000, 100, 768, 2), (1, 5, 10, 25)
    ours, peer = partial(few_shot_accuracy, *train, *test, shots=shots, l2=L2), partial(ridge, train, test, shots)
    assert ours() == peer(), "the two do not measure the same"
    (wall, processor), (their_wall, their_processor) = seconds(ours), seconds(peer)
    print(
        f"{wall:.2f} s ({processor:.2f} s of processor), scikit-learn {their_wall:.2f} s ({their_processor:.2f} s): "
        f"{their_wall / wall:.1f}x ({their_processor / processor:.1f}x)"
    )
    large, queries = features(25_000, 1000, 1280, 1), features(2000, 1000, 1280, 2)
    wall, processor = seconds(lambda: few_shot_accuracy(*large, *queries, shots=(25,), seeds=(0,)))
    print(f"1,000 classes x 25 shots x width 1,280, one seed: {wall:.2f} s ({processor:.2f} s of processor)")


if __name__ == "__main__":
    main()
