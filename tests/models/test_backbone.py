from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from torch import nn

from ssl_vit.interfaces import UserError
from ssl_vit.models import BackboneConfig
from ssl_vit.models.backbone import CONFIG, WEIGHTS, Backbone, build, fresh, initialise, load, load_state, state
from ssl_vit.training.checkpoint import write_backbone

Make = Callable[..., Any]

FREE = {"image_size": 28, "channels": 1, "patch_size": 7, "width": 16, "depth": 2, "heads": 2}
# Position embeddings without an entry for the class token, with registers, and no class token at all.
OTHER_POSITIONS = ["deit3_small_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_siglip_gap_224"]


def pixels(backbone: Backbone, images: int = 2) -> torch.Tensor:
    shape = (images, backbone.channels, backbone.image_size, backbone.image_size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def shaken(backbone: Backbone) -> Backbone:
    """Weights away from their initial values, so that biases, norms and tokens take part; evaluation mode."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return backbone.eval()


# --- what the encoder computes ---


@pytest.mark.parametrize(
    ("name", "ours", "timms"),
    [
        ("vit_tiny_patch16_224", {"image_size": 224}, {}),
        (
            "vit_base_patch16_224",
            FREE,
            {"img_size": 28, "in_chans": 1, "patch_size": 7, "embed_dim": 16, "depth": 2, "num_heads": 2},
        ),
    ],
)
def test_outputs_are_timms_own_bit_for_bit(name: str, ours: dict[str, Any], timms: dict[str, Any]) -> None:
    backbone = shaken(build(BackboneConfig(name=name, mean=0.4, std=0.3, **ours)))
    reference = timm.create_model(name, pretrained=False, num_classes=0, **timms).eval()
    reference.load_state_dict(backbone.vit.state_dict())
    images = pixels(backbone)
    normalised = images.float() * (1 / (255 * 0.3)) - 0.4 / 0.3
    torch.testing.assert_close(normalised, (images / 255 - 0.4) / 0.3)
    with torch.no_grad():
        assert torch.equal(backbone(images), reference.forward_features(normalised))


def paper_vit(weights: dict[str, torch.Tensor], tokens_BND: torch.Tensor, heads: int) -> torch.Tensor:
    """Equations 1 to 4 of the paper in plain tensor algebra: patch embeddings -> every normalised output token."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred**2).mean(-1, keepdim=True)
        return centred / (variance + 1e-6).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]

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


