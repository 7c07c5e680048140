"""The exact probe on arrays, and the one by gradient descent on a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.linear_model import LogisticRegression

from ssl_vit import execution
from ssl_vit.data import DataConfig
from ssl_vit.data.shards import open_shards
from ssl_vit.evaluators import linear_probe, runner
from ssl_vit.evaluators.features import EvalContext, ImageSet
from ssl_vit.evaluators.labels import held_out_split, labels_of
from ssl_vit.evaluators.linear_probe import Config, Evaluator
from ssl_vit.interfaces import UserError
from ssl_vit.models import EncoderConfig, factory
from ssl_vit.objectives import classification
from ssl_vit.recipe import validate
from ssl_vit.results import Result
from ssl_vit.training.flops import training_flops
from ssl_vit.training.optim import peak_lr

Arrays = tuple[np.ndarray, np.ndarray]
Build = Callable[..., EvalContext]
CS = (1e-4, 1e-2, 1.0, 100.0)
LABELS = np.random.default_rng(0).choice([0, 1, 4], 150, p=[0.6, 0.3, 0.1])


def features(labels: np.ndarray, seed: int, noise: float = 1.5) -> np.ndarray:
    """Noisy class means on very different scales, with a constant feature among them."""
    means = np.random.default_rng(9).normal(size=(5, 8))
    generator = np.random.default_rng(seed)
    x = (means[labels] + noise * generator.normal(size=(len(labels), 8))) * 10.0 ** np.arange(-4, 4) + 5
    x[:, 3] = 2.5
    return x


def reference_accuracy(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], c: float) -> float:
    """Standardized as MAE's affine-free BatchNorm (eps 1e-6) does, then scikit-learn's own logistic regression."""

    def normalized(x: np.ndarray) -> np.ndarray:
        mean, variance = torch.from_numpy(train[0].mean(0)), torch.from_numpy(train[0].var(0))
        return F.batch_norm(torch.from_numpy(x), mean, variance, eps=1e-6).numpy()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LogisticRegression(C=c, max_iter=10_000, tol=1e-8).fit(normalized(train[0]), train[1])
        return float(model.score(normalized(test[0]), test[1]))


def probe(build: Build, train: Arrays, test: Arrays, seed: int = 0, **settings: object) -> Result:
    """All labels of the training arrays."""
    evaluator = Evaluator(validate(Config, settings))
    (row,) = runner.measure(evaluator, build(train, test), "trained", ("all",), (seed,))
    return row


@pytest.mark.parametrize(("seed", "share"), [(0, 0.2), (1, 0.2), (0, 0.4)])
def test_c_is_selected_on_held_out_images_and_the_fit_is_sklearns(
    array_context: Build, seed: int, share: float
) -> None:
    x, labels = features(LABELS, 1), LABELS
    test_labels = np.random.default_rng(5).choice([0, 1, 4], 200)
    test_x = features(test_labels, 2)
    kept, held = held_out_split(labels, share, seed)
    scores = [reference_accuracy((x[kept], labels[kept]), (x[held], labels[held]), c) for c in CS]
    assert len(set(scores)) > 1
    best = CS[scores.index(max(scores))]
    found = probe(array_context, (x, labels), (test_x, test_labels), seed, sweep={"c": CS}, held_out=share)
    assert found.accuracy == pytest.approx(reference_accuracy((x, labels), (test_x, test_labels), best))
    assert found.selected == {"c": best} and not found.notes


def test_the_fit_has_converged(array_context: Build) -> None:
    """On correlated features a looser tolerance than 1e-6 changes predictions."""
    generator = np.random.default_rng(0)
    mixing, labels = generator.normal(size=(16, 128)), generator.integers(0, 10, 600)
    x = (generator.normal(size=(10, 16))[labels] + generator.normal(size=(600, 16))) @ mixing
    x += 0.3 * generator.normal(size=x.shape)
    train, test = (x[:300], labels[:300]), (x[300:], labels[300:])
    found = probe(array_context, train, test, sweep={}, c=10.0)
    assert found.accuracy == reference_accuracy(train, test, 10.0) and not found.notes


def test_a_fit_that_stopped_early_says_so(array_context: Build) -> None:
    train = (features(LABELS, 1), LABELS)
    notes = {n: probe(array_context, train, train, sweep={}, max_iterations=n).notes for n in (3, 1000)}
    assert "before it had converged" in notes[3][0] and notes[1000] == ()


def test_one_key_sets_the_pooling() -> None:
    config = validate(Config, {"method": "lars", "pooling": "patches"})
    assert config.head.pooling == "token", "the default of the head says nothing"
    assert validate(Config, config.model_dump()) == config
    with pytest.raises(UserError, match=r"head\.pooling=patches: set pooling=patches"):
        validate(Config, {"method": "lars", "head": {"pooling": "patches"}})


def test_given_settings_are_used_or_refused() -> None:
    assert validate(Config, {"c": 3.0}).candidates == [{}], "one value is not swept"
    assert validate(Config, {"max_iterations": 7}).candidates == validate(Config, {}).candidates
    for method in ({}, {"method": "exact"}):
        with pytest.raises(UserError, match="optim: only method=lars trains by gradient descent"):
            validate(Config, {"optim": {"lr": 0.9}, **method})
    assert validate(Config, validate(Config, {}).model_dump()) == validate(Config, {})
    lars = validate(Config, {"method": "lars", "optim": {"lr": 0.9}})
    assert lars.optim.lr == 0.9 and validate(Config, lars.model_dump()) == lars
    with pytest.raises(UserError, match=r"head\.pooling=token: set pooling=token"):
        validate(Config, {"method": "lars", "head": {"pooling": "token"}})
    for given, key in (
        ({"sweep": {"optim.lr": [0.1, 0.2]}}, r"sweep\.optim\.lr: method=exact"),
        ({"sweep": {"lanes": [4, 8]}}, r"sweep\.lanes: method=exact"),
        ({"method": "lars", "sweep": {"c": [0.1, 0.2]}}, r"sweep\.c=0\.1: .*method=lars"),
        ({"method": "lars", "c": 3.0}, "c: method=lars"),
    ):
        with pytest.raises(UserError, match=key):
            validate(Config, given)
    rates = validate(Config, {"method": "lars", "sweep": {"optim.lr": [0.1, 0.2]}})
    assert rates.candidates == [{"optim.lr": 0.1}, {"optim.lr": 0.2}]


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_a_head_that_would_train_the_encoder_is_refused(head: str) -> None:
    with pytest.raises(UserError, match=rf"head\.head={head}.*fine_tune"):
        validate(Config, {"method": "lars", "head": {"head": head}})


def test_one_class_is_refused(array_context: Build) -> None:
    labels = np.zeros(40, dtype=np.int64)
    train = (features(labels, 1), labels)
    with pytest.raises(UserError, match="one class"):
        probe(array_context, train, train, sweep={})


def test_the_probe_by_lars_learns_on_frozen_features(trained: Path) -> None:
    keys = [
        "method=lars",
        "optim.lr=60",
        "labels_per_class=[4,90%]",
        "training.epochs=20",
        "warmup_epochs=1",
        "training.batch_size=64",
        "lanes=4",
        "augment.crop=center",
        "augment.flip=false",
    ]
    rows = execution.evaluate(trained / "run", "linear_probe", f"{trained}/train", f"{trained}/test", keys).results
    assert {row.arm for row in rows} == {"trained", "untrained"}
    found = [row for row in rows if row.arm == "trained"]
    labels = sum(round(0.9 * count) for count in np.bincount(labels_of(open_shards(f"{trained}/train"))))
    assert [row.labels for row in found] == [40, labels]
    assert [row.images_seen for row in found] == [20 * 40, math.ceil(20 * labels / 64) * 64]
    assert found[1].accuracy > 0.35
    model = factory.load(trained / "run")
    whole = training_flops(classification.Objective(model, classification.Config(head="linear", pooling="mean"), 10))
    assert found[1].flops / found[1].images_seen < 0.4 * whole, "no backward pass through the encoder"


def test_features_are_standardized_by_the_variance_of_the_population(array_context: Build) -> None:
    """Of few images, with a penalty so strong that the scale of the features decides the probabilities."""
    labels = np.repeat([0, 1], 5)
    x = features(labels, 1)[:, 4:]
    found = probe(array_context, (x, labels), (x, labels), sweep={}, c=0.01).prediction.confidence
    model = LogisticRegression(C=0.01, max_iter=1000).fit((x - x.mean(0)) / x.std(0), labels)
    assert found is not None
    np.testing.assert_allclose(found, model.predict_proba((x - x.mean(0)) / x.std(0)).max(1), rtol=1e-3)


def test_the_probe_by_lars_reads_what_it_was_asked_for(context: EvalContext, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(linear_probe, "fit", lambda evaluator, images, encoder, seed: given.append(encoder))
    evaluator = Evaluator(validate(Config, {"method": "lars", "pooling": "patches", "image_size": 12, "lanes": 4}))
    for source in ("trained", "untrained"):
        evaluator.fit(ImageSet(context, source, "train"), 0)
    assert [encoder.image_size for encoder in given] == [(12, 12)] * 2
    for encoder, own in zip(given, (context.trained, context.untrained), strict=True):
        assert torch.equal(encoder.network.blocks[0].mlp.fc1.weight, own.network.blocks[0].mlp.fc1.weight)
    assert not torch.equal(context.trained.network.blocks[0].mlp.fc1.weight, given[1].network.blocks[0].mlp.fc1.weight)
    stage = evaluator.stage(context.data, EncoderConfig(), 10, 0)
    assert stage and isinstance(stage.objective, classification.Config)
    assert (stage.objective.pooling, stage.encoder.image_size, stage.training.batch_size) == ("patches", 12, 8)
    with pytest.raises(UserError, match="3 labeled images are fewer than lanes=4"):
        evaluator.stage(context.data, EncoderConfig(), 3, 0)
    for keys in ({"pooling": "both"}, {"block": 1}):
        with pytest.raises(UserError, match="method=lars reads the model's output"):
            validate(Config, {"method": "lars", **keys})


def test_lars_has_maes_numbers() -> None:
    """MAE's linear probing (its table 10): base rate 0.1 per 256 images, no decay, 90 epochs, 10 of them warm-up."""
    stage = Evaluator(validate(Config, {"method": "lars"})).stage(DataConfig(train="a"), EncoderConfig(), 163_840, 0)
    assert stage
    optim = {"name": "lars", "momentum": 0.9, "weight_decay": 0.0, "schedule": "cosine", "clip_norm": 0.0}
    assert stage.optim.model_dump().items() >= {**optim, "warmup_steps": 100}.items()
    assert (stage.training.steps, stage.training.batch_size, stage.data.augment.scale) == (900, 16_384, (0.08, 1.0))
    assert peak_lr(stage.optim, stage.training.batch_size) == pytest.approx(6.4)
