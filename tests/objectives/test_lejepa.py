"""LeJEPA: SIGReg against numerical integration, the gradient over processes, collapse, and what a step depends on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate

from ssl_vit import stage
from ssl_vit.interfaces import UserError
from ssl_vit.objectives.lejepa import BatchNorm, Config, Objective, participation_ratio, sigreg
from ssl_vit.recipe import load_recipe

GAUSSIAN = 2 * integrate.quad(lambda t: (1 - math.exp(-t * t)) * math.exp(-t * t / 2), 0, 3)[0]


@pytest.fixture
def objective(make_encoder: Callable[..., Any]) -> Objective:
    encoder = make_encoder()
    torch.manual_seed(5)
    return Objective(encoder, Config(projector_width=32, projection=8, directions=64))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit(dimensions: int, count: int) -> torch.Tensor:
    return torch.nn.functional.normalize(drawn(dimensions, count, seed=1), dim=0)


def integrated(values_B: np.ndarray) -> float:
    """The statistic of one direction by adaptive integration over -3..3."""

    def distance(t: float) -> float:
        difference = np.exp(1j * t * values_B).mean() - math.exp(-t * t / 2)
        return float(abs(difference) ** 2 * math.exp(-t * t / 2))

    return len(values_B) * float(integrate.quad(distance, -3, 3, limit=200)[0])


def test_sigreg_is_the_integral_over_each_direction_and_view() -> None:
    projections, directions = drawn(50, 3, 6) * 1.7 + 0.3, unit(6, 10)
    values = (projections.double() @ directions.double()).numpy()
    expected = np.mean([integrated(values[:, view, k]) for view in range(3) for k in range(10)])
    assert float(sigreg(projections, directions)) == pytest.approx(expected, rel=2e-3)
    assert float(sigreg(projections, directions, points=201)) == pytest.approx(expected, rel=2e-5)


def test_sigreg_of_gaussian_projections_is_its_expected_value() -> None:
    """The mean over 400 independent views."""
    found = float(sigreg(drawn(64, 400, 4), unit(4, 16)))
    assert found == pytest.approx(GAUSSIAN, rel=0.1)


@pytest.mark.parametrize("spread", [1.0, 1e-2])
def test_batch_norm_is_torchs(spread: float) -> None:
    vectors = (drawn(10, 6) * 3 + 1) * spread
    own, torchs = BatchNorm(6), torch.nn.BatchNorm1d(6)
    with torch.no_grad():
        for parameter in (own.weight, torchs.weight):
            parameter.copy_(drawn(6, seed=2))
    inputs = [vectors.clone().requires_grad_() for _ in range(2)]
    outputs = [norm(given) for norm, given in zip((own, torchs), inputs, strict=True)]
    torch.testing.assert_close(*outputs)
    rounded = (vectors + 100).bfloat16()
    torch.testing.assert_close(own(rounded), own(rounded.float()))
    for output in outputs:
        (output * drawn(10, 6, seed=3)).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dimensions", [1, 3, 8])
def test_the_participation_ratio_counts_dimensions(dimensions: int) -> None:
    vectors = drawn(4000, dimensions) @ torch.linalg.qr(drawn(8, 8, seed=1)).Q[:dimensions] + 5
    assert float(participation_ratio(vectors)) == pytest.approx(dimensions, rel=0.02)
    assert float(participation_ratio(vectors * 1e-2)) == pytest.approx(dimensions, rel=0.02), "whatever their size"
    assert participation_ratio(vectors.bfloat16()).dtype == torch.float32
    assert float(participation_ratio(torch.full((32, 8), 1.5))) == 0, "a collapsed batch"


@pytest.mark.parametrize("config", [{}, {"pooling": "mean", "points": 5, "sigreg_weight": 0.3}])
def test_the_loss_is_the_weighted_sum_of_invariance_and_sigreg(
    make_encoder: Callable[..., Any], make_batch: Any, config: dict[str, Any]
) -> None:
    encoder = make_encoder(class_token=not config)  # the mean needs none
    objective = Objective(encoder, Config(projector_width=32, projection=8, directions=64, **config))
    batch = make_batch(24, views=3)
    output = objective(batch)
    kinds = [type(module) for module in objective.projector]
    hidden = [torch.nn.Linear, BatchNorm, torch.nn.ReLU]
    assert kinds == [*hidden, *hidden, torch.nn.Linear]
    pooling: Any
    pooling, points, weight = config.values() if config else ("token", 17, 0.02)
    with torch.no_grad():
        images = torch.where(batch.flip[:, None, None, None], batch.images.flip(-1), batch.images)
        features = objective.encoder.represent(images, pooling)
        projections = objective.projector(features).reshape(8, 3, 8)
    centers = projections.mean(1, keepdim=True)
    invariance = ((projections - centers) ** 2).mean()
    regularization = sigreg(projections, objective.directions(batch), points)
    torch.testing.assert_close(output.metrics["invariance"], invariance)
    torch.testing.assert_close(output.metrics["sigreg"], regularization)
    torch.testing.assert_close(output.loss.detach(), (1 - weight) * invariance + weight * regularization)
    torch.testing.assert_close(output.metrics["feature_rank"], participation_ratio(features))
    torch.testing.assert_close(output.metrics["projection_rank"], participation_ratio(projections.flatten(0, 1)))
    assert 1 < output.metrics["feature_rank"] <= 16 and 1 < output.metrics["projection_rank"] <= 8


def test_directions_are_unit_vectors_of_the_seed_and_the_step(
    objective: Objective, make_encoder: Any, make_batch: Any
) -> None:
    first, second = (objective.directions(make_batch(2, step=step)) for step in (0, 1))
    torch.testing.assert_close(first.norm(dim=0), torch.ones(64))
    assert not torch.equal(first, second)
    torch.rand(5)
    assert torch.equal(first, objective.directions(make_batch(2, step=0)))
    encoder = make_encoder()
    for seed in (6, 5 + 2**40):
        torch.manual_seed(seed)
        other = Objective(encoder, objective.config)
        assert not torch.equal(first, other.directions(make_batch(2, step=0)))


def test_any_seed_of_torch_will_do(make_encoder: Callable[..., Any], make_batch: Any) -> None:
    """`torch.seed()`, which others may have called, sets one of 64 bits."""
    encoder = make_encoder()
    with torch.random.fork_rng():
        torch.manual_seed(2**63 + 5)
        objective = Objective(encoder, Config(projector_width=32, projection=8, directions=64))
    assert objective(make_batch(8, views=2)).loss.isfinite()


def test_every_parameter_learns(objective: Objective, make_batch: Any) -> None:
    objective(make_batch(16, views=2)).loss.backward()
    # A batch norm takes away what the bias before it adds, and softmax the bias of attention's keys.
    invisible = ("projector.0.bias", "projector.3.bias")
    silent = [n for n, p in objective.named_parameters() if (p.grad is None or not p.grad.any()) and n not in invisible]
    assert not silent


def test_bf16_leaves_the_loss_in_float32(objective: Objective, make_batch: Any) -> None:
    batch = make_batch(16, views=2)
    exact = objective(batch).loss.detach()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = objective(batch).loss.detach()
    assert rounded.dtype == torch.float32
    assert float(rounded) == pytest.approx(float(exact), rel=0.02)


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("data.views=1", r"data\.views=1: lejepa needs at least 2"),
        ("training.accumulate=2", r"training\.accumulate.*lejepa"),
        ("training.auto_batch=true", r"training\.auto_batch.*lejepa"),
        ("objective.pooling=patches", r"objective\.pooling"),
        ("data.augment.hue=0.6", r"data\.augment\.hue"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(key: str, facts: str) -> None:
    with pytest.raises(UserError, match=facts):
        recipe = load_recipe("digits_lejepa", [key])
        stage.build_objective(recipe, stage.build_encoder(recipe.encoder, None), None)
