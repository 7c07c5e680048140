"""Weights in: from timm, transformers, Google's .npz and bare checkpoints to a folder that `factory.load` reads.

Nothing in them is executed: they are read as safetensors, by `torch.load(weights_only=True)` or by
`numpy.load(allow_pickle=False)`.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from timm.models import load_state_dict

from ssl_vit.files import WEIGHTS, check_archive, expanded, new_folder
from ssl_vit.interfaces import UserError, pair
from ssl_vit.models import PerChannel, factory
from ssl_vit.models.encoder import Encoder, close_names
from ssl_vit.models.exchange import google, hub
from ssl_vit.models.exchange.names import Tensors, from_transformers
from ssl_vit.models.exchange.sizes import PLAIN, Imported, read_sizes, square
from ssl_vit.models.vit import OWN_SETTINGS, ViTEncoder

_CHECKPOINTS = (".safetensors", ".pth", ".pt", ".bin", ".tar")
_ON_THE_HUB = re.compile(r"(?:hf[-_]hub:)?([\w.-]+/[\w.-]+(?:@[\w./-]+)?)")
# An unknown tensor under one of these names is part of the encoder, which would compute something else without it.
_ENCODER = ("blocks.", "patch_embed.", "norm.", "norm_pre.", "cls_token", "pos_embed", "reg_token", "dist_token")
# What tensors and descriptions of other types and sizes than expected raise.
_MISSHAPEN = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError)
_DAMAGED = (*factory.DAMAGED, EOFError, MemoryError, AssertionError, struct.error)


def import_weights(
    weights: str,
    out: Path,
    *,
    name: str | None = None,
    heads: int | None = None,
    mean: PerChannel | None = None,
    std: PerChannel | None = None,
) -> tuple[Encoder, Imported]:
    """Write the encoder of `weights` into the new folder `out`; returns it and where it came from.

    weights: a file, a folder, or a model of timm's or the hub's (see `read`).
    name, heads: for a bare checkpoint: timm's name of the architecture, and the number of heads where it differs.
    mean, std: pixel normalization instead of what the source says.
    Raises UserError for what cannot be read safely or does not fit, RunError when the hub is out of reach.
    """
    with new_folder(out) as folder:
        try:
            imported = read(weights, name, heads)
            model = build(imported, imported.mean if mean is None else mean, imported.std if std is None else std)
        except _MISSHAPEN as error:
            raise UserError(
                f"{weights}: its tensors or its config.json do not describe a model ({type(error).__name__}: {error}); "
                "get the weights again"
            ) from None
        imported.skipped += load_tensors(model, imported.tensors, weights)
        _try_out(model, weights)
        about = {key: getattr(imported, key) for key in ("license", "notes", "skipped")} | {"from": weights}
        factory.write_config(model, folder / factory.CONFIG, imported=about)
        save_file(factory.state(model), folder / WEIGHTS)
    return model, imported


def _try_out(model: Encoder, weights: str) -> None:
    """Let the model read a blank image, in evaluation mode. Raises UserError where it cannot."""
    try:
        with torch.no_grad():
            tokens = model.eval()(torch.zeros(1, model.channels, *model.image_size, dtype=torch.uint8))
    except _MISSHAPEN as error:
        why = f"{type(error).__name__}: {_first_words(error)}"
        raise UserError(f"{weights}: the model that its config.json describes fails ({why}); correct it") from None
    if not tokens.isfinite().all():
        raise UserError(f"{weights}: its features are infinite or NaN: its weights or its config.json are damaged")


def load_tensors(encoder: Encoder, tensors: Tensors, origin: str) -> list[str]:
    """Load the tensors that belong to an encoder; returns the names of the others, such as those of heads. Raises
    UserError if they do not fit."""
    known = encoder.network.state_dict()
    others = [key for key in tensors if key not in known and not key.startswith(_ENCODER)]
    factory.load_state(encoder, {key: value for key, value in tensors.items() if key not in others}, origin)
    return others


def build(imported: Imported, mean: PerChannel, std: PerChannel) -> Encoder:
    """A freshly initialized encoder of the architecture that was found."""
    if factory.is_vit(imported.name):
        return ViTEncoder(imported.name, imported.arguments, mean, std, **imported.own)
    arguments = dict(imported.arguments)
    return factory.build_timm(imported.name, arguments, mean, std, arguments.pop("img_size"))


def read(weights: str, name: str | None = None, heads: int | None = None) -> Imported:
    """Read weights from any source.

    weights: a checkpoint file; a folder with timm's or transformers' `config.json`; a timm name, also after `timm:`
        (its tag selects the pretrained weights); a model of the hub (`OWNER/NAME[@REVISION]`, also after `hf-hub:`).
    name: timm's name of the architecture, for a file that does not state it.
    heads: number of heads of a ViT, if it differs from that of `name`.
    """
    path = expanded(weights)
    described = path.name in (*hub.WEIGHTS_FILES, WEIGHTS) and (path.parent / "config.json").is_file()
    if path.is_file() and not described:
        return _file(path, name, heads)
    model = weights.removeprefix("timm:")
    architecture, remote = model.partition(".")[0], _ON_THE_HUB.fullmatch(weights)
    of_timm, local = timm.is_model(architecture), path.exists()
    if not (local or of_timm) and (remote is None or (path.parent != Path() and path.parent.is_dir())):
        raise UserError(f"{weights}: no such file, folder or timm model{close_names(architecture)}")
    if name or heads:
        raise UserError(f"{weights} defines its architecture{' (config.json)' * local}: remove --name and --heads")
    if local:
        return _folder(path if path.is_dir() else path.parent, weights)
    if of_timm:
        return _timm(model, weights, architecture, {})
    assert remote is not None
    return _folder(hub.download(remote[1]), weights)


def _folder(folder: Path, origin: str) -> Imported:
    ours = ("recipe.yaml", "plan.json") if not (folder / "config.json").exists() else ()
    if (folder / "checkpoints").is_dir() or any((folder / name).is_file() for name in (WEIGHTS, *ours)):
        factory.find_weights(folder)  # raises UserError that says what is missing
        raise UserError(f"{origin} is already an ssl-vit folder and does not need to be imported")
    if not (folder / "config.json").is_file():
        raise UserError(f"{origin} has no config.json: give the file with the weights")
    config = _json(folder / "config.json", origin)
    if "architecture" in config:
        return _timm(f"local-dir:{folder}", origin, config["architecture"], config)
    kind = config.get("model_type")
    if kind not in ("vit", "vit_mae"):
        raise UserError(f"{origin}: its config.json is neither a timm model's nor a ViT's (model_type {kind})")
    return _transformers(folder, config, origin)


def _json(path: Path, origin: str) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{origin}: {path.name} is not readable: {error}") from None


def _timm(spec: str, origin: str, architecture: str, config: dict[str, Any]) -> Imported:
    if not timm.is_model(architecture):
        raise UserError(f"{origin}: timm has no architecture '{architecture}'{close_names(architecture)}")
    try:
        with nullcontext() if spec.startswith("local-dir:") else hub.hub_errors(origin):
            network = timm.create_model(spec, pretrained=True)
    except _DAMAGED as error:
        raise UserError(f"{origin}: timm cannot load it: {_first_words(error)}") from None
    cfg = network.pretrained_cfg
    channels, *size = cfg["input_size"]
    larger = int(size[0] / (cfg.get("crop_pct") or 1))
    notes = [f"timm resizes test images to {larger} pixels, then crops; here data.evaluation_resize sets the resize"]
    arguments = {key: value for key, value in (config.get("model_args") or {}).items() if key != "num_classes"}
    size = network.patch_embed.img_size if factory.is_vit(architecture) else pair(arguments.get("img_size", size))
    return Imported(
        architecture,
        {**arguments, "in_chans": channels, "img_size": square(size)},
        network.state_dict(),
        tuple(cfg["mean"]),
        tuple(cfg["std"]),
        {key: config[key] for key in OWN_SETTINGS if key in config},
        notes=notes,
        license=cfg.get("license"),
    )


def _transformers(folder: Path, config: dict[str, Any], origin: str) -> Imported:
    # The defaults are those of transformers' ViTConfig and ViTImageProcessor: files do not repeat them.
    file = next((folder / name for name in hub.WEIGHTS_FILES if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{origin} holds no {' and no '.join(hub.WEIGHTS_FILES)}")
    activation = config.get("hidden_act", "gelu")
    if activation != "gelu":
        raise UserError(f"{origin}: its activation is {activation}, and only gelu is supported")
    tensors, skipped = from_transformers(_tensors(file))
    size = config.get("image_size", 224)
    size = (size, size) if isinstance(size, int) else tuple(size)
    heads = config.get("num_attention_heads", 12)
    arguments, notes = read_sizes(tensors, origin, PLAIN, heads=heads, image_size=size), list[str]()
    processor = _json(folder / "preprocessor_config.json", origin)
    if not processor:
        notes.append("no preprocessor_config.json: mean and std are assumed to be 0.5, transformers' default")
    mean, std = (processor.get(key, 0.5) for key in ("image_mean", "image_std"))
    if not processor.get("do_normalize", True):
        mean, std = 0.0, 1.0
    settings = {"norm_eps": config.get("layer_norm_eps", 1e-12)}
    return Imported(PLAIN, arguments, tensors, mean, std, settings, skipped=skipped, notes=notes)


def _file(path: Path, name: str | None, heads: int | None) -> Imported:
    if path.suffix == ".npz":
        if name or heads:
            raise UserError(f"{path} defines its architecture: remove --name and --heads")
        return google.read(path)
    if path.suffix not in _CHECKPOINTS:
        raise UserError(f"{path}: weights are read from {', '.join(_CHECKPOINTS)} and .npz files")
    tensors = _tensors(path)
    name = name or _stated_name(path)
    if name is None:
        raise UserError(f"{path} does not state its architecture: give timm's name of it, such as vit_base_patch16_224")
    if not timm.is_model(name):
        raise UserError(f"{path}: timm has no architecture '{name}'{close_names(name)}")
    if factory.is_vit(name) and "register_tokens" not in tensors:  # DINOv2's own files: timm renames and merges
        arguments = read_sizes(tensors, str(path), name, heads=heads)
    else:
        arguments, tensors = _through_timm(path, tensors, name)
    cfg, channels = timm.get_pretrained_cfg(name), arguments["in_chans"]
    mean, std = (cfg.mean, cfg.std) if cfg and len(cfg.mean) == channels else (0.5, 0.5)
    note = f"the file has no mean and std of its pixels: assumed to be {mean} and {std}, as in timm's {name}"
    height, width = pair(arguments["img_size"])  # of so many positions, a square; of timm's own model, that of its name
    assumed = f"the file has no image size: assumed to be {height}x{width} pixels"
    architecture = name.partition(".")[0]  # a tag names weights, and with them their mean, std and image size
    notes = [note, assumed]
    if heads is None and "num_heads" in arguments:
        notes.append(f"the file has no number of heads: assumed to be {arguments['num_heads']}, as in timm's {name}")
    return Imported(architecture, arguments, tensors, mean, std, notes=notes)


def _stated_name(path: Path) -> str | None:
    """The architecture in the metadata of a safetensors file or in a checkpoint of timm's training script."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            stated = file.metadata() or {}
    else:
        with torch.serialization.safe_globals([argparse.Namespace]):
            stated = torch.load(path, map_location="cpu", weights_only=True)
    name = next((stated[key] for key in ("architecture", "arch") if key in stated), None)
    return name.partition(".")[0] if isinstance(name, str) else None


