"""The masked autoencoder against Hugging Face's, and what its encoder may see."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ssl_vit.interfaces import UserError
from ssl_vit.objectives.masked_autoencoder import Config, Objective
from ssl_vit.objectives.patches import constant_l2

DIGITS = {"image_size": 8, "channels": 1, "width": 32, "heads": 4, "position_std": 0.5}
Make = Callable[..., Any]


@pytest.fixture
def make_mae(make_objective: Make) -> Make:
    return partial(make_objective, "masked_autoencoder")


def hugging_face(objective: Objective) -> Any:
    """`ViTMAEForPreTraining` with the objective's weights. Its patches hold the channels last, ours first."""
    transformers = pytest.importorskip("transformers")
    encoder, vit = objective.encoder, objective.encoder.network
    blocks: list[Any] = list(objective.blocks)
    patch, channels, width = encoder.patch_size, encoder.channels, blocks[0].attn.qkv.in_features
    config = transformers.ViTMAEConfig(
        hidden_size=encoder.width,
        num_hidden_layers=len(vit.blocks),
        num_attention_heads=encoder.heads,
        intermediate_size=vit.blocks[0].mlp.fc1.out_features,
        image_size=encoder.image_size[0],
        patch_size=patch,
        num_channels=channels,
        layer_norm_eps=1e-6,
        decoder_hidden_size=width,
        decoder_num_hidden_layers=len(blocks),
        decoder_num_attention_heads=blocks[0].attn.num_heads,
        decoder_intermediate_size=4 * width,
        mask_ratio=objective.config.mask_ratio,
        norm_pix_loss=True,
    )

    def layer(block: Any, prefix: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        linears = [("attention.output.dense", block.attn.proj), ("intermediate.dense", block.mlp.fc1)]
        linears += [("output.dense", block.mlp.fc2)]
        linears += [("layernorm_before", block.norm1), ("layernorm_after", block.norm2)]
        for kind in ("weight", "bias"):
            found |= {f"{prefix}.{name}.{kind}": getattr(linear, kind) for name, linear in linears}
            parts = zip(("query", "key", "value"), getattr(block.attn.qkv, kind).chunk(3), strict=True)
            found |= {f"{prefix}.attention.attention.{part}.{kind}": value for part, value in parts}
        return found

    def channels_last(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (channels, patch * patch)).transpose(0, 1).flatten(0, 1)

    state = {
        "vit.embeddings.cls_token": vit.cls_token,
        "vit.embeddings.position_embeddings": vit.pos_embed,
        "vit.embeddings.patch_embeddings.projection.weight": vit.patch_embed.proj.weight,
        "vit.embeddings.patch_embeddings.projection.bias": vit.patch_embed.proj.bias,
        "vit.layernorm.weight": vit.norm.weight,
        "vit.layernorm.bias": vit.norm.bias,
        "decoder.mask_token": objective.mask_token[None, None],
        "decoder.decoder_pos_embed": torch.cat([torch.zeros(1, width), objective.positions])[None],
        "decoder.decoder_embed.weight": objective.entry.weight,
        "decoder.decoder_embed.bias": objective.entry.bias,
        "decoder.decoder_norm.weight": objective.norm.weight,
        "decoder.decoder_norm.bias": objective.norm.bias,
        "decoder.decoder_pred.weight": channels_last(objective.head.weight),
        "decoder.decoder_pred.bias": channels_last(objective.head.bias),
    }
    for number, block in enumerate(vit.blocks):
        state |= layer(block, f"vit.encoder.layer.{number}")
    for number, block in enumerate(blocks):
        state |= layer(block, f"decoder.decoder_layers.{number}")
    # The names of published checkpoints, which every version of transformers can load.
    model, report = transformers.ViTMAEForPreTraining.from_pretrained(
        None,
        config=config,
        state_dict={name: value.detach() for name, value in state.items()},
        output_loading_info=True,
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize(
    ("config", "encoder"),
    [
        ({}, {}),
        (
            {"decoder_width": 24, "decoder_depth": 3, "decoder_heads": 2},
            {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.1)},
        ),
        ({"mask_ratio": 0.5}, {"channels": 1, "positions": "sincos2d"}),
    ],
)
def test_it_is_hugging_faces(make_mae: Make, make_batch: Make, config: dict[str, Any], encoder: dict[str, Any]) -> None:
    """Decoder input, predictions, loss and gradients, with the same weights and the same mask."""
    objective = make_mae(encoder=encoder, **config)
    with torch.no_grad():  # nothing may hide behind a zero or a one
        for number, parameter in enumerate(objective.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            if parameter.requires_grad:
                parameter += 0.1 * noise
    other, images = hugging_face(objective), objective.encoder.channels
    batch = make_batch(6, channels=images, noise=objective.noise_per_sample())
    entered: dict[str, torch.Tensor] = {}
    objective.blocks[0].register_forward_pre_hook(lambda _, given: entered.update(ours=given[0]))
    other.decoder.decoder_layers[0].register_forward_pre_hook(lambda _, given: entered.update(theirs=given[0]))
    seen = torch.where(batch.flip[:, None, None, None], batch.images.flip(-1), batch.images)
    pixels = (seen / 255 - torch.tensor(objective.encoder.mean)[:, None, None]) / torch.tensor(objective.encoder.std)[
        :, None, None
    ]
    expected = other(pixel_values=pixels, noise=batch.noise)
    order = batch.noise.argsort(1)
    theirs = torch.cat([entered["theirs"][:, :1], _rows(entered["theirs"][:, 1:], order)], 1)
    result = objective(batch)
    torch.testing.assert_close(entered["ours"], theirs, rtol=0, atol=1e-5)
    found, masked = objective.predict(batch, seen)
    assert torch.equal(masked.sort(1).values, expected.mask.nonzero()[:, 1].reshape(len(masked), -1))
    logits = _rows(expected.logits, masked).unflatten(-1, (-1, images)).transpose(-1, -2).flatten(2)
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.loss, expected.loss, rtol=0, atol=1e-5)
    result.loss.backward()
    expected.loss.backward()
    own, proj = objective.encoder.network, other.vit.embeddings.patch_embeddings.projection
    torch.testing.assert_close(own.patch_embed.proj.weight.grad, proj.weight.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(objective.mask_token.grad, other.decoder.mask_token.grad[0, 0], rtol=0, atol=1e-5)


def _rows(tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))


def test_decoder_positions_are_maes_up_to_their_order(make_mae: Make) -> None:
    """MAE's columns are sin and cos of the column, then of the row; timm's sin of row and column, then cos of both."""
    objective = make_mae(encoder={"image_size": 32})
    frequencies = 10000.0 ** -(np.arange(8) / 8)  # width 32, a quarter for each of the four
    angles = [np.outer(place.ravel(), frequencies) for place in np.mgrid[:8, :8]]  # of the row, of the column
    expected = np.concatenate([np.sin(angles[0]), np.sin(angles[1]), np.cos(angles[0]), np.cos(angles[1])], axis=1)
    np.testing.assert_allclose(objective.positions.numpy(), expected, rtol=0, atol=1e-6)


def test_masked_pixels_do_not_reach_the_encoder(make_mae: Make, make_batch: Make) -> None:
    objective = make_mae().eval()
    batch = make_batch(3, noise=objective.noise_per_sample(), flip=torch.zeros(3, dtype=torch.bool))
    inputs: list[torch.Tensor] = []
    objective.encoder.network.blocks[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with torch.no_grad():
        before, masked = objective.predict(batch, batch.images)
        shade = torch.zeros(3, 16, dtype=torch.bool).scatter(1, masked, True).unflatten(1, (4, 4))
        hidden = shade.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
        after, _ = objective.predict(batch, torch.where(hidden, 255 - batch.images, batch.images))
        other, _ = objective.predict(batch, torch.where(hidden, batch.images, 255 - batch.images))
    assert torch.equal(before, after) and not torch.equal(before, other)
    assert [tuple(given.shape) for given in inputs] == [(3, 1 + 4, 16)] * 3, "the class token and a quarter of 16"


@pytest.mark.parametrize(
    "encoder", [{"name": "vit_medium_patch16_reg4_gap_256"}, {"class_token": False}, {"dropout": 0.1}]
)
def test_any_plain_vit_trains(make_mae: Make, make_batch: Make, encoder: dict[str, Any]) -> None:
    """Registers, no class token, a norm after pooling; every weight gets a gradient."""
    objective = make_mae(encoder={**encoder, "image_size": (8, 24)})
    batch = make_batch(4, size=24, noise=objective.noise_per_sample())
    batch.images = batch.images[:, :, :8]
    objective(batch).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in objective.parameters() if p.requires_grad)


@pytest.mark.parametrize("padding", [0, 2])
def test_the_constant_baseline_agrees_with_numpy(make_mae: Make, make_batch: Make, padding: int) -> None:
    objective = make_mae()
    valid = torch.tensor([True] * (6 - padding) + [False] * padding)
    batch = make_batch(6, noise=objective.noise_per_sample(), valid=valid, flip=torch.zeros(6, dtype=torch.bool))
    with torch.no_grad():
        result = objective(batch)
        outputs, masked = objective.predict(batch, batch.images)
    patches = batch.images.numpy().reshape(6, 3, 4, 4, 4, 4).transpose(0, 2, 4, 1, 3, 5).reshape(6, 16, 48) / 127.5 - 1
    picked = np.take_along_axis(patches, masked.numpy()[..., None], 1)[: 6 - padding]
    picked = (picked - picked.mean(-1, keepdims=True)) / np.sqrt(picked.var(-1, ddof=1, keepdims=True) + 1e-6)
    loss = np.mean((outputs.numpy()[: 6 - padding] - picked) ** 2)
    found = objective.summarize({name: m.double()[None] for name, m in result.metrics.items()})
    assert found.keys() == {"constant_loss"}
    np.testing.assert_allclose(result.loss.item(), loss, rtol=1e-5)
    np.testing.assert_allclose(found["constant_loss"].item(), picked.var(axis=(0, 1)).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("encoder", "config", "sizes"),
    [
        ({"name": "vit_base_patch16_224"}, {}, (512, 8, 16)),
        ({"name": "vit_large_patch16_224"}, {}, (512, 8, 16)),
        ({"name": "vit_small_patch16_224"}, {}, (192, 4, 6)),
        ({"name": "vit_tiny_patch16_224"}, {"decoder_width": 128}, (128, 4, 4)),
        ({"name": "vit_tiny_patch16_224", "width": 48, "heads": 4, "depth": 2}, {}, (32, 1, 1)),
    ],
)
def test_the_decoder_is_maes_and_smaller_for_small_encoders(
    encoder: dict[str, Any], config: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    from ssl_vit.models import EncoderConfig, factory

    with torch.device("meta"):
        objective = Objective(factory.build(EncoderConfig(**encoder)), Config(**config))
    blocks: list[Any] = list(objective.blocks)
    assert (objective.entry.out_features, len(blocks), blocks[0].attn.num_heads) == sizes
    assert 4 * objective.masked == 3 * objective.encoder.patches == 147 * 4


@pytest.mark.parametrize(
    ("encoder", "config", "facts"),
    [
        ({"name": "resnet18"}, {}, "masked_autoencoder.*resnet18"),
        ({"name": "vit_tiny_r_s16_p8_224", "image_size": 32}, {}, "hybrid 'vit_tiny_r_s16_p8_224'.*plain ViT"),
        ({"patch_size": 16}, {}, "at least 2 patches"),
        ({"patch_size": 1, "channels": 1}, {}, "patch_size"),
        ({}, {"decoder_width": 30}, "decoder_width=30"),
        ({}, {"decoder_width": 32, "decoder_heads": 3}, "decoder_width=32.*3 heads"),
    ],
)
def test_what_cannot_be_is_named(encoder: dict[str, Any], config: dict[str, Any], facts: str) -> None:
    from ssl_vit.models import EncoderConfig, factory

    sizes = {} if "name" in encoder else {"name": "vit_tiny_patch16_224", "image_size": 16, "patch_size": 4}
    with pytest.raises(UserError, match=facts):
        Objective(factory.build(EncoderConfig(**(sizes | encoder))), Config(**config))


def test_it_learns_real_digits(make_mae: Make, learned: Make) -> None:
    objective = make_mae(encoder=DIGITS | {"patch_size": 2})
    unseen = learned(objective, 60, 20)
    with torch.no_grad():
        output = objective(unseen)
    constant = objective.summarize({name: m.double()[None] for name, m in output.metrics.items()})["constant_loss"]
    assert output.loss.item() < 0.95 * constant.item()


def test_the_constant_baseline_of_patches_of_one_value() -> None:
    means = {"target_square": torch.tensor([1.0, 4.0]), "target_mean": torch.tensor([[0.0], [2.0]]).squeeze(1)}
    assert constant_l2(means)["constant_loss"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("ratio", "masked"), [(0.01, 1), (0.7, 11), (0.72, 12), (0.99, 15)])
def test_the_share_is_rounded_and_leaves_a_patch_on_both_sides(make_mae: Make, ratio: float, masked: int) -> None:
    objective = make_mae(mask_ratio=ratio)
    assert (objective.masked, objective.encoder.patches) == (masked, 16)


def test_the_decoder_starts_as_maes_does(make_mae: Make) -> None:
    """Xavier's uniform weights and no biases."""
    objective = make_mae(encoder={"width": 64, "heads": 4})
    linears = [one for one in objective.blocks.modules() if isinstance(one, torch.nn.Linear)]
    for linear in (objective.entry, *linears, objective.head):
        bound = (6 / (linear.in_features + linear.out_features)) ** 0.5
        assert 0.95 * bound < linear.weight.abs().max() <= bound and not linear.bias.any()
