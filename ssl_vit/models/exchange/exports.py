"""Weights out: to timm, transformers and ONNX, each compared with the encoder itself before the folder appears."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from safetensors.torch import save_file
from torch import nn

from ssl_vit.interfaces import RunError, UserError
from ssl_vit.models import factory
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.exchange.folders import new_folder
from ssl_vit.models.exchange.names import to_transformers
from ssl_vit.models.vit import ViTEncoder

Target = Literal["timm", "transformers", "onnx"]

# What transformers' ViT always has and some of timm's do not.
_NEEDED = ("cls_token", "pos_embed", "patch_embed.proj.bias", "blocks.0.attn.proj.bias", "norm.weight", "norm.bias")
_LARGE = 1.8 * 2**30  # bytes; protobuf's limit is 2 GiB: beyond it the weights are in a file beside model.onnx


def export(encoder: Encoder, out: Path, to: Target, card: str) -> None:
    """Write `encoder` and its model card (the text of README.md) into the new folder `out`, in the format `to`.

    The result is loaded again by its own library, and its tokens for random images are compared: with timm bit for bit,
    with transformers to 1e-5, with onnxruntime to 1e-4. Raises UserError for a model that the format cannot express and
    for a library that is not installed, RunError when the outputs differ; nothing is left behind then.
    """
    with new_folder(out) as folder:
        {"timm": _timm, "transformers": _transformers, "onnx": _onnx}[to](encoder.eval(), folder)
        (folder / "README.md").write_text(card)


class Tokens(nn.Module):
    """timm's network from normalized images to output tokens (B, P + N, D): what an exported model computes."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.network.forward_features(pixel_values)
        return features if features.ndim == 3 else features.flatten(2).mT  # a CNN's are maps (B, D, H, W)


def _timm(encoder: Encoder, folder: Path) -> None:
    if isinstance(encoder, ViTEncoder) and encoder.norm_eps != (usual := factory.named_encoder(encoder.name).norm_eps):
        raise UserError(
            f"timm's {encoder.name} has layer norms of epsilon {usual:g}, these weights {encoder.norm_eps:g}, which "
            "a timm folder cannot express: use --to transformers or --to onnx"
        )
    factory.write_config(encoder, folder / "config.json")
    save_file(factory.state(encoder), folder / "model.safetensors", {"format": "pt"})
    images = _random_images(encoder, 2)
    with torch.no_grad():
        network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        _compare("timm", Tokens(network)(images), Tokens(encoder.network)(images), 0)


def _transformers(encoder: Encoder, folder: Path) -> None:
    tensors, network = factory.state(encoder), encoder.network
    if not isinstance(encoder, ViTEncoder):
        raise UserError(f"transformers' ViT cannot be a {type(network).__name__}: use --to timm or --to onnx")
    missing = [key for key in _NEEDED if key not in tensors]
    if not missing and network.no_embed_class:
        positions = tensors["pos_embed"]  # a class token without a position is one with a position of zero
        tensors["pos_embed"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
    named, unknown = to_transformers(tensors)
    if missing or unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        why = [f"it needs {', '.join(missing)}"] * bool(missing)
        why += [f"it has no place for {', '.join(unknown[:3])}{more}"] * bool(unknown)
        raise UserError(f"transformers' ViT cannot be {encoder.name}: {'; '.join(why)}. Use --to timm or --to onnx")
    library = _optional("transformers")
    height, width = encoder.image_size
    rows, columns = network.patch_embed.patch_size
    library.ViTConfig(
        hidden_size=encoder.width,
        num_hidden_layers=len(network.blocks),
        num_attention_heads=encoder.heads,
        intermediate_size=network.blocks[0].mlp.fc1.out_features,
        layer_norm_eps=encoder.norm_eps,
        image_size=height if height == width else [height, width],
        patch_size=rows if rows == columns else [rows, columns],
        num_channels=encoder.channels,
        qkv_bias=network.blocks[0].attn.qkv.bias is not None,
        architectures=["ViTModel"],
    ).save_pretrained(folder)
    size = {"height": height, "width": width}
    processor = library.ViTImageProcessor(size=size, image_mean=[*encoder.mean], image_std=[*encoder.std])
    processor.save_pretrained(folder)
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    library.utils.logging.disable_progress_bar()
    model = library.ViTModel.from_pretrained(folder, add_pooling_layer=False)
    images = _random_images(encoder, 2).double()  # float64: the difference is not the order of sums
    with torch.no_grad():
        theirs = model.double().eval()(images).last_hidden_state
        ours = Tokens(network.double())(images)
        network.float()
    _compare("transformers", theirs, ours, 1e-5)


def _onnx(encoder: Encoder, folder: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        _optional(package)
    model, file = Tokens(encoder.network).eval(), folder / "model.onnx"
    torch.onnx.export(
        model,
        (_random_images(encoder, 2),),
        file,
        input_names=["pixel_values"],
        output_names=["last_hidden_state"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=sum(p.numel() * p.element_size() for p in model.parameters()) > _LARGE,
        verbose=False,
    )
    factory.write_config(encoder, folder / "config.json")
    session = _optional("onnxruntime").InferenceSession(file, providers=["CPUExecutionProvider"])
    for count in (1, 3):  # neither is the batch size that it was traced with
        images = _random_images(encoder, count)
        theirs = torch.from_numpy(session.run(None, {"pixel_values": images.numpy()})[0])
        with torch.no_grad():
            _compare("onnxruntime", theirs, model(images), 1e-4)


def _random_images(encoder: Encoder, count: int) -> torch.Tensor:
    """Normalized images (count, C, H, W) of standard normal noise, always the same."""
    shape = (count, encoder.channels, *encoder.image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _compare(library: str, theirs: torch.Tensor, ours: torch.Tensor, tolerance: float) -> None:
    if theirs.shape != ours.shape:
        raise RunError(f"{library}'s outputs are {tuple(theirs.shape)}, the encoder's {tuple(ours.shape)}")
    difference = float((theirs - ours).abs().max())
    if not difference <= tolerance:
        raise RunError(f"{library}'s outputs differ from the encoder's by {difference:.2g}, above {tolerance:g}")


def _optional(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise UserError(f"{package} is not installed: pip install 'ssl-vit[export]'") from None