def _through_timm(path: Path, tensors: Tensors, name: str) -> tuple[dict[str, Any], Tensors]:
    """Arguments of timm's `name`, at its own sizes, and the tensors under its names, as timm renames them."""
    cfg = timm.get_pretrained_cfg(name)
    heads = (cfg.classifier,) if isinstance(cfg.classifier, str) else cfg.classifier or ()
    head_weights = [
        tensors[key] for head in (*heads, "head", "fc", "classifier") if (key := f"{head}.weight") in tensors
    ]
    stem = tensors.get(f"{cfg.first_conv}.weight")
    channels = int(stem.shape[1]) if stem is not None and stem.ndim == 4 else cfg.input_size[0]
    classes, size = (len(head_weights[0]) if head_weights else 0), cfg.input_size[1:]
    overlay = {"state_dict": tensors, "num_classes": classes, "label_offset": 0, "input_size": (channels, *size)}
    try:
        network = timm.create_model(
            name, pretrained=True, num_classes=classes, in_chans=channels, pretrained_cfg_overlay=overlay
        )
    except _DAMAGED as error:
        raise UserError(f"{path} does not fit timm's {name}: {_first_words(error)}") from None
    state = network.state_dict()
    missing = [key for key in state if key not in tensors and not key.endswith("num_batches_tracked")]
    if missing and _loads_anything(name):
        raise UserError(f"{path} does not fit timm's {name}: it lacks {', '.join(missing)[:300]}")
    return {"in_chans": channels, "img_size": square(size)}, state


