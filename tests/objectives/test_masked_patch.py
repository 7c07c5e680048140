from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy.stats import chisquare

from ssl_vit.interfaces import UserError
from ssl_vit.objectives.masked_patch import Config, Objective, class_colours, corrupt, mean_colour_classes, patch_pixels

MASKED = -1


def tagged(images: int, patches: int) -> torch.Tensor:
    """Tokens (B, N, 3) that carry their own place in the batch, image * N + patch, so that a donor can be read off."""
    return torch.arange(images * patches).reshape(images, patches, 1).expand(-1, -1, 3).float()


def places(tokens_BN3: torch.Tensor) -> np.ndarray:
    """Which place every token came from, int64 (B, N); MASKED for the mask token."""
    assert (tokens_BN3 == tokens_BN3[..., :1]).all()
    return tokens_BN3[..., 0].long().numpy()


def corrupted(images: int, patches: int, count: int, seed: int = 0, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(where each token came from (B, N), which patches were chosen (B, K)) of one call on tagged tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask_token = torch.full((3,), float(MASKED))
    tokens, indices = corrupt(tagged(images, patches), mask_token, count, generator, **options)
    return places(tokens), indices.numpy()


def own_places(images: int, patches: int) -> np.ndarray:
    return np.arange(images * patches).reshape(images, patches)


# --- corrupt ---


@pytest.mark.parametrize(("patches", "count"), [(196, 98), (196, 29), (9, 4), (16, 16), (5, 1), (1, 1)])
@pytest.mark.parametrize("random_from", ["batch", "image"])
def test_exactly_count_distinct_patches_change_and_no_other(patches: int, count: int, random_from: str) -> None:
    found, indices = corrupted(6, patches, count, mask_share=0.4, random_share=0.3, random_from=random_from)
    assert indices.shape == (6, count)
    assert indices.min() >= 0
    assert indices.max() < patches
    assert all(len(set(row)) == count for row in indices.tolist())
    untouched = np.ones((6, patches), dtype=bool)
    np.put_along_axis(untouched, indices, False, axis=1)
    np.testing.assert_array_equal(found[untouched], own_places(6, patches)[untouched])


def test_every_chosen_patch_becomes_the_mask_token_at_full_mask_share() -> None:
    found, indices = corrupted(8, 20, 10, mask_share=1.0, random_share=0.0)
    assert (np.take_along_axis(found, indices, axis=1) == MASKED).all()
    assert (found == MASKED).sum() == 80


@pytest.mark.parametrize("random_from", ["batch", "image"])
@pytest.mark.parametrize("shares", [(0.8, 0.1), (0.5, 0.5), (0.0, 1.0), (0.0, 0.0), (0.15, 0.35)])
def test_shares_of_mask_random_and_unchanged(shares: tuple[float, float], random_from: str) -> None:
    images, patches, count = 400, 50, 25
    found, indices = corrupted(
        images, patches, count, mask_share=shares[0], random_share=shares[1], random_from=random_from
    )
    now = np.take_along_axis(found, indices, axis=1)
    own = np.take_along_axis(own_places(images, patches), indices, axis=1)
    total = images * count
    # A random other patch is never the patch itself, so "unchanged" counts the kept ones alone.
    kinds = {"mask": now == MASKED, "random": (now != MASKED) & (now != own), "unchanged": now == own}
    for kind, share in zip(kinds, (*shares, 1 - sum(shares)), strict=True):
        five_sigma = 5 * math.sqrt(total * share * (1 - share)) if 0 < share < 1 else 0
        assert abs(int(kinds[kind].sum()) - total * share) <= five_sigma + 1e-6, kind


def test_every_patch_is_chosen_equally_often() -> None:
    _, indices = corrupted(6000, 7, 3)
    assert chisquare(np.bincount(indices.ravel(), minlength=7)).pvalue > 1e-4


@pytest.mark.parametrize(
    ("random_from", "pool", "images", "group"),
    [("batch", 0, 3, 3), ("batch", 2, 4, 2), ("batch", 1, 3, 1), ("image", 0, 3, 1), ("image", 2, 4, 1)],
)
def test_donors_are_uniform_over_the_others_of_their_group(
    random_from: str, pool: int, images: int, group: int
) -> None:
    patches = 4
    ring = group * patches
    counts = np.zeros((images * patches, images * patches))
    for seed in range(1500):
        found, indices = corrupted(
            images, patches, patches, seed, mask_share=0.0, random_share=1.0, random_from=random_from, pool=pool
        )
        assert indices.shape == (images, patches)
        counts[np.arange(images * patches), found.ravel()] += 1
    for own, row in enumerate(counts):
        inside = np.arange(len(row)) // ring == own // ring
        assert row[~inside].sum() == 0, "a donor came from another pool"
        assert row[own] == 0, "a patch donated to itself"
        others = row[inside & (np.arange(len(row)) != own)]
        assert chisquare(others).pvalue > 1e-5
    expected = np.full(ring - 1, 1500 / (ring - 1))
    by_distance = [
        sum(row[own // ring * ring + (own + d) % ring] for own, row in enumerate(counts)) for d in range(1, ring)
    ]
    assert chisquare(by_distance, expected * len(counts)).pvalue > 1e-4


@pytest.mark.parametrize(
    ("random_from", "pool", "parts"), [("batch", 4, 2), ("batch", 4, 4), ("image", 4, 16), ("batch", 2, 8)]
)
def test_the_same_noise_gives_the_same_result_however_lanes_are_dealt_out(
    random_from: str, pool: int, parts: int
) -> None:
    images, patches, count = 16, 9, 4
    noise = torch.rand(images, patches + 2 * count, generator=torch.Generator().manual_seed(3))
    tokens, mask = torch.randn(images, patches, 5), torch.randn(5)
    shares = {"mask_share": 0.3, "random_share": 0.5, "random_from": random_from, "pool": pool}
    whole, chosen = corrupt(tokens, mask, count, noise_BM=noise, **shares)
    pieces = [
        corrupt(t, mask, count, noise_BM=n, **shares)
        for t, n in zip(tokens.chunk(parts), noise.chunk(parts), strict=True)
    ]
    assert torch.equal(whole, torch.cat([piece for piece, _ in pieces]))
    assert torch.equal(chosen, torch.cat([indices for _, indices in pieces]))
    assert not torch.equal(whole, tokens)


@pytest.mark.parametrize(("noise", "steps"), [(0.0, 1), (1 - 2**-24, -1)])
@pytest.mark.parametrize("images", [2, 61])
def test_noise_at_the_edges_of_its_range_stays_inside_the_batch(noise: float, steps: int, images: int) -> None:
    """The nearest and the farthest donor are the two neighbours on the ring of all patches: neither is the patch."""
    numbers = torch.full((images, 9), noise)
    mask_token = torch.full((3,), float(MASKED))
    tokens, _ = corrupt(tagged(images, 3), mask_token, 3, noise_BM=numbers, mask_share=0.0, random_share=1.0)
    np.testing.assert_array_equal(places(tokens), (own_places(images, 3) + steps) % (images * 3))


def test_the_generator_decides_and_torchs_own_is_left_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = corrupted(4, 9, 4, 1), corrupted(4, 9, 4, 1), corrupted(4, 9, 4, 2)
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert not np.array_equal(first[1], other[1])


def test_gradients_flow_as_often_as_a_token_is_read() -> None:
    tokens = tagged(5, 8).clone().requires_grad_()
    mask = torch.full((3,), float(MASKED), requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    out, _ = corrupt(tokens, mask, 6, generator, mask_share=0.4, random_share=0.4)
    out.sum().backward()
    found = places(out.detach())
    assert mask.grad is not None
    assert tokens.grad is not None
    assert mask.grad.tolist() == [float((found == MASKED).sum())] * 3
    reads = np.bincount(found[found != MASKED], minlength=40).reshape(5, 8)
    np.testing.assert_array_equal(tokens.grad[..., 0].numpy(), reads)


def test_half_precision_tokens_stay_half_precision() -> None:
    tokens, _ = corrupt(torch.zeros(2, 4, 3, dtype=torch.bfloat16), torch.ones(3), 2, mask_share=1.0, random_share=0.0)
    assert tokens.dtype == torch.bfloat16
    assert tokens.sum() == 2 * 2 * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "cannot corrupt 0 of 6"),
        ({"count": 7}, "cannot corrupt 7 of 6"),
        ({"count": 3, "noise_BM": torch.rand(4, 11)}, r"noise is \(4, 11\), not \(4, 12\)"),
        ({"count": 3, "noise_BM": torch.rand(3, 12)}, r"noise is \(3, 12\), not \(4, 12\)"),
        ({"count": 3, "pool": 3}, "4 images are not groups of 3"),
        ({"count": 3, "pool": 8}, "4 images are not groups of 8"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(tagged(4, 6), torch.zeros(3), **options)


# --- colour classes ---


@pytest.mark.parametrize(
    ("colour", "bits", "expected"),
    [
        ((0, 0, 0), 3, 0),
        ((255, 255, 255), 3, 511),
        ((31, 31, 31), 3, 0),
        ((32, 32, 32), 3, 64 + 8 + 1),
        ((255, 0, 31), 3, 7 * 64),
        ((32, 31, 64), 3, 64 + 0 + 2),
        ((0, 0, 224), 3, 7),
        ((0, 223, 0), 3, 6 * 8),
        ((200, 100, 50), 3, 6 * 64 + 3 * 8 + 1),
        ((31,), 3, 0),
        ((32,), 3, 1),
        ((255,), 3, 7),
        ((127,), 1, 0),
        ((128,), 1, 1),
        ((173,), 8, 173),
        ((255, 254, 1), 8, 255 * 65536 + 254 * 256 + 1),
        ((255, 0, 0, 255), 3, 7 * 512 + 7),
    ],
)
def test_classes_of_plain_colours(colour: tuple[int, ...], bits: int, expected: int) -> None:
    image = torch.tensor(colour, dtype=torch.uint8)[None, :, None, None].expand(1, -1, 4, 4)
    classes = mean_colour_classes(image, 4, bits)
    assert classes.dtype == torch.int64
    assert classes.tolist() == [[expected]]


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [
        ([31, 32, 32, 32], 0),
        ([32, 32, 32, 32], 1),
        ([31, 33, 31, 33], 1),
        ([0, 0, 0, 127], 0),
        ([0, 0, 0, 128], 1),
        ([255, 255, 255, 254], 7),
    ],
)
def test_the_mean_is_not_rounded_before_it_is_binned(pixels: list[int], expected: int) -> None:
    image = torch.tensor(pixels, dtype=torch.uint8).reshape(1, 1, 2, 2)
    assert mean_colour_classes(image, 2).tolist() == [[expected]]


def test_patches_count_row_by_row_in_images_that_are_not_square() -> None:
    bins = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.uint8)  # 2 rows and 3 columns of patches
    image = (bins * 32 + 7).repeat_interleave(4, 0).repeat_interleave(4, 1)[None, None]
    assert mean_colour_classes(image, 4).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert mean_colour_classes(image.transpose(2, 3), 4).tolist() == [[0, 3, 1, 4, 2, 5]]


def slow_classes(image_CHW: np.ndarray, patch: int, bits: int) -> list[int]:
    """Patch by patch and channel by channel in float64, as the paper's words go."""
    channels, height, width = image_CHW.shape
    classes = []
    for top in range(0, height, patch):
        for left in range(0, width, patch):
            number = 0
            for channel in range(channels):
                total = 0.0
                for y in range(top, top + patch):
                    for x in range(left, left + patch):
                        total += float(image_CHW[channel, y, x])
                number = number * 2**bits + math.floor(total / patch**2 / (256 / 2**bits))
            classes.append(number)
    return classes


@pytest.mark.parametrize(
    ("channels", "height", "width", "patch", "bits"),
    [(3, 8, 8, 4, 3), (1, 28, 28, 7, 3), (3, 6, 15, 3, 2), (3, 10, 5, 5, 8), (4, 4, 8, 2, 4), (2, 3, 4, 1, 1)],
)
def test_classes_agree_with_a_slow_loop(channels: int, height: int, width: int, patch: int, bits: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, channels, height, width), dtype=np.uint8)
    found = mean_colour_classes(torch.from_numpy(pixels), patch, bits)
    assert found.tolist() == [slow_classes(image, patch, bits) for image in pixels]


@pytest.mark.parametrize(("channels", "bits"), [(1, 1), (1, 3), (1, 7), (1, 8), (3, 1), (3, 2), (3, 3), (4, 2)])
def test_class_colours_are_the_centres_of_the_bins(channels: int, bits: int) -> None:
    classes = torch.arange(2 ** (bits * channels))
    colours = class_colours(classes, channels, bits)
    assert colours.dtype == torch.uint8
    assert colours.shape == (len(classes), channels)
    assert torch.equal(mean_colour_classes(colours[:, :, None, None], 1, bits)[:, 0], classes)
    width = 256 / 2**bits
    np.testing.assert_array_equal((colours[0].numpy() + 0.0), np.full(channels, math.floor(width / 2)))
    np.testing.assert_array_equal(256 - colours[-1].numpy().astype(int), np.full(channels, math.ceil(width / 2)))


def test_class_colours_keep_the_shape() -> None:
    assert class_colours(torch.zeros(2, 5, dtype=torch.int64), 3).shape == (2, 5, 3)


# --- targets, loss, metrics ---

Make = Callable[..., Any]


def objective_of(make_backbone: Make, *, backbone: dict[str, Any] | None = None, **config: Any) -> Objective:
    torch.manual_seed(0)
    return Objective(make_backbone(**(backbone or {})), Config(**config))


def spread(objective: Objective) -> Objective:
    """Weights so large that predictions differ between patches: a mix-up cannot hide."""
    with torch.no_grad():
        objective.head.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
        objective.head.bias.normal_(std=0.5, generator=torch.Generator().manual_seed(2))
    return objective


@pytest.mark.parametrize("size", [(8, 16), (16, 8), (8, 8)])
def test_downsized_targets_agree_with_a_loop(make_backbone: Make, size: tuple[int, int]) -> None:
    objective = objective_of(make_backbone, backbone={"patch_size": 8}, target="downsized", bits=2)
    pixels = np.random.default_rng(1).integers(0, 256, (3, 3, *size), dtype=np.uint8)
    found = objective.targets(torch.from_numpy(pixels))
    expected = []
    for image in pixels:
        rows = []
        for top in range(0, size[0], 8):
            for left in range(0, size[1], 8):
                # A 4x4 image of 2x2 means, whose cells are patches of their own.
                rows.append(slow_classes(image[:, top : top + 8, left : left + 8], 2, 2))
        expected.append(rows)
    assert found.dtype == torch.int64
    assert found.tolist() == expected
    assert objective.head.out_features == 16 * 2 ** (2 * 3)


def test_pixel_targets_agree_with_a_loop(make_backbone: Make) -> None:
    objective = objective_of(make_backbone, target="pixels")
    pixels = np.random.default_rng(1).integers(0, 256, (2, 3, 8, 16), dtype=np.uint8)
    found = objective.targets(torch.from_numpy(pixels))
    assert found.shape == (2, 8, 3 * 16)
    for image in range(2):
        for patch in range(8):
            top, left = patch // 4 * 4, patch % 4 * 4
            expected = [pixels[image, c, top + y, left + x] / 255 for c in range(3) for y in range(4) for x in range(4)]
            np.testing.assert_allclose(found[image, patch].numpy(), expected, rtol=1e-6)
    assert objective.head.out_features == 48


def test_mean_colour_targets_have_one_slot(make_backbone: Make) -> None:
    objective = objective_of(make_backbone, backbone={"channels": 1})
    images = torch.randint(0, 256, (2, 1, 16, 16), dtype=torch.uint8)
    assert torch.equal(objective.targets(images)[..., 0], mean_colour_classes(images, 4))
    assert objective.head.out_features == 8


def test_downsized_needs_a_patch_that_four_divides(make_backbone: Make) -> None:
    with pytest.raises(UserError, match="downsized"):
        objective_of(make_backbone, backbone={"image_size": 14, "patch_size": 7}, target="downsized")


@pytest.mark.parametrize(
    ("share", "image_size", "patch_size", "count"),
    [
        (0.5, 224, 16, 98),
        (0.15, 224, 16, 29),
        (1.0, 224, 16, 196),
        (0.001, 224, 16, 1),
        (0.5, 28, 7, 8),
        (0.15, 28, 7, 2),
    ],
)
def test_the_share_of_corrupted_patches_is_one_key(
    make_backbone: Make, make_batch: Make, share: float, image_size: int, patch_size: int, count: int
) -> None:
    sizes = {"image_size": image_size, "patch_size": patch_size, "depth": 1}
    objective = objective_of(make_backbone, backbone=sizes, corruption=share)
    patches = (image_size // patch_size) ** 2
    assert objective.noise_per_sample() == patches + 2 * count
    batch = make_batch(2, size=image_size, noise=objective.noise_per_sample())
    outputs, indices, tokens = objective.predict(batch, batch.images)
    assert outputs.shape == (2, count, 512)
    assert indices.shape == (2, count)
    assert tokens.shape == (2, patches, 16)


def numpy_log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("target", ["mean_colour", "downsized", "pixels"])
def test_loss_and_metrics_agree_with_numpy(make_backbone: Make, make_batch: Make, target: str, padding: int) -> None:
    objective = spread(objective_of(make_backbone, target=target, bits=1, mask_share=0.4, random_share=0.3))
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
    found = {"loss": result.loss, **result.metrics}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].item(), value, rtol=1e-5, err_msg=name)
    assert result.loss.dtype == torch.float32
    assert all(not metric.requires_grad for metric in result.metrics.values())


