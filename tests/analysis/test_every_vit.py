"""Every VisionTransformer that timm can name, small and on a rectangle: outputs are timm's own, pictures are drawn."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch

from ssl_vit.analysis import attention, components
from ssl_vit.models import EncoderConfig
from ssl_vit.models.factory import at_size, build, require_vit
from ssl_vit.models.vit import ViTEncoder

MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit")
# A second class token of a class of its own; a stem whose width is fixed.
REFUSED = ("distilled", "vit_base_mci_224")
NAMES = [name for module in MODULES for name in timm.list_models(module=module)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if not any(part in name for part in REFUSED)])
def test_it_computes_what_timm_does_and_every_picture_is_drawn_at_two_shapes(name: str) -> None:
    with torch.device("meta"):
        patch = ViTEncoder(name, {}, 0.5, 0.5).patch_size
    torch.manual_seed(0)
    size = (2 * patch, 3 * patch)
    config = EncoderConfig(name=name, image_size=size, width=48, depth=2, heads=3)
    model = require_vit(build(config), "this test").eval()
    images = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
    network = timm.create_model(name, num_classes=0, **model.arguments).eval()
    network.load_state_dict(model.network.state_dict())
    with torch.no_grad():
        assert torch.equal(network.forward_features(model.normalized(images)), model(images))
    for encoder, pictured in ((model, images), (at_size(model, size[::-1]), images.mT.contiguous())):
        rows, columns = encoder.grid
        assert (rows, columns) == tuple(side // patch for side in pictured.shape[2:])
        distances = attention.attention_distance(encoder, pictured)
        assert len(distances) == 2 and np.isfinite(distances).all() and distances.min() > 0
        rolled = attention.rollout(encoder, pictured)
        assert rolled.shape == (2, rows, columns) and rolled.min() > 0 and rolled.sum((1, 2)).max() <= 1 + 1e-5
        similarity = components.position_similarity(encoder)
        np.testing.assert_allclose(np.einsum("rcrc->rc", similarity), 1, atol=1e-9)
        assert components.feature_map(encoder, pictured).values.shape == (2, rows, columns, 3)
        assert np.isfinite(components.filter_components(encoder).values).all()