def _loads_anything(name: str) -> bool:
    """Whether timm ignores that tensors of this architecture are missing, as with DLA and Inception-v3."""
    nothing = {"state_dict": {"": torch.zeros(0)}, "num_classes": 0}
    try:
        with torch.device("meta"):
            timm.create_model(name, pretrained=True, num_classes=0, pretrained_cfg_overlay=nothing)
    except _DAMAGED:
        return False
    return True


def _tensors(path: Path) -> Tensors:
    """The tensors of a safetensors file or a PyTorch checkpoint, without the wrappers of training scripts. Raises
    UserError for a damaged file, for one with code in it (which is not run), for one without tensors."""
    try:
        if zipfile.is_zipfile(path):
            check_archive(path)
        content = load_state_dict(str(path), weights_only=True)  # averaged weights (EMA) before the last
    except _DAMAGED as error:
        why = _first_words(error)
        raise UserError(f"{path}: not a readable checkpoint of plain tensors; nothing in it was run ({why})") from None
    content = teacher if isinstance(teacher := content.get("teacher"), dict) else content  # DINO's averaged weights
    tensors = {
        key.removeprefix("backbone."): value for key, value in content.items() if isinstance(value, torch.Tensor)
    }
    if not tensors:
        raise UserError(f"{path}: no tensors there; it holds {', '.join(map(str, content))}")
    return tensors


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
