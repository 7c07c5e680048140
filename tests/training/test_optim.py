from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ssl_vit.interfaces import UserError
from ssl_vit.models import EncoderConfig, factory
from ssl_vit.objectives import classification, masked_patch
from ssl_vit.training import OptimConfig
from ssl_vit.training.optim import (
    WeightAverage,
    build_optimizer,
    lr_factor,
    parameter_groups,
    peak_lr,
    set_lr,
    start_momentum,
)

CPU = torch.device("cpu")


# --- schedule ---


@pytest.mark.parametrize(
    ("schedule", "warmup", "step", "factor"),
    [
        ("cosine", 0, 0, 1.0),
        ("cosine", 0, 25, 0.5 + math.sqrt(2) / 4),
        ("cosine", 0, 100, 0.0),
        ("cosine", 20, 0, 1 / 20),
        ("cosine", 20, 19, 1.0),
        ("cosine", 20, 60, 0.5),
        ("linear", 20, 40, 0.75),
        ("linear", 20, 100, 0.0),
        ("constant", 10, 4, 0.5),
    ],
)
def test_the_schedule_at_steps_worked_out_by_hand(schedule: Any, warmup: int, step: int, factor: float) -> None:
    config = OptimConfig(schedule=schedule, warmup_steps=warmup)
    assert lr_factor(step, 100, config) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(("lr_batch", "batch_size", "lr"), [(None, 4096, 3e-4), (256, 4096, 48e-4), (256, 128, 1.5e-4)])
def test_the_learning_rate_scales_with_the_batch_where_asked(lr_batch: int | None, batch_size: int, lr: float) -> None:
    config = OptimConfig(lr=3e-4, lr_batch=lr_batch)
    assert peak_lr(config, batch_size) == pytest.approx(lr)
    for name in ("adamw", "sgd", "lars"):
        optimizer = build_optimizer(Mixed(), config.model_copy(update={"name": name}), batch_size, CPU)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([lr, lr])


# --- weight decay ---


def test_weight_decay_excludes_what_timm_names_for_other_networks() -> None:
    encoder = factory.build(EncoderConfig(name="crossvit_9_240", image_size=240))
    objective = classification.Objective(encoder, classification.Config(head="linear", pooling="mean"), 2)
    names = {id(parameter): name for name, parameter in objective.named_parameters()}
    decayed = [
        names[id(parameter)]
        for group in parameter_groups(objective, 0.3)
        if group["weight_decay"]
        for parameter in group["params"]
    ]
    assert decayed and not [name for name in decayed if "cls_token" in name or "pos_embed" in name]


@pytest.mark.parametrize(
    "encoder",
    [
        {},
        {"name": "vit_small_patch14_reg4_dinov2"},
        {"positions": "learned_2d"},
        {"positions": "relative"},
    ],
)
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
    assert {"mask_token", "encoder.network.cls_token"} < set(groups[0.0])
    assert ("encoder.network.reg_token" in groups[0.0]) == ("name" in encoder)


@pytest.mark.parametrize("positions", ["learned", "learned_2d", "relative"])
def test_layer_decay_is_maes(make_encoder: Callable[..., Any], positions: str) -> None:
    """MAE's `util/lr_decay.py`: 0 for patches, tokens and positions, i + 1 for block i, depth + 1 for all else."""
    encoder = make_encoder(depth=3, positions=positions)
    objective = classification.Objective(encoder, classification.Config(head="linear"), 5)
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
            exempt = parameter.ndim == 1 or name.startswith(("cls_token", "pos_embed")) or "rel_pos" in name
            assert group["weight_decay"] == (0.0 if exempt else 0.3), name
            seen.add(name)
    assert seen == {name.removeprefix("encoder.network.") for name in names.values()}
    assert optimizer.param_groups[0]["lr"] == 0.1, "the display shows the first group's"


def test_layer_decay_needs_layers() -> None:
    with torch.device("meta"):
        encoder = factory.build(EncoderConfig(name="pit_b_224"))
    with pytest.raises(UserError, match=r"optim\.layer_decay: .*PoolingVisionTransformer"):
        parameter_groups(
            classification.Objective(encoder, classification.Config(head="linear", pooling="mean"), 5), 0.1, 0.5
        )


@pytest.mark.parametrize("name", ["pos_embed", "pos_embed_2d", "cls_token", "reg_token", "mask_token"])
def test_weight_decay_leaves_tokens_and_positions_of_any_module_alone(name: str) -> None:
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(1, 1, 3)), "weight": nn.Parameter(torch.ones(2, 3))})
    found = {id(one): group["weight_decay"] for group in parameter_groups(module, 0.3) for one in group["params"]}
    assert (found[id(module[name])], found[id(module["weight"])]) == (0.0, 0.3)


