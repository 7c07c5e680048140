"""The encoder: timm's VisionTransformer behind a small token interface, shared by every stage and evaluator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ssl_vit.interfaces import UserError
from ssl_vit.models import BackboneConfig
from ssl_vit.models.position import resample

Pooling = Literal["token", "mean", "both", "patches"]

WEIGHTS, CONFIG = "backbone.safetensors", "config.json"


class Backbone(nn.Module):
    """A pre-LN ViT encoder (paper, section 3.1, equations 1 to 4) as `embed -> [corrupt] -> encode`.

    images_BCHW are uint8, 0..255; N is the number of patches, D the width, P the prefix tokens (class, registers).
    """

    def __init__(
        self, name: str, arguments: dict[str, Any], mean: float, std: float, position_std: float = 0.02
    ) -> None:
        """timm's `name` built with `arguments`, its positions drawn with `position_std`; see `build`.

        Raises UserError for a name that is no ViT.
        """
        super().__init__()
        if name not in timm.list_models():
            near = get_close_matches(name, timm.list_models("vit*"), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UserError(f"backbone.name='{name}' is no timm model{hint}")
        try:
            vit = timm.create_model(name, pretrained=False, num_classes=0, **arguments)
        except (TypeError, AssertionError, ValueError) as error:
            with torch.device("meta"):
                vit = timm.create_model(name, pretrained=False)
            if isinstance(vit, VisionTransformer):
                raise UserError(f"backbone.name='{name}' cannot have these sizes: {arguments} ({error})") from None
        if not isinstance(vit, VisionTransformer):
            raise UserError(f"backbone.name='{name}' is a {type(vit).__name__}, not a VisionTransformer")
        if vit.attn_pool is not None or not isinstance(vit.fc_norm, nn.Identity):
            raise UserError(f"backbone.name='{name}' pools before its last norm; use a class-token or plain mean ViT")
        self.vit = vit
        self.name, self.arguments, self.mean, self.std = name, arguments, mean, std
        self.position_std = position_std
        nn.init.trunc_normal_(self.vit.pos_embed, std=position_std)

    @property
    def width(self) -> int:
        return int(self.vit.embed_dim)

    @property
    def patch_size(self) -> int:
        """Pixels of the image to a patch's side; in a hybrid, of the image, not of the CNN's feature map."""
        return self.image_size // int(self.vit.patch_embed.grid_size[0])

    @property
    def image_size(self) -> int:
        return int(cast(tuple[int, int], self.vit.patch_embed.img_size)[0])

    @property
    def heads(self) -> int:
        return int(self.vit.blocks[0].attn.num_heads)

    @property
    def patches(self) -> int:
        return int(self.vit.patch_embed.num_patches)

    @property
    def channels(self) -> int:
        return int(self.vit.in_chans)

    def embed(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """uint8 images -> patch embeddings (B, N, D), before positions. Normalises on the images' device."""
        scale, shift = 1 / (255 * self.std), self.mean / self.std
        return cast(torch.Tensor, self.vit.patch_embed(images_BCHW.to(torch.float32) * scale - shift))

    def encode(self, tokens_BND: torch.Tensor, keep_BK: torch.Tensor | None = None) -> torch.Tensor:
        """Patch embeddings -> normalised output tokens (B, P + N, D); with `keep_BK` (int64 patch indices) only
        those patches' outputs (B, K, D)."""
        tokens = self.vit.norm_pre(self.vit.patch_drop(self.vit._pos_embed(tokens_BND)))
        tokens = self.vit.blocks(tokens)
        if keep_BK is not None:
            index = (keep_BK + self.vit.num_prefix_tokens)[..., None].expand(-1, -1, tokens.shape[-1])
            tokens = tokens.gather(1, index)
        return cast(torch.Tensor, self.vit.norm(tokens))

    def pool(self, outputs: torch.Tensor, pooling: Pooling) -> torch.Tensor:
        """Output tokens (B, P + N, D) -> one vector an image: the class token (B, D), the mean of the patches (B, D),
        both side by side (B, 2D), or all patches side by side (B, N * D), which keeps the layout as pixels do."""
        patches = outputs[:, self.vit.num_prefix_tokens :]
        if pooling in ("token", "both") and not self.vit.has_class_token:
            raise UserError(f"pooling={pooling} needs a class token, which {self.name} does not have: use mean")
        if pooling == "token":
            return outputs[:, 0]
        if pooling == "mean":
            return patches.mean(1)
        if pooling == "patches":
            return patches.flatten(1)
        return torch.cat([outputs[:, 0], patches.mean(1)], dim=1)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """uint8 images -> normalised output tokens (B, P + N, D)."""
        return self.encode(self.embed(images_BCHW))


