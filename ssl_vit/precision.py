"""`training.precision: auto`: the fastest precision for a recipe on this device, by a measured trial."""

from __future__ import annotations

from accelerate.utils.memory import clear_device_cache

from ssl_vit import stage
from ssl_vit.data.order import LanePosition
from ssl_vit.data.shards import open_training
from ssl_vit.interfaces import UserError, is_main_process
from ssl_vit.progress import Say
from ssl_vit.recipe import Recipe, run_recipe
from ssl_vit.training import Precision, distributed
from ssl_vit.training.distributed import Engine, make_accelerator, shared_errors
from ssl_vit.training.memory import find_accumulation, forward_backward

# In order of preference: a later one is chosen only if it takes at most this share of the time of those before it.
_CANDIDATES: dict[str, tuple[Precision, ...]] = {"cuda": ("tf32", "bf16")}
_OTHERWISE: tuple[Precision, ...] = ("fp32", "bf16")
_GAIN = 0.9
_ROUNDS = 3


def resolve(settings: Recipe, say: Say) -> Recipe:
    """The recipe with a precision in place of `auto`: the one of the run that it resumes, else the measured one.

    say: prints what was measured.

    All processes return the same. Raises UserError for anything that would stop the training before its first step.
    """
    if settings.training.precision != "auto":
        return settings
    make_accelerator("fp32", settings.training.timeout)  # connects the processes
    # The main process decides: a run directory on its own disk is not there for the others.
    with shared_errors():
        own = run_recipe(settings.run_directory) if is_main_process() else None
    saved: Precision = distributed.from_main(own.training.precision if own else "auto")
    return with_precision(settings, choose(settings, say) if saved == "auto" else saved)


def choose(settings: Recipe, say: Say) -> Precision:
    """The fastest precision by `measure`; the same on all processes."""
    seconds = measure(settings)
    clear_device_cache(garbage_collection=True)  # in a comparison with several jobs, other processes need this memory
    chosen = fastest(seconds)
    say(f"training.precision=auto: {chosen} ({', '.join(f'{name} {took:.3f} s' for name, took in seconds.items())})")
    return chosen


def with_precision(settings: Recipe, precision: Precision) -> Recipe:
    return settings.model_copy(update={"training": settings.training.model_copy(update={"precision": precision})})


def measure(settings: Recipe) -> dict[Precision, float]:
    """Seconds of a forward and backward pass over one micro-batch, by precision, over all processes; writes nothing.

    Best of three interleaved rounds after a first one, of the precisions whose micro-batch fits. Arguments
    and errors as `resolve`.
    """
    accelerator = make_accelerator("fp32", settings.training.timeout)
    if accelerator.device.type == "xla":
        raise UserError("training.precision=auto: not available on XLA; set bf16 or fp32")
    if accelerator.is_fsdp2:
        raise UserError("training.precision=auto: not available for a sharded model; set bf16 or fp32")
    with shared_errors():
        data = settings.data.model_copy(update={"workers": 0})
        trial = settings.model_copy(update={"data": data})
        job = stage.build(trial, open_training(data), accelerator, quiet=True)
        step = next(job.batches([LanePosition()] * job.lanes))[0]
        module = job.objective.to(accelerator.device).train()
        candidates = _CANDIDATES.get(accelerator.device.type, _OTHERWISE)
        candidates = tuple(one for one in candidates if not distributed.unsupported(one)) or ("fp32",)
    parts: dict[Precision, int] = {}
    for precision in candidates:
        _set(accelerator, precision)
        try:
            parts[precision] = find_accumulation(module, step, accelerator, settings.training, settings.optim)
        except UserError:
            if not parts and precision == candidates[-1]:
                raise
    batch, seconds = step.split(max(parts.values()))[0], dict[Precision, float]()
    for number in range(_ROUNDS + 1):
        for precision in parts:
            _set(accelerator, precision)
            took, _ = forward_backward(module, batch, accelerator)
            if number:
                seconds[precision] = min(seconds.get(precision, float("inf")), took)
    every = distributed.gather(seconds)
    return {precision: sum(one[precision] for one in every) for precision in seconds}


def _set(accelerator: Engine, precision: Precision) -> None:
    distributed.set_float32_matmul(precision)
    accelerator.precision = precision


def fastest(seconds: dict[Precision, float]) -> Precision:
    """The first precision that no later one beats by a tenth."""
    chosen = next(iter(seconds))
    for precision, took in seconds.items():
        if took < _GAIN * seconds[chosen]:
            chosen = precision
    return chosen
