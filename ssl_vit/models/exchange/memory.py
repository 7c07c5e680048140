"""A timm network in memory as an encoder."""

from __future__ import annotations

import copy
import math
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from timm.models import get_model_args, get_model_input_config
from torch import nn

from ssl_vit.interfaces import UserError
from ssl_vit.models import factory
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.exchange.imports import build, load_tensors
from ssl_vit.models.exchange.sizes import Imported, square
from ssl_vit.models.vit import ViTEncoder

_CHANGED = "save a changed network with timm.models.save_for_hf(..., model_args=...) and use `ssl-vit import`"


def from_network(network: nn.Module) -> tuple[Encoder, float]:
    """A copy of a network that `timm.create_model` returned, in evaluation mode, and its `data.evaluation_resize`.

    Mean, std and `crop_pct` are those of its `pretrained_cfg`.
    Raises UserError for a network that is not timm's, or that was changed after timm built it.
    """
    kind, cfg = type(network).__name__, getattr(network, "pretrained_cfg", None) or {}
    name = str(cfg.get("architecture"))
    if not timm.is_model(name):
        raise UserError(
            f"{kind}: neither ssl_vit.load nor timm.create_model made it; `ssl-vit import` reads its weights"
        )
    about = resolve_data_config(pretrained_cfg=dict(cfg))
    channels, *size = get_model_input_config(network)["input_size"]
    arguments = get_model_args(network) | {"in_chans": channels, "img_size": square(size)}
    # The head is not part of an encoder. A CNN's pools; another pooling than the mean gives other outputs below.
    for key in ("num_classes", "features_only", *(["global_pool"] if not factory.is_vit(name) else [])):
        arguments.pop(key, None)
    if objects := sorted(key for key, value in arguments.items() if callable(value)):
        raise UserError(f"{kind}: made with {', '.join(objects)}, which is not a number or a name; {_CHANGED}")
    # With another number of channels timm takes the mean over those of its pretrained_cfg, too.
    mean, std = (v if len(v) == channels else (sum(v) / len(v),) * channels for v in (about["mean"], about["std"]))
    imported = Imported(name, arguments, {}, mean, std)
    with torch.random.fork_rng(devices=[]):
        encoder = build(imported, imported.mean, imported.std)
    larger = math.floor(size[0] / about["crop_pct"])  # timm's whole pixels
    return with_weights(encoder, network), max(1.0, larger / size[0])


def with_weights(encoder: Encoder, network: nn.Module) -> Encoder:
    """`encoder` in evaluation mode, with the weights of a timm network of the same architecture; heads are skipped.

    Raises UserError where the weights do not fit, or compute something else in the encoder.
    """
    kind, tensors = type(network).__name__, network.state_dict()
    try:
        load_tensors(encoder, tensors, kind)
    except UserError as error:
        raise UserError(f"{error}; {_CHANGED}") from None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        image = torch.rand(1, encoder.channels, *encoder.image_size)
        theirs = copy.deepcopy(network).cpu().float().eval()
        ours, pooled = encoder.eval().network, not isinstance(encoder, ViTEncoder)
        try:
            pairs = zip(_outputs(theirs, image, pooled), _outputs(ours, image, pooled), strict=True)
            equal = all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)
        except (AttributeError, RuntimeError, TypeError):  # built without a head, or for other sizes
            equal = False
        if not equal:
            raise UserError(
                f"{kind}: its outputs differ from {encoder.name}'s with the same weights, so it was modified; "
                f"{_CHANGED}"
            )
    return encoder


def _outputs(network: Any, image: torch.Tensor, pooled: bool) -> list[torch.Tensor]:
    """What an encoder reads: features, and the pooled ones of a network whose own head pools them."""
    features = network.forward_features(image)
    tensors = [features] if isinstance(features, torch.Tensor) else []
    return [*tensors, network.forward_head(features, pre_logits=True)] if pooled or not tensors else tensors
