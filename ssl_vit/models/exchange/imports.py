"""Weights in: from timm, Google's .npz, transformers, MAE and bare checkpoints to a folder that `encoder.load` reads.

Nothing in them is executed: they are read as safetensors, by `torch.load(weights_only=True)` or by
`numpy.load(allow_pickle=False)`.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import clean_state_dict

from ssl_vit.interfaces import UserError
from ssl_vit.models import EncoderConfig, PerChannel, factory
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.exchange import google, hub
from ssl_vit.models.exchange.folders import new_folder
from ssl_vit.models.exchange.names import from_transformers
from ssl_vit.models.exchange.sizes import Found, ratio, read_sizes
from ssl_vit.models.resnet import ResNetEncoder, is_cnn
from ssl_vit.models.vit import ViTEncoder

_BARE = (".safetensors", ".pth", ".pt", ".bin")
_WRAPPERS = ("model_ema", "state_dict_ema", "state_dict", "model")  # averaged weights before the last, as timm does
_ON_THE_HUB = re.compile(r"(?:hf[-_]hub:)?([\w.-]+/[\w.-]+(?:@[\w./-]+)?)")
# A tensor left over under one of these names is part of the encoder, which would compute something else without it.
_ENCODER = ("blocks.", "patch_embed.", "norm.", "norm_pre.", "cls_token", "pos_embed", "reg_token", "dist_token")
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError, SafetensorError)


def import_weights(
    weights: str,
    out: Path,
    *,
    name: str | None = None,
    heads: int | None = None,
    mean: PerChannel | None = None,
    std: PerChannel | None = None,
) -> tuple[Encoder, Found]:
    """Write the encoder of `weights` into the new folder `out`; returns it and what was found, as it was written down.

    weights: a file, a folder, or a model of timm's or the hub's (see `read`). name, heads: timm's name and the number
    of heads, for a bare checkpoint, which does not tell. mean, std: pixel normalization instead of what was found.
    Raises UserError for what cannot be read safely or does not fit, RunError when the hub is out of reach.
    """
    with new_folder(out) as folder:
        found = read(weights, name, heads)
        if mean is None or std is None:
            found.notes += found.assumed
        model = _build(found, found.mean if mean is None else mean, found.std if std is None else std)
        own = model.network.state_dict()
        others = [key for key in found.tensors if key not in own and not key.startswith(_ENCODER)]
        found.left_out += others
        factory.load_state(model, {k: v for k, v in found.tensors.items() if k not in others}, weights)
        factory.write_config(model, folder / factory.CONFIG)
        config = json.loads((folder / factory.CONFIG).read_text())
        config["imported"] = {key: getattr(found, key) for key in ("license", "notes", "left_out")} | {"from": weights}
        (folder / factory.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        save_file(factory.state(model), folder / factory.WEIGHTS)
    return model.eval(), found


def _build(found: Found, mean: PerChannel, std: PerChannel) -> Encoder:
    if not is_cnn(found.name):
        return ViTEncoder(found.name, found.arguments, mean, std, **found.own)
    arguments = dict(found.arguments)
    return ResNetEncoder(found.name, arguments, mean, std, arguments.pop("img_size"))


def recipe_keys(model: Encoder) -> dict[str, Any]:
    """The `encoder` keys of a recipe that builds this architecture, for `init_from`; empty where no recipe can."""
    height, width = model.image_size
    keys: dict[str, Any] = {"image_size": height if height == width else [height, width], "channels": model.channels}
    keys |= {
        key: numbers[0] if len({*numbers}) == 1 else numbers
        for key, numbers in (("mean", model.mean), ("std", model.std))
    }
    if isinstance(model, ViTEncoder):
        named = factory.named_encoder(model.name)
        ours, usual = _sizes(model), _sizes(named)
        keys |= {key: value for key, value in ours.items() if value != usual[key]}
    fields = EncoderConfig.model_fields
    keys = {"name": model.name, **{key: value for key, value in keys.items() if value != fields[key].default}}
    with torch.device("meta"):
        built = factory.build(EncoderConfig(**keys)).network.state_dict()
    here = model.network.state_dict()
    return keys if {k: v.shape for k, v in built.items()} == {k: v.shape for k, v in here.items()} else {}


def _sizes(model: ViTEncoder) -> dict[str, Any]:
    return {
        "patch_size": int(model.network.patch_embed.patch_size[0]),  # in a hybrid, cells of its feature map
        "width": model.width,
        "depth": len(model.network.blocks),
        "heads": model.heads,
        "mlp_ratio": ratio(model.width, model.network.blocks[0].mlp.fc1.out_features),
        "class_token": model.has_class_token,
        "positions": model.positions,
        "norm_eps": model.norm_eps,
    }


def read(weights: str, name: str | None = None, heads: int | None = None) -> Found:
    """Read a checkpoint file, a folder with timm's or transformers' `config.json`, a timm name (its pretrained tag
    chooses the weights) or a model of the hub (`OWNER/NAME[@REVISION]`, also after `hf-hub:`)."""
    path = Path(weights).expanduser()
    usual = (*hub.WEIGHTS_FILES, factory.WEIGHTS)  # of a folder whose config.json says the rest
    described = path.is_file() and path.name in usual and (path.parent / "config.json").is_file()
    if path.is_file() and not described:
        return _file(path, name, heads)
    if name or heads:
        raise UserError(f"{weights} tells its own sizes: leave out --name and --heads")
    if path.exists():
        return _folder(path.parent if described else path, weights)
    architecture = weights.partition(".")[0]
    if timm.is_model(architecture):
        return _timm(weights, weights, architecture, {})
    remote = _ON_THE_HUB.fullmatch(weights)
    if remote is None or (path.parent != Path() and path.parent.is_dir()):
        near = get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise UserError(f"{weights}: no such file, folder or timm model{hint}")
    return _folder(hub.download(remote[1]), weights)


def _folder(folder: Path, origin: str) -> Found:
    if (folder / factory.WEIGHTS).is_file() or (folder / "checkpoints").is_dir():
        raise UserError(f"{origin} is ssl-vit's own: every command reads it as it is, without import")
    try:
        config = json.loads((folder / "config.json").read_text())
        kind = config.get("model_type")
        if "architecture" in config:
            return _timm(f"local-dir:{folder}", origin, config["architecture"], config)
    except FileNotFoundError:
        raise UserError(f"{origin} has no config.json: give the file with the weights") from None
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{origin}: config.json is not readable: {error}") from None
    if kind not in ("vit", "vit_mae"):
        raise UserError(f"{origin}: its config.json is of no timm model and of no ViT (model_type {kind})")
    return _transformers(folder, config, origin)


def _timm(spec: str, origin: str, architecture: str, config: dict[str, Any]) -> Found:
    if not is_cnn(architecture):
        factory.named_encoder(architecture)  # refuses what is no ViT before anything is downloaded
    try:
        with hub.answers(origin, "loading"):
            network = timm.create_model(spec, pretrained=True)
    except (ValueError, LookupError, TypeError, RuntimeError, EOFError, SafetensorError, AssertionError) as error:
        raise UserError(f"{origin}: timm cannot load it: {' '.join(str(error).split())[:300]}") from None
    cfg = network.pretrained_cfg
    channels, *size = cfg["input_size"]
    if not is_cnn(architecture):
        size = network.patch_embed.img_size
    said = {key: value for key, value in (config.get("model_args") or {}).items() if key != "num_classes"}
    return Found(
        architecture,
        {**said, "in_chans": channels, "img_size": size[0] if size[0] == size[1] else tuple(size)},
        network.state_dict(),
        tuple(cfg["mean"]),
        tuple(cfg["std"]),
        {key: config[key] for key in ("position_std", "norm_eps", "positions") if key in config},
        license=cfg.get("license"),
    )


def _transformers(folder: Path, config: dict[str, Any], origin: str) -> Found:
    # The defaults are those of transformers' ViTConfig and ViTImageProcessor: files leave out what is as usual.
    file = next((folder / name for name in hub.WEIGHTS_FILES if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{origin} holds no {' and no '.join(hub.WEIGHTS_FILES)}")
    activation = config.get("hidden_act", "gelu")
    if activation != "gelu":
        raise UserError(f"{origin}: its activation is {activation}, and only gelu is read")
    tensors, others = from_transformers(read_tensors(file)[0])
    size = config.get("image_size", 224)
    size = (size, size) if isinstance(size, int) else tuple(size)
    heads = config.get("num_attention_heads", 12)
    name, arguments, notes = read_sizes(tensors, origin, heads=heads, image_size=size)
    mean, std, assumed = _preprocessing(folder, origin)
    own = {"norm_eps": config.get("layer_norm_eps", 1e-12)}
    return Found(name, arguments, tensors, mean, std, own, left_out=others, notes=notes, assumed=assumed)


def _preprocessing(folder: Path, origin: str) -> tuple[PerChannel, PerChannel, list[str]]:
    try:
        said = json.loads((folder / "preprocessor_config.json").read_text())
        assumed = []
    except FileNotFoundError:
        said, assumed = {}, ["no preprocessor_config.json: mean and std are taken to be 0.5, transformers' default"]
    except (OSError, ValueError) as error:
        raise UserError(f"{origin}: preprocessor_config.json is not readable: {error}") from None
    if not said.get("do_normalize", True):
        return 0.0, 1.0, assumed
    mean, std = (said.get(key, 0.5) for key in ("image_mean", "image_std"))
    mean, std = (tuple(value) if isinstance(value, list) else value for value in (mean, std))
    return mean, std, assumed


def _file(path: Path, name: str | None, heads: int | None) -> Found:
    if path.suffix == ".npz":
        if heads:
            raise UserError(f"{path} tells its own number of heads: leave out --heads")
        return google.read(path, name)
    if path.suffix not in _BARE:
        raise UserError(f"{path}: weights are read from {', '.join(_BARE)} and .npz files")
    tensors, notes = read_tensors(path)
    others: list[str] = []
    own: dict[str, Any] = {}
    mean: PerChannel = IMAGENET_DEFAULT_MEAN
    std: PerChannel = IMAGENET_DEFAULT_STD
    said = "ImageNet's, as for MAE, DeiT and DINO"
    if any(key.endswith("embeddings.cls_token") for key in tensors):
        tensors, others = from_transformers(tensors)
        own, mean, std, said = {"norm_eps": 1e-12}, 0.5, 0.5, "0.5, transformers' default"
        notes.append("the layer norms' epsilon is taken to be 1e-12, transformers' default")
    if "register_tokens" in tensors:
        tensors = _with_registers(tensors)
    name, arguments, deduced = read_sizes(tensors, str(path), name=name, heads=heads)
    if arguments["in_chans"] != 3:
        mean, std, said = 0.5, 0.5, "0.5"
    assumed = [f"the file has no mean and std of its pixels: taken to be {said} (--mean, --std)"]
    return Found(name, arguments, tensors, mean, std, own, left_out=others, notes=notes + deduced, assumed=assumed)


def _with_registers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """DINOv2's own names for a ViT with registers -> timm's. There the class token has a position, and the registers
    come after it without one; timm has positions for the patches alone."""
    kept = {name: tensor for name, tensor in tensors.items() if name != "register_tokens"}
    kept["reg_token"] = tensors["register_tokens"]
    if "cls_token" in kept and "pos_embed" in kept:  # else the sizes are refused
        kept["cls_token"] = kept["cls_token"] + kept["pos_embed"][:, :1]
        kept["pos_embed"] = kept["pos_embed"][:, 1:]
    return kept


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a safetensors file or a PyTorch checkpoint, out of its wrappers, and which wrapper that was.

    Raises UserError for a damaged file, for one with code in it (which is not run), for one without tensors.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path), []
        # MAE and timm keep their settings in one beside the weights; it only holds values.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it holds code ({code[1]})" if code else "it is no PyTorch checkpoint, or a damaged one"
        raise UserError(f"{path}: refused: {why}; only plain tensors are read, and nothing was run") from None
    except _DAMAGED as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not a readable checkpoint ({type(error).__name__}: {why})") from None
    wrapper = next((key for key in _WRAPPERS if isinstance(content, dict) and isinstance(content.get(key), dict)), None)
    inside = content[wrapper] if wrapper else content
    if not isinstance(inside, dict) or not any(isinstance(value, torch.Tensor) for value in inside.values()):
        keys = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise UserError(f"{path}: no tensors there, nor under {', '.join(_WRAPPERS)}; it holds {keys}")
    tensors = {key: value for key, value in inside.items() if isinstance(value, torch.Tensor)}
    return clean_state_dict(tensors), [f"read from its '{wrapper}'"] if wrapper else []
