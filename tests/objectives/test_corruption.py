"""Which patches are corrupted, and what becomes of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from ssl_vit.objectives.masked_patch import block_order, corrupt, noise_needed

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


@pytest.mark.parametrize(("patches", "count"), [(196, 98), (196, 29), (9, 4), (16, 16), (5, 1), (1, 1)])
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


def test_every_chosen_patch_becomes_the_mask_token_at_full_mask_prob() -> None:
    found, indices = corrupted(8, 20, 10, mask_prob=1.0, random_prob=0.0)
    assert (np.take_along_axis(found, indices, axis=1) == MASKED).all()
    assert (found == MASKED).sum() == 80


@pytest.mark.parametrize("random_from", ["batch", "image"])
@pytest.mark.parametrize("shares", [(0.8, 0.1), (0.5, 0.5), (0.0, 1.0), (0.0, 0.0), (0.15, 0.35)])
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
    expected = np.full(ring - 1, 1500 / (ring - 1))
    by_distance = [
        sum(row[own // ring * ring + (own + d) % ring] for own, row in enumerate(counts)) for d in range(1, ring)
    ]
    assert chisquare(by_distance, expected * len(counts)).pvalue > 1e-4


@pytest.mark.parametrize(
    ("random_from", "pool", "parts"), [("batch", 4, 2), ("batch", 4, 4), ("image", 4, 16), ("batch", 2, 8)]
)
@pytest.mark.parametrize("blocks", [None, (3, 3)])
def test_the_same_noise_gives_the_same_result_however_lanes_are_dealt_out(
    random_from: str, pool: int, parts: int, blocks: tuple[int, int] | None
) -> None:
    images, patches, count = 16, 9, 4
    needed = noise_needed(patches, count, blocks is not None)
    noise = torch.rand(images, needed, generator=torch.Generator().manual_seed(3))
    tokens, mask = torch.randn(images, patches, 5), torch.randn(5)
    shares = {"mask_prob": 0.3, "random_prob": 0.5, "random_from": random_from, "pool": pool, "blocks": blocks}
    whole, chosen = corrupt(tokens, mask, count, noise_BM=noise, **shares)
    pieces = [
        corrupt(t, mask, count, noise_BM=n, **shares)
        for t, n in zip(tokens.chunk(parts), noise.chunk(parts), strict=True)
    ]
    assert torch.equal(whole, torch.cat([piece for piece, _ in pieces]))
    assert torch.equal(chosen, torch.cat([indices for _, indices in pieces]))
    assert not torch.equal(whole, tokens)


def test_which_patches_what_becomes_of_them_and_who_donates_are_drawn_apart() -> None:
    noise = torch.rand(6, 9 + 2 * 4, generator=torch.Generator().manual_seed(0))
    other = torch.rand(6, 9 + 2 * 4, generator=torch.Generator().manual_seed(1))
    mask_token = torch.full((3,), float(MASKED))

    def found(numbers: torch.Tensor, **shares: float) -> list[list[int]]:
        return places(corrupt(tagged(6, 9), mask_token, 4, noise_BM=numbers, **shares)[0]).tolist()

    donated, masked = {"mask_prob": 0.0, "random_prob": 1.0}, {"mask_prob": 0.5, "random_prob": 0.0}
    kinds, donors = noise.clone(), noise.clone()
    kinds[:, 9:13], donors[:, 13:] = other[:, 9:13], other[:, 13:]
    assert found(kinds, **donated) == found(noise, **donated) != found(donors, **donated)
    assert found(donors, **masked) == found(noise, **masked) != found(kinds, **masked)


@pytest.mark.parametrize(("noise", "steps"), [(0.0, 1), (1 - 2**-24, -1)])
@pytest.mark.parametrize("images", [2, 61])
def test_noise_at_the_edges_of_its_range_stays_inside_the_batch(noise: float, steps: int, images: int) -> None:
    """The nearest and the farthest donor are the two neighbors on the ring of all patches: neither is the patch."""
    numbers = torch.full((images, 9), noise)
    mask_token = torch.full((3,), float(MASKED))
    tokens, _ = corrupt(tagged(images, 3), mask_token, 3, noise_BM=numbers, mask_prob=0.0, random_prob=1.0)
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
    out, _ = corrupt(tokens, mask, 6, generator, mask_prob=0.4, random_prob=0.4)
    out.sum().backward()
    found = places(out.detach())
    assert mask.grad is not None
    assert tokens.grad is not None
    assert mask.grad.tolist() == [float((found == MASKED).sum())] * 3
    reads = np.bincount(found[found != MASKED], minlength=40).reshape(5, 8)
    np.testing.assert_array_equal(tokens.grad[..., 0].numpy(), reads)


def test_half_precision_tokens_stay_half_precision() -> None:
    tokens, _ = corrupt(torch.zeros(2, 4, 3, dtype=torch.bfloat16), torch.ones(3), 2, mask_prob=1.0, random_prob=0.0)
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
        ({"count": 3, "blocks": (2, 2)}, "2x2 patches are not 6"),
        ({"count": 3, "blocks": (2, 3), "noise_BM": torch.rand(4, 12)}, r"noise is \(4, 12\), not \(4, 76\)"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(tagged(4, 6), torch.zeros(3), **options)


# --- blocks ---

GRIDS = [(14, 14), (4, 4), (3, 9), (10, 2), (1, 7), (1, 1)]


def block_noise(images: int, blocks: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(images, blocks, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("share", [0.15, 0.5, 0.75, 1.0])
def test_blocks_are_whole_rectangles_of_the_areas_and_aspects_asked_for(grid: tuple[int, int], share: float) -> None:
    patches = grid[0] * grid[1]
    count = max(1, round(share * patches))
    areas, tall = [], 0
    for order in block_order(block_noise(300, 1), grid, count).reshape(300, *grid).numpy():
        held = order < 0.5
        assert set(order[~held].tolist()) <= {1.0}  # no block holds these
        rows, columns = np.flatnonzero(held.any(1)), np.flatnonzero(held.any(0))
        assert held.sum() == len(rows) * len(columns) > 0
        assert (np.diff(rows) == 1).all() and (np.diff(columns) == 1).all()
        if min(grid) >= 10 and share <= 0.5:  # room for every shape
            assert 0.2 <= len(rows) / len(columns) <= 5
        areas.append(held.sum())
        tall += np.sign(len(rows) - len(columns))
        assert order[int(rows.mean()), int(columns.mean())] == order.min()
        assert order[rows[0], columns[0]] == order[held].max()
    if grid == (14, 14):
        assert abs(tall) < 5 * math.sqrt(300)  # as many tall ones as wide ones
    if patches > 20:
        least = min(max(16 / 196 * patches, 1), count)
        assert np.mean(areas) == pytest.approx((least + count) / 2, rel=0.15)


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("grid", GRIDS)
def test_noise_at_the_edges_of_its_range_keeps_blocks_inside(grid: tuple[int, int], noise: float) -> None:
    patches = grid[0] * grid[1]
    order = block_order(torch.full((1, 1, 4), noise), grid, max(1, patches // 2))
    assert (order < 0.5).any()


def test_an_earlier_block_comes_first() -> None:
    noise = block_noise(50, 5)
    together = block_order(noise, (6, 8), 24)
    alone = torch.stack([block_order(noise[:, n : n + 1], (6, 8), 24) for n in range(5)], 1)
    number = torch.arange(5)[:, None]
    expected = torch.where(alone < 0.5, number + alone, 5).amin(1)
    torch.testing.assert_close(together, expected)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("share", [0.15, 0.5, 0.75, 1.0])
def test_blocks_corrupt_exactly_the_count_and_all_but_the_last_block_whole(grid: tuple[int, int], share: float) -> None:
    patches = grid[0] * grid[1]
    count = max(1, round(share * patches))
    noise = torch.rand(200, noise_needed(patches, count, blocks=True), generator=torch.Generator().manual_seed(1))
    mask_token = torch.full((3,), float(MASKED))
    options = {"noise_BM": noise, "mask_prob": 1.0, "random_prob": 0.0, "blocks": grid}
    tokens, indices = corrupt(tagged(200, patches), mask_token, count, **options)
    chosen = places(tokens) == MASKED
    assert (chosen.sum(1) == count).all()
    assert all(sorted(row) == np.flatnonzero(held).tolist() for row, held in zip(indices.tolist(), chosen, strict=True))
    order = block_order(noise[:, patches + 2 * count :].reshape(200, -1, 4), grid, count).numpy()
    for held, block in zip(chosen, np.floor(order), strict=True):
        last = block[held].max()
        assert held[block < last].all() and not held[block > last].any()


def test_blocks_hold_together_and_favor_no_side() -> None:
    grid, count = (10, 12), 60
    shares = {}
    for blocks in (None, grid):
        generator = torch.Generator().manual_seed(0)
        _, indices = corrupt(torch.zeros(3000, 120, 1), torch.ones(1), count, generator, blocks=blocks)
        chosen = torch.zeros(3000, 120, dtype=torch.bool).scatter_(1, indices, True).reshape(3000, *grid)
        neighbors = (chosen[:, :, 1:] & chosen[:, :, :-1]).float().sum() / chosen[:, :, :-1].float().sum()
        shares[blocks] = float(neighbors)
        frequency = chosen.float().mean(0)
        for mirrored in (frequency.flip(0), frequency.flip(1)):
            assert (frequency - mirrored).abs().max() < 0.06  # five standard errors of a difference of two shares
    assert shares[None] == pytest.approx(0.5, abs=0.02)
    assert shares[grid] > 0.75


@pytest.mark.parametrize("blocks", [None, (3, 3)])
def test_no_shape_depends_on_the_data(blocks: tuple[int, int] | None) -> None:
    """On the meta device there are no values to branch on."""
    noise = torch.rand(4, noise_needed(9, 4, blocks is not None), device="meta")
    tokens = torch.rand(4, 9, 5, device="meta")
    found, indices = corrupt(tokens, torch.rand(5, device="meta"), 4, noise_BM=noise, blocks=blocks)
    assert (found.shape, indices.shape) == ((4, 9, 5), (4, 4))
