"""The ViT encoder: timm's VisionTransformer (and its hybrids) as `embed -> [corrupt] -> encode`."""

from __future__ import annotations

from typing import Any, Self

import torch
from timm.layers import RmsNorm, build_sincos2d_pos_embed
from torch import nn

from ssl_vit.interfaces import Size, UserError, pair
from ssl_vit.models import Pooling, Positions
from ssl_vit.models.blocks import Pick, make_last, run_all, run_last, take
from ssl_vit.models.encoder import Encoder, Numbers, create
from ssl_vit.models.position import VisionTransformer2D, relate

OWN_SETTINGS = ("position_std", "norm_eps", "positions")  # beside timm's arguments


def heads_of(vit: Any) -> int:
    """Attention heads of timm's VisionTransformer, with any of its blocks."""
    return next(int(module.num_heads) for module in vit.blocks[0].modules() if hasattr(module, "num_heads"))


class ViTEncoder(Encoder):
    """A pre-LN ViT encoder (paper, section 3.1, equations 1 to 4). In a hybrid the patches are cut from a CNN's feature
    map.

    heads: attention heads per block. norm_eps: epsilon of the layer norms.
    """

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any],
        mean: Numbers,
        std: Numbers,
        position_std: float = 0.02,
        norm_eps: float | None = None,
        positions: Positions = "learned",
    ) -> None:
        """timm's `name` built with `arguments`; the other arguments as in `EncoderConfig`.

        Raises UserError for sizes that the network cannot have, and for a mean or std of another number of channels.
        """
        arguments = {**arguments, "dynamic_img_size": False}  # sizes change through `untrained` only
        if positions in ("none", "relative"):
            arguments["pos_embed"] = "none"
        super().__init__(name, arguments, mean, std)
        vit = create(name, arguments)
        if vit.attn_pool is not None:  # a head, as in SigLIP: the encoder is what comes before it
            self.arguments |= {"global_pool": "avg", "fc_norm": False}
            vit = create(name, self.arguments)
        if vit.pos_embed is None and "pos_embed" not in arguments:
            raise UserError(f"encoder.name='{name}' has no position embeddings: use another VisionTransformer")
        self.network = vit
        self.width, self.image_size = int(vit.embed_dim), pair(vit.patch_embed.img_size)
        self.heads = heads_of(vit)
        self.prefix_tokens, self.has_class_token = vit.num_prefix_tokens, vit.has_class_token
        self.position_std, self.positions = position_std, positions
        if positions != "relative":
            make_last(vit.blocks[-1])
        norms = [module for module in vit.modules() if isinstance(module, nn.LayerNorm | RmsNorm)]
        for norm in norms:
            norm.eps = norm.eps if norm_eps is None else norm_eps
        self.norm_eps = norms[0].eps if norms else None
        if vit.pos_embed is not None:
            nn.init.trunc_normal_(vit.pos_embed, std=position_std)
        if positions == "sincos2d":
            self._fix_positions()
        elif positions == "learned_2d":
            self._factorize_positions()
        elif positions == "relative":
            self._relate_positions()

    def _factorize_positions(self) -> None:
        if self.width % 2:
            raise UserError(f"encoder.positions=learned_2d needs an even width, not {self.width}")
        vit, rows = self.network, 2 * self.position_prefix + sum(self.grid)
        table = torch.empty(rows, self.width // 2, device=vit.pos_embed.device)
        del vit.pos_embed
        vit.__class__ = VisionTransformer2D
        vit.pos_embed_2d = nn.Parameter(nn.init.trunc_normal_(table, std=self.position_std))

    def _relate_positions(self) -> None:
        if self.prefix_tokens > self.has_class_token:
            raise UserError(f"encoder.positions=relative: {self.name} has registers; use a model without them")
        for block in self.network.blocks:
            relate(block, self.grid, self.heads, self.prefix_tokens, self.position_std)

    def _fix_positions(self) -> None:
        """Constant sin-cos positions of the patch grid by timm (MoCo v3's frequencies); zeros for the prefix tokens."""
        if self.width % 4:
            raise UserError(f"encoder.positions=sincos2d needs a width that 4 divides, not {self.width}")
        positions = self.network.pos_embed
        patches = build_sincos2d_pos_embed([*self.grid], self.width, device=positions.device)
        with torch.no_grad():
            positions.zero_()
            positions[:, -self.patches :] = patches
        positions.requires_grad_(False)

    @property
    def grid(self) -> tuple[int, int]:
        rows, columns = self.network.patch_embed.grid_size
        return int(rows), int(columns)

    @property
    def patch_size(self) -> int:
        """Pixels of the image per side of a patch; in a hybrid too (not cells of the CNN's feature map)."""
        return self.image_size[0] // self.grid[0]

    @property
    def position_prefix(self) -> int:
        """How many position embeddings belong to prefix tokens: 0 where those have no position."""
        return 0 if self.network.no_embed_class else self.prefix_tokens

    @property
    def own_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OWN_SETTINGS}

    def untrained(self, image_size: Size | None = None) -> Self:
        size = self.image_size if image_size is None else pair(image_size)
        if size != self.image_size:  # which imported weights may have for a convolution that drops the last pixels
            check_size(size, self.patch_size, "image_size")
        return type(self)(self.name, {**self.arguments, "img_size": size}, self.mean, self.std, **self.own_settings)

    def embed(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """uint8 images -> patch embeddings (B, N, D), before positions. Normalizes on the images' device."""
        patches_BND: torch.Tensor = self.network.patch_embed(self.normalized(images_BCHW))
        return patches_BND

    def enter(self, tokens_BND: torch.Tensor, visible_BK: torch.Tensor | None = None) -> torch.Tensor:
        """Patch embeddings -> what the first block reads (B, P + N, D): prefix tokens prepended, positions added.

        visible_BK: int64 patch indices; only those patches enter (B, P + K, D), each with its own position.
        """
        vit = self.network
        own, positions = (vit.cls_token, vit.reg_token), vit.pos_embed
        prefix = [token.expand(tokens_BND.shape[0], -1, -1) for token in own if token is not None]
        if positions is None:  # or the blocks have relative ones
            tokens = torch.cat([*prefix, tokens_BND], dim=1).float()  # a sum of blocks, too, stays in float32
        elif vit.no_embed_class:  # positions are the patches' alone
            tokens = torch.cat([*prefix, tokens_BND + positions], dim=1)
        else:
            tokens = torch.cat([*prefix, tokens_BND], dim=1) + positions
        if visible_BK is not None:
            tokens = take(tokens, self._with_prefix(visible_BK))
        entered: torch.Tensor = vit.norm_pre(vit.patch_drop(vit.pos_drop(tokens)))
        return entered

    def _with_prefix(self, patches_BK: torch.Tensor) -> torch.Tensor:
        """Indices of patches -> indices of all prefix tokens and these patches among the tokens, (B, P + K)."""
        prefix = torch.arange(self.prefix_tokens, device=patches_BK.device).expand(len(patches_BK), -1)
        return torch.cat([prefix, patches_BK + self.prefix_tokens], dim=1)

    def encode(self, tokens_BND: torch.Tensor, keep_BK: torch.Tensor | None = None) -> torch.Tensor:
        """Patch embeddings -> output tokens (B, P + N, D), normalized unless the model's last norm comes after pooling.

        keep_BK: int64 patch indices; only those patches' outputs are returned (B, K, D), always normalized.
        """
        if keep_BK is None:
            return self._run_blocks(self.enter(tokens_BND), None)
        index_BK = keep_BK + self.prefix_tokens
        return self.finish(self._run_blocks(self.enter(tokens_BND), lambda tokens: take(tokens, index_BK)))

    def encode_visible(self, tokens_BND: torch.Tensor, visible_BK: torch.Tensor) -> torch.Tensor:
        """Patch embeddings -> output tokens (B, P + K, D) of the prefix tokens and these patches, always normalized.

        visible_BK: int64 patch indices. The other patches do not enter the first block.
        """
        among_BT = self._with_prefix(visible_BK) if self.positions == "relative" else None
        return self.finish(self._run_blocks(self.enter(tokens_BND, visible_BK), None, among_BT=among_BT))

    def _run_blocks(
        self, tokens: torch.Tensor, pick: Pick | None, depth: int | None = None, among_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All blocks (or the first `depth`) and the last norm; of the last one, only the tokens that `pick` takes.

        among_BT: for relative positions, which tokens of the whole sequence these are; None: all of them.
        """
        among = {} if among_BT is None else {"among_BT": among_BT}
        *before, last = list(self.network.blocks)[:depth]
        tokens = run_all(before, tokens, grad_checkpointing=self.network.grad_checkpointing, **among)
        read: torch.Tensor = self.network.norm(run_last(last, tokens, pick, **among))
        return read

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        return self.encode(self.embed(images_BCHW))

    def represent(self, images_BCHW: torch.Tensor, pooling: Pooling, block: int | None = None) -> torch.Tensor:
        self.check_pooling(pooling)
        if block and block > (depth := len(self.network.blocks)):
            raise UserError(f"block={block}: {self.name} has blocks 1 to {depth}")
        pick: Pick | None = (lambda tokens: tokens[:, :1]) if pooling == "token" else None
        return self.pool(self._run_blocks(self.enter(self.embed(images_BCHW)), pick, block), pooling)


def check_size(image_size: tuple[int, int], patch: int, key: str) -> None:
    """Raises UserError, naming the nearest sizes, unless `patch` (pixels) divides both sides."""
    for side in image_size:
        if side % patch:
            near = side // patch * patch or patch
            raise UserError(
                f"{key}={side} is not a multiple of the patch size {patch}: "
                f"use {near} or {near + patch}, or another encoder.patch_size"
            )
