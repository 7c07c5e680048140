"""The counted cost of a training step, against counts worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ssl_vit.interfaces import Batch, StepOutput, UserError
from ssl_vit.models.timm_encoder import TimmEncoder
from ssl_vit.objectives import classification, lejepa, masked_autoencoder, masked_patch
from ssl_vit.training.flops import training_flops, unused_parameters


def test_a_vit_costs_what_its_matrices_say(make_encoder: Callable[..., Any]) -> None:
    width, depth, patches, classes = 16, 2, 16, 5
    objective = classification.Objective(make_encoder(), classification.Config(head="linear", pooling="mean"), classes)
    tokens = patches + 1
    block = tokens * (4 * width * width + 2 * width * 4 * width)  # qkv, projection, MLP
    attention = 2 * tokens * tokens * width
    patch = patches * 3 * 4 * 4 * width
    forward = 2 * (patch + depth * (block + attention) + width * classes)
    backward = 2 * forward - 2 * patch  # the images need no gradient
    assert training_flops(objective) == forward + backward


def test_counting_changes_nothing(make_encoder: Callable[..., Any]) -> None:
    objective = masked_patch.Objective(make_encoder(dropout=0.5), masked_patch.Config()).eval()
    weights = {name: value.clone() for name, value in objective.state_dict().items()}
    state = torch.get_rng_state()
    assert training_flops(objective) > 0
    assert torch.equal(state, torch.get_rng_state())
    assert not objective.training
    assert all(torch.equal(value, weights[name]) for name, value in objective.state_dict().items())
    assert all(parameter.grad is None for parameter in objective.parameters())


def test_what_changes_the_count_is_counted_again(make_encoder: Callable[..., Any]) -> None:
    def count(head: str = "linear", frozen: bool = False, **encoder: Any) -> float:
        objective = classification.Objective(
            make_encoder(**encoder), classification.Config(head=head, pooling="mean"), 5
        )
        objective.encoder.requires_grad_(not frozen)
        return training_flops(objective)

    assert count() == count()
    counts = [count(), count("mlp"), count(frozen=True), count(image_size=32), count(class_token=False)]
    assert len(set(counts)) == len(counts)


def test_every_view_is_counted(make_encoder: Callable[..., Any]) -> None:
    objective = lejepa.Objective(make_encoder(), lejepa.Config(projector_width=32))
    two, four = (training_flops(objective, views) for views in (2, 4))
    assert four == pytest.approx(2 * two, rel=0.01)


def test_settings_that_change_no_module_are_counted_again(make_encoder: Callable[..., Any]) -> None:
    encoder = make_encoder()
    configs = [masked_autoencoder.Config(mask_ratio=share) for share in (0.25, 0.75)]
    few, many = (training_flops(masked_autoencoder.Objective(encoder, config)) for config in configs)
    assert few != many


def test_images_of_another_size_are_counted_again() -> None:
    config = classification.Config(head="linear", pooling="mean")
    encoders = [TimmEncoder("test_convnext", {}, 0.5, 0.5, size) for size in (64, 128)]
    small, large = (training_flops(classification.Objective(encoder, config, 5)) for encoder in encoders)
    assert large == pytest.approx(4 * small, rel=0.01)


def test_parameters_without_a_gradient_are_found(make_encoder: Callable[..., Any]) -> None:
    def unused(encoder: Any, pooling: str) -> list[str]:
        config = classification.Config(head="linear", pooling=pooling)
        return unused_parameters(classification.Objective(encoder, config, 5))

    convnext = TimmEncoder("test_convnext", {}, 0.5, 0.5, 64)
    assert unused(convnext, "mean") == []
    assert unused(convnext, "patches") == [f"encoder.network.head.norm.{name}" for name in ("weight", "bias")]
    assert all(unused(make_encoder(), pooling) == [] for pooling in ("token", "mean", "patches"))
    assert unused(make_encoder().requires_grad_(False), "mean") == []


def test_a_class_that_is_defined_again_is_counted_again(make_encoder: Callable[..., Any]) -> None:
    """As in a notebook."""

    def unused(reads_bias: bool) -> list[str]:
        class Own(classification.Objective):
            def forward(self, batch: Batch) -> StepOutput:
                output = super().forward(batch)
                return output if reads_bias else StepOutput(output.loss.detach() + self.encoder(batch.images).sum())

        return unused_parameters(Own(make_encoder(), classification.Config(head="linear", pooling="mean"), 5))

    assert unused(False) == ["head.weight", "head.bias"] and unused(True) == []


def test_metrics_that_cannot_be_logged_are_refused_before_the_training(make_encoder: Callable[..., Any]) -> None:
    class Own(classification.Objective):
        def forward(self, batch: Batch) -> StepOutput:
            output = super().forward(batch)
            return StepOutput(output.loss, {"loss": output.loss.detach()})

    with pytest.raises(UserError, match="must not be named loss"):
        training_flops(Own(make_encoder(), classification.Config(head="linear", pooling="mean"), 5))


@pytest.mark.parametrize(
    "values",
    [
        lambda loss: loss[loss > 0],
        lambda loss: loss * loss.mean().item(),
        lambda loss: loss * torch.bincount(loss.detach().long()).sum(),
    ],
)
def test_an_objective_that_needs_values_is_named(
    make_encoder: Callable[..., Any], values: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    class Own(classification.Objective):
        def forward(self, batch: Batch) -> StepOutput:
            output = super().forward(batch)
            return StepOutput(values(output.loss.reshape(1)).sum(), output.metrics)

    objective = Own(make_encoder(), classification.Config(head="linear", pooling="mean"), 5)
    with pytest.raises(UserError, match=r"test_flops: its step needs the values of tensors"):
        training_flops(objective)
