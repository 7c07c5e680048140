"""What the encoder computes, against timm and against a second ViT written from the paper's equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn

from ssl_vit.interfaces import UserError
from ssl_vit.models import EncoderConfig
from ssl_vit.models.factory import build, state

Make = Callable[..., Any]

FREE = {"image_size": 28, "channels": 1, "patch_size": 7, "width": 16, "depth": 2, "heads": 2}
TIMM_FREE = {"img_size": 28, "in_chans": 1, "patch_size": 7, "embed_dim": 16, "depth": 2, "num_heads": 2}
SMALL = {"width": 16, "depth": 2, "heads": 2}
TIMM_SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 2}
# name, our keys, timm's arguments: plain, free, rectangular, registers, norm after pooling, no class token, hybrids.
MODELS: list[Any] = [
    ("vit_tiny_patch16_224", {"image_size": 224}, {}),
    ("vit_base_patch16_224", FREE, TIMM_FREE),
    ("vit_small_patch14_reg4_dinov2", {**SMALL, "image_size": 56}, {**TIMM_SMALL, "img_size": 56}),
    ("test_vit2", {"image_size": 64}, {"img_size": 64, "dynamic_img_size": False}),
    (
        "vit_tiny_patch16_224",
        {**SMALL, "image_size": 64, "class_token": False},
        {**TIMM_SMALL, "img_size": 64, "class_token": False, "global_pool": "avg", "fc_norm": False},
    ),
    (
        "vit_base_patch16_siglip_gap_224",
        {**SMALL, "image_size": 64, "class_token": True},
        {**TIMM_SMALL, "img_size": 64, "class_token": True, "global_pool": "token"},
    ),
    (
        "vit_tiny_r_s16_p8_224",
        {**SMALL, "image_size": (64, 96), "patch_size": 4},
        {**TIMM_SMALL, "img_size": (64, 96), "patch_size": 4},
    ),
]


def named(model: tuple[str, dict[str, Any], dict[str, Any]]) -> str:
    return "-".join([model[0], *(key for key in model[1] if key not in SMALL)])


@pytest.mark.parametrize(("name", "ours", "timms"), MODELS, ids=[named(model) for model in MODELS])
def test_outputs_are_timms_own_bit_for_bit(
    shaken: Make, pixels: Make, name: str, ours: dict[str, Any], timms: dict[str, Any]
) -> None:
    encoder = shaken(build(EncoderConfig(name=name, mean=0.4, std=0.3, **ours)))
    reference = timm.create_model(name, pretrained=False, num_classes=0, **timms).eval()
    reference.load_state_dict(encoder.network.state_dict())
    images = pixels(encoder)
    normalized = images.float() * (1 / (255 * 0.3)) - 0.4 / 0.3
    torch.testing.assert_close(normalized, (images / 255 - 0.4) / 0.3)
    with torch.no_grad():
        outputs = encoder(images)
        assert torch.equal(outputs, reference.forward_features(normalized))
        representation = encoder.pool(outputs, "token" if reference.global_pool == "token" else "mean")
        assert torch.equal(representation, reference.forward_head(outputs, pre_logits=True))
        assert torch.equal(representation, reference(normalized))
    assert encoder.patches == outputs.shape[1] - encoder.prefix_tokens
    height, width = encoder.image_size
    assert encoder.grid == (height // encoder.patch_size, width // encoder.patch_size)  # color targets' patches


def paper_vit(weights: dict[str, torch.Tensor], tokens_BND: torch.Tensor, heads: int) -> torch.Tensor:
    """Equations 1 to 4 of the paper in plain tensor algebra: patch embeddings -> every normalized output token."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        variance = (centered**2).mean(-1, keepdim=True)
        return centered / (variance + 1e-6).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    images, _, width = tokens_BND.shape
    size = width // heads
    z = torch.cat([weights["cls_token"].expand(images, 1, width), tokens_BND], dim=1) + weights["pos_embed"]  # eq. 1
    layer = 0
    while f"blocks.{layer}.norm1.weight" in weights:
        block = f"blocks.{layer}"
        queries, keys, values = linear(norm(z, f"{block}.norm1"), f"{block}.attn.qkv").split(width, dim=-1)
        mixed = []
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            scores = queries[..., own] @ keys[..., own].mT / math.sqrt(size)
            attention = scores.exp() / scores.exp().sum(-1, keepdim=True)
            mixed.append(attention @ values[..., own])
        z = z + linear(torch.cat(mixed, -1), f"{block}.attn.proj")  # eq. 2
        hidden = linear(norm(z, f"{block}.norm2"), f"{block}.mlp.fc1")
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        z = z + linear(hidden, f"{block}.mlp.fc2")  # eq. 3
        layer += 1
    assert layer > 0
    return norm(z, "norm")  # eq. 4


