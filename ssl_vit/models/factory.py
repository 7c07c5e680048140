"""Build encoders from a configuration, save and load them in timm's format, resample them to other image sizes."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ssl_vit.files import WEIGHTS, expanded, read_json, weights_file
from ssl_vit.interfaces import Size, UserError, pair
from ssl_vit.models import EncoderConfig, Pooling, Resampling
from ssl_vit.models.encoder import Encoder, Numbers, create
from ssl_vit.models.position import own_format, resample, resample_relative, timm_format
from ssl_vit.models.timm_encoder import TimmEncoder
from ssl_vit.models.vit import OWN_SETTINGS, ViTEncoder, check_size

AnyEncoder = TypeVar("AnyEncoder", bound=Encoder)

CONFIG = "config.json"
_POOLS = {"token": "token", "mean": "avg"}  # timm's names of our poolings
DAMAGED = (OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, SafetensorError)


def build(config: EncoderConfig) -> Encoder:
    """A freshly initialized encoder (timm's initialization, torch's default generator).

    Raises UserError for a name that timm does not know, for sizes that do not fit together, and for keys that an
    architecture other than a VisionTransformer does not have.
    """
    if "." in config.name:
        raise UserError(f"encoder.name={config.name}: a tag names weights: remove it, and see `ssl-vit import --help`")
    return _build_vit(config) if is_vit(config.name) else _build_other(config)


@cache
def is_vit(name: str) -> bool:
    """Whether timm's `name` is a VisionTransformer. Raises UserError for a name that timm does not know."""
    with torch.device("meta"):
        return type(create(name, {})) is VisionTransformer


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
    if config.width and config.width % (heads := config.heads or named.heads):
        raise UserError(f"encoder.width={config.width} must be a multiple of encoder.heads={heads}; change either")
    sizes: dict[str, Any] = {"embed_dim": config.width, "depth": config.depth, "num_heads": config.heads}
    sizes |= {"mlp_ratio": config.mlp_ratio, "patch_size": config.patch_size}
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


def _build_other(config: EncoderConfig) -> TimmEncoder:
    fits = {"name", "image_size", "channels", "drop_path", "mean", "std", "position_resampling"}
    for key, value in config:
        if key not in fits and value != EncoderConfig.model_fields[key].default:
            raise UserError(f"encoder.{key}: {config.name} is not a VisionTransformer; remove the key")
    arguments: dict[str, Any] = {"in_chans": config.channels}
    if config.drop_path:
        arguments["drop_path_rate"] = config.drop_path
    return build_timm(config.name, arguments, config.mean, config.std, config.image_size)


def build_timm(name: str, arguments: dict[str, Any], mean: Numbers, std: Numbers, image_size: Size) -> TimmEncoder:
    """A network that is not a VisionTransformer, with timm's `img_size` where it is built for one size."""
    cfg = timm.get_pretrained_cfg(name)
    if cfg and cfg.fixed_input_size and pair(image_size) != tuple(cfg.input_size[1:]):
        arguments = {"img_size": pair(image_size), **arguments}
    return TimmEncoder(name, arguments, mean, std, image_size)


def require_vit(encoder: Encoder, what: str) -> ViTEncoder:
    """The encoder if it is a ViT. Raises UserError, saying that `what` needs one, for another network."""
    if not isinstance(encoder, ViTEncoder):
        kind = type(encoder.network).__name__
        raise UserError(f"{what} needs a VisionTransformer, and encoder.name='{encoder.name}' is a {kind}")
    return encoder


def require_patches(encoder: Encoder, what: str) -> ViTEncoder:
    """The encoder if each patch embedding depends on its own pixels alone.

    Raises UserError as `require_vit` does, and for a hybrid, whose CNN shows unmasked patches what is masked.
    """
    vit = require_vit(encoder, what)
    if hasattr(vit.network.patch_embed, "backbone"):
        raise UserError(f"{what}: the CNN of the hybrid '{encoder.name}' sees the masked patches; use a plain ViT")
    return vit


