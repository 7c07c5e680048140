"""Which images are labeled: label budgets, held-out parts, and the labels themselves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

import numpy as np

from ssl_vit.data import DataConfig
from ssl_vit.data.headers import channels, open_header
from ssl_vit.data.overlap import saw_images
from ssl_vit.data.packing.plan import by_class
from ssl_vit.data.shards import ShardSet
from ssl_vit.data.shards.info import IMAGE_EXTENSIONS
from ssl_vit.data.shards.reading import decode_label
from ssl_vit.evaluators import ALL
from ssl_vit.interfaces import BadSample, Budget, UserError
from ssl_vit.records import SkippedSample
from ssl_vit.results import class_name

_LOOKED_AT, _SHARE_OF_GRAY = 200, 0.5  # images; difference of the shares of gray images that is worth a note


def choose_labeled(labels: np.ndarray, budget: Budget, seed: int, *, share_of: np.ndarray | None = None) -> np.ndarray:
    """Indices of the images that a label budget allows: the first images of each class's permutation by
    `default_rng(seed)`, class by class; a share such as "10%" of every class (rounded, at least one image); or "all" in
    order.

    Nested: larger budgets contain smaller ones. A class with too few images gives all it has.
    labels: int (n,); images with a negative label are never chosen.
    share_of: the labels (n,) that a share counts, where some of them are held out of `labels`.
    """
    labeled = np.flatnonzero(labels >= 0)
    if budget == ALL:
        return labeled
    everything = labels if share_of is None else share_of
    images = dict(zip(*np.unique(everything, return_counts=True), strict=True))  # by class
    generator = np.random.default_rng(seed)
    chosen = []
    for indices in by_class(labeled, labels):
        if isinstance(budget, int):
            count = budget
        else:
            count = max(1, round(float(budget[:-1]) / 100 * int(images[labels[indices[0]]])))
        chosen.append(generator.permutation(indices)[:count])
    return np.concatenate(chosen)


def held_out_split(labels: np.ndarray, share: float, seed: int, repeat: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(kept, held out) index arrays, stratified: round(share * count) of every class, never all of a class.

    repeat: number of the split, for several splits of one seed.
    """
    generator = np.random.default_rng([seed, 1, *([repeat] if repeat else [])])
    kept, held = [], []
    for order in map(generator.permutation, by_class(np.flatnonzero(labels >= 0), labels)):
        count = min(round(share * len(order)), len(order) - 1)
        held.append(order[:count])
        kept.append(order[count:])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(held))


def short_classes(labels: np.ndarray, shots: int, everything: np.ndarray) -> list[int]:
    """Those of all training images' classes that have fewer than `shots` among `labels`, both int (n,)."""
    classes = np.unique(everything[everything >= 0])
    counts = np.bincount(labels[labels >= 0], minlength=int(classes.max()) + 1)[classes]
    return list(map(int, classes[counts < shots]))


def named(classes: Sequence[int], names: Sequence[str] | None) -> str:
    """Up to ten classes by name, else by number."""
    known = ", ".join(class_name(names, label) for label in classes[:10])
    return known + (f" and {len(classes) - 10} more" if len(classes) > 10 else "")


def short_note(
    labels: np.ndarray, budget: Budget, everything: np.ndarray, names: Sequence[str] | None = None
) -> tuple[str, ...]:
    """What a reader must know of the labels (n,) that a label budget gave; everything: see `short_classes`."""
    if isinstance(budget, str) and budget != ALL:
        asked = len(choose_labeled(everything, budget, 0))
        return (f"{budget} of the labels are {asked} images; {len(labels)} could be used",) * (len(labels) < asked)
    if not isinstance(budget, int) or not (short := short_classes(labels, budget, everything)):
        return ()
    return (f"{len(short)} class(es) have fewer than {budget} usable images; all are used: {named(short, names)}",)


def untrained_note(test_labels: np.ndarray, everything: np.ndarray, names: Sequence[str] | None) -> tuple[str, ...]:
    """What a reader must know where test images (their labels: int (m,)) have classes that no training image has."""
    unknown = np.setdiff1d(test_labels, everything)
    if not len(unknown):
        return ()
    images = int(np.isin(test_labels, unknown).sum())
    which = named(unknown.tolist(), names)
    return (f"{images} test image(s) have a class without any training image and count as wrong: {which}",)


