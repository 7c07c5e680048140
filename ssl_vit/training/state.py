"""The state of a training that checkpoints keep: weights, optimizer, random states; whole or sharded alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ssl_vit.data.order import LanePosition
from ssl_vit.files import WEIGHTS
from ssl_vit.interfaces import UserError, is_main_process
from ssl_vit.models.encoder import shares_parameters
from ssl_vit.models.objective import Objective
from ssl_vit.models.position import timm_format
from ssl_vit.training import distributed
from ssl_vit.training.optim import WeightAverage

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

OBJECTIVE, TRAINING = "objective.safetensors", "training.safetensors"
OPTIMIZER, RANDOM = "optimizer.safetensors", "random.safetensors"
ENCODER, NETWORK = "encoder.", "encoder.network."  # prefixes of its tensors, and of timm's names, in the objective

Tensors = dict[str, torch.Tensor]


@dataclass
class Progress:
    """Where a run stands: steps done, seconds trained, the position of each lane, and the fingerprint of the shards
    (`data`) that the positions refer to.

    accumulate: micro-batches of a process's part of a step.
    """

    lanes: list[LanePosition]
    step: int = 0
    seconds: float = 0.0
    data: str = ""
    classes: tuple[str, ...] = ()
    accumulate: int = 1

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"lanes": [LanePosition(**lane) for lane in state["lanes"]]})


@dataclass
class State:
    """Everything that a resumed run needs: the objective (unwrapped), torch's optimizer over its parameters, the random
    states of its device.

    average: average of the weights, if the recipe sets one.
    parts: the components whose state is a few numbers, by name.
    """

    objective: Objective
    optimizer: torch.optim.Optimizer
    device: torch.device
    average: WeightAverage | None = None
    parts: dict[str, Stateful] = field(default_factory=dict)

    def optimized(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters by name, in its own order."""
        names = {id(parameter): name for name, parameter in self.objective.named_parameters()}
        return {names[id(p)]: p for group in self.optimizer.param_groups for p in group["params"]}

    def tensors(self) -> dict[str, Tensors]:
        """What each file of a checkpoint holds, on the main process; every process must call it."""
        trained = self.objective.state_dict()
        published = whole({**trained, **self.average.values} if self.average else trained)
        optimizer = {
            f"{name}/{key}": value
            for name, parameter in self.optimized().items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        random = enumerate(distributed.gather(random_state(self.device)))
        return {
            WEIGHTS: timm_format(self.objective.encoder.network, part(published, NETWORK)),
            OBJECTIVE: {name: tensor for name, tensor in published.items() if not name.startswith(ENCODER)},
            **({TRAINING: whole(trained)} if self.average else {}),
            OPTIMIZER: whole(optimizer),
            RANDOM: {f"{rank}/{kind}": tensor for rank, own in random for kind, tensor in own.items()},
        }


def check_names(objective: nn.Module, what: str) -> None:
    """Raises UserError for parameters and buffers that checkpoints cannot store. what: begins its message."""
    if shares_parameters(objective):
        raise UserError(f"{what}: one of its parameters has two names, which checkpoints cannot store")
    added = (name for name in objective.state_dict() if name.startswith(ENCODER) and not name.startswith(NETWORK))
    if name := next(added, None):
        raise UserError(f"{what}: checkpoints would not store {name}; keep modules apart from the encoder")


def part(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def whole(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Gather the shards of each tensor, contiguous, on the CPU of the main process; other processes get nothing."""
    full_tensors = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_main_process():
            full_tensors[name] = full.detach().cpu().contiguous()
    return full_tensors


def placed(tensors: Tensors, like_tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Shard whole tensors like the tensors of the same name and shape in `like_tensors`."""
    sharded = dict(tensors)
    for name, tensor in tensors.items():
        like = like_tensors.get(name)
        if isinstance(like, DTensor) and like.shape == tensor.shape:
            local = tensor.to(like.device)
            sharded[name] = distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)
    return sharded


def random_state(device: torch.device) -> Tensors:
    """The state of the generators that this process's model draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "xla":
        import torch_xla.core.xla_model as xm

        state["xla"] = torch.tensor([xm.get_rng_state() >> 32, xm.get_rng_state() & 0xFFFFFFFF])  # 64 bits, unsigned
    elif device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: Tensors, device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type not in state:  # saved on another kind of device
        return
    if device.type == "xla":
        import torch_xla.core.xla_model as xm

        high, low = state["xla"].tolist()
        xm.set_rng_state(high << 32 | low)
    elif device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type])
