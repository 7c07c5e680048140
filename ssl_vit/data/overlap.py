"""Whether training data includes images of a test set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ssl_vit.data.places import absolute, is_shards, split_name
from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.interfaces import UserError


def overlaps(places: Sequence[str], test: ShardSet, opened: ShardSet | None = None) -> bool:
    """Whether these places of training data have images of a set, as far as their names tell, or shards of it under
    other names, as far as they are on this machine.

    opened: the shards of some of these places, which are not opened again.
    """
    if saw_images(places, test.spec) or (opened and opened.in_common(test)):
        return True
    for place in set(places) - {*(opened.places if opened else ())}:
        if "://" not in place and is_shards(split_name(place)[0]):
            with suppress(UserError):  # gone since the training
                if open_shards(place).in_common(test):
                    return True
    return False


def saw_images(places: Iterable[str], of: str) -> bool:
    """Whether one of these places of training data has images of a set, as far as their names tell: it is that set, the
    whole of which the set is a part, or a folder of images inside it or around it."""
    theirs = absolute(of)
    for ours in map(absolute, places):
        wholes = [split_name(name)[0] for name in (ours, theirs)]
        if ours in (theirs, wholes[1]) or theirs == wholes[0]:
            return True
        bases = [*map(Path, wholes)]
        for outer, inner in (bases, bases[::-1]):
            if outer in inner.parents and inner.is_dir() and not is_shards(str(outer)):
                return True
    return False


def redrawn(places: Iterable[str], of: str) -> bool:
    """Whether training data and a set are parts of one folder of images without splits, or shards that `shards make`
    wrote together as parts of a holdout: the holdout changes with the images."""
    theirs, ours = absolute(of), [*map(absolute, places)]
    if "#" in theirs:
        return split_name(theirs)[0] in {split_name(one)[0] for one in ours}
    if "://" in theirs or Path(theirs).parent not in {Path(one).parent for one in ours} or not is_shards(theirs):
        return False
    return "part of holdout" in (open_shards(theirs).source or "")
