from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from ssl_vit.interfaces import UserError
from ssl_vit.objectives.classification import Config, Objective

Make = Callable[..., Any]


def objective_of(make_backbone: Make, classes: int | None = 5, **config: Any) -> Objective:
    torch.manual_seed(0)
    return Objective(make_backbone(), Config(**config), classes)


def trained_head(objective: Objective) -> Objective:
    """Give a zero head weights, so that predictions depend on the image."""
    for number, parameter in enumerate(objective.head.parameters()):
        nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(number))
    return objective.eval()


@pytest.mark.parametrize("classes", [2, 5, 1000])
def test_the_linear_head_starts_with_uniform_predictions(make_backbone: Make, make_batch: Make, classes: int) -> None:
    objective = objective_of(make_backbone, classes, head="linear")
    batch = make_batch(7, classes=classes)
    assert (objective.logits(batch.images) == 0).all()
    assert objective(batch).loss.item() == pytest.approx(math.log(classes), rel=1e-6)
    assert [type(module) for module in objective.head.modules()] == [nn.Linear]
    assert objective.head.weight.shape == (classes, 16)


def test_the_pretraining_head_has_one_tanh_hidden_layer(make_backbone: Make, make_batch: Make) -> None:
    objective = objective_of(make_backbone, head="mlp").eval()
    assert [type(module) for module in objective.head] == [nn.Linear, nn.Tanh, nn.Linear]
    hidden, _, output = objective.head
    assert (hidden.in_features, hidden.out_features, output.out_features) == (16, 16, 5)
    images = make_batch(3).images
    token = objective.backbone(images)[:, 0]
    by_hand = torch.tanh(token @ hidden.weight.T + hidden.bias) @ output.weight.T + output.bias
    torch.testing.assert_close(objective.logits(images), by_hand)


@pytest.mark.parametrize("pooling", ["token", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_loss_and_accuracy_agree_with_numpy(
    make_backbone: Make, make_batch: Make, head: str, smoothing: float, pooling: str
) -> None:
    objective = trained_head(objective_of(make_backbone, head=head, label_smoothing=smoothing, pooling=pooling))
    batch = make_batch(9)
    images = torch.stack([i.flip(-1) if f else i for i, f in zip(batch.images, batch.flip, strict=True)])
    with torch.no_grad():
        outputs = objective.backbone(images)
        pooled = outputs[:, 0] if pooling == "token" else outputs[:, 1:].mean(1)
        logits = objective.head(pooled).double().numpy()
        result = objective(batch)
    log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    wanted = np.full((9, 5), smoothing / 5)
    wanted[np.arange(9), batch.labels.numpy()] += 1 - smoothing
    assert result.loss.item() == pytest.approx(-(wanted * log_probabilities).sum(1).mean(), rel=1e-5)
    hits = (logits.argmax(1) == batch.labels.numpy()).mean()
    assert result.metrics["accuracy"].item() == pytest.approx(hits)
    assert result.loss.dtype == torch.float32


@pytest.mark.parametrize("label", [-1, 3])
def test_padding_has_no_influence(make_backbone: Make, make_batch: Make, label: int) -> None:
    objective = trained_head(objective_of(make_backbone, head="linear"))
    batch = make_batch(8, flip=torch.zeros(8, dtype=torch.bool))
    real = batch.split(2)[0]
    batch.valid[4:], batch.labels[4:] = False, label
    with_padding, alone = objective(batch), objective(real)
    torch.testing.assert_close(with_padding.loss, alone.loss)
    torch.testing.assert_close(with_padding.metrics["accuracy"], alone.metrics["accuracy"])
    gradients = [torch.autograd.grad(result.loss, objective.head.weight)[0] for result in (with_padding, alone)]
    torch.testing.assert_close(*gradients)


def test_a_batch_of_padding_alone_is_zero_and_finite(make_backbone: Make, make_batch: Make) -> None:
    objective = trained_head(objective_of(make_backbone, head="linear"))
    batch = make_batch(4, valid=torch.zeros(4, dtype=torch.bool), labels=torch.full((4,), -1))
    result = objective(batch)
    assert result.loss.item() == 0
    assert result.metrics["accuracy"].item() == 0


@pytest.mark.parametrize(("recipe", "shards", "expected"), [(None, 5, 5), (9, 5, 9), (9, None, 9)])
def test_the_number_of_classes_comes_from_the_recipe_or_the_shards(
    make_backbone: Make, recipe: int | None, shards: int | None, expected: int
) -> None:
    objective = Objective(make_backbone(), Config(head="linear", classes=recipe), shards)
    assert objective.head.out_features == expected


def test_a_missing_number_of_classes_is_the_users_mistake(make_backbone: Make) -> None:
    with pytest.raises(UserError, match=r"objective\.classes"):
        Objective(make_backbone(), Config(), None)


def test_it_needs_no_noise(make_backbone: Make) -> None:
    assert objective_of(make_backbone).noise_per_sample() == 0


@pytest.mark.parametrize(
    "wrong", [{"classes": 1}, {"head": "conv"}, {"label_smoothing": 1.0}, {"pooling": "max"}, {"heads": 2}]
)
def test_configurations_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Config(**wrong)
