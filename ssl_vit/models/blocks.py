"""Blocks of a ViT: the kernel of their attention, and the last block for only those tokens that are read after it.

The other tokens of the last block need keys and values, but no query, projection or MLP. With half of the patches read
this saves about half a block of work, with the class token alone almost one block. Loss and gradients stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from timm.layers import Attention
from timm.models import checkpoint_seq
from timm.models.vision_transformer import Block
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_LONGEST = 600  # tokens: longer sequences would need much memory for their attention weights
Pick = Callable[[torch.Tensor], torch.Tensor]


def run(block: nn.Module, tokens_BTD: torch.Tensor, **more: Any) -> torch.Tensor:
    """A block's output tokens.

    While training in bf16 on a CPU, attention is made of matrix products, because the backward pass of torch's fused
    kernel is slow there: forward and backward together take 1.7 times as long with 197 tokens, 5 times with 17.
    """
    slow = (
        tokens_BTD.device.type == "cpu"
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and tokens_BTD.shape[1] <= _LONGEST
    )
    # Around each block, so that a block whose activations are computed again uses the same kernel.
    with sdpa_kernel(SDPBackend.MATH) if slow else nullcontext():
        outputs: torch.Tensor = block(tokens_BTD, **more)
    return outputs


def run_all(
    blocks: Sequence[nn.Module], tokens_BTD: torch.Tensor, *, grad_checkpointing: bool, **more: Any
) -> torch.Tensor:
    """The output tokens of several blocks."""
    if grad_checkpointing and torch.is_grad_enabled():
        outputs: torch.Tensor = checkpoint_seq([partial(run, block, **more) for block in blocks], tokens_BTD)
        return outputs
    for block in blocks:
        tokens_BTD = run(block, tokens_BTD, **more)
    return tokens_BTD


def take(tokens_BTD: torch.Tensor, index_BK: torch.Tensor) -> torch.Tensor:
    """Row `index` of every sequence: (B, K, D). Copies whole rows: half the cost of `gather` on a CPU."""
    batch, length = tokens_BTD.shape[:2]
    return tokens_BTD.flatten(0, 1).index_select(0, flat_rows(index_BK, length)).unflatten(0, (batch, -1))


def flat_rows(index_BK: torch.Tensor, length: int) -> torch.Tensor:
    """Indices within each of B sequences of `length` rows -> indices of all their rows laid end to end, (B * K,)."""
    start_B1 = torch.arange(len(index_BK), device=index_BK.device)[:, None] * length
    return (index_BK + start_B1).flatten()


class LastBlock(Block):
    """timm's block; with `pick`, tokens (B, T, D) -> those that are read (B, K, D), it computes only their outputs."""

    def forward(self, x: torch.Tensor, *arguments: object, pick: Pick | None = None) -> torch.Tensor:
        if pick is None:
            every: torch.Tensor = super().forward(x, *arguments)
            return every
        tokens = pick(x) + self.drop_path1(self.ls1(self._attention(self.norm1(x), pick)))
        picked: torch.Tensor = tokens + self.drop_path2(self.ls2(self.mlp(self.norm2(tokens))))
        return picked

    def _attention(self, tokens_BTD: torch.Tensor, pick: Pick) -> torch.Tensor:
        attn = self.attn
        asking_BKD = pick(tokens_BTD)
        width = attn.num_heads * attn.head_dim
        sizes = [width, 2 * width]
        weights = attn.qkv.weight.split(sizes)
        biases = attn.qkv.bias.split(sizes) if attn.qkv.bias is not None else (None, None)

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(-1, (-1, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)

        (query,) = heads(F.linear(asking_BKD, weights[0], biases[0]))
        key, value = heads(F.linear(tokens_BTD, weights[1], biases[1]))
        dropout = attn.attn_drop.p if self.training else 0.0
        read = F.scaled_dot_product_attention(attn.q_norm(query), attn.k_norm(key), value, dropout_p=dropout)
        output: torch.Tensor = attn.proj_drop(attn.proj(attn.norm(read.transpose(1, 2).flatten(2))))
        return output


def make_last(block: nn.Module) -> None:
    """Turn a plain timm block into a `LastBlock` (same weights and names); other blocks stay."""
    attn: Any = getattr(block, "attn", None)
    plain = type(block) is Block and type(attn) is Attention and getattr(attn, "gate", None) is None
    if plain and attn.fused_attn:
        block.__class__ = LastBlock


def run_last(block: nn.Module, tokens_BTD: torch.Tensor, pick: Pick | None = None, **more: Any) -> torch.Tensor:
    """The last block's output tokens, of which `pick` takes some; a `LastBlock` computes only these."""
    if pick is None:
        return run(block, tokens_BTD, **more)
    if isinstance(block, LastBlock):
        return run(block, tokens_BTD, pick=pick, **more)
    return pick(run(block, tokens_BTD, **more))