@pytest.mark.parametrize(("channels", "depth", "heads", "mlp_ratio"), [(1, 2, 2, 4.0), (3, 1, 4, 1.5), (4, 3, 1, 2.0)])
def test_the_encoder_is_the_papers(
    make_backbone: Make, channels: int, depth: int, heads: int, mlp_ratio: float
) -> None:
    backbone = shaken(
        make_backbone(channels=channels, depth=depth, heads=heads, mlp_ratio=mlp_ratio, mean=0.2, std=0.25)
    )
    weights, images = state(backbone), pixels(backbone, 3)
    normalised = (images / 255 - 0.2) / 0.25
    with torch.no_grad():
        rows = []
        for top in range(0, 16, 4):
            for left in range(0, 16, 4):
                rows.append(normalised[:, :, top : top + 4, left : left + 4].flatten(1))
        kernel = weights["patch_embed.proj.weight"].flatten(1)
        tokens = torch.stack(rows, 1) @ kernel.T + weights["patch_embed.proj.bias"]
        torch.testing.assert_close(backbone.embed(images), tokens, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(backbone(images), paper_vit(weights, tokens, heads), atol=1e-5, rtol=1e-5)
        backbone.double()
        found, expected = backbone.encode(tokens.double()), paper_vit(state(backbone), tokens.double(), heads)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_keeping_patches_is_gathering_from_the_whole_output(make_backbone: Make) -> None:
    backbone = shaken(make_backbone())
    keep = torch.tensor([[3, 0, 15], [7, 7, 1]])
    with torch.no_grad():
        tokens = backbone.embed(pixels(backbone))
        whole, kept = backbone.encode(tokens), backbone.encode(tokens, keep_BK=keep)
    assert whole.shape == (2, 17, 16)
    expected = torch.stack([torch.stack([whole[image, 1 + patch] for patch in keep[image]]) for image in range(2)])
    torch.testing.assert_close(kept, expected, atol=1e-6, rtol=1e-6)


def test_pooling(make_backbone: Make) -> None:
    backbone = make_backbone()
    outputs = torch.randn(3, 17, 16)
    assert torch.equal(backbone.pool(outputs, "token"), outputs[:, 0])
    torch.testing.assert_close(backbone.pool(outputs, "mean"), outputs[:, 1:].sum(1) / 16)
    both = backbone.pool(outputs, "both")
    assert torch.equal(both, torch.cat([backbone.pool(outputs, "token"), backbone.pool(outputs, "mean")], 1))
    side_by_side = backbone.pool(outputs, "patches")
    assert side_by_side.shape == (3, 256)
    assert torch.equal(side_by_side[:, 32:48], outputs[:, 3])


def test_no_patch_is_passed_off_as_the_class_token(make_backbone: Make) -> None:
    with pytest.raises(UserError):
        backbone = make_backbone(name="vit_base_patch16_siglip_gap_224")
        assert backbone.vit.num_prefix_tokens == 0
        backbone.pool(torch.randn(3, 16, 16), "token")


def test_dropout_and_normalisation_follow_the_configuration(make_backbone: Make) -> None:
    backbone = make_backbone(dropout=0.25, drop_path=0.5)
    rates = {name: module.p for name, module in backbone.named_modules() if isinstance(module, nn.Dropout)}
    assert {rate for name, rate in rates.items() if "attn_drop" not in name and "head" not in name} == {0.25}
    assert {"vit.pos_drop", "vit.blocks.0.attn.proj_drop", "vit.blocks.1.mlp.drop1"} <= rates.keys()
    assert backbone.vit.blocks[1].drop_path1.drop_prob == 0.5


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_tiny_r_s16_p8_224", "vit_base_r50_s16_224"])
def test_the_patch_size_is_in_pixels_of_the_image(name: str) -> None:
    """Colour targets cut the image by `patch_size`: they must make exactly the patches that the encoder sees."""
    with torch.device("meta"):
        backbone = build(BackboneConfig(name=name, image_size=64))
    assert (backbone.image_size // backbone.patch_size) ** 2 == backbone.patches


# --- sizes ---


def paper_parameters(image: int, channels: int, patch: int, width: int, layers: int, mlp: int) -> int:
    """Weights and biases of equations 1 to 4, counted by hand."""
    embedding = patch * patch * channels * width + width
    attention = 3 * (width * width + width) + width * width + width
    perceptron = width * mlp + mlp + mlp * width + width
    positions = ((image // patch) ** 2 + 1) * width
    return embedding + width + positions + layers * (attention + perceptron + 4 * width) + 2 * width


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("config", "sizes", "millions"),
    [
        ({"name": "vit_base_patch16_224"}, (224, 3, 16, 768, 12, 3072), 85.8),
        ({"name": "vit_base_patch32_224"}, (224, 3, 32, 768, 12, 3072), 87.5),
        ({"name": "vit_large_patch16_224"}, (224, 3, 16, 1024, 24, 4096), 303.3),
        ({"name": "vit_huge_patch14_224"}, (224, 3, 14, 1280, 32, 5120), 630.8),
        ({"name": "vit_base_patch16_224", **FREE}, (28, 1, 7, 16, 2, 64), 0.0),
        ({**FREE, "mlp_ratio": 2.0, "channels": 4}, (28, 4, 7, 16, 2, 32), 0.0),
    ],
)
def test_parameter_counts(config: dict[str, Any], sizes: tuple[int, ...], millions: float) -> None:
    with torch.device("meta"):
        backbone = build(BackboneConfig(**config))
    assert parameters(backbone) == paper_parameters(*sizes)
    assert round(parameters(backbone) / 1e6, 1) == millions


def test_vit_b_with_an_imagenet_head_has_86_million_parameters_to_the_last() -> None:
    with torch.device("meta"):
        backbone = build(BackboneConfig())
    assert parameters(backbone) + 768 * 1000 + 1000 == 86_567_656  # as published with the weights in timm


def test_the_small_grey_vit_has_7850_parameters() -> None:
    backbone = build(BackboneConfig(**FREE))
    whole = parameters(backbone) + parameters(nn.Linear(backbone.width, 10))
    assert whole == 7850
    assert whole - backbone.vit.cls_token.numel() - backbone.vit.pos_embed.numel() == 7562


def test_properties(make_backbone: Make) -> None:
    backbone = make_backbone(image_size=28, channels=1, patch_size=7)
    found = (backbone.width, backbone.patch_size, backbone.image_size, backbone.patches, backbone.channels)
    assert found == (16, 7, 28, 16, 1)


@pytest.mark.parametrize("deviation", [0.02, 0.3])
def test_positions_start_with_the_deviation_asked_for(make_backbone: Make, deviation: float) -> None:
    positions = make_backbone(image_size=64, width=64, position_std=deviation).vit.pos_embed
    assert positions.std().item() == pytest.approx(deviation, rel=0.05)


# --- errors ---


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "vit_bse_patch16_224"}, "did you mean .*vit_base_patch16_224"),
        ({"name": "vit_bse_patch16_224", "patch_size": 16}, "did you mean .*vit_base_patch16_224"),
        ({"name": "qqqq"}, "no timm model"),
        ({"name": "resnet18"}, "not a VisionTransformer"),
        ({"name": "resnet18", "patch_size": 4}, "not a VisionTransformer"),
        ({"name": "swin_tiny_patch4_window7_224", "patch_size": 4}, "not a VisionTransformer"),
        ({"name": "eva02_tiny_patch14_224"}, "not a VisionTransformer"),
        ({"name": "eva02_tiny_patch14_224", "patch_size": 14}, "not a VisionTransformer"),
        ({"image_size": 225}, r"backbone\.image_size=225 .* use 224 or 240"),
        ({"image_size": 10, "patch_size": 16}, r"backbone\.image_size=10 .* use 16 or 32"),
        ({"width": 16, "heads": 3}, r"backbone\.width=16"),
        ({"width": 20}, r"backbone\.width=20"),
        ({"heads": 7}, r"backbone\.heads=7"),
    ],
)
def test_what_cannot_be_built_is_the_users_mistake(config: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=message):
        build(BackboneConfig(**config))


