"""The masked stage's pictures show what the model is given, what it answers and what is true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ssl_vit.analysis import reconstruction
from ssl_vit.objectives import masked_autoencoder, masked_patch

Build = Callable[..., Any]


def objective_of(encoder: Any, **settings: Any) -> masked_patch.Objective:
    torch.manual_seed(1)
    return masked_patch.Objective(encoder, masked_patch.Config(**settings))


def patches_of(pictures: np.ndarray, patch: int = 4) -> np.ndarray:
    """(B, H, W, C) -> (B, N, patch, patch, C) by plain slicing."""
    height, width = pictures.shape[1:3]
    places = [(y, x) for y in range(0, height, patch) for x in range(0, width, patch)]
    return np.stack([pictures[:, y : y + patch, x : x + patch] for y, x in places], axis=1)


@pytest.mark.parametrize("size", [(16, 16), (8, 24)])
def test_the_four_pictures(make_encoder: Build, make_batch: Build, size: tuple[int, int]) -> None:
    objective = objective_of(make_encoder(image_size=size))
    batch = make_batch(9, size=24, noise=objective.noise_per_sample())
    batch.images = batch.images[:, :, : size[0], : size[1]]
    shown = reconstruction.reconstructions(objective, batch, images=8)
    assert shown.shape == (8, 4, *size, 3) and shown.dtype == np.uint8
    given, corrupted, predicted, target = (patches_of(shown[:, column]) for column in range(4))
    seen = np.where(batch.flip[:8, None, None, None], batch.images[:8].flip(-1), batch.images[:8])
    assert np.array_equal(shown[:, 0], np.moveaxis(seen, 1, -1))
    # Targets: the middle of the color bin, 32 wide, that the mean falls into.
    means = given.reshape(8, given.shape[1], -1, 3).mean(2)
    assert np.array_equal(target, np.broadcast_to((means // 32 * 32 + 16)[:, :, None, None], target.shape))
    _, chosen = objective.corrupt(torch.zeros(8, given.shape[1], 1), torch.zeros(1), few_of(batch))
    found = set()
    for image in range(8):
        kinds = dict(zip(chosen[image].tolist(), batch.noise[image, given.shape[1] :].tolist(), strict=False))
        for patch in range(given.shape[1]):
            own, bad, guess = given[image, patch], corrupted[image, patch], predicted[image, patch]
            kind = "none" if patch not in kinds else "mask" if kinds[patch] < 0.8 else "other"
            kind = "same" if kinds.get(patch, 0) >= 0.9 else kind
            found.add(kind)
            if kind == "mask":
                assert (bad == 128).all()
            elif kind == "other":
                assert not np.array_equal(bad, own)
                assert any(np.array_equal(bad, donor) for donor in given.reshape(-1, 4, 4, 3))
            else:
                assert np.array_equal(bad, own)
            assert kind != "none" or np.array_equal(guess, target[image, patch])
            assert np.ptp(guess.reshape(-1, 3), axis=0).max() == 0  # one color
    assert found == {"none", "mask", "other", "same"}


def few_of(batch: Any) -> Any:
    return replace(batch, noise=batch.noise[:8])


def test_the_predictions_are_the_models(make_encoder: Build, make_batch: Build) -> None:
    """A head that always says class 511 paints every corrupted patch in the brightest color, and no other patch."""
    objective = objective_of(make_encoder())
    with torch.no_grad():
        objective.head.weight.zero_()
        objective.head.bias[511] = 9
    batch = make_batch(2, noise=objective.noise_per_sample())
    shown = reconstruction.reconstructions(objective, batch)
    white = (patches_of(shown[:, 2]) == 240).all(axis=(2, 3, 4))
    assert white.sum(1).tolist() == [8, 8]


@pytest.mark.parametrize("target", ["downsized", "pixels"])
def test_finer_targets_have_finer_pictures(make_encoder: Build, make_batch: Build, target: str) -> None:
    objective = objective_of(make_encoder(image_size=16, patch_size=8), target=target)
    batch = make_batch(2, noise=objective.noise_per_sample(), flip=torch.zeros(2, dtype=torch.bool))
    shown = reconstruction.reconstructions(objective, batch)
    cells = shown[:, 3].reshape(2, 8, 2, 8, 2, 3)
    if target == "pixels":
        assert np.array_equal(shown[:, 3], shown[:, 0])
    else:
        assert (cells == cells[:, :, :1, :, :1]).all()
        means = shown[:, 0].reshape(2, 8, 2, 8, 2, 3).mean(axis=(2, 4))
        assert np.array_equal(cells[:, :, 0, :, 0], means // 32 * 32 + 16)


def test_a_masked_autoencoders_pictures(make_encoder: Build, make_batch: Build) -> None:
    """Masked patches are gray in the second picture, and predicted with their own mean and contrast in the third."""
    objective = masked_autoencoder.Objective(make_encoder(mean=(0.4, 0.5, 0.6)), masked_autoencoder.Config())
    batch = make_batch(3, noise=objective.noise_per_sample(), flip=torch.zeros(3, dtype=torch.bool))
    masked = batch.noise.argsort(1)[:, 4:]
    shown = reconstruction.reconstructions(objective, batch)
    given, seen, predicted, target = (patches_of(shown[:, column]) for column in range(4))
    gray = (seen == 128).all((2, 3, 4))
    assert np.array_equal(np.flatnonzero(gray[0]), masked[0].sort().values) and gray.sum() == 36
    assert np.array_equal(target, given) and np.array_equal(seen[~gray], given[~gray])
    assert np.array_equal(predicted[~gray], given[~gray]) and not np.array_equal(predicted[gray], given[gray])
    truth = objective.targets(batch.images, masked)
    objective.predict = lambda *_: (truth, masked)  # type: ignore[method-assign]
    assert np.array_equal(reconstruction.reconstructions(objective, batch)[:, 2], shown[:, 0]), "a perfect prediction"
