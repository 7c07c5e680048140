"""Which patches are corrupted, and what becomes of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from ssl_vit.objectives.masked_patch import corrupt, noise_needed

Make = Callable[..., Any]

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


@pytest.mark.parametrize(("patches", "count"), [(196, 29), (16, 16), (5, 1), (1, 1)])
@pytest.mark.parametrize("random_from", ["batch", "image"])
def test_exactly_count_distinct_patches_change_and_no_other(patches: int, count: int, random_from: str) -> None:
    found, indices = corrupted(6, patches, count, mask_prob=0.4, random_prob=0.3, random_from=random_from)
    assert indices.shape == (6, count)
    assert indices.min() >= 0
    assert indices.max() < patches
    assert all(len(set(row)) == count for row in indices.tolist())
    untouched = np.ones((6, patches), dtype=bool)
    np.put_along_axis(untouched, indices, False, axis=1)
    np.testing.assert_array_equal(found[untouched], own_places(6, patches)[untouched])


@pytest.mark.parametrize("random_from", ["batch", "image"])
@pytest.mark.parametrize("shares", [(0.8, 0.1), (0.0, 1.0), (0.15, 0.35)])
def test_shares_of_mask_random_and_unchanged(shares: tuple[float, float], random_from: str) -> None:
    images, patches, count = 400, 50, 25
    found, indices = corrupted(
        images, patches, count, mask_prob=shares[0], random_prob=shares[1], random_from=random_from
    )
    now = np.take_along_axis(found, indices, axis=1)
    own = np.take_along_axis(own_places(images, patches), indices, axis=1)
    total = images * count
    # A random other patch is never the patch itself, so "unchanged" counts the kept ones alone.
    kinds = {"mask": now == MASKED, "random": (now != MASKED) & (now != own), "unchanged": now == own}
    for kind, share in zip(kinds, (*shares, 1 - sum(shares)), strict=True):
        five_sigma = 5 * math.sqrt(total * share * (1 - share)) if 0 < share < 1 else 0
        assert abs(int(kinds[kind].sum()) - total * share) <= five_sigma + 1e-6, kind


@pytest.mark.parametrize(
    ("random_from", "pool", "images", "group"),
    [("batch", 0, 3, 3), ("batch", 2, 4, 2), ("image", 2, 4, 1)],
)
def test_donors_are_uniform_over_the_others_of_their_group(
    random_from: str, pool: int, images: int, group: int
) -> None:
    patches = 4
    ring = group * patches
    counts = np.zeros((images * patches, images * patches))
    for seed in range(1500):
        found, indices = corrupted(
            images, patches, patches, seed, mask_prob=0.0, random_prob=1.0, random_from=random_from, pool=pool
        )
        assert indices.shape == (images, patches)
        counts[np.arange(images * patches), found.ravel()] += 1
    for own, row in enumerate(counts):
        inside = np.arange(len(row)) // ring == own // ring
        assert row[~inside].sum() == 0, "a donor came from another pool"
        assert row[own] == 0, "a patch donated to itself"
        others = row[inside & (np.arange(len(row)) != own)]
        assert chisquare(others).pvalue > 1e-5


@pytest.mark.parametrize(("random_from", "pool", "parts"), [("batch", 4, 4), ("image", 4, 16)])
def test_the_same_noise_gives_the_same_result_however_lanes_are_split(random_from: str, pool: int, parts: int) -> None:
    images, patches, count = 16, 9, 4
    generator = torch.Generator().manual_seed(3)
    noise = torch.rand(images, noise_needed(patches, count), generator=generator)
    tokens, mask = torch.randn(images, patches, 5, generator=generator), torch.randn(5, generator=generator)
    shares: dict[str, Any] = {"mask_prob": 0.3, "random_prob": 0.5, "random_from": random_from, "pool": pool}
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
    """The nearest and the farthest donor are the two neighbors on the ring of all patches: neither is the patch."""
    numbers = torch.full((images, 9), noise)
    mask_token = torch.full((3,), float(MASKED))
    tokens, _ = corrupt(tagged(images, 3), mask_token, 3, noise_BM=numbers, mask_prob=0.0, random_prob=1.0)
    np.testing.assert_array_equal(places(tokens), (own_places(images, 3) + steps) % (images * 3))


def test_the_generator_decides_and_torchs_own_is_untouched() -> None:
    before = torch.get_rng_state()
    first, again, other = corrupted(4, 9, 4, 1), corrupted(4, 9, 4, 1), corrupted(4, 9, 4, 2)
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert not np.array_equal(first[1], other[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "cannot corrupt 0 of 6"),
        ({"count": 7}, "cannot corrupt 7 of 6"),
        ({"count": 3, "noise_BM": torch.zeros(4, 11)}, r"noise is \(4, 11\), not \(4, 12\)"),
        ({"count": 3, "pool": 3}, "4 images are not groups of 3"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(tagged(4, 6), torch.zeros(3), **options)


def test_donors_are_uniform_where_other_patches_stay_as_they_are() -> None:
    """Which patch is given does not depend on whether one is."""
    counts = np.zeros(16)
    for seed in range(400):
        found, _ = corrupted(2, 8, 8, seed, mask_prob=0.0, random_prob=0.5)
        steps = (found - own_places(2, 8)) % 16
        counts += np.bincount(steps.ravel(), minlength=16)
    assert chisquare(counts[1:]).pvalue > 1e-5


def test_what_becomes_of_a_patch_does_not_depend_on_what_chose_it() -> None:
    """Numbers of their own decide: where these are above both shares, every patch stays as it is."""
    noise = torch.rand(50, noise_needed(9, 4), generator=torch.Generator().manual_seed(0))
    noise[:, 9 : 9 + 4] = 0.95
    tokens, _ = corrupt(tagged(50, 9), torch.full((3,), float(MASKED)), 4, noise_BM=noise)
    np.testing.assert_array_equal(places(tokens), own_places(50, 9))
