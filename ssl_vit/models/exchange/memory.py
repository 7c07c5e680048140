"""A timm network in memory as an encoder."""

from __future__ import annotations

import copy
import math
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from torch import nn

from ssl_vit.interfaces import UserError, pair
from ssl_vit.models import factory
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.exchange.imports import build, load_tensors
from ssl_vit.models.exchange.sizes import Imported, read_sizes, square
from ssl_vit.models.vit import ViTEncoder, heads_of

_CHANGED = "save a changed network with timm.models.save_for_hf(..., model_args=...) and use `ssl-vit import`"


def from_network(network: nn.Module) -> tuple[Encoder, float]:
    """A copy of a network that `timm.create_model` returned, in evaluation mode, and its `data.evaluation_resize`.

    Image size, mean, std and `crop_pct` are those of its `pretrained_cfg`.
    Raises UserError for a network that is not timm's, or that was changed after timm built it.
    """
    kind, cfg = type(network).__name__, getattr(network, "pretrained_cfg", None) or {}
    name = str(cfg.get("architecture"))
    if not timm.is_model(name):
        raise UserError(
            f"{kind}: neither ssl_vit.load nor timm.create_model made it; `ssl-vit import` reads its weights"
        )
    vit: Any = network
    tensors, about = network.state_dict(), resolve_data_config(pretrained_cfg=dict(cfg))
    size = pair(getattr(getattr(network, "patch_embed", None), "img_size", None) or about["input_size"][1:])
    if factory.is_vit(name):
        try:
            arguments = read_sizes(tensors, kind, name, heads=heads_of(vit), image_size=size)
        except LookupError as error:
            raise UserError(f"{kind}: it has no tensor {error}, which a ViT here needs; {_CHANGED}") from None
        if vit.global_pool in ("token", "avg"):
            arguments |= {"global_pool": vit.global_pool, "fc_norm": not isinstance(vit.fc_norm, nn.Identity)}
    else:
        stem = tensors.get(f"{cfg.get('first_conv')}.weight")
        arguments = {
            "in_chans": about["input_size"][0] if stem is None else int(stem.shape[1]),
            "img_size": square(size),
        }
    # With another number of channels timm takes the mean over those of its pretrained_cfg, too.
    channels = arguments["in_chans"]
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
