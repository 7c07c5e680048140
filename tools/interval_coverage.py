"""How often the report's intervals of a difference cover the truth, by simulation.

    python tools/interval_coverage.py [REPETITIONS]

Prints a row per number of seeds and of test images: share of intervals that include the true difference, for the
interval over seeds and images of 95% and of 99% (as Bonferroni's for five tests) and, beside them, for one over seeds
alone. Then the 95% intervals where the first arm, or both, have several pretrainings that the seeds use in turn. Then,
for two equal arms, how often one is called better or worse where seeds are added until the difference is decided, with
and without alpha spending, and with it where the seeds share three pretrainings. Then the mean of the per-class
accuracies where some classes have few test images, and label efficiency, whose interval resamples seeds. Then the first
again with two seeds.
"""

from __future__ import annotations

import sys

import numpy as np
from scipy.special import expit

from ssl_vit.report import sequential
from ssl_vit.report.statistics import balanced, crossed_mean, label_efficiency, outcome, paired_difference

# Standard deviations on the logit scale: of images (shared by both arms, and of each arm's own) and of seeds likewise.
IMAGE, OWN_IMAGE, SEED, OWN_SEED = 1.5, 0.7, 0.15, 0.1
PRETRAINING = (0.05, 0.15, 0.4)  # of pretrainings, where an arm has several: 0.8, 2.4 and 6.4 points of accuracy
LOGITS = 0.85, 0.55  # of the two arms
LOOKS = (8, 12, 16, 20)  # seeds, where they are added until decided
MARGIN = 0.01
CLASSES = ((300, 300, 1), (200, 200, 3), (100, 100, 5, 5), (100, 100, 100))  # test images by class
CURVE = np.array([0.3, 0.45, 0.6, 0.7])  # accuracies at these labels per class
LABELS = np.array([5.0, 10.0, 20.0, 40.0])


