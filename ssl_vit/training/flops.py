"""What a training step costs and which parameters it trains, by a pass on meta tensors."""

from __future__ import annotations

import copy

import torch
from torch.utils.flop_counter import FlopCounterMode

from ssl_vit.interfaces import Batch, UserError, first_line
from ssl_vit.models.objective import Objective
from ssl_vit.training.logging import metric_shapes

_IMAGES = 2  # one image alone would be refused by a batch norm


def training_flops(objective: Objective, views: int = 1) -> float:
    """Floating-point operations (a multiply and an add are two) of the forward and backward pass, for one image.

    views: views of each image (`data.views`).

    Counted over matrix products, convolutions and attention, by torch's counter, in one step on a batch without values;
    nothing is computed, and torch's generator stays where it was. Objectives of the same modules, parameters and
    settings are counted once, because an evaluator trains many.
    """
    return _passed(objective, views)[0]


def unused_parameters(objective: Objective, views: int = 1) -> list[str]:
    """Names of the parameters that require a gradient and get none, such as the head of a CNN whose patches are read.

    views: views of each image (`data.views`).
    """
    return _passed(objective, views)[1]


_known: dict[tuple[type, str], tuple[float, list[str]]] = {}  # by class: a notebook may define it again


def _passed(objective: Objective, views: int) -> tuple[float, list[str]]:
    config = getattr(objective, "config", None)
    if config is None:  # nothing says what the objective does with its modules
        return _pass(objective, views)
    parameters = [(name, p.shape, p.requires_grad) for name, p in objective.named_parameters()]
    key = type(objective), f"{objective} {config} {objective.encoder.image_size} {views} {parameters}"
    if key not in _known:
        _known[key] = _pass(objective, views)
    return _known[key]


def _pass(objective: Objective, views: int) -> tuple[float, list[str]]:
    replica = copy.deepcopy(objective).to("meta").train()
    if hasattr(replica.encoder.network, "set_grad_checkpointing"):
        replica.encoder.network.set_grad_checkpointing(False)  # what is computed twice counts once
    height, width = replica.encoder.image_size

    def blank(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(_IMAGES * views, *shape, dtype=dtype, device="meta")

    batch = Batch(
        images=blank(replica.encoder.channels, height, width, dtype=torch.uint8),
        labels=blank(dtype=torch.int64),
        noise=blank(replica.noise_per_sample(), dtype=torch.float32),
        flip=blank(dtype=torch.bool),
        indices=blank(dtype=torch.int64),
        valid=blank(dtype=torch.bool),
        keys=[""] * _IMAGES * views,
        lane_size=_IMAGES * views,
        views=views,
    )
    # The default device may be meta here (`stage.check`), but what an objective draws has to have a value.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), FlopCounterMode(display=False) as counter:
        try:
            output = replica(batch)
            output.loss.backward()
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error).lower():
                raise
            wrong = "its step needs the values of tensors; use shapes that do not depend on data, and no .item()"
            raise UserError(f"{type(objective).__module__}: {wrong} ({first_line(error)})") from error
    metric_shapes(output)
    unused = [name for name, p in replica.named_parameters() if p.requires_grad and p.grad is None]
    return counter.get_total_flops() / _IMAGES, unused
