"""The state of a training that checkpoints keep: weights, optimizer, random states; whole or sharded alike."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, distribute_tensor

from ssl_vit.data.order import LanePosition
from ssl_vit.interfaces import UserError
from ssl_vit.training import distributed
from ssl_vit.training.optim import WeightAverage

Tensors = dict[str, torch.Tensor]


class Stateful(Protocol):
    """A component with state of its own in `state.json`: plain JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass
class Progress:
    """Where a run stands: steps done, seconds trained, each lane's position in which shards.

    accumulate: micro-batches of a process's part of a step. skipped_steps: those that were not finite.
    """

    lanes: list[LanePosition]
    step: int = 0
    seconds: float = 0.0
    data: str = ""
    classes: tuple[str, ...] = ()
    accumulate: int = 1
    skipped_steps: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"lanes": [LanePosition(**lane) for lane in state["lanes"]]})


@dataclass
class State:
    """Everything that a resumed run needs: the objective (unwrapped), torch's optimizer over its parameters, the random
    states of its device.

    average: of the weights, where the recipe asks for one.
    parts: the components whose state is a few numbers, by name.
    """

    objective: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    average: WeightAverage | None = None
    parts: dict[str, Stateful] = field(default_factory=dict)

    @property
    def sharded(self) -> bool:
        """Whether the parameters are spread over the processes (FSDP)."""
        return any(isinstance(parameter, DTensor) for parameter in self.objective.parameters())

    def weights(self, averaged: bool) -> Tensors:
        """The objective's tensors by name, whole, on the CPU of the main process; every process must call it."""
        tensors = self.objective.state_dict()
        return whole({**tensors, **self.average.values} if averaged and self.average else tensors)

    def load_average(self, tensors: Tensors) -> None:
        """Take the averaged weights from whole tensors by the objective's names."""
        if self.average:
            own = {name: tensors[name] for name in self.average.values}
            for name, tensor in placed(own, self.objective).items():
                self.average.values[name].copy_(tensor)

    def save_optimizer(self, folder: Path) -> None:
        """Write this process's part: all of it, or its shards. Tensors alone, in safetensors files.

        Every process must call it where the parameters are sharded, the main one alone where they are not.
        """
        tensors = {
            f"{name}/{key}": value
            for name, parameter in self._by_name().items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(tensors, storage_writer=writer, no_dist=not self.sharded, process_group=distributed.group())

    def load_optimizer(self, folder: Path) -> None:
        """Read it back, whatever number of processes wrote it. UserError where the parameters are others."""
        reader = HuggingFaceStorageReader(str(folder))
        found: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
        own, read = self._by_name(), Tensors()
        for key, entry in found.items():
            name = key.rpartition("/")[0]
            if name not in own:
                raise UserError(f"{folder.parent}: from another recipe: its optimizer knows {name}, this one does not")
            sharded = isinstance(own[name], DTensor) and entry.size == own[name].shape
            read[key] = torch.zeros_like(own[name]) if sharded else torch.zeros(entry.size)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(read, storage_reader=reader, no_dist=True)
        state: dict[int, Tensors] = {}
        numbers = {name: number for number, name in enumerate(own)}
        for key, tensor in read.items():
            name, _, item = key.rpartition("/")
            state.setdefault(numbers[name], {})[item] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    def _by_name(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters in its own order."""
        names = {id(parameter): name for name, parameter in self.objective.named_parameters()}
        return {names[id(p)]: p for group in self.optimizer.param_groups for p in group["params"]}


def whole(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Each tensor with all its shards, contiguous on the CPU of the main process; elsewhere nothing is kept."""
    found = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if distributed.is_main():
            found[name] = full.detach().cpu().contiguous()
    return found


def placed(tensors: Mapping[str, torch.Tensor], model: nn.Module) -> Tensors:
    """Whole tensors, each cut into shards where the model's tensor of that name and shape is."""
    own = model.state_dict()
    found = dict(tensors)
    for name, tensor in tensors.items():
        like = own.get(name)
        if isinstance(like, DTensor) and like.shape == tensor.shape:
            local = tensor.to(like.device)
            found[name] = distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)
    return found


def random_state(device: torch.device) -> Tensors:
    """The state of the generators that this process's model draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "xla":
        import torch_xla.core.xla_model as xm

        state["xla"] = torch.tensor([xm.get_rng_state() >> 32, xm.get_rng_state() & 0xFFFFFFFF])  # 64 bits, unsigned
    return state


def set_random_state(state: Tensors, device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if device.type == "xla" and "xla" in state:
        import torch_xla.core.xla_model as xm

        high, low = state["xla"].tolist()
        xm.set_rng_state(high << 32 | low)
