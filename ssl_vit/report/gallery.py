"""Test images on which two arms disagree, as small pictures with what each arm predicted."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.data.shards.reading import decode_label
from ssl_vit.interfaces import BadSample, Budget, RunError, UserError
from ssl_vit.report.read import Comparison
from ssl_vit.report.summary import Difference, rows_by_place

EACH = 8  # images for either arm
_SIDE = 96  # pixels, at most


@dataclass(frozen=True)
class Card:
    """A test image. picture: data URI. answers: by arm, its classes with the number of seeds that predicted each."""

    picture: str
    truth: str
    answers: Mapping[str, str]


@dataclass(frozen=True)
class Gallery:
    """better, worse: where more seeds of the first arm were right than of the second; where fewer were.

    missing: why there are no pictures; "" where there are.
    """

    arm: str
    against: str
    budget: Budget
    better: tuple[Card, ...]
    worse: tuple[Card, ...]
    missing: str = ""


def gallery(comparison: Comparison, head: Difference) -> Gallery:
    """The test images on which both arms of a headline disagree most, at the largest label budget that both have."""
    table, pair = comparison.table, (head.arm, head.against)
    measured = rows_by_place(comparison)[head.place]
    budget, arms = next(item for item in reversed(measured.items()) if set(pair) <= set(item[1]))
    rows = {arm: [*arms[arm].values()] for arm in comparison.arms if arm in arms}
    both = [row for arm in pair for row in rows[arm]]
    images, (labels, correct) = table.images(both), table.cells(both)
    ours, theirs = np.split(correct, [len(rows[head.arm])])
    gain = ours.mean(axis=0) - theirs.mean(axis=0)
    order = np.argsort(-gain, kind="stable")
    better = [index for index in order[:EACH].tolist() if gain[index] > 0]
    worse = [index for index in order[::-1][:EACH].tolist() if gain[index] < 0]
    try:
        shards = _test_shards(comparison, head.place.data)
        pictures = {index: _picture(shards, int(images[index]), int(labels[index])) for index in [*better, *worse]}
    except (UserError, RunError) as error:
        return Gallery(*pair, budget, (), (), str(error))

    def name(label: int) -> str:
        return comparison.class_name(head.place.data, label)

    def answer(arm: str, image: int) -> str:
        predictions = [table.results[row].prediction for row in rows[arm]]
        found = [label for one in predictions for label in one.predicted[one.images == image].tolist()]
        return ", ".join(f"{name(label)} ({count})" for label, count in Counter(found).most_common(2))

    cards = {
        index: Card(picture, name(int(labels[index])), {arm: answer(arm, int(images[index])) for arm in rows})
        for index, picture in pictures.items()
        if picture
    }
    first, second = (tuple(cards[index] for index in places if index in cards) for places in (better, worse))
    return Gallery(*pair, budget, first, second)


def _test_shards(comparison: Comparison, data: str) -> ShardSet:
    """The test shards of a dataset, of every fold. Raises UserError where they are remote, missing or changed."""
    name, every = f"{data} test", comparison.record.data.items()
    parts = [part for key, part in every if key == name or key.startswith(f"{name} of fold ")]
    if remote := [part.path for part in parts if "://" in part.path]:
        raise UserError(f"{remote[0]} is remote")
    try:
        opened = open_shards([part.path for part in parts])
    except UserError:
        gone = [part.path for part in parts if not Path(part.path).is_absolute() and not Path(part.path).exists()]
        if not gone:
            raise
        raise UserError(f"{gone[0]} is not found from here; run `ssl-vit report` where `compare` ran") from None
    if opened.samples != sum(part.samples or 0 for part in parts):
        raise UserError(f"{opened.spec} holds other images now")
    return opened


def _picture(shards: ShardSet, image: int, label: int) -> str:
    """A test image as a small picture; "" where it cannot be read. Raises UserError where its label is another now.

    image: index that counts through all the shards.
    """
    from ssl_vit.data.images import open_picture  # imports torch

    shard = int(np.searchsorted(shards.first_index, image, side="right")) - 1
    try:
        content = shards.open(shard).read(image - int(shards.first_index[shard]))
        if decode_label(content, None) != label:
            raise UserError(f"{shards.spec} holds other images now")
        shown = Image.fromarray(open_picture(content, 3).whole().permute(1, 2, 0).numpy())
    except BadSample:
        return ""
    shown.thumbnail((_SIDE, _SIDE))
    form, buffer = "PNG" if max(shown.size) <= _SIDE // 2 else "JPEG", io.BytesIO()
    shown.save(buffer, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