@pytest.mark.parametrize("target", ["mean_colour", "downsized", "pixels"])
def test_only_targets_of_corrupted_patches_count(
    make_backbone: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    objective = spread(objective_of(make_backbone, target=target, bits=1, mask_share=0.3, random_share=0.3))
    batch = make_batch(4, noise=objective.noise_per_sample())
    images = torch.where(batch.flip[:, None, None, None], batch.images.flip(-1), batch.images)
    with torch.no_grad():
        _, indices, tokens = objective.predict(batch, images)
        before = objective(batch)
    own = objective.targets(images)
    chosen = torch.zeros(own.shape[:2], dtype=torch.bool).scatter_(1, indices, True)
    unchanged = chosen & (tokens == objective.backbone.embed(images)).all(-1)
    assert 0 < unchanged.sum() < chosen.sum() < chosen.numel()  # some of the corrupted ones stayed as they were

    def losses(changed: torch.Tensor) -> dict[str, float]:
        shifted = own + 1 if own.is_floating_point() else (own + 1) % objective.colours
        monkeypatch.setattr(objective, "targets", lambda _: torch.where(changed[..., None], shifted, own))
        with torch.no_grad():
            after = objective(batch)
        return {"loss": after.loss.item(), **{name: value.item() for name, value in after.metrics.items()}}

    reference = {"loss": before.loss.item(), **{name: value.item() for name, value in before.metrics.items()}}
    assert losses(~chosen) == pytest.approx(reference, rel=1e-6)  # the moving average of frequencies rounds
    for image, patch in chosen.nonzero().tolist():
        one = torch.zeros_like(chosen)
        one[image, patch] = True
        assert losses(one)["loss"] != reference["loss"], (image, patch)


@pytest.mark.parametrize("target", ["mean_colour", "pixels"])
def test_the_gradient_enters_at_corrupted_patches_alone(
    make_backbone: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    objective = spread(objective_of(make_backbone, target=target, mask_share=0.3, random_share=0.3))
    batch = make_batch(4, noise=objective.noise_per_sample())
    seen: dict[str, torch.Tensor] = {}
    encode = objective.backbone.encode

    def encode_everything(tokens: torch.Tensor, keep_BK: torch.Tensor) -> torch.Tensor:
        seen["outputs"], seen["keep"] = encode(tokens), keep_BK
        seen["outputs"].retain_grad()
        return torch.stack([rows[1 + keep] for rows, keep in zip(seen["outputs"], keep_BK, strict=True)])

    monkeypatch.setattr(objective.backbone, "encode", encode_everything)
    objective(batch).loss.backward()
    gradient = seen["outputs"].grad
    assert gradient is not None
    chosen = torch.zeros(4, 17, dtype=torch.bool).scatter_(1, seen["keep"] + 1, True)
    assert torch.equal(gradient.abs().sum(-1) > 0, chosen)


def test_targets_come_from_the_flipped_image(make_backbone: Make, make_batch: Make) -> None:
    """With a constant prediction the loss is a function of the targets alone: compute them by hand."""
    objective = spread(objective_of(make_backbone))
    objective.head.weight.data.zero_()
    batch = make_batch(6, noise=objective.noise_per_sample(), flip=torch.tensor([True, False] * 3))
    with torch.no_grad():
        loss = objective(batch).loss.item()
        _, indices, _ = objective.predict(batch, batch.images)
    log_probabilities = numpy_log_softmax(objective.head.bias.detach().double().numpy())
    per_direction = []
    for flips in (batch.flip.tolist(), [False] * 6):
        values = []
        for image, flip, chosen in zip(batch.images.numpy(), flips, indices.tolist(), strict=True):
            classes = slow_classes(image[:, :, ::-1] if flip else image, 4, 3)
            values += [-log_probabilities[classes[patch]] for patch in chosen]
        per_direction.append(float(np.mean(values)))
    assert loss == pytest.approx(per_direction[0], rel=1e-5)
    assert abs(per_direction[0] - per_direction[1]) > 1e-2


def test_the_class_token_is_never_corrupted(make_backbone: Make, make_batch: Make) -> None:
    objective = objective_of(make_backbone, corruption=1.0, mask_share=1.0, random_share=0.0)
    vit = objective.backbone.vit
    inputs: list[torch.Tensor] = []
    vit.blocks[0].register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].detach()))
    batch = make_batch(3, noise=objective.noise_per_sample())
    with torch.no_grad():
        objective.predict(batch, batch.images)
        objective.backbone(batch.images)
    corrupted_input, clean_input = inputs
    own = vit.cls_token + vit.pos_embed[:, :1]
    assert torch.equal(corrupted_input[:, :1], clean_input[:, :1])
    assert torch.equal(corrupted_input[:, :1], own.detach().expand(3, -1, -1))
    assert (corrupted_input[:, 1:] != clean_input[:, 1:]).any(-1).all()
    masked = objective.mask_token + vit.pos_embed[0, 1:]
    torch.testing.assert_close(corrupted_input[:, 1:], masked.detach().expand(3, -1, -1))


