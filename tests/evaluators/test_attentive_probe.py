"""The attentive probe: its head against a direct computation, and what it reads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode

from ssl_vit import execution, plugins
from ssl_vit.evaluators import runner
from ssl_vit.evaluators.attentive_probe import HEAD_SIZE, AttentiveHead, Config, Evaluator
from ssl_vit.evaluators.features import EvalContext, FeatureConfig, Features, ImageSet
from ssl_vit.interfaces import Diverged, UserError
from ssl_vit.records import Cost


@pytest.mark.parametrize(("width", "heads"), [(128, 2), (192, 3), (16, 1)])
def test_the_head_is_cross_attention_and_a_linear_layer(width: int, heads: int) -> None:
    head = AttentiveHead(width, 5)
    for n, parameter in enumerate(head.parameters()):
        parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(n))
    tokens = torch.randn(3, 7, width, generator=torch.Generator().manual_seed(1))
    weight = head.key_value.weight.detach().numpy().astype(np.float64)
    expected = np.empty((3, 5))
    for image in range(3):
        x, read = tokens[image].numpy().astype(np.float64), []
        for h in range(heads):
            rows = slice(h * HEAD_SIZE, (h + 1) * HEAD_SIZE)
            key, value = x @ weight[: heads * HEAD_SIZE][rows].T, x @ weight[heads * HEAD_SIZE :][rows].T
            scores = key @ head.query_HE[h].detach().numpy() / np.sqrt(HEAD_SIZE)
            attention = np.exp(scores) / np.exp(scores).sum()
            read.append(attention @ value)
        expected[image] = head.classifier.weight.detach().numpy() @ np.concatenate(read) + head.classifier.bias.tolist()
    with torch.no_grad():
        np.testing.assert_allclose(head(tokens).numpy(), expected, atol=1e-4)


def patch_features(context: EvalContext, generator: np.random.Generator, split: str) -> Features:
    """The class is in one patch, at another place in every image, so that the mean of the patches hides it."""
    patches, width = context.trained.patches, context.trained.width
    labels = np.arange(200) % 4
    tokens = generator.normal(size=(200, patches, width)).astype(np.float32)
    place = generator.integers(patches, size=200)
    tokens[np.arange(200), place, labels] += 8
    tokens[np.arange(200), place, 4] += 8
    return Features(tokens.reshape(200, -1), labels, np.arange(200))


def test_it_finds_what_one_patch_holds(context: EvalContext) -> None:
    generator, config = np.random.default_rng(0), Config(steps=200, sweep={"lr": [1e-2]}, batch_size=64)
    for split in ("train", "test"):
        key = ("trained", split, config.representation, None)
        context.features[key] = patch_features(context, generator, split)
    train, test = (ImageSet(context, "trained", split) for split in ("train", "test"))
    (found,) = Evaluator(config.with_settings({"lr": 1e-2})).fit(train, 0)(test)
    assert (found.prediction.predicted == found.prediction.labels).mean() > 0.9
    mean = FeatureConfig(pooling="mean").representation
    for split in ("train", "test"):
        whole = context.features["trained", split, config.representation, None]
        tokens = whole.vectors.reshape(200, context.trained.patches, -1)
        context.features["trained", split, mean, None] = replace(whole, vectors=tokens.mean(1))
    linear = plugins.load("evaluators", "linear_probe")
    (hidden,) = linear.Evaluator(linear.Config(sweep={})).fit(train, 0)(test)
    assert (hidden.prediction.predicted == hidden.prediction.labels).mean() < 0.8
    assert found.cost.images_seen == 200 * 64 and found.cost.flops > 0


def test_seeds_sweep_and_references(trained: Path, context: EvalContext) -> None:
    given = ["steps=5", "labels_per_class=[2,5]", "seeds=[0,1]", "sweep={lr: [0.001, 0.01]}"]
    found = execution.evaluate(trained / "run", "attentive_probe", f"{trained}/train", f"{trained}/test", given)
    assert {(row.arm, row.labels_per_class, row.seed) for row in found.results} == {
        (arm, budget, seed) for arm in ("trained", "untrained") for budget in (2, 5) for seed in (0, 1)
    }
    assert all(row.selected["lr"] in (0.001, 0.01) for row in found.results)
    config = Config(steps=5, labels_per_class=5, seeds=1, sweep={"lr": [0.001, 0.01]})
    again, _ = runner.evaluate(Evaluator(config), context)
    (first,) = [row for row in found.results if (row.arm, row.labels_per_class, row.seed) == ("trained", 5, 1)]
    (second,) = [row for row in again if row.arm == "trained"]
    assert (first.accuracy, first.selected) == (second.accuracy, second.selected)
    np.testing.assert_array_equal(first.prediction.predicted, second.prediction.predicted)


def test_too_many_tokens_are_refused_before_they_are_extracted(context: EvalContext) -> None:
    evaluator = Evaluator(Config(memory_gib=1e-4, labels_per_class=2, sweep={}))
    with pytest.raises(UserError, match=r"attentive_probe: the tokens of 120 images take 0\.1 GiB.*memory_gib=0\.0001"):
        runner.evaluate(evaluator, context)
    assert not context.features
    with pytest.raises(ValidationError, match="pooling"):
        Config(pooling="mean")


def test_the_training_is_adamw_with_a_cosine_decay_on_whole_shuffled_batches(context: EvalContext) -> None:
    config = Config(steps=7, batch_size=64, lr=0.03, weight_decay=0.5, sweep={})
    features = {split: patch_features(context, np.random.default_rng(0), split) for split in ("train", "test")}
    for split, given in features.items():
        context.features["trained", split, config.representation, None] = given
    before = torch.get_rng_state()
    (found,) = Evaluator(config).fit(ImageSet(context, "trained", "train"), 3)(ImageSet(context, "trained", "test"))
    assert torch.equal(before, torch.get_rng_state())
    train, test = (torch.from_numpy(one.vectors).reshape(200, context.trained.patches, -1) for one in features.values())
    mean, std, labels = train.mean((0, 1)), train.std((0, 1), correction=0), torch.from_numpy(features["train"].labels)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = AttentiveHead(context.trained.width, 4)
    optimizer, shuffle = torch.optim.AdamW(head.parameters(), weight_decay=0.5), torch.Generator().manual_seed(3)
    for step in range(7):
        if step % 3 == 0:  # an epoch has three whole batches; its last 8 images are skipped
            order = torch.randperm(200, generator=shuffle)
        rows = order[64 * (step % 3) :][:64]
        optimizer.param_groups[0]["lr"] = 0.03 * (1 + math.cos(math.pi * step / 7)) / 2
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head((train[rows] - mean) / std), labels[rows]).backward()
        optimizer.step()
    expected, classes = (part.detach().numpy() for part in head((test - mean) / std).softmax(-1).max(-1))
    np.testing.assert_allclose(np.asarray(found.prediction.confidence), expected, atol=1e-5)
    np.testing.assert_array_equal(found.prediction.predicted, classes)


def test_the_cost_is_what_torch_counts(context: EvalContext) -> None:
    config, patches, width = Config(steps=2, batch_size=50, sweep={}), context.trained.patches, context.trained.width
    features = patch_features(context, np.random.default_rng(0), "train")
    for split in ("train", "test"):
        context.features["trained", split, config.representation, None] = features
    (found,) = Evaluator(config).fit(ImageSet(context, "trained", "train"), 0)(ImageSet(context, "trained", "test"))
    heads = max(1, round(width / HEAD_SIZE))
    attention = 3 * 4 * patches * heads * HEAD_SIZE  # which torch counts with two batch dimensions only
    with FlopCounterMode(display=False) as counter:
        AttentiveHead(width, 4)(torch.zeros(1, patches, width)).sum().backward()
    counted = counter.flop_counts["Global"]
    linear = sum(flops for operation, flops in counted.items() if "attention" not in str(operation))
    assert (found.cost.images_seen, found.cost.flops) == (100, (linear + attention) * 100)


def test_the_memory_of_the_tokens_is_that_of_float32_at_the_size_asked_for(context: EvalContext) -> None:
    encoder = context.trained
    height, width = encoder.image_size
    gib = 4 * 1_000 * encoder.patches * encoder.width / 2**30
    for size, factor in ((None, 1), ((2 * height, 2 * width), 4)):
        Evaluator(Config(image_size=size, memory_gib=1.01 * factor * gib)).check(encoder, 1_000)
        with pytest.raises(UserError, match="the tokens of 1,000 images"):
            Evaluator(Config(image_size=size, memory_gib=0.99 * factor * gib)).check(encoder, 1_000)


def test_a_learning_rate_that_diverges_is_named_and_has_cost_something(context: EvalContext) -> None:
    config = Config(steps=3, batch_size=50, lr=1e30, sweep={})
    features = patch_features(context, np.random.default_rng(0), "train")
    for split in ("train", "test"):
        context.features["trained", split, config.representation, None] = features
    classify = Evaluator(config).fit(ImageSet(context, "trained", "train"), 0)
    with pytest.raises(Diverged, match=r"attentive probe diverged with lr=1e\+30") as caught:
        classify(ImageSet(context, "trained", "test"))
    assert isinstance(caught.value.cost, Cost) and caught.value.cost.images_seen == 150
