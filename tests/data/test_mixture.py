"""Several sets of shards as one: shares, classes, topology, and refusals that name the key."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from ssl_vit import stage
from ssl_vit.data import AugmentConfig, DataConfig
from ssl_vit.data.images import train_transform
from ssl_vit.data.order import LanePosition
from ssl_vit.data.samples import Preprocess
from ssl_vit.data.shards import open_training
from ssl_vit.data.stream import train_source
from ssl_vit.evaluators.labels import labels_of
from ssl_vit.interfaces import UserError
from ssl_vit.recipe import load_recipe
from tests.tars import packed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,415 digits in 6 shards (train) and 382 in 5 (test)."""
    folder = tmp_path_factory.mktemp("sets")
    for split, shards in (("train", 6), ("test", 5)):
        packed("digits", folder / split, split, shards=shards)
    return folder


def mixture(folder: Path, train: float | None, test: float | None, **keys: Any) -> DataConfig:
    sets = [{"shards": f"{folder}/train", "weight": train}, {"shards": f"{folder}/test", "weight": test}]
    return DataConfig(**({"train": sets, "lanes": 4, "workers": 0} | keys))


def indices(data: DataConfig, steps: int, ranks: int = 1) -> list[list[int]]:
    """The global batches' sample indices, step by step."""
    preprocess = Preprocess(train_transform(8, AugmentConfig(crop="center")), 1, 10)
    shards = open_training(data)
    sources_ = [
        train_source(shards, preprocess, data, batch_size=40, rank=rank, ranks=ranks, device=CPU)
        for rank in range(ranks)
    ]
    streams = [itertools.islice(source([LanePosition()] * 4), steps) for source in sources_]
    return [[n for batch, _ in step for n in batch.indices.tolist()] for step in zip(*streams, strict=True)]


def test_without_weights_every_sample_of_every_set_comes_once_an_epoch(folder: Path) -> None:
    data = DataConfig(train=[f"{folder}/train", f"{folder}/test"], lanes=4, workers=0)
    shards = open_training(data)
    assert (shards.samples, len(shards.urls)) == (1797, 11)
    seen = [n for step in indices(data, 1797 // 40) for n in step]
    assert len(set(seen)) == len(seen) == 1760


@pytest.mark.parametrize("ranks", [2, 4])
def test_batches_of_a_mixture_do_not_depend_on_the_topology(folder: Path, ranks: int) -> None:
    data = mixture(folder, 2.0, 1.0)
    assert indices(data, 20, ranks) == indices(data, 20)


def test_other_weights_are_another_fingerprint(folder: Path) -> None:
    one, again, other = (open_training(mixture(folder, weight, 1.0)).fingerprint for weight in (2.0, 2.0, 3.0))
    assert one == again != other


def test_sets_of_other_classes_have_no_labels_together(folder: Path, tmp_path: Path) -> None:
    assert open_training(mixture(folder, None, None)).classes == tuple("0123456789")
    info = (folder / "test" / "info.json").read_text()
    other = tmp_path / "other"
    other.mkdir()
    for tar in (folder / "test").glob("*.tar"):
        (other / tar.name).symlink_to(tar)
    (other / "info.json").write_text(info.replace('"7"', '"seven"'))
    mixed = open_training(DataConfig(train=[f"{folder}/train", str(other)]))
    assert mixed.classes is None
    with pytest.raises(UserError, match="class 7 is 7 in one, seven in the other"):
        labels_of(mixed)
    supervised = load_recipe("digits_supervised", [f"data.train=[{folder}/train,{other}]", "objective.classes=10"])
    with pytest.raises(UserError, match="class 7 is 7 in one, seven in the other"):
        stage.check(supervised, mixed)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([], "the mixture is empty"),
        ([{"shards": "a", "weight": 1}, {"shards": "b"}], "every set of a mixture a weight, or none"),
        ([{"shards": "a", "weight": 0}], "greater than 0"),
        ([{"shards": "a", "wieght": 1}], "Extra inputs"),
    ],
)
def test_what_is_no_mixture_is_refused(train: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(train=train)


def test_an_image_that_is_repeated_before_its_set_ends_is_augmented_anew(folder: Path) -> None:
    data = mixture(folder, 1.0, 9.0)
    preprocess = Preprocess(train_transform(8, AugmentConfig(crop="center")), 1, 10, noise=1)
    source = train_source(open_training(data), preprocess, data, batch_size=40, rank=0, ranks=1, device=CPU)
    drawn = [
        pair
        for batch, _ in itertools.islice(source([LanePosition()] * 4), 40)  # less than an epoch of all
        for pair in zip(batch.indices.tolist(), batch.noise[:, 0].tolist(), strict=True)
    ]
    assert len(set(drawn)) == len(drawn) > 2 * len({index for index, _ in drawn})
