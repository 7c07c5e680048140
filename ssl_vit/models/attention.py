"""Which kernel computes the attention of a block."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_LONGEST = 600  # tokens: longer sequences would need much memory for their attention weights


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