# --- optimizers ---


def test_an_optimizer_has_the_settings_of_the_recipe() -> None:
    config = OptimConfig(name="adamw", betas=(0.7, 0.8), momentum=0.4)
    assert {group["betas"] for group in build_optimizer(Mixed(), config, 8, CPU).param_groups} == {(0.7, 0.8)}
    for name in ("sgd", "lars"):
        optimizer = build_optimizer(Mixed(), config.model_copy(update={"name": name}), 8, CPU)
        assert {group["momentum"] for group in optimizer.param_groups} == {0.4}
    sgd = config.model_copy(update={"name": "sgd"})
    for sharded in (False, True):
        groups = build_optimizer(Mixed(), sgd, 8, CPU, sharded=sharded).param_groups
        assert {group["fused"] for group in groups} == {not sharded}


def test_an_overflow_in_the_first_step_leaves_no_garbage_in_the_momentum() -> None:
    """Uninitialized memory is NaN under deterministic algorithms."""
    parameter = nn.Parameter(torch.ones(64))
    optimizer: Any = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    start_momentum(optimizer)
    torch.use_deterministic_algorithms(True)
    try:
        for overflow, gradient in ((1.0, math.inf), (0.0, 1.0)):
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(overflow)
            parameter.grad = torch.full((64,), gradient)
            optimizer.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(parameter.detach(), torch.full((64,), 0.9)), "as the first step without an overflow"


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


@pytest.mark.parametrize("decay", [0.1, pytest.param(0.0, id="as MAE's probe")])
def test_lars_agrees_with_a_reference_written_by_hand(decay: float) -> None:
    """You et al., algorithm 1; without decay it is MAE's: weight matrices, and only they, move by
    0.001 * |weight| / (|gradient| + decay * |weight|) of their direction."""
    model = Mixed()
    optimizer = build_optimizer(model, OptimConfig(name="lars", momentum=0.9, weight_decay=decay), 8, CPU)
    weights = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    velocity = {name: np.zeros_like(value) for name, value in weights.items()}
    for step, lr in enumerate([0.1, 0.05, 0.2, 0.01, 0.1]):
        set_lr(optimizer.param_groups, lr)
        optimizer.zero_grad()
        model(torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)).backward()
        for name, parameter in model.named_parameters():
            direction = gradient = np.array(parameter.grad)
            if name == "head.weight":
                size = np.linalg.norm(weights[name])
                direction = (gradient + decay * weights[name]) * 0.001 * size
                direction /= np.linalg.norm(gradient) + decay * size
            velocity[name] = 0.9 * velocity[name] + direction
            weights[name] = weights[name] - lr * velocity[name]
        optimizer.step()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), weights[name], rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("convnext_atto", "stages.3.blocks.1"),
        ("resnet10t", "layer4.0"),
        ("vit_tiny_patch16_224", "blocks.11"),
        ("beit_base_patch16_224", "blocks.11"),  # with a norm after pooling
    ],
)
def test_the_last_block_is_one_layer_below_the_head(name: str, last: str) -> None:
    with torch.device("meta"):
        encoder = factory.build(EncoderConfig(name=name))
        objective = classification.Objective(encoder, classification.Config(head="linear", pooling="mean"), 5)
    scales = {id(one): group["lr_scale"] for group in parameter_groups(objective, 0.1, 0.5) for one in group["params"]}
    found = {name: scales[id(one)] for name, one in encoder.network.named_parameters()}
    assert {scale for name, scale in found.items() if name.startswith(f"{last}.")} == {0.5}
    assert {scale for name, scale in found.items() if name.startswith(("norm.", "fc_norm.", "head.norm."))} <= {1.0}


# --- the average of the weights ---


def test_the_average_agrees_with_one_by_hand_and_is_swapped_in_and_out() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    average, expected = WeightAverage(model, 0.5), model.weight.detach().numpy().copy()
    for step in range(12):
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[step + 1.0, (-2.0) ** step]]))
        last = model.weight.detach().numpy().copy()
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * last
        np.testing.assert_array_equal(model.weight.detach().numpy(), last)
        np.testing.assert_allclose(average.values["weight"].numpy(), expected, rtol=1e-5)
    assert average.values.keys() == {"weight"}
    with pytest.raises(KeyError), average.swapped_in():
        np.testing.assert_allclose(model.weight.detach().numpy(), expected, rtol=1e-5)
        raise KeyError
    np.testing.assert_array_equal(model.weight.detach().numpy(), last)
    average.apply()
    np.testing.assert_allclose(model.weight.detach().numpy(), expected, rtol=1e-5)