def write_config(
    encoder: Encoder, path: Path, *, resize: float = 1.0, pooling: Pooling | None = None, **more: Any
) -> None:
    """Write timm's `config.json`, from which `timm.create_model("local-dir:FOLDER")` builds the same model.

    resize: as `data.evaluation_resize`.
    pooling: pooling of the model's output, where this model has it in timm (`token`, `mean`); else, the encoder's own.
    more: other entries.
    """
    arguments, pools = dict(encoder.arguments), {}
    if isinstance(encoder, ViTEncoder):
        own = pool = encoder.network.global_pool
        if pooling != "token" or encoder.has_class_token:
            pool = _POOLS.get(str(pooling), own)
        pools = {"global_pool": pool}
        if pool != own:
            arguments |= pools | {"fc_norm": not isinstance(encoder.network.fc_norm, nn.Identity)}
    content = {
        "architecture": encoder.name,
        "num_classes": 0,
        "num_features": encoder.width,
        **pools,
        "model_args": arguments,
        "pretrained_cfg": pretrained_cfg(encoder, resize),
        **encoder.own_settings,
        **more,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def pretrained_cfg(encoder: Encoder, resize: float = 1.0) -> dict[str, Any]:
    """How timm describes the weights, for `timm.data.resolve_data_config`. resize: as `data.evaluation_resize`."""
    size, larger = encoder.image_size[0], round(resize * encoder.image_size[0])
    crop = size / larger
    while math.floor(size / crop) < larger:  # how timm gets back to whole pixels
        crop = math.nextafter(crop, 0)
    return {
        "architecture": encoder.name,
        "input_size": (encoder.channels, *encoder.image_size),
        "fixed_input_size": isinstance(encoder, ViTEncoder) or "img_size" in encoder.arguments,
        "interpolation": "bilinear",
        "crop_pct": crop,
        "mean": encoder.mean,
        "std": encoder.std,
        "num_classes": 0,
        "first_conv": encoder.network.pretrained_cfg.get("first_conv"),
        "classifier": encoder.network.pretrained_cfg.get("classifier"),
    }


def state(encoder: Encoder) -> dict[str, torch.Tensor]:
    """The weights in timm's format, contiguous on the CPU."""
    tensors = timm_format(encoder.network, encoder.network.state_dict())
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def load_state(encoder: Encoder, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
    """Load weights in timm's format. Raises UserError listing the keys and shapes that do not fit."""
    try:
        encoder.network.load_state_dict(own_format(encoder.network, tensors))
    except RuntimeError as error:  # torch lists missing and unknown names and other shapes
        words = " ".join(str(error).split()).partition(": ")[2]
        raise UserError(f"{origin} does not fit this encoder: {words[:400]}") from None


def initialize(model: Encoder, source: Encoder, origin: str, method: Resampling = "timm") -> None:
    """Give `model` the weights of `source`; a ViT's positions are resampled by `method` where the patch grids differ.

    Raises UserError when anything else differs.
    """
    for key in ("channels", "width", "heads", "mean", "std", "norm_eps", "positions", "architecture"):
        own, other = getattr(model, key, None), getattr(source, key, None)
        if own != other:
            raise UserError(f"{origin} does not fit this encoder: encoder.{key} is {other} there, {own} here")
    weights = state(source)
    if isinstance(source, ViTEncoder) and isinstance(model, ViTEncoder):
        if (own := _activation(model)) != (other := _activation(source)):
            raise UserError(f"{origin} does not fit this encoder: its blocks compute {other}, those here {own}")
        if (positions := weights.get("pos_embed")) is not None:
            weights["pos_embed"] = resample(positions, source.grid, model.grid, source.position_prefix, method)
        for name in [key for key in weights if key.endswith("relative_position_bias_table")]:
            weights[name] = resample_relative(weights[name], source.grid, model.grid, source.prefix_tokens, method)
    load_state(model, weights, origin)


def _activation(encoder: ViTEncoder) -> str:
    """The activation functions of the blocks, which have no weights."""
    modules = encoder.network.blocks.named_modules()
    kinds = {type(module).__name__ for name, module in modules if name.rpartition(".")[2].startswith("act")}
    return ", ".join(sorted(kinds))


def at_size(model: AnyEncoder, image_size: Size, method: Resampling = "timm") -> AnyEncoder:
    """A copy of `model` for images of another size or aspect ratio.

    Same weights. A ViT's positions (fixed ones too) are resampled by `method`, those of other networks by timm; those
    of the prefix tokens are kept. Raises UserError for a size that the patches or the network do not allow.
    """
    if pair(image_size) == model.image_size:
        return copy.deepcopy(model)
    if isinstance(model, TimmEncoder):
        return model.at_size(image_size)
    with torch.random.fork_rng(devices=[]):
        other = model.untrained(image_size)
    initialize(other, model, "this encoder", method)
    return other.to(next(model.parameters()).device).train(model.training)


def fresh(like: AnyEncoder, seed: int, image_size: Size | None = None) -> AnyEncoder:
    """An untrained encoder of the same architecture (at another image size if given), initialized by `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return like.untrained(image_size)


def origin(path: Path | str) -> str | None:
    """What imported weights were imported from; None for weights that were trained here."""
    imported = read_json(find_weights(path) / CONFIG).get("imported")
    return str(imported["from"]) if imported else None


def find_weights(path: Path | str) -> Path:
    """The folder with `encoder.safetensors` of a run, a checkpoint or a weights folder. Raises UserError if none."""
    path = expanded(path)
    if not path.exists():
        raise UserError(f"{path}: no such run, checkpoint or weights folder (timm's: `ssl-vit import NAME FOLDER`)")
    if found := weights_file(path):
        return found.parent
    if (path / "plan.json").is_file():
        runs = sorted(str(file.parent) for file in path.glob(f"*/{WEIGHTS}"))
        raise UserError(f"{path} is a comparison; name the run of one of its arms: {', '.join(runs) or 'none yet'}")
    raise UserError(f"{path}: no {WEIGHTS} there, nor in its checkpoints; the run may not have saved one yet")


def load(path: Path | str) -> Encoder:
    """The encoder of a run, a checkpoint or a weights folder, in evaluation mode, at its own image size.

    Raises UserError for a missing folder, a damaged file, or weights that do not fit their `config.json`.
    """
    folder = find_weights(path)
    try:
        config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
        _check_sizes(config, tensors)
        encoder = _from_config(config)
    except DAMAGED as error:
        raise UserError(f"{folder}: not a readable encoder ({type(error).__name__}: {error})") from None
    load_state(encoder, tensors, str(folder))
    return encoder.eval()


def _check_sizes(config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for a configuration of far more parameters than there are, before memory is taken for them;
    `load_state` names the few that are missing."""
    there, arguments = sum(tensor.numel() for tensor in tensors.values()), config.get("model_args", {})
    depths = [arguments.get(key, 0) for key in ("depth", "depths", "layers")]
    depth = sum(sum(one) if isinstance(one, list) else one for one in depths)
    if depth <= len(tensors):  # else even their names would take long
        with torch.device("meta"):
            network = _from_config(config).network
        parameters, buffers = (sum(one.numel() for one in of()) for of in (network.parameters, network.buffers))
        if parameters <= 2 * there + 2**20 and buffers <= 16 * there + 2**27:
            return
    raise ValueError(f"{CONFIG} describes a larger model than {WEIGHTS} holds ({there:,} numbers)")


def _from_config(config: dict[str, Any]) -> Encoder:
    name, cfg, arguments = config["architecture"], config["pretrained_cfg"], config.get("model_args", {})
    mean, std, image_size = cfg["mean"], cfg["std"], tuple(cfg["input_size"][1:])
    if not is_vit(name):
        return TimmEncoder(name, arguments, mean, std, image_size)
    settings = {key: config[key] for key in OWN_SETTINGS if key in config}
    return ViTEncoder(name, {"img_size": image_size, **arguments}, mean, std, **settings)
