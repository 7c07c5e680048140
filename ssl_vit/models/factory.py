"""Build encoders from a configuration, save and load them in timm's format, resample them to other image sizes."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ssl_vit.interfaces import Size, UserError, pair
from ssl_vit.models import EncoderConfig, Resampling
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.position import resample
from ssl_vit.models.resnet import ResNetEncoder, is_cnn
from ssl_vit.models.vit import ViTEncoder, check_size

AnyEncoder = TypeVar("AnyEncoder", bound=Encoder)

WEIGHTS, CONFIG = "encoder.safetensors", "config.json"


def build(config: EncoderConfig) -> Encoder:
    """A freshly initialized encoder (timm's initialization, torch's default generator).

    Raises UserError for a name that timm does not know or that is neither a VisionTransformer nor a ResNet, and for
    sizes that do not fit together.
    """
    return _build_cnn(config) if is_cnn(config.name) else _build_vit(config)


@cache
def named_encoder(name: str) -> ViTEncoder:
    """The model that timm's name alone stands for, without memory for its weights. UserError for another name."""
    with torch.device("meta"):
        return ViTEncoder(name, {}, 0.5, 0.5)


def _build_vit(config: EncoderConfig) -> ViTEncoder:
    named = named_encoder(config.name)
    cells = int(named.network.patch_embed.patch_size[0])  # pixels, or in a hybrid cells of the feature map
    patch_size = named.patch_size // cells * (config.patch_size or cells)
    check_size(pair(config.image_size), patch_size, "encoder.image_size")
    sizes = {
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": config.mlp_ratio,
        "patch_size": config.patch_size,
    }
    arguments: dict[str, Any] = {
        "img_size": config.image_size,
        "in_chans": config.channels,
        "pos_drop_rate": config.dropout,
        "proj_drop_rate": config.dropout,
        "drop_path_rate": config.drop_path,
        "weight_init": "jax" if config.init == "jax" else "",
        **{name: value for name, value in sizes.items() if value is not None},
    }
    if config.class_token is not None and config.class_token != named.has_class_token:
        # Without a class token the last norm stays on the tokens (equation 4), and the mean is taken after it.
        mean_pooled = {"class_token": False, "global_pool": "avg", "fc_norm": False}
        arguments |= {"class_token": True, "global_pool": "token"} if config.class_token else mean_pooled
    return ViTEncoder(
        config.name, arguments, config.mean, config.std, config.position_std, config.norm_eps, config.positions
    )


def _build_cnn(config: EncoderConfig) -> ResNetEncoder:
    fits = {"name", "image_size", "channels", "drop_path", "mean", "std", "position_resampling"}
    for key, value in config:
        if key not in fits and value != EncoderConfig.model_fields[key].default:
            raise UserError(f"encoder.{key}: {config.name} is a ResNet, which has no such setting; remove the key")
    arguments: dict[str, Any] = {"in_chans": config.channels}
    if config.drop_path:
        arguments["drop_path_rate"] = config.drop_path
    return ResNetEncoder(config.name, arguments, config.mean, config.std, config.image_size)


def require_vit(encoder: Encoder, what: str) -> ViTEncoder:
    """The encoder if it is a ViT. Raises UserError, saying that `what` needs one, for a CNN."""
    if not isinstance(encoder, ViTEncoder):
        raise UserError(f"{what} needs a Vision Transformer, and encoder.name='{encoder.name}' is a ResNet")
    return encoder


