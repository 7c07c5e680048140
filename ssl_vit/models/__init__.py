"""The one encoder that every stage shares: its configuration (torch-free; `factory.py` builds it)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ssl_vit.interfaces import Config, Size


def _image_size(value: Any) -> Any:
    sides = value if isinstance(value, list | tuple) and len(value) == 2 else [value]
    if not all(isinstance(side, int) and not isinstance(side, bool) and 1 <= side <= 16384 for side in sides):
        raise ValueError("give pixels: a square's side such as 224, or [height, width]")
    return value


ImageSize = Annotated[Size, BeforeValidator(_image_size)]
Pooling = Literal["token", "mean", "both", "patches"]
PerChannel = float | tuple[float, ...]
Positions = Literal["learned", "learned_2d", "sincos2d", "relative", "none"]
Resampling = Literal["timm", "google"]


class EncoderConfig(Config):
    """A timm Vision Transformer, by name, with any size overridden; or, for classification, another network of timm.

    name: a timm model whose class is VisionTransformer: plain (`vit_base_patch16_224`, `vit_tiny_patch16_224`, ...),
        with registers (`vit_small_patch14_reg4_dinov2`), or hybrid (`vit_base_r50_s16_224`: patches of a ResNet's
        feature map); or any other network (`resnet50`, `convnext_tiny`), which takes name, image_size, channels,
        drop_path, mean and std only.
    image_size: pixels, a square's side or [height, width].
    channels: 1 gray, 3 RGB, 4 RGBA.
    patch_size: pixels; in a hybrid, cells of the feature map (1: the paper's 1x1 patches). None: as in the timm model.
    width: size of the embeddings; None: as in the timm model.
    depth: number of blocks; None: as in the timm model.
    heads: attention heads; None: as in the timm model.
    mlp_ratio: width of the MLPs over that of the embeddings; None: as in the timm model.
    class_token: whether the encoder has a class token (None: as in the timm model). Without one, `pooling`
        must be mean or patches.
    positions: the kinds of the paper's appendix D.4, and one more. `learned`: 1D, the paper's default. `learned_2d`: a
        vector of half the width for each column and each row, saved as the 1D positions that they amount to.
        `sincos2d`: constant. `none`. `relative`: in every block and head, a learned number for each offset between two
        patches is added to their attention logit (timm's RelPosBias, as in Swin and BEiT); the paper adds the query's
        product with a learned embedding of the offset instead. timm's and transformers' ViT do not have them.
    position_resampling: how `init_from` fits positions to another patch grid: `timm` (bicubic, antialiased) or `google`
        (scipy's zoom of order 1, the paper authors').
    dropout: dropout rate after the position embeddings and after every linear layer except qkv (paper, table 3: 0.1).
    init: `jax` (the authors' initialization: Xavier-uniform projections, as in timm) or `timm` (normal 0.02).
    position_std: standard deviation of the initial learned positions (authors: 0.02).
    drop_path: stochastic depth rate of the last block.
    norm_eps: epsilon of the layer norms; None: timm's for this name (1e-6 in most).
    mean: subtracted from pixels scaled to [0, 1], one number or one per channel.
    std: standard deviation that they are divided by; a mean and std of 0.5 give the paper authors' [-1, 1].
    """

    name: str = "vit_base_patch16_224"
    image_size: ImageSize = 224
    channels: int = Field(3, ge=1, le=1024)
    patch_size: int | None = Field(None, ge=1, le=4096)
    width: int | None = Field(None, ge=1, le=16384)
    depth: int | None = Field(None, ge=1, le=1024)
    heads: int | None = Field(None, ge=1, le=1024)
    mlp_ratio: float | None = Field(None, gt=0, le=64)
    class_token: bool | None = None
    positions: Positions = "learned"
    position_resampling: Resampling = "timm"
    dropout: float = Field(0.0, ge=0, lt=1)
    drop_path: float = Field(0.0, ge=0, lt=1)
    init: Literal["jax", "timm"] = "jax"
    position_std: float = Field(0.02, gt=0)
    norm_eps: float | None = Field(None, gt=0)
    mean: PerChannel = 0.5
    std: PerChannel = 0.5
