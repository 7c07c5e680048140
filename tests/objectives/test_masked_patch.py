"""The masked-patch objective: loss, metrics, gradients, and how the recipe's settings reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ssl_vit.interfaces import UserError
from ssl_vit.objectives.masked_patch import corrupt

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("share", "image_size", "patch_size", "count"),
    [
        (0.5, 224, 16, 98),
        (0.001, 224, 16, 1),
        (0.15, 28, 7, 2),
    ],
)
def test_the_share_of_corrupted_patches_is_one_key(
    make_objective: Make, make_batch: Make, share: float, image_size: int, patch_size: int, count: int
) -> None:
    sizes = {"image_size": image_size, "patch_size": patch_size, "depth": 1}
    objective = make_objective(encoder=sizes, mask_ratio=share)
    patches = (image_size // patch_size) ** 2
    assert objective.noise_per_sample() == patches + 2 * count
    batch = make_batch(2, size=image_size, noise=objective.noise_per_sample())
    outputs, indices, tokens = objective.predict(batch, batch.images)
    assert outputs.shape == (2, count, 512)
    assert indices.shape == (2, count)
    assert tokens.shape == (2, patches, 16)


@pytest.mark.parametrize(("size", "patch_size", "side"), [((64, 96), 16, 32), ((16, 16), 4, 8), ((16, 16), 4, 4)])
def test_whole_squares_are_corrupted(
    make_objective: Make, make_batch: Make, size: tuple[int, int], patch_size: int, side: int
) -> None:
    """`mask_size` pixels wide; the share is one of squares, and each is as likely as another."""
    sizes = {"image_size": size, "patch_size": patch_size, "depth": 1}
    objective = make_objective(encoder=sizes, mask_ratio=0.6, mask_size=side)
    patches = torch.zeros(300, objective.encoder.patches, 1)
    batch = make_batch(300, noise=objective.noise_per_sample())
    _, indices = objective.corrupt(patches, torch.ones(1), batch)
    chosen = torch.zeros(300, objective.encoder.patches).scatter_add_(1, indices, torch.ones(indices.shape))
    times = side // patch_size
    squares = chosen.reshape(300, *objective.encoder.grid)[:, ::times, ::times]
    whole = squares.repeat_interleave(times, 1).repeat_interleave(times, 2)
    assert torch.equal(whole.flatten(1), chosen) and chosen.max() == 1
    assert (squares.sum((1, 2)) == round(0.6 * squares[0].numel())).all()
    assert squares.mean(0).min() > 0.45 and squares.mean(0).max() < 0.8


@pytest.mark.parametrize("side", [6, 12, 24])
def test_a_mask_size_that_does_not_fit_is_named(make_objective: Make, side: int) -> None:
    with pytest.raises(UserError, match=rf"objective.mask_size={side} .* patch size 4 .* 16x16"):
        make_objective(mask_size=side)


def numpy_log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("target", ["mean_color", "downsized", "pixels", "l1"])
def test_loss_and_metrics_agree_with_numpy(
    make_objective: Make, make_batch: Make, target: str, padding: int, spread: Make
) -> None:
    kinds = {"target": "pixels", "loss": "l1"} if target == "l1" else {"target": target}
    objective = spread(make_objective(**kinds, bits=1, mask_prob=0.4, random_prob=0.3))
    valid = torch.tensor([True] * (6 - padding) + [False] * padding)
    batch = make_batch(6, noise=objective.noise_per_sample(), valid=valid)
    images = torch.stack([i.flip(-1) if f else i for i, f in zip(batch.images, batch.flip, strict=True)])
    with torch.no_grad():
        result = objective(batch)
        outputs, indices, _ = objective.predict(batch, images)
        targets = objective.targets(images).numpy()
    real = 6 - padding
    outputs, chosen = outputs.double().numpy()[:real], indices.numpy()[:real]
    picked = np.stack([targets[n][chosen[n]] for n in range(real)])
    if target == "pixels":
        expected = {
            "loss": np.mean((outputs - picked) ** 2),
            "constant_loss": np.mean((picked - picked.mean(axis=(0, 1))) ** 2),
        }
    elif target == "l1":
        colors = picked.reshape(-1, 3, 16).swapaxes(1, 2).reshape(-1, 3)
        expected = {
            "loss": np.abs(outputs - picked).mean(),
            "constant_loss": np.abs(colors - np.median(colors, 0)).mean(),
        }
    else:
        log_probabilities = numpy_log_softmax(outputs.reshape(*picked.shape, 8))
        frequencies = np.bincount(picked.ravel(), minlength=8) / picked.size
        seen = frequencies[frequencies > 0]
        expected = {
            "loss": -np.take_along_axis(log_probabilities, picked[..., None], -1).mean(),
            "accuracy": (log_probabilities.argmax(-1) == picked).mean(),
            "constant_loss": -(seen * np.log(seen)).sum(),
            "constant_accuracy": frequencies.max(),
        }
    found = {"loss": result.loss, **objective.summarize({name: m.double()[None] for name, m in result.metrics.items()})}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].item(), value, rtol=1e-5, err_msg=name)
    assert result.loss.dtype == torch.float32
    assert all(not metric.requires_grad for metric in result.metrics.values())


def test_the_constant_baseline_follows_the_classes_over_the_steps(make_objective: Make) -> None:
    """Its frequencies are a moving average (1% a step) over all calls."""
    shares_SC = torch.rand(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shares_SC /= shares_SC.sum(-1, keepdim=True)
    average, losses, accuracies = np.zeros(8), list[float](), list[float]()
    for shares in shares_SC.numpy():
        average = 0.99 * average + 0.01 * shares
        losses.append(-(shares * np.log(average / average.sum())).sum())
        accuracies.append(shares[average.argmax()])
    objective = make_objective(bits=1)
    parts = [objective.summarize({"class_shares": part}) for part in shares_SC.split([1, 3, 2])]
    for name, expected in (("constant_loss", losses), ("constant_accuracy", accuracies)):
        np.testing.assert_allclose(torch.cat([part[name] for part in parts]).numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(objective.frequencies.numpy(), average, rtol=1e-6)
    whole = make_objective(bits=1)
    whole.summarize({"class_shares": shares_SC})
    assert torch.equal(whole.frequencies, objective.frequencies)


def test_the_class_token_is_never_corrupted(make_objective: Make, make_batch: Make) -> None:
    objective = make_objective(mask_ratio=1.0, mask_prob=1.0, random_prob=0.0)
    vit = objective.encoder.network
    inputs: list[torch.Tensor] = []
    vit.blocks[0].register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].detach()))
    batch = make_batch(3, noise=objective.noise_per_sample())
    with torch.no_grad():
        objective.predict(batch, batch.images)
        objective.encoder(batch.images)
    corrupted_input, clean_input = inputs
    own = vit.cls_token + vit.pos_embed[:, :1]
    assert torch.equal(corrupted_input[:, :1], clean_input[:, :1])
    assert torch.equal(corrupted_input[:, :1], own.detach().expand(3, -1, -1))
    assert (corrupted_input[:, 1:] != clean_input[:, 1:]).any(-1).all()
    masked = objective.mask_token + vit.pos_embed[0, 1:]
    torch.testing.assert_close(corrupted_input[:, 1:], masked.detach().expand(3, -1, -1))


@pytest.mark.parametrize("shares", [(0.8, 0.1), (0.0, 1.0)])
@pytest.mark.parametrize(("random_from", "lane_size"), [("batch", 3), ("image", 0)])
def test_the_recipes_settings_reach_the_corruption(
    make_objective: Make, make_batch: Make, shares: tuple[float, float], random_from: str, lane_size: int
) -> None:
    settings: dict[str, Any] = {"mask_prob": shares[0], "random_prob": shares[1], "random_from": random_from}
    objective = make_objective(mask_ratio=0.75, **settings)
    batch = make_batch(12, noise=objective.noise_per_sample(), lane_size=lane_size)
    with torch.no_grad():
        _, indices, tokens = objective.predict(batch, batch.images)
        clean = objective.encoder.embed(batch.images)
    expected = corrupt(clean, objective.mask_token, 12, noise_BM=batch.noise, pool=lane_size, **settings)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(indices, expected[1])


@pytest.mark.parametrize(
    ("config", "patch_size"),
    [
        ({"mask_ratio": 0.15}, 2),
        ({"mask_prob": 0.5, "random_prob": 0.5, "random_from": "image"}, 2),
        ({"target": "downsized"}, 4),
        ({"target": "pixels"}, 2),
        ({"target": "pixels", "loss": "l1", "mask_prob": 1.0, "random_prob": 0.0, "mask_size": 4}, 2),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_every_variant_learns_real_digits(
    make_objective: Make, learned: Make, config: dict[str, Any], patch_size: int
) -> None:
    """The loss on unseen digits falls below what the best answer that ignores the image would have."""
    sizes = {"image_size": 8, "channels": 1, "patch_size": patch_size, "width": 32, "heads": 4, "position_std": 0.5}
    objective = make_objective(encoder=sizes, **config)
    unseen = learned(objective, 40, 32)
    with torch.no_grad():
        loss = objective(unseen).loss.item()
        _, indices, _ = objective.predict(unseen, unseen.images)
    targets = objective.targets(unseen.images).numpy()
    picked = np.take_along_axis(targets, indices.numpy()[..., None], 1)
    if config.get("target") == "pixels":
        l1 = config.get("loss") == "l1"
        best = np.abs(picked - np.median(picked)).mean() if l1 else picked.var(axis=(0, 1)).mean()
    else:
        shares = np.bincount(picked.ravel()) / picked.size
        best = -(shares[shares > 0] * np.log(shares[shares > 0])).sum()
    assert loss < 0.98 * best


def test_a_hybrid_shows_what_is_masked_and_is_refused(make_encoder: Make, make_objective: Make) -> None:
    """Inverting one patch changes other patch embeddings of a hybrid, but none of a plain ViT's."""
    sizes: dict[str, Any] = {"image_size": 64, "width": 24, "heads": 3}
    hybrid = sizes | {"name": "vit_tiny_r_s16_p8_224", "patch_size": 2}
    changed = {}
    plain = sizes | {"patch_size": 8}
    for kind, config in {"hybrid": hybrid, "plain": plain}.items():
        encoder = make_encoder(**config).eval()
        patch = encoder.patch_size
        image = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        other = image.clone()
        other[..., :patch, :patch] = 255 - other[..., :patch, :patch]
        with torch.no_grad():
            before, after = encoder.embed(image)[0, 1:], encoder.embed(other)[0, 1:]
        changed[kind] = int(((after - before).norm(dim=-1) > 0.01 * before.norm(dim=-1)).sum())
    assert changed["plain"] == 0 < changed["hybrid"]
    with pytest.raises(UserError, match="CNN of the hybrid 'vit_tiny_r_s16_p8_224' sees the masked patches"):
        make_objective(encoder=hybrid)
