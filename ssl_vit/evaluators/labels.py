"""Which images are labelled: label budgets, held-out parts, and the labels themselves."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ssl_vit.data.shards import ShardSet, read_members
from ssl_vit.interfaces import UserError


def choose_shots(labels: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Indices of the first `shots` images of each class's permutation by `default_rng(seed)`, class by class.

    Nested: more shots contain fewer. A class with too few images gives all it has. labels: int (n,); negative ones are
    not images to choose from.
    """
    generator = np.random.default_rng(seed)
    chosen = []
    for label in np.unique(labels[labels >= 0]):
        chosen.append(generator.permutation(np.flatnonzero(labels == label))[:shots])
    return np.concatenate(chosen)


def held_out_split(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(kept, held out) index arrays, stratified: round(share * count) of every class, never all of a class."""
    generator = np.random.default_rng([seed, 1])
    kept, held = [], []
    for label in np.unique(labels[labels >= 0]):
        order = generator.permutation(np.flatnonzero(labels == label))
        count = min(round(share * len(order)), len(order) - 1)
        held.append(order[:count])
        kept.append(order[count:])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(held))


@lru_cache(maxsize=8)
def labels_of(shards: ShardSet) -> np.ndarray:
    """Every sample's class index, int64 (samples,), read without decoding an image; -1 where there is none.

    Read once a process. Raises UserError where no sample has a label.
    """
    labels = np.full(shards.samples, -1, dtype=np.int64)
    for shard, url in enumerate(shards.urls):
        for position, sample in read_members(url):
            if not isinstance(sample, Exception) and position < shards.counts[shard]:
                text = sample.get("cls", b"-1")
                try:
                    labels[shards.first_index[shard] + position] = int(text)
                except ValueError:
                    continue
    if (labels < 0).all():
        raise UserError(f"{shards.spec}: no sample there has a label (.cls), so nothing can be evaluated on it")
    return labels