# --- saving and loading ---


def saved(folder: Path, backbone: Backbone) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_backbone(backbone, folder)
    return folder


@pytest.mark.parametrize(
    "overrides",
    [{}, FREE, {"mean": 0.3, "std": 0.2, "mlp_ratio": 1.5, "init": "timm"}, *({"name": n} for n in OTHER_POSITIONS)],
)
def test_saved_weights_open_here_and_in_timm(make_backbone: Make, tmp_path: Path, overrides: dict[str, Any]) -> None:
    backbone = shaken(make_backbone(**overrides))
    folder = saved(tmp_path / "weights", backbone)
    images = pixels(backbone)
    normalised = images.float() * (1 / (255 * backbone.std)) - backbone.mean / backbone.std
    reference = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    again = load(folder)
    assert not again.training
    assert (again.name, again.mean, again.std) == (backbone.name, backbone.mean, backbone.std)
    with torch.no_grad():
        expected = backbone(images)
        assert torch.equal(again(images), expected)
        assert torch.equal(reference.forward_features(normalised), expected)
    settings = reference.pretrained_cfg
    assert list(settings["input_size"]) == [backbone.channels, backbone.image_size, backbone.image_size]
    assert list(settings["mean"]) == [backbone.mean] * backbone.channels
    assert list(settings["std"]) == [backbone.std] * backbone.channels


def test_dropout_and_initialisation_travel_with_the_weights(make_backbone: Make, tmp_path: Path) -> None:
    backbone = make_backbone(dropout=0.3, drop_path=0.2, position_std=0.5)
    again = load(saved(tmp_path, backbone))
    assert again.vit.pos_drop.p == 0.3
    assert again.position_std == 0.5
    assert all(
        torch.equal(a, b)
        for a, b in zip(state(fresh(again, 3)).values(), state(fresh(backbone, 3)).values(), strict=True)
    )


@pytest.mark.parametrize("asked", ["run", "checkpoint", "published"])
def test_a_run_a_checkpoint_or_a_folder_opens(make_backbone: Make, tmp_path: Path, asked: str) -> None:
    old, new, published = (make_backbone(seed) for seed in (1, 2, 3))
    saved(tmp_path / "checkpoints" / "step_00000010", old)
    saved(tmp_path / "checkpoints" / "step_00000200", new)
    (tmp_path / "checkpoints" / "step_00000300").mkdir()  # without weights: passed over
    path, expected = {
        "run": (tmp_path, new),
        "checkpoint": (tmp_path / "checkpoints" / "step_00000010", old),
        "published": (saved(tmp_path, published) if asked == "published" else tmp_path, published),
    }[asked]
    assert torch.equal(load(str(path)).vit.pos_embed, expected.vit.pos_embed)


def test_loading_leaves_torchs_generator_out_of_the_weights(make_backbone: Make, tmp_path: Path) -> None:
    folder = saved(tmp_path, make_backbone())
    torch.manual_seed(1)
    first = state(load(folder))
    torch.manual_seed(2)
    second = state(load(folder))
    assert all(torch.equal(first[name], second[name]) for name in first)


def cut(folder: Path, file: str) -> None:
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])


def config_becomes(content: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / CONFIG).write_text(json.dumps(content))


