"""Devices, processes and precision as Accelerate sets them up, and what the processes share."""

from __future__ import annotations

import atexit
import ctypes
import datetime
import gc
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    is_torch_xla_available,
    parse_flag_from_env,
)
from torch import nn

from ssl_vit.interfaces import RunError, UserError, first_line, is_main_process, world_size
from ssl_vit.training import Precision

_KNOWN_WARNINGS = (
    "Please use the new API settings to control TF32",  # only torch 2.9 warns about this
    "`broadcast_buffers` is deprecated",  # Accelerate has no new name for it
    "torch.distributed.nn.functional.all_reduce is deprecated",  # the other one's gradient was not checked in torch 2.9
    "Grad strides do not match bucket view strides",  # one small gradient is copied
)
# Error messages of gloo, NCCL and torch's store when another process no longer responds.
_GONE = re.compile(
    r"(?i)connection (closed|reset|refused)|timed out|wait timeout|broken pipe|socket timeout|\bgloo\b|\bnccl|"
    r"collective operation timeout|failed to (recv|send)|no route to host"
)
_SILENT = re.compile(r"(?i)time(d )?out")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Engine(Accelerator):
    """An Accelerator whose precision can differ between trainings of one process.

    Accelerate fixes one precision for the whole process and passes it to FSDP2, which would cast a batch's noise,
    logged values and sums of gradients to 16 bits. Here each training sets its own precision: the loop runs the forward
    pass under `autocast` and scales the loss.
    """

    def __init__(self, precision: Precision, **arguments: Any) -> None:
        super().__init__(mixed_precision="no", **arguments)
        self.precision = precision
        if self.is_fsdp2:
            self.state.fsdp_plugin.mixed_precision_policy = None

    def autocast(self) -> AbstractContextManager[None]:
        """Matrix products and convolutions in 16 bits where the precision says so."""
        dtype = _AUTOCAST.get(self.precision)
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Gradients are added up over micro-batches before the processes share them; with FSDP2, after each one: else
        every process would keep all of them."""
        return nullcontext() if self.is_fsdp2 else super().no_sync(model)


def set_float32_matmul(precision: Precision) -> None:
    """Let matrix products and convolutions in float32 use TensorFloat-32, or not."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def make_accelerator(precision: Precision = "fp32", timeout: int = 600, *, or_fp32: bool = False) -> Engine:
    """The engine that all processes share; the order of the data splits it across them.

    timeout: seconds that a process waits for the others.
    or_fp32: use fp32, and print a note, where the device does not have the precision: a run that was trained elsewhere
        can be evaluated.

    Raises UserError for a precision that the device does not have and for ways of distribution that checkpoints do not
    cover; RunError when the processes do not find each other.
    """
    has_xla = is_torch_xla_available()
    # Without cpu=True, Accelerate 1.15 ignores the launcher's processes on a machine that has no accelerator.
    no_device = not torch.accelerator.is_available() and not has_xla
    launched = world_size()
    if not has_xla and (reason := unsupported(precision)):
        if not or_fp32:
            raise UserError(reason)
        if is_main_process():
            print(f"note: {reason}; evaluating in fp32", file=sys.stderr)
        precision = "fp32"
    for kind in ("DEEPSPEED", "MEGATRON_LM"):
        if parse_flag_from_env(f"ACCELERATE_USE_{kind}"):
            raise UserError(f"{kind} is not supported: use FSDP2 (recipes/launch/fsdp2.yaml) instead")
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise UserError("the launcher's dynamo_backend is not supported: set it to no, and training.compile=true")
    # For `training.deterministic`: cuBLAS reads it once, with the first product of the process.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for warning in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", warning)
    try:
        accelerator = Engine(
            precision,
            cpu=no_device,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=timeout)),
                # A batch norm's running statistics are each process's own until `Trainer.share_buffers`.
                DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            ],
        )
        connect(timeout)
    except (RuntimeError, ConnectionError) as error:
        if launched == 1:
            raise
        raise RunError(
            f"the {launched} processes could not connect within {timeout} s (training.timeout): "
            f"{first_line(error)}; check that all were started, with the same main address and port"
        ) from error
    # After the constructor, which may allow TF32 by itself.
    set_float32_matmul(precision)
    with shared_errors():
        _check_world(accelerator, launched)
    if accelerator.device.type == "cpu":
        set_up_cpu()
    _keep_what_is_imported()
    return accelerator