@pytest.mark.parametrize("random_from", ["batch", "image"])
def test_micro_batches_of_whole_lanes_give_the_whole_batchs_result(
    make_backbone: Make, make_batch: Make, random_from: str
) -> None:
    objective = spread(objective_of(make_backbone, mask_share=0.3, random_share=0.6, random_from=random_from)).eval()
    batch = make_batch(12, noise=objective.noise_per_sample(), lane_size=3)
    with torch.no_grad():
        _, indices, tokens = objective.predict(batch, batch.images)
        pieces = [objective.predict(part, part.images) for part in batch.split(2)]
        parts = [objective(part).loss for part in batch.split(4)]
        torch.testing.assert_close(torch.stack(parts).mean(), objective(batch).loss)
    assert torch.equal(indices, torch.cat([piece[1] for piece in pieces]))
    torch.testing.assert_close(tokens, torch.cat([piece[2] for piece in pieces]))


@pytest.mark.parametrize("shares", [(0.8, 0.1), (0.3, 0.5), (0.0, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize(("random_from", "lane_size"), [("batch", 3), ("batch", 0), ("image", 3)])
def test_the_recipes_choices_reach_the_corruption(
    make_backbone: Make, make_batch: Make, shares: tuple[float, float], random_from: str, lane_size: int
) -> None:
    choices = {"mask_share": shares[0], "random_share": shares[1], "random_from": random_from}
    objective = objective_of(make_backbone, corruption=0.75, **choices)
    batch = make_batch(12, noise=objective.noise_per_sample(), lane_size=lane_size)
    with torch.no_grad():
        _, indices, tokens = objective.predict(batch, batch.images)
        clean = objective.backbone.embed(batch.images)
    expected = corrupt(clean, objective.mask_token, 12, noise_BM=batch.noise, pool=lane_size, **choices)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(indices, expected[1])


def test_mask_token_and_head_receive_gradients(make_backbone: Make, make_batch: Make) -> None:
    objective = objective_of(make_backbone)
    objective(make_batch(4, noise=objective.noise_per_sample())).loss.backward()
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_patch_pixels_number_patches_as_the_patch_embedding_does(make_backbone: Make) -> None:
    backbone = make_backbone()
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    patches = patch_pixels(images.float() / 127.5 - 1, 4).flatten(2)
    weights = backbone.vit.patch_embed.proj.weight.flatten(1)
    by_hand = patches @ weights.T + backbone.vit.patch_embed.proj.bias
    torch.testing.assert_close(backbone.embed(images), by_hand)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask_share": 0.8, "random_share": 0.3},
        {"mask_share": 1.1},
        {"random_share": -0.1},
        {"corruption": 0.0},
        {"corruption": 1.5},
        {"bits": 0},
        {"bits": 9},
        {"target": "median"},
        {"random_from": "everywhere"},
        {"corruptions": 0.5},
    ],
)
def test_configurations_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Config(**wrong)


def test_shares_may_add_up_to_one() -> None:
    assert Config(mask_share=0.9, random_share=0.1).mask_share == 0.9
