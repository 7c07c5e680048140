"""Patches of images as targets: their pixels, and the loss of the best constant prediction of them."""

from __future__ import annotations

import torch

from ssl_vit.interfaces import Batch

MASK_GRAY = 128  # how pictures show a masked patch
DOWNSIZED = 4  # target 2 of the paper's masked patch prediction: the patch downsized to 4x4


def patch_pixels(images_BCHW: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Images -> (B, N, C, P, P), patches in row-major order as the patch embedding numbers them."""
    b, c, h, w = images_BCHW.shape
    p = patch_size
    grid = images_BCHW.reshape(b, c, h // p, p, w // p, p)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(b, (h // p) * (w // p), c, p, p)


def downsized_classes(images_BCHW: torch.Tensor, patch_size: int, bits: int = 3) -> torch.Tensor:
    """uint8 images -> the classes of each patch downsized to 4x4, int64 (B, N, 16), for a patch of any size P >= 4.

    Cell i covers the pixels floor(i * P / 4) to ceil((i + 1) * P / 4), as in adaptive average pooling, so that cells
    overlap where 4 does not divide P. Exact, as in `masked_patch.mean_color_classes`.
    """
    pixels = patch_pixels(images_BCHW, patch_size).long()
    cells = [slice(i * patch_size // DOWNSIZED, -(-(i + 1) * patch_size // DOWNSIZED)) for i in range(DOWNSIZED)]
    places = [pixels[..., rows, columns].flatten(-2) for rows in cells for columns in cells]
    bins_BNCS = torch.stack([place.sum(-1) * 2**bits // (256 * place.shape[-1]) for place in places], dim=-1)
    weights_C = 2 ** (bits * torch.arange(bins_BNCS.shape[2] - 1, -1, -1, device=bins_BNCS.device))
    return (bins_BNCS * weights_C[:, None]).sum(2)


def whole_images(patches_BNCPP: torch.Tensor, height: int) -> torch.Tensor:
    """Patches -> images (B, C, H, W) of `height` pixels: the inverse of `patch_pixels`."""
    b, n, c, p, _ = patches_BNCPP.shape
    rows = height // p
    return patches_BNCPP.reshape(b, rows, n // rows, c, p, p).permute(0, 3, 1, 4, 2, 5).reshape(b, c, height, -1)


def replaced(patches_BNCPP: torch.Tensor, index_BK: torch.Tensor, values_BKCPP: torch.Tensor) -> torch.Tensor:
    """Patches with those at `index`, int64 and distinct per image, replaced by the values."""
    return patches_BNCPP.scatter(1, index_BK[..., None, None, None].expand_as(values_BKCPP), values_BKCPP)


def class_shares(batch: Batch, classes_BKS: torch.Tensor, number: int) -> torch.Tensor:
    """The share of each of `number` classes, float32 (number,); padding does not count."""
    flat = classes_BKS.flatten()
    weights = batch.valid.float()[:, None, None].expand_as(classes_BKS).flatten()
    counts = torch.zeros(number, device=flat.device).scatter_add_(0, flat, weights)
    return counts / weights.sum().clamp(min=1)


def level_shares(batch: Batch, targets_BKS: torch.Tensor, channels: int) -> torch.Tensor:
    """Pixels in [0, 1], S = C*P*P -> the shares of each channel's 256 levels, float32 (C * 256,)."""
    offsets = 256 * torch.arange(channels, device=targets_BKS.device)
    levels = (targets_BKS.unflatten(-1, (channels, -1)) * 255).round().long() + offsets[:, None]
    return class_shares(batch, levels.flatten(2), 256 * channels)


def constant_l1(means: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Metrics of T steps with `level_shares` -> with `constant_loss` (T,): the mean absolute error of the best constant
    prediction, the median color."""
    rest = dict(means)
    shares_TCL = rest.pop("level_shares").unflatten(-1, (-1, 256))
    below = (shares_TCL * shares_TCL.shape[1]).cumsum(-1)
    # The mean distance from the median is the sum over the levels of the smaller tail.
    return {**rest, "constant_loss": torch.minimum(below, 1 - below).clamp(min=0).sum(-1).mean(-1) / 255}


def moments(batch: Batch, targets_BKS: torch.Tensor) -> dict[str, torch.Tensor]:
    """The mean target, float32 (S,), and the mean square, of which `constant_l2` makes the constant baseline."""
    weights_B1 = batch.valid.float()[:, None] / batch.valid.sum().clamp(min=1)
    square = batch.mean(targets_BKS.square().mean(dim=(1, 2)))
    return {"target_mean": (targets_BKS.mean(1) * weights_B1).sum(0), "target_square": square}


def constant_l2(means: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Metrics of T steps with `moments` -> with `constant_loss` (T,): the mean squared error of the mean target."""
    rest = dict(means)
    square, mean_TS = rest.pop("target_square"), rest.pop("target_mean")
    return {**rest, "constant_loss": square - mean_TS.reshape(len(square), -1).square().mean(-1)}
