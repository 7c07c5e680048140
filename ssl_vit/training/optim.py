"""Optimizers with the usual weight-decay exclusions, schedules as functions of the step, averaged weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.models import group_parameters
from timm.optim import Lars
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ssl_vit.interfaces import UserError
from ssl_vit.training import OptimConfig

_NO_DECAY = ("pos_embed", "pos_embed_2d", "relative_position_bias_table", "cls_token", "reg_token", "mask_token")


def parameter_groups(model: nn.Module, weight_decay: float, layer_decay: float | None = None) -> list[dict[str, Any]]:
    """Trainable parameters in groups: matrices decay; biases, norms, tokens and positions do not.

    layer_decay: the factor of the learning rate from a layer of `model.encoder` to the one below it, as `lr_scale` of
    each group; the last norm and everything outside the encoder keep 1 (BEiT's and MAE's rule, on timm's layers).
    """
    scales = _layer_scales(model.encoder.network, layer_decay) if layer_decay else {}  # type: ignore[union-attr, arg-type]
    network: Any = getattr(getattr(model, "encoder", None), "network", None)
    excluded = network.no_weight_decay() if hasattr(network, "no_weight_decay") else ()  # by timm for this network
    excluded = {f"encoder.network.{name}" for name in excluded}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and name.rsplit(".", 1)[-1] not in _NO_DECAY and name not in excluded
            groups.setdefault((scales.get(id(parameter), 1.0), decays), []).append(parameter)
    return [
        {"params": groups[scale, decays], "weight_decay": weight_decay * decays, "lr_scale": scale, "decays": decays}
        for scale, decays in sorted(groups, reverse=True)  # the full learning rate first
    ]


def _layer_scales(network: nn.Module, decay: float) -> dict[int, float]:
    """By a parameter's id: decay ** (layers between it and the head). Raises UserError where timm defines none."""
    if not hasattr(network, "group_matcher"):
        raise UserError(f"optim.layer_decay: timm defines no layer groups for {type(network).__name__}; set it to null")
    names = dict(network.named_parameters())
    layers: dict[str, int] = group_parameters(network, network.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    last_norm = ("norm.", "fc_norm.", "head.norm.")  # in timm of the last block or above, in BEiT and MAE of the head
    head = max(layer for name, layer in layers.items() if not name.startswith(last_norm)) + 1
    return {
        id(names[name]): 1.0 if name.startswith(last_norm) else decay ** (head - layer)
        for name, layer in layers.items()
    }


def build_optimizer(
    model: nn.Module, config: OptimConfig, batch_size: int, device: torch.device, *, sharded: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of `config` for the model's trainable parameters. It uses torch's fused kernels where they exist;
    SGD has none for parameters that will be sharded."""
    groups, lr = parameter_groups(model, config.weight_decay, config.layer_decay), peak_lr(config, batch_size)
    fused = device.type in ("cpu", "cuda")
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=config.betas, fused=fused)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, fused=fused and not sharded)
    for group in groups:
        group["always_adapt"] = group["decays"]  # else timm's Lars is plain SGD where the decay is 0, as in MAE's probe
    return Lars(groups, lr=lr, momentum=config.momentum)


def start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Momentum buffers of zeros for SGD, which the first step leaves as they would be without this.

    torch's fused kernel allocates them uninitialized and does not fill them where fp16 overflows in the first step.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def peak_lr(config: OptimConfig, batch_size: int) -> float:
    """The learning rate after warmup, scaled by batch size where the configuration asks for it."""
    return config.lr * batch_size / config.lr_batch if config.lr_batch else config.lr


def lr_factor(step: int, total: int, config: OptimConfig) -> float:
    """The share of the peak learning rate that optimizer step `step` (0 .. total - 1) uses.

    Warmup rises as (step + 1) / warmup, so that no step is wasted at zero; then cosine or linear falls toward 0 at
    `total`.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(total - config.warmup_steps, 1)
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if config.schedule == "linear" else 1.0


def set_lr(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Give every parameter group the learning rate of this step, times the group's own `lr_scale`."""
    for group in groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


class WeightAverage:
    """An exponential moving average of a model's trainable parameters, sharded as they are."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.originals: dict[str, torch.Tensor] = {}  # the model's weights while the average is swapped in

    def update(self, step: int) -> None:
        """After optimizer step `step` (from 0). The first steps count for more, as in TensorFlow's average."""
        decay = min(self.decay, (1 + step) / (10 + step))
        get_ema_multi_avg_fn(decay)(list(self.values.values()), list(self.parameters.values()), None)

    @torch.no_grad()
    def apply(self) -> None:
        """Set the model's weights to the average."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.values[name])

    @contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """The model holds the average meanwhile. Not for sharded models."""
        self.originals = {name: parameter.clone() for name, parameter in self.parameters.items()}
        try:
            self.apply()
            yield
        finally:
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Give the model the weights that were swapped out, if any; also after a call that a signal interrupted."""
        for name, original in self.originals.items():
            self.parameters[name].copy_(original)
        self.originals = {}
