"""What a launcher may ask for and is not done is refused in plain words."""

from __future__ import annotations

import pytest
import torch

from ssl_vit.interfaces import UserError
from ssl_vit.training.distributed import make_accelerator


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_other_ways_to_shard_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(UserError, match=rf"{kind} is not supported: use FSDP2 \(recipes/launch/fsdp2.yaml\)"):
        make_accelerator()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_fsdp_is_not_silently_something_else_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"FSDP was launched, but Accelerate runs NO here: .*cpu\.yaml"):
        make_accelerator()