def write_config(encoder: Encoder, path: Path) -> None:
    """Write timm's `config.json`, from which `timm.create_model("local-dir:FOLDER")` builds the same model."""
    network, is_vit = encoder.network, isinstance(encoder, ViTEncoder)
    content = {
        "architecture": encoder.name,
        "num_classes": 0,
        "num_features": encoder.width,
        "global_pool": network.global_pool if is_vit else "avg",
        "model_args": encoder.arguments,
        "pretrained_cfg": pretrained_cfg(encoder),
        **encoder.own_settings,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def pretrained_cfg(encoder: Encoder) -> dict[str, Any]:
    """How timm describes the weights: image size and normalization, which `timm.data.resolve_data_config` reads."""
    return {
        "input_size": (encoder.channels, *encoder.image_size),
        "fixed_input_size": isinstance(encoder, ViTEncoder),
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "mean": encoder.mean,
        "std": encoder.std,
        "num_classes": 0,
        "first_conv": encoder.network.pretrained_cfg.get("first_conv"),
        "classifier": encoder.network.pretrained_cfg.get("classifier"),
    }


def state(encoder: Encoder) -> dict[str, torch.Tensor]:
    """The weights by timm's own names, contiguous on the CPU."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.network.state_dict().items()}


def load_state(encoder: Encoder, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
    """Load weights by timm's names. Raises UserError listing the keys and shapes that do not fit."""
    try:
        encoder.network.load_state_dict(dict(tensors))
    except RuntimeError as error:  # torch lists missing and unknown names and other shapes
        words = " ".join(str(error).split()).partition(": ")[2]
        raise UserError(f"{origin} does not fit this encoder: {words[:400]}") from None


def initialize(model: Encoder, source: Encoder, origin: str, method: Resampling = "timm") -> None:
    """Give `model` the weights of `source`; a ViT's positions are resampled by `method` where the patch grids differ.

    Raises UserError when anything else differs.
    """
    for key in ("heads", "mean", "std", "norm_eps", "positions"):
        own, other = getattr(model, key, None), getattr(source, key, None)
        if own != other:
            raise UserError(f"{origin} does not fit this encoder: encoder.{key} is {other} there, {own} here")
    weights = state(source)
    if isinstance(source, ViTEncoder) and isinstance(model, ViTEncoder):
        if (own := _activation(model)) != (other := _activation(source)):
            raise UserError(f"{origin} does not fit this encoder: its blocks compute {other}, those here {own}")
        positions = weights["pos_embed"]
        weights["pos_embed"] = resample(positions, source.grid, model.grid, source.position_prefix, method)
    load_state(model, weights, origin)


def _activation(encoder: ViTEncoder) -> str:
    """The activation functions of the blocks, which have no weights."""
    modules = encoder.network.blocks.named_modules()
    kinds = {type(module).__name__ for name, module in modules if name.rpartition(".")[2].startswith("act")}
    return ", ".join(sorted(kinds))


def at_size(model: AnyEncoder, image_size: Size, method: Resampling = "timm") -> AnyEncoder:
    """A copy of `model` for images of another size or aspect ratio.

    Same weights; positions (fixed ones too) are resampled by `method`, those of the prefix tokens kept.
    Raises UserError for a size that the patches do not divide.
    """
    if pair(image_size) == model.image_size:
        return copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        other = model.untrained(image_size)
    initialize(other, model, "this encoder", method)
    return other.to(next(model.parameters()).device).train(model.training)


def fresh(like: AnyEncoder, seed: int, image_size: Size | None = None) -> AnyEncoder:
    """An untrained encoder of the same architecture (at another image size if given), initialized by `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return like.untrained(image_size)


def find_weights(path: Path | str) -> Path:
    """The folder with `encoder.safetensors` of a run, a checkpoint or a weights folder. Raises UserError if none."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such run, checkpoint or weights folder")
    for folder in [path, *sorted(path.glob("checkpoints/step_*"), reverse=True)]:
        if (folder / WEIGHTS).is_file():
            return folder
    raise UserError(f"{path}: no {WEIGHTS} there, nor in its checkpoints; the run may not have saved one yet")


def load(path: Path | str) -> Encoder:
    """The encoder of a run, a checkpoint or a weights folder, in evaluation mode, at its own image size.

    Raises UserError for a missing folder, a damaged file, or weights that do not fit their `config.json`.
    """
    folder = find_weights(path)
    try:
        encoder = _from_config(json.loads((folder / CONFIG).read_text()))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, LookupError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"{folder}: not a readable encoder ({type(error).__name__}: {error})") from None
    load_state(encoder, tensors, str(folder))
    return encoder.eval()


def _from_config(config: dict[str, Any]) -> Encoder:
    name, cfg, arguments = config["architecture"], config["pretrained_cfg"], config.get("model_args", {})
    mean, std, image_size = cfg["mean"], cfg["std"], tuple(cfg["input_size"][1:])
    if is_cnn(name):
        return ResNetEncoder(name, arguments, mean, std, image_size)
    own = {key: config[key] for key in ("position_std", "norm_eps", "positions") if key in config}
    return ViTEncoder(name, {"img_size": image_size, **arguments}, mean, std, **own)
