from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn

from ssl_vit.objectives import classification, masked_patch
from ssl_vit.training import OptimConfig
from ssl_vit.training.optim import build_optimizer, lr_factor, parameter_groups, peak_lr, set_lr

CPU = torch.device("cpu")


# --- schedule ---


@pytest.mark.parametrize(
    ("schedule", "warmup", "step", "factor"),
    [
        ("cosine", 0, 0, 1.0),
        ("cosine", 0, 25, 0.5 + math.sqrt(2) / 4),
        ("cosine", 0, 50, 0.5),
        ("cosine", 0, 75, 0.5 - math.sqrt(2) / 4),
        ("cosine", 0, 100, 0.0),
        ("cosine", 20, 0, 1 / 20),
        ("cosine", 20, 9, 0.5),
        ("cosine", 20, 19, 1.0),
        ("cosine", 20, 20, 1.0),
        ("cosine", 20, 60, 0.5),
        ("linear", 0, 0, 1.0),
        ("linear", 0, 30, 0.7),
        ("linear", 20, 4, 0.25),
        ("linear", 20, 40, 0.75),
        ("linear", 20, 99, 1 / 80),
        ("linear", 20, 100, 0.0),
        ("constant", 0, 0, 1.0),
        ("constant", 0, 99, 1.0),
        ("constant", 10, 4, 0.5),
        ("constant", 10, 50, 1.0),
    ],
)
def test_the_schedule_at_steps_worked_out_by_hand(schedule: Any, warmup: int, step: int, factor: float) -> None:
    config = OptimConfig(schedule=schedule, warmup_steps=warmup)
    assert lr_factor(step, 100, config) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 37), (10, 37), (36, 37), (37, 37), (50, 37)])
def test_it_rises_then_falls_and_no_step_is_wasted_at_zero(schedule: Any, warmup: int, total: int) -> None:
    config = OptimConfig(schedule=schedule, warmup_steps=warmup)
    factors = np.array([lr_factor(step, total, config) for step in range(total)])
    assert (factors > 0).all()
    assert (factors <= 1).all()
    assert (np.diff(factors[:warmup]) > 0).all()
    assert (np.diff(factors[warmup:]) < 0).all()
    if warmup <= total:
        assert factors.max() == 1.0


@pytest.mark.parametrize(("lr_batch", "batch_size", "lr"), [(None, 4096, 3e-4), (256, 4096, 48e-4), (256, 128, 1.5e-4)])
def test_the_learning_rate_scales_with_the_batch_where_asked(lr_batch: int | None, batch_size: int, lr: float) -> None:
    config = OptimConfig(lr=3e-4, lr_batch=lr_batch)
    assert peak_lr(config, batch_size) == pytest.approx(lr)
    for name in ("adamw", "sgd", "lars"):
        optimizer = build_optimizer(Mixed(), config.model_copy(update={"name": name}), batch_size, CPU)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([lr, lr])


def test_set_lr_reaches_every_group() -> None:
    optimizer = build_optimizer(Mixed(), OptimConfig(weight_decay=0.1), 8, CPU)
    set_lr(optimizer.param_groups, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


# --- weight decay ---


@pytest.mark.parametrize("encoder", [{}, {"name": "vit_small_patch14_reg4_dinov2"}])
def test_weight_decay_leaves_biases_norms_tokens_and_positions_alone(
    make_encoder: Callable[..., Any], encoder: dict[str, Any]
) -> None:
    objective = masked_patch.Objective(make_encoder(**encoder), masked_patch.Config())
    objective.encoder.network.blocks[0].mlp.fc1.weight.requires_grad_(False)
    names = {id(parameter): name for name, parameter in objective.named_parameters()}
    groups = {
        group["weight_decay"]: [names[id(parameter)] for parameter in group["params"]]
        for group in parameter_groups(objective, 0.3)
    }
    assert set(groups) == {0.3, 0.0}
    everyone = groups[0.3] + groups[0.0]
    trainable = sorted(name for name, parameter in objective.named_parameters() if parameter.requires_grad)
    assert sorted(everyone) == trainable
    matrices = {f"{layer}.weight" for layer in ("qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "patch_embed.proj", "head")}
    assert all(any(name.endswith(matrix) for matrix in matrices) for name in groups[0.3])
    assert not any(any(name.endswith(matrix) for matrix in matrices) for name in groups[0.0])
    assert {"mask_token", "encoder.network.pos_embed", "encoder.network.cls_token"} < set(groups[0.0])
    assert ("encoder.network.reg_token" in groups[0.0]) == bool(encoder)


def test_layer_decay_is_maes(make_encoder: Callable[..., Any]) -> None:
    """MAE's `util/lr_decay.py`: 0 for patches, tokens and positions, i + 1 for block i, depth + 1 for all else."""
    objective = classification.Objective(make_encoder(depth=3), classification.Config(head="linear"), 5)
    names = {id(parameter): name for name, parameter in objective.named_parameters()}
    config = OptimConfig(name="adamw", lr=0.1, weight_decay=0.3, layer_decay=0.5)
    optimizer = build_optimizer(objective, config, 8, CPU)
    set_lr(optimizer.param_groups, 0.1)
    seen = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)].removeprefix("encoder.network.")
            layer = 4
            if name.startswith(("patch_embed", "cls_token", "pos_embed")):
                layer = 0
            elif name.startswith("blocks."):
                layer = int(name.split(".")[1]) + 1
            assert group["lr"] == pytest.approx(0.1 * 0.5 ** (4 - layer)), name
            exempt = parameter.ndim == 1 or name in ("cls_token", "pos_embed")
            assert group["weight_decay"] == (0.0 if exempt else 0.3), name
            seen.add(name)
    assert seen == {name.removeprefix("encoder.network.") for name in names.values()}
    assert optimizer.param_groups[0]["lr"] == 0.1, "the display shows the first group's"


def test_layer_decay_counts_from_the_last_block_where_a_norm_follows_the_mean(
    make_encoder: Callable[..., Any],
) -> None:
    """timm gives `fc_norm` a layer of its own, above the blocks."""
    vit = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        depth=3,
        embed_dim=24,
        num_heads=2,
        num_classes=0,
        global_pool="avg",
        fc_norm=True,
    )
    holder = torch.nn.Module()
    holder.encoder = torch.nn.Module()
    holder.encoder.network = vit
    scales = {id(p): group["lr_scale"] for group in parameter_groups(holder, 0.3, 0.5) for p in group["params"]}
    found = [scales[id(p)] for p in (vit.patch_embed.proj.weight, vit.blocks[0].norm1.bias, vit.blocks[2].norm1.bias)]
    assert found == [0.5**4, 0.5**3, 0.5]
    assert scales[id(vit.fc_norm.weight)] == 1.0


