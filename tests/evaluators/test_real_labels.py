"""Reassessed labels of ImageNet's validation images, on digits in files of the same names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from ssl_vit.data.shards import open_shards
from ssl_vit.evaluators.labels import labels_of
from ssl_vit.models import EncoderConfig, factory
from ssl_vit.results import load
from tests.tars import packed

Call = Callable[..., tuple[int, str]]
IMAGES, CLASSES = 60, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, saved: Callable[..., Path]) -> Path:
    """`train` and `test` shards of digits, the test images numbered across the classes; weights of a small encoder."""
    out = tmp_path_factory.mktemp("imagenet")
    digits = load_digits(n_class=CLASSES)
    for split, first in (("train", 0), ("test", IMAGES)):
        for number in range(IMAGES):
            label, pixels = digits.target[first + number], digits.images[first + number]
            path = out / split / f"n0{label}" / f"ILSVRC2012_val_{number + 1:08d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 15).astype(np.uint8)).save(path)
        packed(out / split, out / "shards" / split, shards=2, keep_names=True)
    sizes: dict[str, Any] = {"name": "vit_tiny_patch16_224", "image_size": 8, "channels": 1, "patch_size": 2}
    torch.manual_seed(0)
    saved(out / "weights", factory.build(EncoderConfig(**sizes, width=16, depth=1, heads=1)))
    return out


def numbers(folder: Path) -> list[int]:
    """The number in the file name of each test image, by global index, from 0."""
    shards = open_shards(str(folder / "shards/test"))
    files = [shards.open(shard) for shard in range(len(shards.counts))]
    names = [str(file.file_name(position)) for file in files for position in range(len(file.samples))]
    return [int(name[-12:-4]) - 1 for name in names]


def own_labels(folder: Path) -> list[list[int]]:
    """By number: the one label that the shards have."""
    labels, order = labels_of(open_shards(str(folder / "shards/test"))), numbers(folder)
    return [[int(labels[order.index(number)])] for number in range(IMAGES)]


def evaluate(call: Call, folder: Path, content: Any, *more: str) -> tuple[int, str]:
    (folder / "real.json").write_text(content if isinstance(content, str) else json.dumps(content))
    places = ("--data", folder / "shards", "--real-labels", folder / "real.json")
    return call("eval", folder / "weights", "knn", *places, "labels_per_class=[5]", "ks=[1,3]", "seeds=[0]", *more)


def test_a_prediction_is_correct_where_it_is_one_of_the_labels(folder: Path, call: Call) -> None:
    real = own_labels(folder)
    for number in range(0, IMAGES, 4):
        real[number] = []
    for number in range(1, IMAGES, 4):
        real[number] = [real[number][0], (real[number][0] + 1) % CLASSES]
    for number in range(2, IMAGES, 8):
        real[number] = [(real[number][0] + 2) % CLASSES]
    code, said = evaluate(call, folder, real, "--per-class")
    assert code == 0, said
    (path,) = (folder / "weights" / "results").glob("*.json")
    rows, _ = load(path)
    order, original = numbers(folder), [row for row in rows if "ReaL" not in row.variant]
    assert len(rows) == 2 * len(original) > 2
    for row in original:
        (again,) = [one for one in rows if one.arm == row.arm and one.variant == f"{row.variant}, ReaL"]
        pairs = zip(row.prediction.images.tolist(), row.prediction.predicted.tolist(), strict=True)
        correct = {image: predicted in real[order[image]] for image, predicted in pairs if real[order[image]]}
        assert again.prediction.images.tolist() == [*correct] and len(correct) == 45
        assert again.prediction.correct.tolist() == [*correct.values()]
        assert again.accuracy == pytest.approx(np.mean([*correct.values()]))
        own = row.prediction.labels[np.isin(row.prediction.images, [*correct])]
        by_class = [np.array([*correct.values()])[own == label].mean() for label in np.unique(own)]
        assert again.mean_per_class == pytest.approx(np.mean(by_class)), "classes by the labels of the shards"
        assert not again.primary and again.seconds == again.flops == again.images_seen == 0
        assert "45 of 60 test images" in again.notes[-1]
    assert any(row.accuracy not in {one.accuracy for one in original} for row in rows)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "not a list"),
        ('[["ant"]]', "not a list"),
        ([[0]] * 10, "has no labels for .*ILSVRC2012_val_000000"),
        ("reversed", "ImageNet's order"),
    ],
)
def test_other_labels_are_refused_before_anything_is_measured(
    folder: Path, call: Call, content: Any, message: str
) -> None:
    if content == "reversed":
        content = [[(one + 1) % CLASSES] for (one,) in own_labels(folder)]
    results = {path: path.stat().st_mtime_ns for path in (folder / "weights").rglob("results/*")}
    code, said = evaluate(call, folder, content)
    assert code == 2 and "real.json" in said
    assert re.search(message, said), said
    assert results == {path: path.stat().st_mtime_ns for path in (folder / "weights").rglob("results/*")}


def test_the_metric_must_be_accuracy(folder: Path, call: Call) -> None:
    code, said = evaluate(call, folder, own_labels(folder), "--metric", "mean_per_class")
    assert code == 2 and "metric=mean_per_class" in said


def test_images_without_imagenets_names_are_refused(folder: Path, few_digits: Path, call: Call) -> None:
    (folder / "real.json").write_text(json.dumps([[0]] * 100))
    places = ("--data", few_digits, "--real-labels", folder / "real.json")
    code, said = call("eval", folder / "weights", "knn", *places)
    assert code == 2 and "000000" in said and "ILSVRC2012_val_00000001" in said