def check_classes(shards: ShardSet) -> None:
    """Raises UserError where the labeled images belong to fewer than two classes."""
    if labeled_classes(shards) < 2:
        raise UserError(f"{shards.spec}: all labeled images belong to one class; evaluation needs at least two")


def set_notes(train: ShardSet, test: ShardSet) -> list[str]:
    """What a user must know of the two sets of an evaluation: shards of both, numbers of classes, training images
    without a label, and gray images.

    The headers of up to 200 images of each set's first shard are read.
    """
    notes, counts = list[str](), [len(one.classes or ()) for one in (train, test)]
    if all(counts) and counts[0] != counts[1]:
        notes.append(f"{train.spec} names {counts[0]} classes, {test.spec} names {counts[1]}; check that labels agree")
    if (shared := train.in_common(test)) or saw_images(train.places, test.spec):
        what = f"have {shared} shards in common" if shared else "have images in common"
        notes.append(f"{train.spec} and {test.spec} {what}; the accuracy is not that on unseen images")
    if unlabeled := int((labels_of(train) < 0).sum()):
        count = f"{unlabeled} of {train.samples} images of {train.spec}"
        notes.append(f"{count} have no valid label and are not used as labeled images")
    (gray, seen), (test_gray, test_seen) = _count_gray(train), _count_gray(test)
    if seen and test_seen and abs(gray / seen - test_gray / test_seen) > _SHARE_OF_GRAY:
        notes.append(
            f"{gray} of {seen} images of {train.spec} are gray, and {test_gray} of {test_seen} of {test.spec}; "
            "check that both are prepared alike"
        )
    return notes


def _count_gray(shards: ShardSet) -> tuple[int, int]:
    """(gray images, readable images) among some of the first shard."""
    file, gray = shards.open(0), list[bool]()
    for position in np.unique(np.linspace(0, max(len(file.samples) - 1, 0), _LOOKED_AT).astype(int)):
        with suppress(BadSample):
            content = file.read(int(position))
            images = [content[extension] for extension in IMAGE_EXTENSIONS if extension in content]
            gray += [channels(open_header(data)) == 1 for data in images[:1]]
    return sum(gray), len(gray)


def labels_of(shards: ShardSet) -> np.ndarray:
    """Every sample's class index, int64 (samples,), read without decoding an image; -1 where there is none that can be
    used.

    Read once per process. Raises UserError where no sample has a label, and for a mixture of sets whose labels mean
    different classes.
    """
    return _read_labels(shards)[0]


def invalid_labels(shards: ShardSet, data: DataConfig) -> list[SkippedSample]:
    """The samples with a label that is no class index of the set.

    Raises UserError as `labels_of` does, and where `data` lets no sample be skipped.
    """
    invalid = _read_labels(shards)[1]
    if invalid and data.on_bad_sample == "fail":
        raise invalid[0].error()
    return invalid


@lru_cache(maxsize=8)
def _read_labels(shards: ShardSet) -> tuple[np.ndarray, list[SkippedSample]]:
    if shards.conflict:
        raise UserError(shards.conflict)
    labels, first_index = np.full(shards.samples, -1, dtype=np.int64), shards.first_index
    invalid, classes = list[SkippedSample](), len(shards.classes) if shards.classes else None
    for shard, url in enumerate(shards.urls):
        file, first = shards.open(shard), first_index[shard]
        for position, sample in enumerate(file.samples):
            try:
                labels[first + position] = decode_label(file.read(position, ("cls",)), classes)
            except BadSample as problem:
                invalid.append(SkippedSample(shard=url, key=sample.key, reason=str(problem)))
    if (labels < 0).all():
        why = f" ({invalid[0].key}: {invalid[0].reason})" if invalid else ""
        raise UserError(f"{shards.spec}: the images have no labels{why}; put them into one subfolder per class")
    return labels, invalid


def labeled_classes(shards: ShardSet) -> int:
    """The number of classes with labeled images: less than the named ones where some have none."""
    labels = labels_of(shards)
    return len(np.unique(labels[labels >= 0]))
