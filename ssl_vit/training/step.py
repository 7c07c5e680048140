"""One optimizer step: micro-batches forward and backward, clipping, the update, the average of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn
from torch.distributed.tensor import DTensor

from ssl_vit.interfaces import Batch, StepOutput, UserError
from ssl_vit.training import OptimConfig, TrainingConfig, distributed, optim
from ssl_vit.training.distributed import autocast_sharded
from ssl_vit.training.memory import fitting_accumulation
from ssl_vit.training.state import Average, State, random_state, set_random_state


@dataclass(frozen=True)
class Taken:
    """What a step did. norm: of the gradient before clipping; finite: whether it counts."""

    parts: list[Batch]
    outputs: list[StepOutput]
    norm: torch.Tensor
    finite: bool


class Stepper:
    """The prepared objective and its optimizer."""

    def __init__(
        self, objective: nn.Module, config: OptimConfig, training: TrainingConfig, total: int, accelerator: Accelerator
    ) -> None:
        self.config, self.training, self.total, self.accelerator = config, training, total, accelerator
        device = accelerator.device
        optimizer = optim.build_optimizer(objective, config, training.batch_size, device, sharded=accelerator.is_fsdp2)
        if accelerator.is_fsdp2:
            autocast_sharded(objective, accelerator)
        self.model, self.optimizer = accelerator.prepare(objective, optimizer)
        unwrapped = accelerator.unwrap_model(self.model, keep_torch_compile=False)
        average = Average(unwrapped, training.ema) if training.ema else None
        self.state = State(unwrapped, self.optimizer.optimizer, device, accelerator.scaler, average)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def take(self, batch: Batch, step: int, accumulate: int) -> Taken:
        """Optimizer step `step` (from 0) over this process's batch, in `accumulate` micro-batches.

        Nothing here waits for the device, unless steps that are not finite are to be skipped.
        """
        peak = optim.peak_lr(self.config, self.training.batch_size)
        optim.set_lr(self.optimizer.param_groups, peak * optim.lr_factor(step, self.total, self.config))
        parts = batch.split(accumulate)
        skip = self.training.on_nonfinite == "skip"
        buffers = self._buffers() if skip else []
        outputs = []
        for part in parts[:-1]:
            with self.accelerator.no_sync(self.model):
                outputs.append(self.model(part))
                self.accelerator.backward(outputs[-1].loss / accumulate)
        outputs.append(self.model(parts[-1]))
        self.accelerator.backward(outputs[-1].loss / accumulate)
        # Without a limit too: a gradient that is not finite must be seen before its step is kept.
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip_norm or math.inf)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        finite = not skip or self._finite(outputs, norm)
        if not finite:
            self._restore(buffers)
        if finite or self.accelerator.scaler:  # the scaler leaves such a step out by itself
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if finite and self.state.average:
            self.state.average.update(step)
        if self.accelerator.device.type == "xla":
            import torch_xla

            torch_xla.sync()  # one graph a step
        return Taken(parts, outputs, norm, finite)

    def _finite(self, outputs: list[StepOutput], norm: torch.Tensor) -> bool:
        """Whether the loss and gradient are finite on every process; waits for the device."""
        values = [output.loss.detach() for output in outputs]
        # With loss scaling, a gradient may overflow: that is the scaler's matter.
        if not self.accelerator.scaler:
            values.append(norm.to(values[0]))
        return not distributed.largest(int(not bool(torch.stack(values).isfinite().all())))

    def _buffers(self) -> list[torch.Tensor]:
        """A copy of what a forward pass may change beside the gradients: running statistics of a batch norm."""
        return [buffer.clone() for buffer in self.state.objective.buffers()]

    def _restore(self, buffers: list[torch.Tensor]) -> None:
        for buffer, kept in zip(self.state.objective.buffers(), buffers, strict=True):
            buffer.copy_(kept)

    def share_buffers(self) -> None:
        """The main process's running statistics for all: each saw other images, and a checkpoint keeps those alone."""
        if self.accelerator.num_processes > 1 and not self.state.sharded:
            own = list(self.state.objective.buffers())
            for buffer, shared in zip(own, broadcast(own), strict=True):
                buffer.copy_(shared)

    def accumulation(self, batch: Batch, lanes: int, least: int) -> int:
        """The fewest micro-batches (`least` or more), made of whole ones of this process's `lanes`, that the memory
        holds.

        Leaves weights, buffers, optimizer and random state as they are. Raises UserError where nothing fits.
        """
        if self.state.sharded or self.accelerator.device.type == "xla":
            raise UserError("training.auto_batch: not for sharded models and XLA; set training.accumulate instead")
        optimizer, device = self.state.optimizer, self.accelerator.device
        random, buffers, fresh = random_state(device), self._buffers(), not optimizer.state

        def attempt(accumulate: int) -> None:
            try:
                if fresh:  # the optimizer's own memory counts: a step of nothing makes it take that
                    optim.set_lr(optimizer.param_groups, 0.0)
                    for parameter in self.state.objective.parameters():
                        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
                    optimizer.step()
                # Not through DDP: a process that runs out of memory would leave the others waiting.
                self.accelerator.backward(self.state.objective(batch.split(accumulate)[0]).loss)
            finally:
                optimizer.zero_grad(set_to_none=True)
                if fresh:
                    optimizer.state.clear()

        counts = [n for n in range(min(least, lanes), lanes + 1) if lanes % n == 0]
        try:
            return fitting_accumulation(len(batch.images), counts, attempt)
        finally:
            set_random_state(random, device)
            self._restore(buffers)
