"""Networks of timm in memory: embedded as timm's own preprocessing gives, evaluated, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import ssl_vit
from ssl_vit.analysis import loaded
from ssl_vit.interfaces import UserError

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
NETWORKS = [
    ("vit_tiny_patch16_224", SMALL),
    ("vit_tiny_patch16_224", SMALL | {"global_pool": "avg", "num_classes": 4}),
    ("resnet10t", {}),
]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Class folders of noise in three sizes, as smooth as photographs: resizing methods differ little."""
    generator = np.random.default_rng(0)
    for name in ("bee", "wasp"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for n in range(10):
            coarse = Image.fromarray(generator.integers(0, 256, (5, 5, 3), dtype=np.uint8))
            coarse.resize((40 + n % 3 * 9, 48), Image.Resampling.BICUBIC).save(tmp_path / f"photos/{name}/{n}.png")
    return tmp_path / "photos"


def test_a_loaded_network_can_be_saved_for_the_hub(
    make_encoder: Callable[..., Any], saved: Callable[..., Path], tmp_path: Path
) -> None:
    network: Any = ssl_vit.load(saved(tmp_path / "weights", make_encoder()))
    timm.models.save_for_hf(network, tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["architecture"].startswith("vit")


def test_blocks_of_another_kind_are_refused(photos: Path) -> None:
    network = timm.create_model("vit_pwee_patch16_reg1_gap_256", img_size=32, depth=1, embed_dim=48, num_heads=3)
    with pytest.raises(UserError, match=r"no tensor 'blocks\.0\.mlp\.fc1\.weight'"):
        ssl_vit.embed(network, photos, workers=0)


@pytest.mark.parametrize(("name", "arguments"), NETWORKS)
def test_embeddings_of_a_timm_network_are_timms(
    photos: Path, shaken: Callable[..., Any], name: str, arguments: dict[str, Any]
) -> None:
    network = shaken(timm.create_model(name, **arguments)).eval()
    side = 32 if "img_size" in arguments else 64
    network.pretrained_cfg |= {"input_size": (3, side, side), "mean": (0.3, 0.5, 0.4), "std": (0.2, 0.3, 0.25)}
    frame = ssl_vit.embed(network, photos, workers=0)
    about = timm.data.resolve_data_config(model=network) | {"interpolation": "bilinear"}
    assert about["crop_pct"] < 1
    transform = timm.data.create_transform(**about)
    images = torch.stack([transform(Image.open(photos / file)) for file in frame["file"]])
    with torch.no_grad():
        tokens = network.forward_features(images)
        expected = network.forward_head(tokens, pre_logits=True)
        if arguments.get("global_pool", "token") == "token" and tokens.ndim == 3:
            expected = tokens[:, 1:].mean(1)
    ours = np.stack([*frame["embedding"]])
    assert np.abs(ours - expected.numpy()).max() < 0.03 * expected.std()
    assert np.abs(ours - np.roll(expected.numpy(), 1, axis=0)).max() > 0.1 * expected.std(), "the images differ"


def test_a_timm_network_is_evaluated(photos: Path, tmp_path: Path) -> None:
    network = timm.create_model("vit_tiny_patch16_224", **SMALL)
    with pytest.raises(UserError, match=r"VisionTransformer: .*name the data"):
        ssl_vit.evaluate(network, "knn")
    found = ssl_vit.evaluate(network, "knn", data=photos, ks=[1], say=lambda text: None)
    assert set(found.table["arm"]) == {"trained", "untrained", "pixels"}
    assert not network.pretrained_cfg.get("run") and network.training


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t"])
def test_a_gray_network_has_timms_mean_over_channels(name: str) -> None:
    encoder = loaded.load(timm.create_model(name, in_chans=1)).encoder
    mean = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())["mean"]
    assert encoder.channels == 1
    gray = torch.full((1, 1, *encoder.image_size), round(255 * sum(mean) / 3), dtype=torch.uint8)
    assert encoder.normalized(gray).abs().max() < 0.02


def test_other_networks_are_refused() -> None:
    with pytest.raises(UserError, match=r"Linear: neither ssl_vit\.load nor timm\.create_model"):
        loaded.load(torch.nn.Linear(2, 2))
    changed = timm.create_model("vit_tiny_patch16_224", act_layer=torch.nn.ReLU, **SMALL)
    with pytest.raises(UserError, match=r"outputs differ.*save_for_hf"):
        loaded.load(changed)
    for other in ({"global_pool": "max"}, {"features_only": True}, {"output_stride": 8}):
        with pytest.raises(UserError, match=r"outputs differ|neither"):
            loaded.load(timm.create_model("resnet18", **other))
    shorter: Any = timm.create_model("resnet10t")
    shorter.layer4 = torch.nn.Identity()
    with pytest.raises(UserError, match=r"ResNet does not fit .*layer4.*save_for_hf"):
        loaded.load(shorter)
