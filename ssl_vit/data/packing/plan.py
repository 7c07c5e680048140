"""Which image goes into which shard: a pure function of a source's labels and the options, no I/O."""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
from pydantic import Field

from ssl_vit.data.packing.sources.base import Source
from ssl_vit.interfaces import Config, UserError

LEAST_SHARDS = 16


class Options(Config):
    """All options that decide what is in the shards.

    shard_size: most images per shard. There are at least 16 shards (one per image where there are fewer images), in
        train and in test, so that processes and loader workers read, and download, mostly different ones.
    shards: number of shards instead. Sizes differ by at most one image.
    resize: see `ssl_vit.data.packing.images.to_stored`.
    quality: see there.
    seed: seed of the shuffle, the holdout, the folds and the subset.
    order: `shuffle`: over all images; `stratified`: shuffled, with each class spread evenly over the shards;
        `source`: as in the source, also within train and test.
    holdout: fraction of each class (of an unlabeled source: of all images) that goes to out/test while the rest goes
        to out/train; both are shard sets. A class of one image stays in train. Where the source has groups, a fraction
        of the groups instead.
    subset: images per class (of an unlabeled source: in total), or all that a class has. A larger subset holds the
        smaller ones. The test images of a holdout do not depend on it.
    keep_names: store the source's file names, as KEY.json.
    folds: number of folds for cross-validation: shard sets out/fold_0, out/fold_1 and so on. Each class is spread
        evenly over them; where the source has groups, whole groups are, in the order of the source.
    """

    shard_size: int = Field(1000, ge=1)
    shards: int | None = Field(None, ge=1)
    resize: int | None = Field(None, ge=1)
    quality: int = Field(95, ge=1, le=100)
    seed: int = Field(0, ge=0)
    order: Literal["shuffle", "stratified", "source"] = "shuffle"
    holdout: float = Field(0.0, ge=0, lt=1)
    subset: int | None = Field(None, ge=1)
    keep_names: bool = False
    folds: int | None = Field(None, ge=2)


def plan_shards(source: Source, options: Options) -> dict[str, list[np.ndarray]]:
    """The indices of the images in each shard, in order (int64), by folder: {"": shards}, or with a holdout
    {"train": shards, "test": shards}, or with folds {"fold_0": shards, ...}. Every random choice comes from the seed
    alone.

    Warns where classes are smaller than the subset. Raises UserError for options that do not fit the source.
    """
    if options.order == "stratified" and source.labels is None:
        raise UserError(f"{source.name}: order=stratified needs labels, and it has none; use order=shuffle")
    if source.count == 0:
        raise UserError(f"{source.name} has no images")
    if options.folds and options.holdout:
        raise UserError("folds and holdout are mutually exclusive")
    everything = np.arange(source.count)
    parts = {"": everything}
    if options.holdout:
        test = _held_out(source, options.holdout, np.random.default_rng([options.seed, 1]))
        parts = {"train": np.setdiff1d(everything, test, assume_unique=True), "test": test}
        if not all(map(len, parts.values())):
            raise UserError(
                f"{source.name}: {source.count} images are too few: holding out {options.holdout:g} of "
                f"{source.held_out_from} leaves train or test empty; add images"
            )
    first = next(iter(parts))
    if options.subset is not None:
        groups = by_class(parts[first], source.labels)
        if small := [len(group) for group in groups if len(group) < options.subset]:
            what = f"{len(small)} of {len(groups)} classes have" if source.labels is not None else "the source has"
            few = f"fewer than subset={options.subset} images (as few as {min(small)})"
            warnings.warn(f"{source.name}: {what} {few}", stacklevel=3)
        rng = np.random.default_rng([options.seed, 2])
        parts[first] = np.sort(_sample(rng, groups, [options.subset] * len(groups)))
    if options.folds:
        parts = {f"fold_{n}": fold for n, fold in enumerate(_folds(source, parts[first], options.folds, options.seed))}
        first = next(iter(parts))
    largest = len(parts[first])
    if options.shards is not None and options.shards > largest:
        raise UserError(f"{source.name}: shards={options.shards} is more than its {largest} images; ask for fewer")
    shuffle = np.random.default_rng([options.seed, 0])
    planned = {}
    for part, indices in parts.items():
        if options.shards is None:
            count = max(-(-len(indices) // options.shard_size), min(LEAST_SHARDS, len(indices)))
        else:  # of a holdout, `shards` is the number in train; test gets shards of about the same size
            count = min(max(1, round(options.shards * len(indices) / largest)), len(indices))
        if options.order != "source":
            indices = shuffle.permutation(indices)
        if options.order == "stratified":
            in_turn = np.concatenate(by_class(indices, source.labels))
            planned[part] = [shuffle.permutation(in_turn[shard::count]) for shard in range(count)]
        else:
            planned[part] = np.array_split(indices, count)
    return planned


def by_class(indices: np.ndarray, labels: np.ndarray | None) -> list[np.ndarray]:
    """The indices of each class, in the given order; of an unlabeled source, or without indices, one group."""
    if labels is None:
        return [indices]
    ordered = indices[np.argsort(labels[indices], kind="stable")]
    return np.split(ordered, np.flatnonzero(np.diff(labels[ordered])) + 1)


def _held_out(source: Source, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """The indices of the test images, ascending: a fraction of each class, or of the source's groups."""
    groups = source.groups
    parts = by_class(np.arange(source.count), source.labels) if groups is None else [np.unique(groups)]
    sizes = [min(max(round(fraction * len(part)), 1), len(part) - 1) for part in parts]
    test = _sample(rng, parts, sizes)
    return np.sort(test) if groups is None else np.flatnonzero(np.isin(groups, test))


def _folds(source: Source, indices: np.ndarray, folds: int, seed: int) -> list[np.ndarray]:
    """The indices of each fold, ascending. Raises UserError where there are too few."""
    if source.groups is None:
        in_turn = np.concatenate(by_class(np.random.default_rng([seed, 3]).permutation(indices), source.labels))
        parts = [np.sort(in_turn[fold::folds]) for fold in range(folds)]
    else:
        groups = source.groups[indices]
        parts = [indices[np.isin(groups, part)] for part in np.array_split(np.unique(groups), folds)]
    if not all(map(len, parts)):
        raise UserError(f"{source.name}: folds={folds} leaves a fold empty; ask for fewer")
    return parts


def _sample(rng: np.random.Generator, groups: list[np.ndarray], sizes: list[int]) -> np.ndarray:
    return np.concatenate([rng.permutation(group)[:size] for group, size in zip(groups, sizes, strict=True)])