def _check_world(accelerator: Engine, launched: int) -> None:
    """Refuse a world that is not the one that was launched, and those that checkpoints do not cover."""
    if accelerator.num_processes < launched:
        raise UserError(f"{launched} processes were launched but Accelerate runs {accelerator.num_processes}")
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("FSDP version 1 is not supported: use FSDP2 (recipes/launch/fsdp2.yaml)")
    if kind != DistributedType.FSDP and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise UserError(
            f"FSDP was launched, but Accelerate runs {kind.value} here: it shards on accelerators only; on a CPU use "
            "recipes/launch/cpu.yaml"
        )
    if kind == DistributedType.XLA and accelerator.num_processes > 1:
        raise UserError(
            f"{accelerator.num_processes} XLA processes are not supported: launch one (recipes/launch/tpu.sh)"
        )


def set_up_cpu() -> None:
    """What makes training on a CPU faster: freed memory is kept, and attention in bf16 (`models.blocks`) stays in
    16 bits between its products."""
    keep_freed_memory()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # CPUs obey it too


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, on Linux with glibc. Asking for a step's activations again takes
    up to a sixth of a small model's step on a CPU. The process stays as large as its largest step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:  # musl has none
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


@cache
def _keep_what_is_imported() -> None:
    """Accelerate collects garbage after every training, which would walk all that is imported: 0.3 s each time."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # else native modules report what they own as leaked


def unsupported(precision: Precision) -> str:
    """Why the device does not compute in this precision, or would use another one without saying so; "" where it
    does."""
    gpu = torch.cuda.is_available()
    if precision == "fp16" and not torch.accelerator.is_available():
        return "training.precision=fp16 needs a GPU (use bf16 or fp32 on a CPU)"
    if precision == "tf32" and not (gpu and torch.cuda.get_device_capability() >= (8, 0)):
        return "training.precision=tf32 needs an NVIDIA GPU of Ampere or newer (use fp32)"
    if precision == "bf16" and gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "training.precision=bf16 needs an NVIDIA GPU of Ampere or newer (use fp16 on this one)"
    return ""


_group: Any = None
_timeout = 0


def connect(timeout: int) -> None:
    """Give the launched processes a CPU group of their own: what they agree on does not wait for the accelerator.

    timeout: seconds that a process waits for the others. Every process must call it; one alone needs no group. It
    returns once all are there: if the main process, through which the others find each other, ended before (with an
    error in the recipe), they would never stop waiting for it.
    """
    global _group, _timeout
    if not several() and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _group, _timeout = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout)), timeout
        gather(None)


def several() -> bool:
    """Whether there are other processes to agree with."""
    return _group is not None


def rank() -> int:
    return dist.get_rank() if several() else 0


def gather(value: Any) -> list[Any]:
    """Every process's value, in rank order, on every process."""
    if not several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_group)
    return values


def from_main(value: Any) -> Any:
    """The main process's value, on every process."""
    values = [value]
    if several():
        dist.broadcast_object_list(values, src=0, group=_group)
    return values[0]


def largest(value: int) -> int:
    """The largest of the processes' numbers; cheap enough for every step."""
    if not several():
        return value
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=_group)
    return int(tensor)


def total(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the processes' CPU tensors."""
    if several():
        dist.all_reduce(tensor, group=_group)
    return tensor


@contextmanager
def shared_errors(what: str = "") -> Iterator[None]:
    """Context manager that every process enters: a UserError or RunError of one process is raised on all of them, and
    an OSError as a RunError. It is also a barrier.

    what: begins the message of an OSError, which may not name its file: "FILE: cannot write".

    Other exceptions are raised only on the process where they occur; the other processes notice that it ended.
    """
    own_error: UserError | RunError | None = None
    try:
        yield
    except (UserError, RunError) as error:
        own_error = error
    except OSError as error:
        about = f"{what}: {error}" if what else str(error)
        own_error = RunError(f"{about}; fix that and run the command again")
        own_error.__cause__ = error
    errors = [item for item in gather((type(own_error), str(own_error)) if own_error else None) if item]
    if own_error and not several():
        raise own_error
    if errors:
        kind, text = errors[0]
        shared = kind(text)
        shared.everywhere = True
        raise shared from own_error


@contextmanager
def others_watched(last_saved: Callable[[], str]) -> Iterator[None]:
    """Turn the end of another process, or its silence for longer than the timeout, into a plain RunError.

    last_saved: says which checkpoint is the last good one.
    """
    try:
        yield
    except RuntimeError as error:
        # Further lines may hold the traceback of a loader worker, whose own connections may have timed out.
        first = str(error).partition("\n")[0]
        if not several() or not _GONE.search(first):
            raise
        reason = first.split("] ", 1)[-1].split(". This is typically")[0]
        silent = f"has not answered for {_timeout} s (training.timeout)"
        raise RunError(
            f"another process of this run {silent if _SILENT.search(reason) else 'has ended'}: see its output "
            f"({reason})\n{last_saved()}; run the same command again on all machines"
        ) from error
