from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ssl_vit import execution
from ssl_vit.interfaces import UserError
from ssl_vit.models.factory import build, load
from ssl_vit.objectives.classification import Config, Objective
from ssl_vit.recipe import load_recipe
from ssl_vit.stage import build_objective

Make = Callable[..., Any]


def objective_of(make_encoder: Make, classes: int | None = 5, **config: Any) -> Objective:
    torch.manual_seed(0)
    return Objective(make_encoder(), Config(**config), classes)


def test_fewer_classes_than_the_images_have_are_refused(make_encoder: Make) -> None:
    with pytest.raises(UserError, match=r"objective\.classes=4: the images have 5 classes; remove it"):
        Objective(make_encoder(), Config(classes=4), 5)


def trained_head(objective: Objective) -> Objective:
    """Give a zero head weights, so that predictions depend on the image."""
    for number, parameter in enumerate(objective.head.parameters()):
        nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(number))
    return objective.eval()


def test_the_linear_head_starts_with_uniform_predictions(make_encoder: Make, make_batch: Make) -> None:
    objective = objective_of(make_encoder, 7, head="linear")
    batch = make_batch(7, classes=7)
    assert (objective.logits(batch.images) == 0).all()
    assert objective(batch).loss.item() == pytest.approx(math.log(7), rel=1e-6)


@pytest.mark.parametrize(
    ("head", "smoothing", "pooling"),
    [("mlp", 0.0, "token"), ("linear", 0.1, "mean"), ("mlp", 0.1, "mean"), ("mlp", 0.0, "patches")],
)
def test_loss_and_accuracy_agree_with_numpy(
    make_encoder: Make, make_batch: Make, head: str, smoothing: float, pooling: str
) -> None:
    objective = trained_head(objective_of(make_encoder, head=head, label_smoothing=smoothing, pooling=pooling))
    batch = make_batch(9)
    images = torch.stack([i.flip(-1) if f else i for i, f in zip(batch.images, batch.flip, strict=True)])
    if head == "mlp":
        assert next(objective.head.parameters()).shape[0] == objective.encoder.width
    kinds = [type(module) for module in objective.head.children()]
    assert kinds == ([nn.Linear, nn.Tanh, nn.Linear] if head == "mlp" else [])
    with torch.no_grad():
        outputs = objective.encoder(images)
        patches = outputs[:, 1:]
        pooled = {"token": outputs[:, 0], "mean": patches.mean(1), "patches": patches.flatten(1)}[pooling]
        logits = objective.head(pooled).double().numpy()
        result = objective(batch)
    log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    wanted = np.full((9, 5), smoothing / 5)
    wanted[np.arange(9), batch.labels.numpy()] += 1 - smoothing
    assert result.loss.item() == pytest.approx(-(wanted * log_probabilities).sum(1).mean(), rel=1e-5)
    hits = (logits.argmax(1) == batch.labels.numpy()).mean()
    assert result.metrics["accuracy"].item() == pytest.approx(hits)
    assert result.loss.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert objective.logits(images).dtype == torch.float32


def test_padding_has_no_influence(make_encoder: Make, make_batch: Make) -> None:
    objective = trained_head(objective_of(make_encoder, head="linear"))
    batch = make_batch(8, flip=torch.zeros(8, dtype=torch.bool))
    with torch.no_grad():
        next(reversed(list(objective.head.parameters())))[0] = -1e3  # class 0, which padding is clamped to, never wins
    batch.labels[:4] = objective.logits(batch.images).argmax(-1)[:4]
    real = batch.split(2)[0]
    batch.valid[4:], batch.labels[4:] = False, -1
    with_padding, alone = objective(batch), objective(real)
    assert with_padding.metrics["accuracy"] == alone.metrics["accuracy"] == 1
    gradients = [
        torch.autograd.grad(result.loss, next(objective.head.parameters()))[0] for result in (with_padding, alone)
    ]
    torch.testing.assert_close(*gradients)


