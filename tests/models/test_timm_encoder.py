"""Networks of timm other than VisionTransformers as encoders: features are those that timm itself computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn

from ssl_vit.interfaces import UserError
from ssl_vit.models import EncoderConfig
from ssl_vit.models.encoder import create
from ssl_vit.models.factory import at_size, build, fresh, initialize, load, require_vit, state
from ssl_vit.models.timm_encoder import TimmEncoder
from ssl_vit.objectives import classification
from ssl_vit.training.flops import training_flops

Make = Callable[..., Any]


def cnn(name: str = "resnet10t", seed: int = 0, **overrides: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(EncoderConfig(name=name, **({"image_size": 64} | overrides))).eval()


@pytest.mark.parametrize(
    ("name", "size", "channels"),
    [
        ("resnet18", (96, 40), 1),
        ("resnet18", 33, 4),
        ("resnetv2_50x1_bit", (64, 32), 3),
        ("convnext_atto", (64, 32), 3),  # a norm after pooling
        ("mobilenetv3_small_050", 64, 3),  # a layer after pooling, of another width
    ],
)
def test_outputs_are_timms_feature_map_and_their_mean_is_timms_pooling(
    pixels: Make, name: str, size: Any, channels: int
) -> None:
    encoder = cnn(name, image_size=size, channels=channels, mean=0.4, std=0.3)
    reference = timm.create_model(name, pretrained=False, num_classes=0, in_chans=channels).eval()
    reference.load_state_dict(encoder.network.state_dict())
    images = pixels(encoder)
    normalized = images.float() * (1 / (255 * 0.3)) - 0.4 / 0.3
    with torch.no_grad():
        outputs, features = encoder(images), reference.forward_features(normalized)
        mean = encoder.represent(images, "mean")
        torch.testing.assert_close(mean, reference(normalized), atol=1e-5, rtol=1e-5)
        assert mean.shape[1] == encoder.num_features("mean")
    assert torch.equal(outputs.mT.reshape(features.shape), features)
    assert encoder.grid == features.shape[2:]
    patches = encoder.pool(outputs, "patches")
    assert torch.equal(patches, outputs.flatten(1)) and patches.shape[1] == encoder.num_features("patches")


@pytest.mark.parametrize(
    ("name", "prefix", "patch"),
    [
        ("vit_small_patch16_dinov3", 5, 16),
        ("eva02_tiny_patch14_224", 1, 14),  # a norm after pooling
        ("deit_tiny_distilled_patch16_224", 2, 16),
    ],
)
def test_tokens_of_other_transformers(pixels: Make, name: str, prefix: int, patch: int) -> None:
    encoder = cnn(name, image_size=2 * patch)
    images = pixels(encoder)
    with torch.no_grad():
        tokens = encoder.network.forward_features(encoder.normalized(images))
        finish = getattr(encoder.network, "fc_norm", nn.Identity())
        assert torch.equal(encoder(images), tokens)
        assert torch.equal(encoder.represent(images, "mean"), finish(tokens[:, prefix:].mean(1)))
        assert torch.equal(encoder.represent(images, "token"), finish(tokens[:, 0]))
        assert encoder.represent(images, "patches").shape == (2, encoder.num_features("patches"))
        larger = at_size(encoder, 4 * patch)
        assert (larger.grid, encoder.grid, larger(pixels(larger)).shape[1]) == ((4, 4), (2, 2), prefix + 16)
        assert fresh(encoder, 0, 4 * patch).grid == (4, 4)


def test_a_network_without_patch_tokens_says_so(pixels: Make) -> None:
    encoder = cnn("levit_128s", image_size=224)
    images = pixels(encoder)
    with torch.no_grad():
        expected = encoder.network(encoder.normalized(images))
        assert torch.equal(encoder.represent(images, "mean"), expected)
        assert torch.equal(encoder(images), expected[:, None])
    with pytest.raises(
        UserError, match=r"pooling=patches: levit_128s \(LevitDistilled\) has no patch tokens: use mean"
    ):
        encoder.represent(images, "patches")
    with pytest.raises(UserError, match=r"reads only images of \(224, 224\)"):
        at_size(encoder, 64)
    with pytest.raises(UserError, match="efficientformer_l1 cannot read images of"):
        cnn("efficientformer_l1", image_size=64)


def test_other_arguments_keep_the_weights(pixels: Make) -> None:
    encoder = cnn("convnext_atto")
    dropped = encoder.with_arguments(drop_path_rate=0.5)
    assert all(torch.equal(a, b) for a, b in zip(state(encoder).values(), state(dropped).values(), strict=True))
    assert {module.drop_prob for module in dropped.modules() if isinstance(module, DropPath)} > {0.5}
    assert not dropped.training and dropped.train().with_arguments(drop_path_rate=0.1).training
    with pytest.raises(UserError, match="cannot have these settings"):
        cnn().with_arguments(proj_drop_rate=0.1)


def test_weights_that_several_layers_share_are_refused() -> None:
    with pytest.raises(UserError, match="coat_tiny shares weights between layers"):
        TimmEncoder("coat_tiny", {}, (0.5,) * 3, (0.5,) * 3, 224)


def test_weights_of_another_network_with_the_same_tensors_are_refused() -> None:
    dilated = TimmEncoder("resnet10t", {"in_chans": 3, "output_stride": 8}, (0.5,) * 3, (0.5,) * 3, 64)
    with pytest.raises(UserError, match=r"other does not fit this encoder: .*output_stride"):
        initialize(cnn(), dilated, "other")
    initialize(cnn(drop_path=0.1), cnn(image_size=96), "other")


def test_what_only_a_vit_has_is_refused() -> None:
    with pytest.raises(UserError, match=r"encoder\.class_token: resnet10t is not a VisionTransformer"):
        cnn(class_token=False)
    with pytest.raises(UserError, match="needs a class token, which resnet10t does not have: use mean"):
        cnn().pool(torch.zeros(2, 4, 512), "token")
    with pytest.raises(UserError, match="block=1: the blocks of resnet10t"):
        cnn().represent(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "mean", 1)
    with pytest.raises(UserError, match=r"needs a VisionTransformer.*'resnet10t' is a ResNet"):
        require_vit(cnn(), "objective.name=masked_patch")


@pytest.mark.parametrize("overrides", [{}, {"image_size": (64, 96), "channels": 1, "mean": 0.3, "drop_path": 0.2}])
def test_saved_weights_open_here_and_in_timm(
    pixels: Make, saved: Make, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    encoder = cnn(**overrides)
    with torch.no_grad():
        encoder.train()(pixels(encoder))  # the running statistics travel too
    again, images = load(saved(tmp_path, encoder.eval())), pixels(encoder)
    reference = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert isinstance(again, TimmEncoder)
    assert (again.image_size, again.channels, again.mean) == (encoder.image_size, encoder.channels, encoder.mean)
    with torch.no_grad():
        assert torch.equal(again(images), encoder(images))
        expected = reference.forward_features(images.float() * (1 / (255 * 0.5)) - encoder.mean[0] / 0.5)
        assert torch.equal(again(images), expected.flatten(2).mT)
    assert reference.pretrained_cfg["input_size"] == (encoder.channels, *encoder.image_size)


def test_fresh_ones_and_other_sizes(pixels: Make) -> None:
    like = cnn(seed=1)
    first, second, other = fresh(like, 3), fresh(like, 3), fresh(like, 4, (32, 64))
    assert all(torch.equal(a, b) for a, b in zip(state(first).values(), state(second).values(), strict=True))
    assert not torch.equal(state(first)["conv1.0.weight"], state(other)["conv1.0.weight"])
    assert other.image_size == (32, 64)
    larger = at_size(like, (64, 128))
    assert (larger.image_size, larger.grid, larger.training) == ((64, 128), (2, 4), False)
    assert all(torch.equal(a, b) for a, b in zip(state(like).values(), state(larger).values(), strict=True))
    with torch.no_grad():
        assert larger(pixels(larger)).shape == (2, 8, 512)


def test_what_a_network_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that a user registered with timm without its `build_model_with_cfg`."""
    made = timm.create_model

    def without_checkpointing(*arguments: Any, **settings: Any) -> Any:
        network = made(*arguments, **settings)
        monkeypatch.delattr(type(network), "set_grad_checkpointing", raising=False)
        return network

    with monkeypatch.context() as patch:
        patch.setattr(timm, "create_model", lambda *_, **__: nn.Linear(2, 2))
        with pytest.raises(UserError, match="test_convnext': no pretrained_cfg"):
            create("test_convnext", {})
    monkeypatch.setattr(timm, "create_model", without_checkpointing)
    encoder = TimmEncoder("test_convnext", {}, 0.5, 0.5, 64)
    objective = classification.Objective(encoder, classification.Config(head="linear", pooling="mean"), 5)
    assert training_flops(objective) > 0
