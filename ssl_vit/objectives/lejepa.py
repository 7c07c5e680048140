"""LeJEPA (Balestriero and LeCun 2025, arXiv 2511.08544): views of an image agree, and all embeddings are Gaussian."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn

from ssl_vit.data.augment import device_images
from ssl_vit.data.samples import sample_seed
from ssl_vit.interfaces import Batch, ObjectiveConfig, StepOutput
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.objective import Objective as BaseObjective


class Config(ObjectiveConfig):
    """Defaults are those of the paper's minimal example. The number of views is `data.views` (at least 2; there: 4).

    sigreg_weight: lambda: the loss is (1 - lambda) * invariance + lambda * SIGReg (paper: 0.02 to 0.05).
    pooling: what the projector reads: the class `token` or the `mean` of the patches.
    projector_width: width of the projector's two hidden layers.
    projection: output dimension of the projector.
    directions: random unit vectors that SIGReg projects onto in each step (paper: 256 to 1,024).
    points: number of points of the numerical integration over [0, 3].
    """

    name: Literal["lejepa"] = "lejepa"
    sigreg_weight: float = Field(0.02, ge=0, le=1)
    pooling: Literal["token", "mean"] = "token"
    projector_width: int = Field(2048, ge=1)
    projection: int = Field(16, ge=2)
    directions: int = Field(256, ge=1)
    points: int = Field(17, ge=2)


def processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def mean_over_processes(tensor: torch.Tensor) -> torch.Tensor:
    """The mean of the processes' tensors, differentiable.

    DDP averages gradients over processes, so a loss made of such means has the gradient that one process would compute
    on the whole batch.
    """
    if processes() == 1 or tensor.device.type == "meta":  # where operations are only counted
        return tensor
    return _all_reduce(tensor) / processes()


@torch.compiler.disable
def _all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all processes. Its gradient is summed too: every process's loss depends on every process's input."""
    from torch.distributed.nn.functional import all_reduce  # not in every build of torch

    summed: torch.Tensor = all_reduce(tensor)
    return summed


class BatchNorm(nn.Module):
    """Batch norm over the batch of all processes, on any device (torch's SyncBatchNorm needs a GPU), in float32.

    It keeps no running statistics: the projector is used in training alone. The processes' batches have equal sizes.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, vectors_BD: torch.Tensor) -> torch.Tensor:
        vectors_BD = vectors_BD.float()
        centered_BD = vectors_BD - mean_over_processes(vectors_BD.mean(0))
        variance_D = mean_over_processes(centered_BD.square().mean(0))
        return centered_BD * (variance_D + 1e-5).rsqrt() * self.weight + self.bias


def sigreg(projections_BVD: torch.Tensor, directions_DK: torch.Tensor, points: int = 17) -> torch.Tensor:
    """Sketched isotropic Gaussian regularization: how far the projections of each view are from a standard Gaussian.

    Along each direction: the squared distance of the empirical characteristic function of the B images from
    exp(-t^2/2), weighted by exp(-t^2/2), integrated over -3..3 (trapezoid on `points` points of 0..3, doubled) and
    multiplied by B (the test statistic of Epps and Pulley 1983). B counts the images of all processes.

    projections_BVD: float32.
    directions_DK: float32 unit vectors.

    Returns the mean over views and directions, a float32 scalar >= 0. About 1.05 is expected of Gaussian projections,
    for any B; of others it grows with B.
    """
    images = projections_BVD.shape[0] * processes()
    t_T = torch.linspace(0, 3, points, device=projections_BVD.device)
    gauss_T = (-0.5 * t_T.square()).exp()
    angles_BVKT = (projections_BVD @ directions_DK)[..., None] * t_T
    real_VKT, imaginary_VKT = mean_over_processes(torch.stack([angles_BVKT.cos().mean(0), angles_BVKT.sin().mean(0)]))
    distances_VKT = (real_VKT - gauss_T).square() + imaginary_VKT.square()
    return 2 * images * torch.trapezoid(distances_VKT * gauss_T, dx=3 / (points - 1)).mean()


@torch.no_grad()
def participation_ratio(vectors_BD: torch.Tensor) -> torch.Tensor:
    """How many dimensions the vectors of all processes' images fill: (sum of the covariance's eigenvalues)^2 / (sum of
    their squares), a float32 scalar from 0 (all vectors equal: collapse) to D.

    The participation ratio (Gao et al. 2017, bioRxiv 214262). Unlike RankMe's entropy (arXiv 2210.02885) it needs no
    decomposition, for which the host would wait in every step.
    """
    vectors_BD = vectors_BD.float()
    centered_BD = vectors_BD - mean_over_processes(vectors_BD.mean(0))
    covariance_DD = mean_over_processes(centered_BD.T @ centered_BD / len(vectors_BD))
    return covariance_DD.trace().square() / covariance_DD.square().sum().clamp(min=1e-20)


class Objective(BaseObjective):
    """The encoder and a projector (MLP with batch norm). No teacher, no stop-gradient, no schedule."""

    least_views = 2
    whole_batch = True

    def __init__(self, encoder: Encoder, config: Config, classes: int | None = None) -> None:
        super().__init__()
        encoder.check_pooling(config.pooling)
        self.encoder, self.config = encoder, config
        # The recipe's, the same on all processes. Torch's own, where none was set, may have 64 bits.
        self.seed = torch.initial_seed() & (2**63 - 1)
        hidden = config.projector_width
        self.projector = nn.Sequential(
            nn.Linear(encoder.width, hidden),
            BatchNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            BatchNorm(hidden),
            nn.ReLU(),
            nn.Linear(hidden, config.projection),
        )

    @torch.compiler.disable  # a compiler would make a program per step
    def directions(self, batch: Batch) -> torch.Tensor:
        """Unit vectors, float32 (D, K): a function of (seed, step), the same on all processes and devices."""
        device, generator = batch.images.device, torch.Generator()
        generator.manual_seed(sample_seed(self.seed, batch.step, -1))  # no sample has the index -1
        drawn_DK = torch.randn(self.config.projection, self.config.directions, generator=generator)
        unit_DK = drawn_DK / drawn_DK.norm(dim=0)
        pinned = device.type == "cuda"  # MPS may read memory that is not pinned after it was freed
        return (unit_DK.pin_memory() if pinned else unit_DK).to(device, non_blocking=pinned)

    def forward(self, batch: Batch) -> StepOutput:
        """Loss over the batch of all processes, its two parts, and the effective ranks of features and projections,
        which fall where the representation collapses.

        The batch has no padding and the same size on all processes.
        """
        directions_DK = self.directions(batch)
        features_BD = self.encoder.represent(device_images(batch), self.config.pooling)
        projections_BD = self.projector(features_BD).float()
        kind = projections_BD.device.type
        with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):  # meta tensors have no autocast
            projections_BVD = projections_BD.unflatten(0, (-1, batch.views))
            invariance = (projections_BVD - projections_BVD.mean(1, keepdim=True)).square().mean()
            gaussian = sigreg(projections_BVD, directions_DK, self.config.points)
            ranks = {
                "feature_rank": participation_ratio(features_BD.detach()),
                "projection_rank": participation_ratio(projections_BD.detach()),
            }
        loss = (1 - self.config.sigreg_weight) * invariance + self.config.sigreg_weight * gaussian
        return StepOutput(loss, {"invariance": invariance.detach(), "sigreg": gaussian.detach(), **ranks})
