"""Weights out: to timm and transformers, each compared with the encoder itself before the folder appears."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import timm
import torch
from PIL.Image import Resampling
from safetensors.torch import save_file

from ssl_vit.files import new_folder
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.models import Pooling, factory
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.exchange.names import to_transformers
from ssl_vit.models.vit import ViTEncoder

Target = Literal["timm", "transformers"]


@dataclass(frozen=True)
class Use:
    """How an encoder was evaluated, which its export repeats.

    resize: as `data.evaluation_resize`.
    pooling: pooling of the tokens; None: unknown.
    """

    resize: float = 1.0
    pooling: Pooling | None = None


# What transformers' ViT always has and some of timm's do not.
_NEEDED = ("cls_token", "pos_embed", "patch_embed.proj.bias", "blocks.0.attn.proj.bias", "norm.weight", "norm.bias")


def export(encoder: Encoder, out: Path, to: Target, card: str, use: Use = Use()) -> None:
    """Write `encoder` and its model card (the text of README.md) into the new folder `out`, in the format `to`, with
    the image preparation and, in timm's format, the pooling of `use`.

    The result is loaded again by its own library, and its tokens for random images are compared: with timm bit for bit,
    with transformers to 1e-5. Raises UserError for a model that the format cannot express and for a library that is not
    installed, RunError when the outputs differ; nothing is left behind then.
    """
    if to not in get_args(Target):
        raise UserError(f"to={to}: choose one of {', '.join(get_args(Target))}")
    if isinstance(encoder, ViTEncoder) and encoder.positions == "relative":
        raise UserError(
            "neither timm's VisionTransformer nor transformers' ViT has relative positions: these weights cannot be "
            "exported; load them with ssl_vit.load"
        )
    with new_folder(out) as folder:
        (_timm if to == "timm" else _transformers)(encoder.eval(), folder, use)
        (folder / "README.md").write_text(card)


@torch.no_grad()
def _timm(encoder: Encoder, folder: Path, use: Use) -> None:
    if isinstance(encoder, ViTEncoder) and encoder.norm_eps != (usual := factory.named_encoder(encoder.name).norm_eps):
        raise UserError(
            f"timm's {encoder.name} has layer norms of epsilon {usual:g}, these weights {encoder.norm_eps:g}, which "
            "a timm folder cannot express: use --to transformers"
        )
    factory.write_config(encoder, folder / "config.json", resize=use.resize, pooling=use.pooling)
    save_file(factory.state(encoder), folder / "model.safetensors", {"format": "pt"})
    images = _random_images(encoder)
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    if isinstance(encoder, ViTEncoder):  # every token, not only what timm would pool
        ours, pooled = encoder.encode(encoder.network.patch_embed(images)), theirs(images)
        _compare("timm", theirs.forward_features(images), encoder.network.forward_features(images), 0)
        if use.pooling in ("token", "mean"):
            _compare("timm", pooled, encoder.pool(ours, use.pooling), 1e-5)
    else:
        _compare("timm", theirs(images), encoder.network(images), 0)


@torch.no_grad()
def _transformers(encoder: Encoder, folder: Path, use: Use) -> None:
    try:
        import transformers
    except ImportError:
        raise UserError("transformers is not installed: pip install 'ssl-vit[export]'") from None
    if not isinstance(encoder, ViTEncoder):
        raise UserError(f"{encoder.name} is not a VisionTransformer, which transformers' ViT requires: use --to timm")
    tensors, network = factory.state(encoder), encoder.network
    if network.no_embed_class and network.has_class_token:
        positions = tensors["pos_embed"]  # a class token without a position is one with a position of zero
        tensors["pos_embed"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
    named, unknown = to_transformers(tensors)
    wrong = [f"it needs {key}" for key in _NEEDED if key not in tensors]
    wrong += [f"it has no place for {key}" for key in unknown]
    if wrong:
        raise UserError(f"transformers' ViT cannot represent {encoder.name}: {'; '.join(wrong[:4])}. Use --to timm")
    height, width = encoder.image_size
    rows, columns = network.patch_embed.patch_size
    transformers.ViTConfig(
        hidden_size=encoder.width,
        num_hidden_layers=len(network.blocks),
        num_attention_heads=encoder.heads,
        intermediate_size=network.blocks[0].mlp.fc1.out_features,
        layer_norm_eps=encoder.norm_eps or 0.0,
        image_size=height if height == width else [height, width],
        patch_size=rows if rows == columns else [rows, columns],
        num_channels=encoder.channels,
        qkv_bias=network.blocks[0].attn.qkv.bias is not None,
        architectures=["ViTModel"],
    ).save_pretrained(folder)
    numbers: dict[str, Any] = {
        "image_mean": [*encoder.mean],
        "image_std": [*encoder.std],
        "resample": Resampling.BILINEAR,
    }
    size = {"height": height, "width": width}
    if height == width:
        resized = {"shortest_edge": round(use.resize * height)}
        processor: Any = transformers.BitImageProcessor(
            size=resized, crop_size=size, do_convert_rgb=encoder.channels == 3, **numbers
        )
    else:  # transformers cannot resize until a rectangle is covered
        processor = transformers.ViTImageProcessor(size=size, **numbers)
    processor.save_pretrained(folder)
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    transformers.utils.logging.disable_progress_bar()
    model = transformers.ViTModel.from_pretrained(folder, add_pooling_layer=False).double().eval()
    images = _random_images(encoder).double()  # float64: the difference is not the order of sums
    theirs, ours = model(images).last_hidden_state, network.double().forward_features(images)
    network.float()
    _compare("transformers", theirs, ours, 1e-5)


def _random_images(encoder: Encoder) -> torch.Tensor:
    """Two normalized images of standard normal noise, always the same."""
    shape = (2, encoder.channels, *encoder.image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _compare(library: str, theirs: torch.Tensor, ours: torch.Tensor, tolerance: float) -> None:
    difference = float((theirs - ours).abs().max()) if theirs.shape == ours.shape else float("inf")
    if not difference <= tolerance:
        raise RunError(f"{library}'s outputs differ from the encoder's by {difference:.2g}, above {tolerance:g}")