def build(config: BackboneConfig) -> Backbone:
    """A freshly initialised backbone (timm's initialisation, torch's default generator).

    Raises UserError for a name that timm does not know or that is not a VisionTransformer, and for sizes that do not
    fit together.
    """
    with torch.device("meta"):
        named = Backbone(config.name, {}, config.mean, config.std)  # only to read the sizes that the name implies
    patch_size = config.patch_size or named.patch_size
    width, heads = config.width or named.width, config.heads or named.heads
    if config.image_size % patch_size:
        near = config.image_size // patch_size * patch_size or patch_size
        raise UserError(
            f"backbone.image_size={config.image_size} is not a multiple of the patch size {patch_size}: "
            f"use {near} or {near + patch_size}, or another backbone.patch_size"
        )
    if width % heads:
        raise UserError(f"backbone.width={width} is not a multiple of backbone.heads={heads}")
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
    return Backbone(config.name, arguments, config.mean, config.std, config.position_std)


def write_config(backbone: Backbone, path: Path) -> None:
    """Write timm's `config.json`, from which `timm.create_model("local-dir:FOLDER")` builds the same model."""
    channels = backbone.channels
    content = {
        "architecture": backbone.name,
        "num_classes": 0,
        "num_features": backbone.width,
        "global_pool": "token",
        "model_args": backbone.arguments,
        "pretrained_cfg": {
            "input_size": [channels, backbone.image_size, backbone.image_size],
            "fixed_input_size": True,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "mean": [backbone.mean] * channels,
            "std": [backbone.std] * channels,
            "num_classes": 0,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
        "position_std": backbone.position_std,  # ours: an untrained twin starts the same way
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def state(backbone: Backbone) -> dict[str, torch.Tensor]:
    """The weights by timm's own names, contiguous on the CPU."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in backbone.vit.state_dict().items()}


def load_state(backbone: Backbone, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
    """Load weights by timm's names. Raises UserError listing the keys and shapes that do not fit."""
    own = backbone.vit.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in tensors]
    wrong += [f"{name} is unknown" for name in tensors if name not in own]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(f"{origin} does not fit this backbone: {'; '.join(wrong[:3])}{more}")
    backbone.vit.load_state_dict(dict(tensors))


def initialise(model: Backbone, source: Backbone, origin: str) -> None:
    """Give `model` the weights of `source`, its positions interpolated where the patch grids differ (timm's method).

    Raises UserError when anything else differs.
    """
    for what, own, other in (
        ("backbone.heads", model.heads, source.heads),
        ("backbone.mean", model.mean, source.mean),
        ("backbone.std", model.std, source.std),
    ):
        if own != other:
            raise UserError(f"{origin} does not fit this backbone: {what} is {other} there, {own} here")
    weights = state(source)
    old, new = source.vit.patch_embed.grid_size, model.vit.patch_embed.grid_size
    prefix = 0 if source.vit.no_embed_class else source.vit.num_prefix_tokens
    weights["pos_embed"] = resample(weights["pos_embed"], old, new, prefix)
    load_state(model, weights, origin)


def fresh(like: Backbone, seed: int, image_size: int | None = None) -> Backbone:
    """An untrained backbone of the same architecture (at another image size where asked), initialised by `seed`."""
    arguments = dict(like.arguments)
    if image_size and image_size != like.image_size:
        if image_size % like.patch_size:
            raise UserError(f"image_size={image_size} is not a multiple of the patch size {like.patch_size}")
        arguments["img_size"] = image_size
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Backbone(like.name, arguments, like.mean, like.std, like.position_std)


def find_weights(path: Path | str) -> Path:
    """The folder holding `backbone.safetensors` for a run, a checkpoint or a weights folder. UserError if none."""
    path = Path(path)
    if (path / WEIGHTS).is_file():
        return path
    checkpoints = sorted(path.glob("checkpoints/step_*"))
    for checkpoint in reversed(checkpoints):
        if (checkpoint / WEIGHTS).is_file():
            return checkpoint
    if not path.exists():
        raise UserError(f"{path}: no such run, checkpoint or weights folder")
    raise UserError(f"{path}: no {WEIGHTS} there, nor in its checkpoints; did the run save one yet?")


def load(path: Path | str) -> Backbone:
    """The backbone of a run, a checkpoint or a weights folder, in evaluation mode and with its own sizes.

    Raises UserError for a missing folder, a damaged file, or weights that do not fit their `config.json`.
    """
    folder = find_weights(path)
    try:
        config = json.loads((folder / CONFIG).read_text())
        cfg = config["pretrained_cfg"]
        arguments, position_std = config.get("model_args", {}), config.get("position_std", 0.02)
        backbone = Backbone(config["architecture"], arguments, cfg["mean"][0], cfg["std"][0], position_std)
        tensors = load_file(folder / WEIGHTS)
    except (OSError, LookupError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"{folder}: not a readable backbone ({type(error).__name__}: {error})") from None
    load_state(backbone, tensors, str(folder))
    return backbone.eval()
