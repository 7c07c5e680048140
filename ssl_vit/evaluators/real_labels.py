"""ImageNet-ReaL: predictions scored again by reassessed labels (Beyer et al. 2020, arXiv 2006.07159)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from ssl_vit.data.shards import ShardSet
from ssl_vit.evaluators.labels import labels_of
from ssl_vit.interfaces import UserError
from ssl_vit.results import Prediction, Result, scored

VARIANT = "ReaL"
_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")
_AGREEMENT = 0.5  # of ImageNet's own labels about 90% are right by the reassessed ones; in another class order, 0.1%

RealLabels = dict[int, frozenset[int]]
"""By global index: the right classes of a test image, at least one."""


def read_real_labels(path: Path, test: ShardSet) -> RealLabels:
    """The reassessed labels of test images; one without any is excluded.

    path: `real.json` of github.com/google-research/reassessed-imagenet: per validation image, in the order of their
        file names, a list of class indices.
    test: shards with ImageNet's validation images, or some of them. Each one's file name (`shards make --keep-names`),
        or else its key, contains ILSVRC2012_val_00000001 and so on.

    Raises UserError for another file, for images without such a name, and where the classes are in another order.
    """
    try:
        published = TypeAdapter(list[frozenset[NonNegativeInt]]).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise UserError(f"{path}: not a list with a list of class indices per image ({why})") from None
    labels, sets = labels_of(test), RealLabels()
    for shard, first in enumerate(test.first_index[:-1].tolist()):
        file = test.open(shard)
        for position, sample in enumerate(file.samples):
            name = file.file_name(position) or sample.key
            number = _NAME.search(name)
            if number is None or not 1 <= int(number[1]) <= len(published):
                raise UserError(
                    f"{test.urls[shard]}: {path} has no labels for {name}; its {len(published):,} images are "
                    "ILSVRC2012_val_00000001 and so on: make the shards from these files, with --keep-names"
                )
            if classes := published[int(number[1]) - 1]:
                sets[first + position] = classes
    agreeing = [labels[image] in classes for image, classes in sets.items() if labels[image] >= 0]
    if not agreeing or np.mean(agreeing) < _AGREEMENT:
        raise UserError(
            f"{path}: it agrees with {sum(agreeing)} of {len(agreeing)} labels of {test.spec}; number the classes in "
            "ImageNet's order, that of the sorted WordNet ids"
        )
    return sets


def rescored(result: Result, sets: RealLabels) -> Result:
    """The row by the reassessed labels: a prediction is correct where it is one of its image's.

    Images without any are excluded. The label of an image is its prediction where that is correct, else the first of
    its labels. Costs are 0: they are in the original row.
    """
    prediction = result.prediction
    keep = np.isin(prediction.images, [*sets])
    if not keep.any():
        raise UserError("real_labels: no test image has a reassessed label; remove it")
    arrays = {name: None if array is None else array[keep] for name, array in vars(prediction).items()}
    right = [sets[image] for image in prediction.images[keep].tolist()]
    predicted = prediction.predicted[keep].tolist()
    arrays["labels"] = np.array(
        [
            label if label in true_labels else min(true_labels)
            for label, true_labels in zip(predicted, right, strict=True)
        ]
    )
    again = Prediction(**arrays)  # type: ignore[arg-type]
    return replace(
        result,
        **scored(again, prediction.labels[keep]),  # type: ignore[arg-type]
        prediction=again,
        variant=", ".join(filter(None, (result.variant, VARIANT))),
        primary=False,
        images_seen=0,
        flops=0.0,
        seconds=0.0,
        notes=(*result.notes, f"{VARIANT}: {keep.sum():,} of {len(keep):,} test images have reassessed labels"),
    )