def truth(pretraining: tuple[float, float] = (0.0, 0.0)) -> float:
    """The true difference: both arms' accuracy over all pretrainings, seeds and images, by Gauss-Hermite quadrature.

    pretraining: standard deviation of the pretrainings of A and of B.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    scales = np.hypot(np.sqrt(IMAGE**2 + OWN_IMAGE**2 + SEED**2 + OWN_SEED**2), pretraining)
    a, b = (
        float((weights * expit(logit + own * nodes)).sum() / weights.sum())
        for logit, own in zip(LOGITS, scales, strict=True)
    )
    return a - b


def simulate(
    seeds: int,
    images: int,
    generator: np.random.Generator,
    logits: tuple[float, float] = LOGITS,
    pretraining: np.ndarray | tuple[float, float] = (0.0, 0.0),
) -> tuple[np.ndarray, np.ndarray]:
    """bool (S, M) twice: whether arms A and B classified each image correctly (crossed logistic model).

    pretraining: effect of each seed's pretraining of A and of B, (2, S, 1); none: 0 for both.
    """
    shared = IMAGE * generator.normal(size=images) + SEED * generator.normal(size=(seeds, 1))

    def correct(logit: np.ndarray | float) -> np.ndarray:
        own = OWN_IMAGE * generator.normal(size=images) + OWN_SEED * generator.normal(size=(seeds, 1))
        return generator.random((seeds, images), dtype=np.float32) < expit((logit + shared + own).astype(np.float32))

    return correct(logits[0] + pretraining[0]), correct(logits[1] + pretraining[1])


def coverage(seeds: int, images: int, repetitions: int, generator: np.random.Generator) -> np.ndarray:
    """Shares of intervals that cover the truth, (3,): over seeds and images (95%, 99%), over seeds alone (95%)."""
    difference, covered = truth(), np.zeros(3)
    for _ in range(repetitions):
        a, b = simulate(seeds, images, generator)
        found = paired_difference(a, b)
        of_seeds = paired_difference(*(c.mean(1, keepdims=True).repeat(2, 1) for c in (a, b)))
        estimates = found, found.at(0.99), of_seeds
        covered += [abs(one.mean - difference) <= (one.half_width or 0) for one in estimates]
    return covered / repetitions


def nested_coverage(
    pretrainings: int,
    deviations: tuple[float, float],
    seeds: int,
    images: int,
    repetitions: int,
    generator: np.random.Generator,
) -> float:
    """Share of intervals that cover the truth where the seeds use the pretrainings in turn.

    deviations: standard deviation of the pretrainings of A and of B; 0 for an arm without pretraining.
    """
    difference, covered, used = truth(deviations), 0, np.arange(seeds) % pretrainings
    for _ in range(repetitions):
        effects = np.reshape(deviations, (2, 1, 1)) * generator.normal(size=(2, pretrainings, 1))
        a, b = simulate(seeds, images, generator, pretraining=effects[:, used])
        found = crossed_mean(a.astype(np.float64) - b, pretrainings=[*used])
        covered += abs(found.mean - difference) <= (found.half_width or 0)
    return covered / repetitions


def false_claims(
    images: int,
    repetitions: int,
    generator: np.random.Generator,
    *,
    spending: bool = True,
    pretrainings: int | None = None,
) -> float:
    """Share of comparisons of two equal arms that are called better or worse at any of the `LOOKS`.

    pretrainings: number of pretrainings of the first arm, which the seeds use in turn; None: seeds are the unit.
    """
    levels = sequential.levels([look / LOOKS[-1] for look in LOOKS]) if spending else [0.05] * len(LOOKS)
    claimed, used = 0, np.arange(LOOKS[-1]) % (pretrainings or LOOKS[-1])
    for _ in range(repetitions):
        effects = np.zeros((2, LOOKS[-1], 1))
        if pretrainings:
            effects[0] = PRETRAINING[1] * generator.normal(size=(pretrainings, 1))[used]
        a, b = simulate(LOOKS[-1], images, generator, (LOGITS[0], LOGITS[0]), effects)
        gains = a.astype(np.float64) - b
        for look, level in zip(LOOKS, levels, strict=True):
            estimate = crossed_mean(gains[:look], confidence=1 - level, pretrainings=[*used[:look]])
            found = outcome(estimate, MARGIN)
            claimed += found in ("better", "worse")
            if found != "undecided":
                break
    return claimed / repetitions


def per_class_coverage(sizes: tuple[int, ...], repetitions: int, generator: np.random.Generator) -> float:
    """The same for the mean of the per-class accuracies of two equal arms, whose 8 seeds differ little."""
    labels, covered = np.repeat(np.arange(len(sizes)), sizes), 0
    for _ in range(repetitions):
        arms = 4 * generator.normal(size=(2, 1, len(labels))) + 0.1 * generator.normal(size=(2, 8, 1))
        a, b = generator.random((2, 8, len(labels))) < expit(IMAGE * generator.normal(size=len(labels)) + arms)
        found = crossed_mean(balanced(a.astype(float) - b, labels))
        covered += abs(found.mean) <= (found.half_width or 0)
    return covered / repetitions


def efficiency_coverage(seeds: int, repetitions: int, generator: np.random.Generator) -> float:
    """Share of intervals of label efficiency that include the truth, without variation between test images."""
    truth, covered = float(np.exp(np.interp(0.525, CURVE, np.log(LABELS)))), 0
    for _ in range(repetitions):
        shared = 0.02 * generator.normal(size=(seeds, 1))
        curve = CURVE + shared + 0.02 * generator.normal(size=(seeds, len(CURVE)))
        accuracy = 0.525 + shared[:, 0] + 0.02 * generator.normal(size=seeds)
        _, low, high = label_efficiency(accuracy, curve, LABELS)
        covered += low <= truth <= high
    return covered / repetitions


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    print(f"true difference {100 * truth():.2f} points, {repetitions} repetitions\n")
    print("| seeds | test images | over seeds and images | the same, 99% | over seeds alone |\n|---|---|---|---|---|")
    generator = np.random.default_rng(0)
    for seeds in (3, 4, 5, 8, 20):
        for images in (400, 2000, 10000):
            shares = " | ".join(f"{100 * share:.1f}%" for share in coverage(seeds, images, repetitions, generator))
            print(f"| {seeds} | {images:,} | {shares} |", flush=True)
    print("\n| pretrainings | test images | deviation of pretrainings (logit) | one arm | both arms |")
    print("|---|---|---|---|---|")
    for pretrainings in (3, 5):
        for images in (400, 2000):
            for deviation in PRETRAINING:
                one, both = (
                    nested_coverage(pretrainings, (deviation, other), 8, images, repetitions, generator)
                    for other in (0.0, deviation)
                )
                row = f"| {pretrainings} | {images:,} | {deviation} | {100 * one:.1f}% | {100 * both:.1f}% |"
                print(row, flush=True)
    print(f"\nequal arms, looks at {LOOKS} seeds\n")
    print("| test images | false claims | without alpha spending | with it, three pretrainings |\n|---|---|---|---|")
    for images in (200, 400, 2000):
        spent, free = (false_claims(images, repetitions, generator, spending=one) for one in (True, False))
        few = false_claims(images, repetitions, generator, pretrainings=3)
        print(f"| {images:,} | {100 * spent:.1f}% | {100 * free:.1f}% | {100 * few:.1f}% |", flush=True)
    generator = np.random.default_rng(0)
    print("\n| test images by class | mean of the per-class accuracies |\n|---|---|")
    for sizes in CLASSES:
        share = per_class_coverage(sizes, repetitions, generator)
        print(f"| {', '.join(map(str, sizes))} | {100 * share:.1f}% |", flush=True)
    print("\n| seeds | label efficiency |\n|---|---|")
    for seeds in (5, 8, 20):
        print(f"| {seeds} | {100 * efficiency_coverage(seeds, repetitions, generator):.1f}% |", flush=True)
    print("\n| two seeds, test images | over seeds and images |\n|---|---|")
    generator = np.random.default_rng(0)
    for images in (200, 400, 2000):
        print(f"| {images:,} | {100 * coverage(2, images, repetitions, generator)[0]:.1f}% |", flush=True)


if __name__ == "__main__":
    main()