@pytest.mark.parametrize(
    ("channels", "depth", "heads", "mlp_ratio", "size"),
    [(3, 1, 4, 1.5, (8, 20)), (4, 3, 1, 2.0, 16)],
)
def test_the_encoder_is_the_papers(
    make_encoder: Make, shaken: Make, pixels: Make, channels: int, depth: int, heads: int, mlp_ratio: float, size: Any
) -> None:
    sizes = {"channels": channels, "depth": depth, "heads": heads, "mlp_ratio": mlp_ratio, "image_size": size}
    encoder = shaken(make_encoder(mean=0.2, std=0.25, **sizes))
    weights, images = state(encoder), pixels(encoder, 3)
    normalized = (images / 255 - 0.2) / 0.25
    with torch.no_grad():
        rows = []
        for top in range(0, images.shape[2], 4):
            for left in range(0, images.shape[3], 4):
                rows.append(normalized[:, :, top : top + 4, left : left + 4].flatten(1))
        kernel = weights["patch_embed.proj.weight"].flatten(1)
        tokens = torch.stack(rows, 1) @ kernel.T + weights["patch_embed.proj.bias"]
        torch.testing.assert_close(encoder.embed(images), tokens, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(encoder(images), paper_vit(weights, tokens, heads), atol=1e-5, rtol=1e-5)
        encoder.double()
        found, expected = encoder.encode(tokens.double()), paper_vit(state(encoder), tokens.double(), heads)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_pooling(make_encoder: Make) -> None:
    encoder = make_encoder()
    outputs = torch.randn(3, 17, 16)
    assert torch.equal(encoder.pool(outputs, "token"), outputs[:, 0])
    torch.testing.assert_close(encoder.pool(outputs, "mean"), outputs[:, 1:].sum(1) / 16)
    both = encoder.pool(outputs, "both")
    assert torch.equal(both, torch.cat([encoder.pool(outputs, "token"), encoder.pool(outputs, "mean")], 1))
    side_by_side = encoder.pool(outputs, "patches")
    assert side_by_side.shape == (3, 256)
    assert torch.equal(side_by_side[:, 32:48], outputs[:, 3])


def test_pooling_of_all_patches_applies_the_norm_after_pooling_to_each(make_encoder: Make) -> None:
    encoder = make_encoder(name="test_vit2", depth=1)
    outputs = torch.randn(3, encoder.prefix_tokens + encoder.patches, encoder.width)
    assert isinstance(encoder.network.fc_norm, nn.LayerNorm)
    expected = encoder.network.fc_norm(outputs[:, encoder.prefix_tokens :]).flatten(1)
    torch.testing.assert_close(encoder.pool(outputs, "patches"), expected)


@pytest.mark.parametrize(("init", "least", "most"), [("jax", 0.2, 0.28), ("timm", 0.0, 0.12)])
def test_the_initialization_is_the_one_asked_for(make_encoder: Make, init: str, least: float, most: float) -> None:
    """Xavier-uniform numbers of a 16x64 matrix lie within sqrt(6 / 80); timm's have a standard deviation of 0.02."""
    weight = make_encoder(init=init).network.blocks[0].mlp.fc1.weight
    assert least < weight.abs().max() < most


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2", "test_vit2"])
def test_every_representation_after_every_block_is_timms_under_the_last_norm(
    make_encoder: Make, shaken: Make, pixels: Make, name: str
) -> None:
    encoder = shaken(make_encoder(name=name, depth=3)).eval()
    images, run = pixels(encoder), []
    for block in encoder.network.blocks:
        block.register_forward_hook(lambda *_: run.append(1))
    with torch.no_grad():
        reached = encoder.network.forward_intermediates(
            encoder.normalized(images), norm=True, output_fmt="NLC", intermediates_only=True, return_prefix_tokens=True
        )
        for pooling in ("token", "mean", "both", "patches") if encoder.has_class_token else ("mean", "patches"):
            for number, (patches, prefix) in enumerate(reached, 1):
                expected = encoder.pool(torch.cat([prefix, patches], dim=1), pooling)
                run.clear()
                found = encoder.represent(images, pooling, number)
                assert len(run) == number, "no block is computed that is not read"
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(encoder.represent(images, pooling), found, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match=r"block=4: .* has blocks 1 to 3"):
        encoder.represent(images, "mean", 4)


@pytest.mark.parametrize(
    "overrides", [{"name": "vit_base_patch16_siglip_gap_224"}, {"class_token": False}, {"name": "test_vit2"}]
)
def test_no_patch_or_register_is_passed_off_as_the_class_token(make_encoder: Make, overrides: dict[str, Any]) -> None:
    encoder = make_encoder(**overrides)
    assert not encoder.has_class_token
    for pooling in ("token", "both"):
        with pytest.raises(UserError, match="use mean"):
            encoder.pool(torch.randn(3, 17, 16), pooling)


@pytest.mark.parametrize("positions", ["none", "relative", "learned"])
@pytest.mark.parametrize("class_token", [True, False])
def test_the_sum_of_the_blocks_stays_in_float32(make_encoder: Make, positions: str, class_token: bool) -> None:
    encoder = make_encoder(positions=positions, class_token=class_token)
    sums = list[torch.dtype]()
    for block in encoder.network.blocks:
        block.register_forward_hook(lambda _, inputs, outputs: sums.append(outputs.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        encoder(torch.zeros(2, encoder.channels, *encoder.image_size, dtype=torch.uint8))
    assert sums and set(sums) == {torch.float32}


# --- dropout (paper, appendix B.1) ---


def test_dropout_follows_the_positions_and_every_dense_layer_but_the_qkv_projections(
    make_encoder: Make, pixels: Make
) -> None:
    encoder = make_encoder(dropout=0.25)
    leaves = [
        (n, m) for n, m in encoder.network.named_modules() if not list(m.children()) and type(m) is not nn.Identity
    ]
    order: list[str] = []
    for name, module in leaves:
        if not isinstance(module, nn.Dropout) or module.p > 0:
            module.register_forward_hook(lambda *_, name=name: order.append(name))
        if isinstance(module, nn.Dropout) and module.p > 0:
            assert module.p == 0.25
    positioned: list[torch.Tensor] = []
    encoder.network.pos_drop.register_forward_pre_hook(lambda _, inputs: positioned.append(inputs[0]))
    images = pixels(encoder)
    encoder.train()(images)
    block = ["norm1", "attn.qkv", "attn.proj", "attn.proj_drop"]
    block += ["norm2", "mlp.fc1", "mlp.act", "mlp.drop1", "mlp.fc2", "mlp.drop2"]
    blocks = [f"blocks.{number}.{name}" for number in range(2) for name in block]
    assert order == ["patch_embed.proj", "pos_drop", *blocks, "norm"]
    vit = encoder.network
    summed = torch.cat([vit.cls_token.expand(2, -1, -1), encoder.embed(images)], 1) + vit.pos_embed
    torch.testing.assert_close(positioned[0], summed)
    assert vit.blocks[0].attn.attn_drop.p == 0


# --- positions ---


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit3_small_patch16_224", "vit_small_patch14_reg4_dinov2"])
def test_fixed_positions_are_sines_and_cosines_of_row_and_column(make_encoder: Make, name: str) -> None:
    encoder = make_encoder(name=name, positions="sincos2d", image_size=(12, 20), width=24)
    found = encoder.network.pos_embed.detach().numpy()[0]
    prefix = len(found) - 15
    assert prefix == (1 if name == "vit_tiny_patch16_224" else 0)
    frequencies = 1 / 10000 ** (np.arange(6) / 6)
    for row in range(3):
        for column in range(5):
            angles = np.concatenate([row * frequencies, column * frequencies])
            expected = np.concatenate([np.sin(angles), np.cos(angles)])
            np.testing.assert_allclose(found[prefix + row * 5 + column], expected, atol=1e-6)
    assert (found[:prefix] == 0).all() and not encoder.network.pos_embed.requires_grad
    with pytest.raises(UserError, match="width that 4 divides"):
        make_encoder(positions="sincos2d", width=18)