def test_the_number_of_classes_is_the_recipes_or_the_shards(make_encoder: Make) -> None:
    for recipe, shards in ((9, 5), (9, None), (None, 9)):
        assert Objective(make_encoder(), Config(head="linear", classes=recipe), shards).head.out_features == 9
    with pytest.raises(UserError, match=r"objective\.classes"):
        Objective(make_encoder(), Config(), None)
    with pytest.raises(UserError, match="at least two classes"):
        Objective(make_encoder(), Config(), 1)


def mixed(objective: Objective, batch: Any, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The images and soft targets that the objective's mixing makes of a batch, and the objective's output for it."""
    torch.manual_seed(seed)
    assert objective.mix
    images, targets = objective.mix(batch.images.float(), batch.labels)
    torch.manual_seed(seed)
    return images, targets, objective.train()(batch)


def test_mixup_blends_images_and_labels_in_one_ratio(make_encoder: Make, make_batch: Make) -> None:
    objective = trained_head(objective_of(make_encoder, head="linear", mixup=0.8, label_smoothing=0.1))
    batch = make_batch(6, flip=torch.zeros(6, dtype=torch.bool))
    images, targets, output = mixed(objective, batch)
    own = torch.nn.functional.one_hot(batch.labels, 5).float()
    ratio = ((images[0] - batch.images[5]) / (batch.images[0].float() - batch.images[5])).nanmedian()
    assert 0 < ratio < 1
    torch.testing.assert_close(images, ratio * batch.images + (1 - ratio) * batch.images.roll(1, 0))
    torch.testing.assert_close(targets, ratio * own + (1 - ratio) * own.roll(1, 0))
    smooth = 0.9 * targets + 0.1 / 5
    by_hand = -(smooth * objective.logits(images).log_softmax(-1)).sum(-1).mean()
    assert output.loss.item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_mixed_images_count_as_hits_of_their_own_labels_and_alpha_sets_the_ratio(
    make_encoder: Make, make_batch: Make
) -> None:
    objective = trained_head(objective_of(make_encoder, head="linear", mixup=1.0))
    batch = make_batch(5, labels=torch.arange(5), flip=torch.zeros(5, dtype=torch.bool))
    ratios = []
    for seed in range(6):
        images, targets, output = mixed(objective, batch, seed)
        hits = (objective.logits(images).argmax(-1) == batch.labels).float().mean()
        assert output.metrics["accuracy"].item() == pytest.approx(hits.item())
        ratios.append(float(targets[0, 0]))
    assert min(ratios) < 0.5 < max(ratios)
    extreme = objective_of(make_encoder, head="linear", mixup=1e-2)
    for seed in range(6):
        assert mixed(extreme, batch, seed)[1].amax(-1).min() > 0.99


def test_cutmix_pastes_a_box_and_weighs_labels_by_its_area(make_encoder: Make, make_batch: Make) -> None:
    objective = trained_head(objective_of(make_encoder, head="linear", cutmix=1.0))
    batch = make_batch(5, labels=torch.arange(5), flip=torch.zeros(5, dtype=torch.bool))
    own, weights = torch.eye(5), []
    for seed in range(12):
        images, targets, output = mixed(objective, batch, seed)
        pasted = (images != batch.images).any(1)  # (B, H, W)
        box = pasted.any(0)
        rows, columns = box.any(1).sum(), box.any(0).sum()
        assert (images == torch.where(box, batch.images.roll(1, 0), batch.images)).all() and box.sum() == rows * columns
        share = float(box.float().mean())
        torch.testing.assert_close(targets, (1 - share) * own + share * own.roll(1, 0))
        by_hand = -(targets * objective.logits(images).log_softmax(-1)).sum(-1).mean()
        assert output.loss.item() == pytest.approx(by_hand.item(), rel=1e-5)
        weights.append(share)
    assert any(0 < share < 0.19 for share in weights)
    extreme = objective_of(make_encoder, head="linear", cutmix=1e-3)  # no box, or one of full size cut at the border
    shares = [1 - float(mixed(extreme, batch, seed)[1][0, 0]) for seed in range(12)]
    assert all(share == 0 or share > 0.19 for share in shares) and 0 < shares.count(0) < 12


def test_with_both_a_batch_gets_one_of_them_and_evaluation_none(make_encoder: Make, make_batch: Make) -> None:
    objective = objective_of(make_encoder, head="linear", mixup=0.8, cutmix=1.0)
    batch = make_batch(6)
    assert objective.mix
    whole = []
    for seed in range(12):
        torch.manual_seed(seed)
        images, _ = objective.mix(batch.images.float(), batch.labels)
        whole.append(bool((images == images.round()).all()))  # a blend has fractions, a paste has not
    assert 0 < sum(whole) < 12
    state = torch.get_rng_state()
    objective.eval()(batch)
    assert torch.equal(state, torch.get_rng_state())


def test_the_probe_trains_its_head_and_nothing_else(make_encoder: Make, make_batch: Make) -> None:
    encoder = make_encoder(dropout=0.5, drop_path=0.5)
    objective = Objective(encoder, Config(head="probe", pooling="mean"), 5).train()
    head: Any = objective.head
    norm, linear = head
    assert (norm.affine, norm.eps) == (False, 1e-6)
    assert 0.005 < linear.weight.std() < 0.015
    batch = make_batch(8, flip=torch.zeros(8, dtype=torch.bool))
    vectors = encoder.pool(encoder.eval()(batch.images), "mean")
    standard = (vectors - vectors.mean(0)) / (vectors.var(0, unbiased=False) + 1e-6).sqrt()
    objective.train()  # must leave dropout off
    torch.testing.assert_close(objective.logits(batch.images), standard @ linear.weight.T + linear.bias)
    objective(batch).loss.backward()
    assert [name for name, p in objective.named_parameters() if p.grad is not None] == ["head.1.weight", "head.1.bias"]


def test_a_resnet_learns_real_digits_and_serves_the_evaluators(few_digits: Path, tmp_path: Path) -> None:
    """The comparison's CNN through the same recipe, loop, checkpoint and evaluators as a ViT."""
    sizes = ["encoder.name=resnet10t", "encoder.image_size=[8,16]", "encoder.channels=1"]
    data = [f"data.train={few_digits}/train", "data.lanes=4", "data.workers=0", "data.augment.crop=center"]
    length = ["training.steps=30", "training.batch_size=32", "training.log_every=10", "optim.warmup_steps=5"]
    keys = [*sizes, *data, *length, "optim.lr=3e-3", "data.augment.flip=false", f"run={tmp_path}/run"]
    execution.train(load_recipe("supervised_resnet50", keys), quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.6 * lines[0]["loss"]
    encoder = load(tmp_path / "run")
    assert (encoder.name, encoder.image_size, encoder.channels) == ("resnet10t", (8, 16), 1)
    settings = ["labels_per_class=[5]", "pooling=mean"]
    result = execution.evaluate(tmp_path / "run", "few_shot", f"{few_digits}/train", f"{few_digits}/test", settings)
    trained, untrained = (
        float(np.mean([row.accuracy for row in result.results if row.arm == arm])) for arm in ("trained", "untrained")
    )
    assert trained > max(untrained, 0.5)
    with pytest.raises(UserError, match="needs a class token, which resnet10t does not have: use mean"):
        execution.train(load_recipe("supervised_resnet50", [*keys, f"run={tmp_path}/t", "objective.pooling=token"]))


@pytest.mark.parametrize("key", ["mixup", "cutmix"])
def test_views_of_one_image_are_not_mixed(key: str) -> None:
    settings = load_recipe("cifar10_cpu_supervised", ["data.views=2", f"objective.{key}=0.8"])
    with torch.device("meta"), pytest.raises(UserError, match=r"data\.views=1"):
        build_objective(settings, build(settings.encoder), 10)
