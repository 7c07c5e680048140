"""Accelerate's engine: devices, processes and precision, as `accelerate launch`, torchrun or Slurm set them up."""

from __future__ import annotations

import atexit
import datetime
import gc
import os
import shutil
import warnings
from functools import cache

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
    get_mixed_precision_context_manager,
    is_torch_xla_available,
    parse_flag_from_env,
)
from torch import nn

from ssl_vit.interfaces import RunError, UserError
from ssl_vit.training import Precision, processes
from ssl_vit.training.memory import keep_freed_memory

_KNOWN_WARNINGS = (
    "Please use the new API settings to control TF32",  # torch 2.9's alone, of what later versions take in silence
    "`broadcast_buffers` is deprecated",  # Accelerate has no new name for it
    "Grad strides do not match bucket view strides",  # of one small gradient, which is copied
)
_MIXED = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}


def make_accelerator(precision: Precision = "fp32", timeout: int = 600, compiled: bool = False) -> Accelerator:
    """The engine that all processes share; the data plan shards, the loop accumulates.

    timeout: seconds that a process waits for the others. compiled: prepared models go through torch.compile, one graph
    for one shape (without it, what `accelerate launch --dynamo_backend` says holds). Raises UserError for a precision
    that the device does not have, for compiling where nothing compiles, and for ways of distribution that checkpoints
    do not cover; RunError when the processes do not find each other.
    """
    has_xla = is_torch_xla_available()
    # Without cpu=True, Accelerate 1.15 ignores the launcher's processes on a machine that has no accelerator.
    no_device = not torch.accelerator.is_available() and not has_xla
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if not has_xla:
        _check_precision(precision)
    if compiled:
        _check_compiler(has_xla, no_device)
    for kind in ("DEEPSPEED", "MEGATRON_LM"):
        if parse_flag_from_env(f"ACCELERATE_USE_{kind}"):
            raise UserError(f"{kind} is not supported: use FSDP2 (recipes/launch/fsdp2.yaml), which shards the same")
    for known in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", known)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    # It fixes the precision of the process's first stage; the next may have another. After a sharded stage, what lies
    # under it must go too: it would find FSDP named there and not set it up again.
    sharded = PartialState._shared_state.get("distributed_type") == DistributedType.FSDP
    AcceleratorState._reset_state(reset_partial_state=sharded)
    try:
        accelerator = Accelerator(
            mixed_precision=_MIXED[precision],
            cpu=no_device,
            # The loop accumulates by itself, whatever ACCELERATE_GRADIENT_ACCUMULATION_STEPS says.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            dynamo_plugin=TorchDynamoPlugin(backend="inductor", dynamic=False) if compiled else None,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=timeout)),
                # A batch norm's running statistics are each process's own until `Stepper.share_buffers`.
                DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            ],
        )
        processes.connect(timeout)
    except (RuntimeError, ConnectionError) as error:
        if launched == 1:
            raise
        raise RunError(
            f"the {launched} processes did not find each other within {timeout} s (training.timeout): "
            f"{str(error).splitlines()[0]}; check that all were started, with the same main address and port"
        ) from error
    with processes.shared_errors():
        _check_world(accelerator, launched)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    _keep_what_is_imported()
    return accelerator


def autocast_sharded(objective: nn.Module, accelerator: Accelerator) -> None:
    """Before `prepare`: FSDP2 shards, and autocast rules the precision, as it does on one GPU.

    Accelerate would leave it to FSDP2, which casts a batch's noise, what is logged and the sums of gradients to 16
    bits, but not the images made of its bytes, so that the first convolution fails.
    """
    accelerator.state.fsdp_plugin.mixed_precision_policy = None
    if accelerator.native_amp:
        autocast = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
        objective.forward = autocast(objective.forward)


def _check_world(accelerator: Accelerator, launched: int) -> None:
    """Refuse a world that is not the one that was launched, and those that checkpoints do not cover."""
    if accelerator.num_processes < launched:
        raise UserError(
            f"{launched} processes were launched but Accelerate formed a world of {accelerator.num_processes}"
        )
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("the first FSDP is not supported: use FSDP2 (recipes/launch/fsdp2.yaml)")
    if kind != DistributedType.FSDP and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise UserError(
            f"FSDP was launched, but Accelerate runs {kind.value} here: it shards on accelerators alone; on a CPU use "
            "recipes/launch/cpu.yaml"
        )
    if kind == DistributedType.XLA and accelerator.num_processes > 1:
        raise UserError(
            f"{accelerator.num_processes} XLA processes are not supported: launch one (recipes/launch/tpu.sh)"
        )


@cache
def _keep_what_is_imported() -> None:
    """Accelerate collects garbage after every training, which would walk all that is imported: 0.3 s each time."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # else native modules report what they own as leaked


def _check_compiler(has_xla: bool, no_device: bool) -> None:
    if has_xla:
        raise UserError("training.compile: XLA compiles by itself: leave it out")
    compiler = os.environ.get("CXX", "g++")
    if no_device and shutil.which(compiler) is None:
        raise UserError(f"training.compile needs a C++ compiler on a CPU, and there is no {compiler}: install one")


def _check_precision(precision: Precision) -> None:
    """Refuse what the device would not do, or would do in another precision without saying so."""
    gpu = torch.cuda.is_available()
    if precision == "fp16" and not torch.accelerator.is_available():
        raise UserError("training.precision=fp16 needs a GPU: use bf16 or fp32 on a CPU")
    if precision == "tf32" and not (gpu and torch.cuda.get_device_capability() >= (8, 0)):
        raise UserError("training.precision=tf32 needs an NVIDIA GPU of Ampere or newer: use fp32")
    if precision == "bf16" and gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError("training.precision=bf16 needs an NVIDIA GPU of Ampere or newer: use fp16 on this one")
