"""Frozen features of a real run: what is read, at which size, and what the cache knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.transforms import v2

from ssl_vit import execution
from ssl_vit.analysis import loaded
from ssl_vit.data import evaluation
from ssl_vit.data.samples import SampleReader
from ssl_vit.evaluators import features, knn, runner
from ssl_vit.evaluators.features import EvalContext, FeatureConfig, Features, ImageSet
from ssl_vit.interfaces import Batch, RunError
from ssl_vit.models import factory


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shard of each sample that is read from now on."""
    shards: list[int] = []
    sample = SampleReader.sample

    def counted(self: SampleReader, shard: int, *where: int) -> Any:
        shards.append(shard)
        return sample(self, shard, *where)

    monkeypatch.setattr(SampleReader, "sample", counted)
    return shards


def test_only_the_images_that_are_asked_for_are_read(context: EvalContext, read: list[int]) -> None:
    context.data = context.data.model_copy(update={"cache_mb": 0})
    whole = ImageSet(context, "trained", "train").features(FeatureConfig())
    assert len(read) == context.train.samples == len(whole.labels)
    np.testing.assert_array_equal(whole.labels, context.train_labels)
    read.clear()
    some = np.array([300, 7, 8])
    few = ImageSet(context, "trained", "train", some, np.sort(some)).features(FeatureConfig())
    assert len(read) == 3 and few.images.tolist() == [300, 7, 8]
    np.testing.assert_allclose(few.vectors, whole.vectors[some], rtol=1e-5, atol=1e-6)


def test_features_are_in_the_order_of_the_images_with_several_workers(context: EvalContext) -> None:
    context.data, context.batch_size = context.data.model_copy(update={"cache_mb": 0}), 16
    alone = ImageSet(context, "pixels", "train").features(FeatureConfig())
    context.features.clear()
    context.data = context.data.model_copy(update={"workers": 3})
    shared = ImageSet(context, "pixels", "train").features(FeatureConfig())
    assert shared.images.tolist() == list(range(context.train.samples))
    np.testing.assert_array_equal(shared.vectors, alone.vectors)
    np.testing.assert_array_equal(shared.labels, context.train_labels)


def test_small_sets_are_decoded_once_for_all_encoders(
    context: EvalContext, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_kept", {})
    for source in ("trained", "untrained"):
        ImageSet(context, source, "test").features(FeatureConfig())
    assert len(read) == context.test.samples


def test_features_are_extracted_once_for_all_evaluators(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (f"{trained}/train", f"{trained}/test")
    first = execution.evaluate(trained / "run", "few_shot", *data, ["labels_per_class=[2]"])
    extract = features.extract

    def only_pixels(images: ImageSet, *rest: Any) -> Features:
        assert images.source == "pixels", "extracted again"
        return extract(images, *rest)

    monkeypatch.setattr(features, "extract", only_pixels)
    again = execution.evaluate(trained / "run", "few_shot", *data, ["labels_per_class=[2]"])
    assert again.results == first.results, "a result repeats bit for bit"
    same_images = ["ks=[3]", "labels_per_class=2", "seeds=[0,1,2]"]
    execution.evaluate(trained / "run", "knn", *data, same_images)
    with pytest.raises(AssertionError, match="extracted again"):
        execution.evaluate(trained / "run", "few_shot", *data, ["labels_per_class=[2]", "pooling=token"])


def test_the_cache_knows_other_weights_shards_and_preparation(trained: Path, tmp_path: Path) -> None:
    train, test, given = f"{trained}/train", f"{trained}/test", loaded.load(trained / "run")
    other = factory.fresh(given.encoder, 0)

    def names(test: str = test, **changed: Any) -> set[str]:
        context = execution.make_context(replace(given, **changed), train, test, cache=tmp_path)
        for source in ("trained", "pixels"):
            ImageSet(context, source, "test").features(FeatureConfig())
        return {path.name for path in tmp_path.glob("*.safetensors")}

    assert len(names()) == 1, "raw pixels are not kept"
    assert len(names()) == 1, "the same again"
    assert len(names(encoder=other)) == 2, "other weights"
    assert len(names(test=train)) == 3, "other shards"
    larger = given.data.model_copy(update={"evaluation_resize": 1.5})
    assert len(names(data=larger)) == 4, "other preparation"
    smaller = given.data.model_copy(update={"max_pixels": 100})
    assert len(names(data=smaller)) == 5, "other images would be skipped"
    assert given.settings
    bf16 = given.settings.training.model_copy(update={"precision": "bf16"})
    settings = given.settings.model_copy(update={"training": bf16})
    assert len(names(settings=settings)) == 6, "other precision"
    damaged = sorted(tmp_path.glob("*.safetensors"))[0]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    changes: list[dict[str, Any]] = [{}, {"encoder": other}, {"test": train}, {"data": larger}]
    changes += [{"data": smaller}, {"settings": settings}]
    for changed in changes:
        names(**changed)
    assert damaged.read_bytes() == whole, "what a full disk cut short is extracted again"


@pytest.mark.parametrize("method", ["timm", "google"])
def test_features_at_another_size_and_aspect_ratio(trained: Path, context: EvalContext, method: Any) -> None:
    wide = FeatureConfig(pooling="patches", image_size=(8, 12), position_resampling=method)
    found = ImageSet(context, "trained", "test").features(wide)
    assert found.vectors.shape == (100, 4 * 6 * 64)
    digits = (load_digits().images[1415:1515] * 255 / 16).round()[:, None]
    # The smallest 12x12 that covers 8x12, cropped in the center.
    images = v2.functional.resize(torch.from_numpy(digits).to(torch.uint8), [12, 12], antialias=True)[:, :, 2:10]
    for way in ("timm", "google"):
        model = factory.at_size(factory.load(trained / "run"), (8, 12), way).eval()
        with torch.no_grad():
            expected = model.pool(model(images), "patches")
        away = torch.from_numpy(found.vectors)[:, None].sub(expected).abs().amax(-1)
        assert (away.amin(1).max() < 1e-3) == (way == method)  # packing has shuffled the digits
    assert ImageSet(context, "pixels", "test").features(wide).vectors.shape == (100, 64)
    config = knn.Config.model_validate({"image_size": [8, 12], "position_resampling": method, "ks": 5})
    assert len(runner.evaluate(knn.Evaluator(config), context)[0]) == 3


def test_features_are_extracted_without_dropout(context: EvalContext) -> None:
    context.trained = context.trained.with_arguments(pos_drop_rate=0.5).train()
    together = [ImageSet(context, "trained", "test", np.arange(5), np.arange(count)) for count in (5, 6)]
    one, again = (images.features(FeatureConfig()).vectors for images in together)
    np.testing.assert_allclose(one, again, rtol=1e-4, atol=1e-5)


def test_an_image_with_one_feature_that_is_not_finite_is_named(context: EvalContext) -> None:
    def one_bad(batch: Batch) -> torch.Tensor:
        found = torch.ones(len(batch.indices), 2)
        found[batch.indices == 3, 1] = torch.nan
        return found

    with pytest.raises(RunError, match=r"features of image 3 of .* are not finite"):
        features.extract(ImageSet(context, "trained", "test"), one_bad)


def test_raw_pixels_are_scaled_to_one(context: EvalContext) -> None:
    found = ImageSet(context, "pixels", "test").features(FeatureConfig()).vectors
    assert found.min() == -1 and 0.9 < found.max() <= 1