def edit_config(**changes: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changes))

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda f: cut(f, WEIGHTS), id="weights cut short"),
        pytest.param(lambda f: (f / WEIGHTS).write_bytes(b""), id="weights empty"),
        pytest.param(lambda f: (f / WEIGHTS).write_text("hello " * 99), id="weights are text"),
        pytest.param(lambda f: cut(f, CONFIG), id="config cut short"),
        pytest.param(lambda f: (f / CONFIG).unlink(), id="config missing"),
        pytest.param(lambda f: (f / CONFIG).write_bytes(b"\xff\xfe"), id="config is binary"),
        pytest.param(config_becomes({}), id="config empty"),
        pytest.param(config_becomes(None), id="config null"),
        pytest.param(config_becomes([1]), id="config a list"),
        pytest.param(edit_config(pretrained_cfg={"mean": 0.5, "std": 0.5}), id="mean not a list"),
        pytest.param(edit_config(pretrained_cfg={"mean": [], "std": []}), id="mean empty"),
        pytest.param(edit_config(model_args={"embed_dimension": 16}), id="unknown argument"),
        pytest.param(edit_config(architecture="vit_unknown"), id="unknown architecture"),
    ],
)
def test_damaged_weights_are_reported_with_their_folder(
    make_backbone: Make, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    folder = saved(tmp_path / "weights", make_backbone())
    damage(folder)
    with pytest.raises(UserError):
        load(folder)


@pytest.mark.parametrize(("create", "message"), [(False, "no such run"), (True, f"no {WEIGHTS} there")])
def test_missing_weights_are_reported(tmp_path: Path, create: bool, message: str) -> None:
    path = tmp_path / "run"
    if create:
        path.mkdir()
    with pytest.raises(UserError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "cls_token"}, "cls_token is missing"),
        ({"add": "head.weight"}, "head.weight is unknown"),
        ({"cut": "pos_embed"}, r"pos_embed is \(1, 3, 16\), not \(1, 17, 16\)"),
    ],
)
def test_wrong_weights_are_listed_by_name(
    make_backbone: Make, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    folder = saved(tmp_path, make_backbone())
    tensors = load_file(folder / WEIGHTS)
    if "drop" in change:
        del tensors[change["drop"]]
    if "add" in change:
        tensors[change["add"]] = torch.zeros(2)
    if "cut" in change:
        tensors[change["cut"]] = tensors[change["cut"]][:, :3].contiguous()
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UserError, match=message) as raised:
        load(folder)
    assert str(folder) in str(raised.value)


def test_many_wrong_weights_are_counted(make_backbone: Make) -> None:
    with pytest.raises(UserError, match=r"and \d+ more"):
        load_state(make_backbone(), state(make_backbone(depth=1)), "there")


def test_loaded_weights_are_copies(make_backbone: Make) -> None:
    one, other = make_backbone(1), make_backbone(2)
    load_state(other, state(one), "one")
    assert torch.equal(one.vit.cls_token, other.vit.cls_token)
    with torch.no_grad():
        other.vit.cls_token.add_(1)
    assert not torch.equal(one.vit.cls_token, other.vit.cls_token)


# --- fresh and initialise ---


def test_fresh_weights_depend_on_the_seed_alone(make_backbone: Make) -> None:
    like, twin = make_backbone(1), shaken(make_backbone(2))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = state(fresh(like, 11))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    second, other = state(fresh(twin, 11)), state(fresh(like, 12))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["patch_embed.proj.weight"], other["patch_embed.proj.weight"])
    assert not torch.equal(first["pos_embed"], other["pos_embed"])
    assert not torch.equal(first["pos_embed"], state(like)["pos_embed"])


def test_fresh_at_another_size(make_backbone: Make) -> None:
    larger = fresh(make_backbone(mean=0.1, position_std=0.7), 0, image_size=24)
    assert (larger.image_size, larger.patches, larger.mean, larger.position_std) == (24, 36, 0.1, 0.7)
    assert larger(torch.zeros(1, 3, 24, 24, dtype=torch.uint8)).shape == (1, 37, 16)
    with pytest.raises(UserError, match="image_size=25"):
        fresh(make_backbone(), 0, image_size=25)


@pytest.mark.parametrize("size", [16, 24, 8])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", *OTHER_POSITIONS])
def test_initialise_copies_weights_and_resamples_positions(make_backbone: Make, name: str, size: int) -> None:
    source, model = shaken(make_backbone(1, name=name)), make_backbone(2, name=name, image_size=size)
    initialise(model, source, "source")
    old, new = state(source), state(model)
    assert all(torch.equal(new[key], old[key]) for key in old if key != "pos_embed")
    prefix = old["pos_embed"].shape[1] - 16
    side = size // 4
    expected = resample_abs_pos_embed(old["pos_embed"], [side, side], [4, 4], num_prefix_tokens=prefix)
    torch.testing.assert_close(new["pos_embed"], expected)
    if size == 16:
        images = pixels(source)
        with torch.no_grad():
            assert torch.equal(model.eval()(images), source(images))


@pytest.mark.parametrize("difference", [{"width": 32}, {"depth": 3}, {"patch_size": 8}, {"channels": 1}])
def test_initialise_refuses_other_architectures(make_backbone: Make, difference: dict[str, int]) -> None:
    with pytest.raises(UserError, match="the other run does not fit"):
        initialise(make_backbone(), make_backbone(**difference), "the other run")
