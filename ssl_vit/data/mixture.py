"""Several shard sets as one: what `data.train` names, opened for the plan."""

from __future__ import annotations

from itertools import chain

from ssl_vit.data import DataConfig
from ssl_vit.data.shards import ShardSet, open_shards


def open_training(data: DataConfig) -> ShardSet:
    """The shards of `data.train`: one set, or a mixture as one whose shards and global indices count through its sets.

    A mixture has classes where all its sets name the same ones, else none: labels of different meanings are no labels.
    Raises UserError where a set is missing, RunError where a server does not answer.
    """
    if isinstance(data.train, str):
        return open_shards(data.train, data.remote)
    parts = [(part, open_shards(part.shards, data.remote)) for part in data.train]
    sets = [opened for _, opened in parts]
    return ShardSet(
        spec=" + ".join(part.shards for part, _ in parts),
        urls=tuple(chain.from_iterable(opened.urls for opened in sets)),
        counts=tuple(chain.from_iterable(opened.counts for opened in sets)),
        classes=sets[0].classes if len({opened.classes for opened in sets}) == 1 else None,
        source=" + ".join(opened.source or part.shards for part, opened in parts),
        checksums=tuple(chain.from_iterable(opened.checksums for opened in sets)),
        sizes=tuple(chain.from_iterable(opened.sizes for opened in sets)),
        headers=tuple(chain.from_iterable(opened.headers for opened in sets)),
        remote=data.remote,
        license=" + ".join(sorted({opened.license for opened in sets if opened.license})) or None,
        mixture=tuple((len(opened.urls), part.weight) for part, opened in parts),
    )