def test_an_empty_group_is_left_out() -> None:
    assert [group["weight_decay"] for group in parameter_groups(nn.Linear(3, 2, bias=False), 0.3)] == [0.3]
    assert [group["weight_decay"] for group in parameter_groups(nn.LayerNorm(3), 0.3)] == [0.0]


# --- optimizers ---


class Mixed(nn.Module):
    """Parameters of every kind, in float64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.pos_embed = nn.Parameter(torch.randn(1, 4, 3, generator=generator, dtype=torch.float64))
        self.mask_token = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64))
        self.norm = nn.LayerNorm(3, dtype=torch.float64)
        self.head = nn.Linear(3, 2, dtype=torch.float64)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(2, 3, generator=generator))
            self.head.bias.copy_(torch.randn(2, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(x + self.pos_embed) * self.mask_token)).square().mean()


DECAYS = {"head.weight"}
RATES = [0.1, 0.05, 0.2, 0.01, 0.1]


class AdamwReference:
    """Adam (Kingma and Ba, algorithm 1) with decoupled decay (Loshchilov and Hutter, algorithm 2), in numpy."""

    def __init__(self, config: OptimConfig) -> None:
        self.betas, self.decay = config.betas, config.weight_decay
        self.moments: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.step = 0

    def update(self, weights: dict[str, np.ndarray], gradients: dict[str, np.ndarray], lr: float) -> None:
        self.step += 1
        for name, gradient in gradients.items():
            first, second = self.moments.get(name, (np.zeros_like(gradient), np.zeros_like(gradient)))
            first = self.betas[0] * first + (1 - self.betas[0]) * gradient
            second = self.betas[1] * second + (1 - self.betas[1]) * gradient**2
            self.moments[name] = (first, second)
            unbiased = first / (1 - self.betas[0] ** self.step), second / (1 - self.betas[1] ** self.step)
            decay = self.decay if name in DECAYS else 0.0
            weights[name] = weights[name] - lr * (unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8) + decay * weights[name])


class SgdReference:
    """Heavy-ball momentum on the gradient plus the decayed weight; the learning rate scales the velocity."""

    def __init__(self, config: OptimConfig) -> None:
        self.momentum, self.decay = config.momentum, config.weight_decay
        self.velocity: dict[str, np.ndarray] = {}

    def direction(self, name: str, gradient: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return gradient + (self.decay if name in DECAYS else 0.0) * weight

    def update(self, weights: dict[str, np.ndarray], gradients: dict[str, np.ndarray], lr: float) -> None:
        for name, gradient in gradients.items():
            direction = self.direction(name, gradient, weights[name])
            self.velocity[name] = self.momentum * self.velocity.get(name, np.zeros_like(gradient)) + direction
            weights[name] = weights[name] - lr * self.velocity[name]


class LarsReference(SgdReference):
    """LARS (You et al., algorithm 1; without decay it is MAE's): weight matrices, and only they, move by
    0.001 * |weight| / (|gradient| + decay * |weight|) of their direction."""

    def direction(self, name: str, gradient: np.ndarray, weight: np.ndarray) -> np.ndarray:
        direction = super().direction(name, gradient, weight)
        if name not in DECAYS:
            return direction
        size = np.linalg.norm(weight)
        return direction * 0.001 * size / (np.linalg.norm(gradient) + self.decay * size)


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (OptimConfig(name="adamw", weight_decay=0.3), AdamwReference),
        (OptimConfig(name="adamw", weight_decay=0.0, betas=(0.8, 0.95)), AdamwReference),
        (OptimConfig(name="sgd", momentum=0.9, weight_decay=0.1), SgdReference),
        (OptimConfig(name="sgd", momentum=0.0), SgdReference),
        pytest.param(OptimConfig(name="lars", momentum=0.9, weight_decay=0.1), LarsReference, id="lars with decay"),
        pytest.param(OptimConfig(name="lars", momentum=0.9, weight_decay=0.0), LarsReference, id="lars as MAE's probe"),
    ],
)
def test_five_steps_agree_with_a_reference_written_by_hand(config: OptimConfig, reference: type) -> None:
    model = Mixed()
    optimizer, by_hand = build_optimizer(model, config, 8, CPU), reference(config)
    weights = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    start = {name: value.copy() for name, value in weights.items()}
    for step, lr in enumerate(RATES):
        set_lr(optimizer.param_groups, lr)
        optimizer.zero_grad()
        model(torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)).backward()
        gradients = {name: np.array(parameter.grad) for name, parameter in model.named_parameters()}
        by_hand.update(weights, gradients, lr)
        optimizer.step()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), weights[name], rtol=1e-6, atol=1e-9, err_msg=name)
        assert not np.array_equal(weights[name], start[name])
