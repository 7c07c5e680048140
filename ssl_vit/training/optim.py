"""Optimisers with the usual weight-decay exclusions, and schedules as functions of the optimiser step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from timm.optim import Lars
from torch import nn

from ssl_vit.training import OptimConfig

_NO_DECAY = ("pos_embed", "cls_token", "reg_token", "mask_token")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Trainable parameters in two groups: matrices decay; biases, norms, tokens and positions do not."""
    decay: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = parameter.ndim <= 1 or name.rsplit(".", 1)[-1] in _NO_DECAY
            (rest if exempt else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module, config: OptimConfig, batch_size: int, device: torch.device
) -> torch.optim.Optimizer:
    """The optimiser of `config` over the model's trainable parameters; torch's fused kernels where they exist."""
    groups, lr = parameter_groups(model, config.weight_decay), peak_lr(config, batch_size)
    fused = device.type in ("cpu", "cuda")
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=config.betas, fused=fused)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, fused=fused)
    groups[0]["always_adapt"] = True  # else timm's Lars is plain SGD where the decay is 0, as in MAE's probe
    return Lars(groups, lr=lr, momentum=config.momentum)


def peak_lr(config: OptimConfig, batch_size: int) -> float:
    """The learning rate after warm-up, scaled by batch size where the configuration asks for it."""
    return config.lr * batch_size / config.lr_batch if config.lr_batch else config.lr


def lr_factor(step: int, total: int, config: OptimConfig) -> float:
    """The share of the peak learning rate that optimiser step `step` (0 .. total - 1) uses.

    Warm-up rises as (step + 1) / warmup, so that no step is wasted at zero; then cosine or linear falls towards 0 at
    `total`.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(total - config.warmup_steps, 1)
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if config.schedule == "linear" else 1.0


def set_lr(groups: Iterable[dict[str, object]], lr: float) -> None:
    """Give every parameter group the learning rate of this step."""
    for group in groups:
        group["lr"] = lr
