"""Recipe + shards -> training job: the one builder of every training and dry run."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import set_seed

from ssl_vit import plugins, recipe
from ssl_vit.data.augment import color_augment
from ssl_vit.data.images import train_transform
from ssl_vit.data.samples import Preprocess
from ssl_vit.data.shards import ShardSet
from ssl_vit.data.stream import train_source, training_samples
from ssl_vit.interfaces import Batch, UserError
from ssl_vit.models import EncoderConfig, factory
from ssl_vit.models.objective import Objective
from ssl_vit.recipe import Recipe
from ssl_vit.training import memory
from ssl_vit.training.callbacks import Checkpointing, Logging, NanGuard, Pictures, StopOnSignal
from ssl_vit.training.distributed import Engine, make_accelerator
from ssl_vit.training.flops import unused_parameters
from ssl_vit.training.loop import Job
from ssl_vit.training.optim import parameter_groups
from ssl_vit.training.state import check_names


def build(
    settings: Recipe,
    shards: ShardSet,
    accelerator: Engine,
    *,
    encoder: factory.Encoder | None = None,
    classes: int | None = None,
    subset: np.ndarray | None = None,
    run: Path | None = None,
    quiet: bool = False,
) -> Job:
    """Build a training job. Processes differ only in their part of the data and in their dropout.

    encoder: encoder to use instead of building it from the recipe.
    classes: number of classes; None: the number that the shards name.
    subset: int64 global indices of the images to train on; None: `data.samples` of them.
    run: the run directory; None keeps nothing on disk.

    Raises UserError for a model, objective or topology that cannot work.
    """
    training, named = settings.training, len(shards.classes) if shards.classes else None
    if training.auto_batch and (accelerator.is_fsdp2 or accelerator.device.type == "xla"):
        raise UserError("training.auto_batch: not for FSDP or XLA; set it to false, and raise training.accumulate")
    if training.compile:
        _check_compile(accelerator)
    torch.use_deterministic_algorithms(training.deterministic)
    set_seed(settings.seed)
    given = encoder is not None
    encoder = encoder or build_encoder(settings.encoder, settings.init_from)
    if training.checkpoint_activations:
        _checkpoint_activations(encoder, accelerator)
    count = classes or getattr(settings.objective, "classes", None) or named
    if count is None and recipe.needs_labels(settings) and not shards.labeled:
        raise UserError(f"{shards.spec}: the images have no labels; put them into one subfolder per class")
    objective = build_objective(settings, encoder, classes or named)
    for name in unused_parameters(objective, settings.data.views):
        objective.get_parameter(name).requires_grad_(False)  # DDP would wait for its gradient
    parameter_groups(objective, settings.optim.weight_decay, settings.optim.layer_decay)  # rejects what it cannot group
    needs_labels = objective.needs_labels
    if needs_labels and shards.conflict:
        raise UserError(shards.conflict)
    preprocess = Preprocess(
        train_transform(encoder.image_size, settings.data.augment),
        encoder.channels,
        count,
        noise=(noise := objective.noise_per_sample()),
        flip=settings.data.augment.flip,
        color=color_augment(settings.data.augment),
        views=settings.data.views,
        # Pretraining without noise would draw the same crops as a fine-tuning on the same images with the same seed.
        seed=settings.seed if noise or given else settings.seed + 2**31,
        needs_labels=needs_labels,
        max_pixels=settings.data.max_pixels,
    )
    in_micro_batch = training.batch_size // (accelerator.num_processes * training.accumulate) * settings.data.views
    memory.check_batch_norm(objective, in_micro_batch)
    images = training_samples(shards, settings.data) if subset is None else subset
    batches = train_source(
        shards,
        preprocess,
        settings.data,
        batch_size=training.batch_size,
        accumulate=training.accumulate,
        rank=accelerator.process_index,
        ranks=accelerator.num_processes,
        device=accelerator.device,
        keep=None if images is None else shards.members_of(images),
    )
    # From here on each process draws its own dropout; the initialization above was the same on all.
    set_seed((settings.seed + 1 + 1_000_003 * accelerator.process_index) % 2**31)  # apart from those of other seeds
    draws = run and training.picture_every and hasattr(objective, "reconstruct")
    pictures = [Pictures(_draw_into(run))] if run and draws else []
    if accelerator.is_fsdp2:
        if pictures:
            raise UserError("training.picture_every: not available for a sharded model; set it to 0")
        wrapped = accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap or ()
        if missing := {*wrapped} - {type(module).__name__ for module in objective.modules()}:
            raise UserError(
                f"fsdp_transformer_layer_cls_to_wrap: {encoder.name} has no layer {', '.join(sorted(missing))}; name "
                "the class of its blocks in the launch file"
            )
    return Job(
        objective=objective,
        batches=batches,
        lanes=settings.data.lanes,
        total_steps=training.total_steps(shards.samples if images is None else len(images)),
        training=training,
        optim=settings.optim,
        accelerator=accelerator,
        run=run,
        data=shards.fingerprint,
        classes=tuple(shards.classes or ()) if needs_labels else (),
        callbacks=[NanGuard(), Logging(), Checkpointing(), StopOnSignal(), *pictures],
        recipe=recipe.flatten(settings.model_dump(mode="json")),
        quiet=quiet,
    )


def build_encoder(config: EncoderConfig, init_from: str | None) -> factory.Encoder:
    """A new encoder, with the weights of `init_from` where given (positions resampled to the new image size)."""
    encoder = factory.build(config)
    if init_from:
        factory.initialize(encoder, factory.load(init_from), init_from, config.position_resampling)
    return encoder


def build_objective(settings: Recipe, encoder: factory.Encoder, classes: int | None) -> Objective:
    """Build the recipe's objective around an encoder. classes: number of classes that the shards name.

    Raises UserError where it does not fit the recipe's views or micro-batches.
    """
    name, training = settings.objective.name, settings.training
    objective: Objective = plugins.load("objectives", name).Objective(encoder, settings.objective, classes)
    check_names(objective, f"objective {name}")
    if objective.needs_labels is not type(objective).needs_labels:
        raise UserError(f"objective {name}: needs_labels must be an attribute of the class")
    if settings.data.views > 1 and getattr(objective, "mix", None):
        raise UserError("objective.mixup and cutmix would mix views of the same image; set data.views=1")
    if settings.data.views < objective.least_views:
        raise UserError(f"data.views={settings.data.views}: {name} needs at least {objective.least_views}")
    if objective.whole_batch and (training.accumulate > 1 or training.auto_batch):
        key = "auto_batch" if training.auto_batch else "accumulate"
        raise UserError(
            f"training.{key}: micro-batches would change the loss of {name}, which compares the images of a batch; "
            "lower training.batch_size or data.views, or set training.checkpoint_activations=true"
        )
    return objective


def check(
    settings: Recipe,
    shards: ShardSet,
    *,
    classes: int | None = None,
    subset: np.ndarray | None = None,
    here: bool = True,
) -> None:
    """Raises UserError for anything that `build` rejects. Cheap: the only weights read are those of `init_from`.

    here: whether this machine will train; another one may have other precisions.
    """
    accelerator = make_accelerator(settings.training.precision if here else "fp32", settings.training.timeout)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        source = factory.load(start) if (start := settings.init_from) else None
        warnings.filterwarnings("ignore", ".*no-op")  # copying to a network without numbers
        with torch.device("meta"):
            encoder = factory.build(settings.encoder)
            if source and start:
                factory.initialize(encoder, source, start, settings.encoder.position_resampling)
            build(settings, shards, accelerator, encoder=encoder, classes=classes, subset=subset, quiet=True)


def _check_compile(accelerator: Engine) -> None:
    """Raises UserError for what torch.compile does not support, before the first step would fail."""
    kind = accelerator.device.type
    if kind == "xla":
        raise UserError("training.compile: XLA compiles by itself; set it to false")
    if accelerator.is_fsdp2:
        raise UserError("training.compile: not for sharded models, whose hooks break every graph; set it to false")
    # Triton builds its launchers in C, torch's CPU kernels are C++.
    variable, *names = ("CXX", "g++", "clang++", "cl") if kind == "cpu" else ("CC", "gcc", "clang", "cl")
    if not any(map(shutil.which, filter(None, [os.environ.get(variable), *names]))):
        raise UserError(f"training.compile: needs a compiler and found none; install {names[0]}, or set it to false")


def _checkpoint_activations(encoder: factory.Encoder, accelerator: Engine) -> None:
    if accelerator.device.type == "xla":
        raise UserError("training.checkpoint_activations: not available on XLA; raise training.accumulate")
    if memory.has_batch_norm(encoder):
        raise UserError("training.checkpoint_activations: batch norm would count every image twice; set it to false")
    try:
        encoder.network.set_grad_checkpointing(True)
    except (AssertionError, AttributeError):
        raise UserError(f"training.checkpoint_activations: not supported by {encoder.name}; set it to false") from None


def _draw_into(run: Path) -> Callable[[Objective, Batch, int], np.ndarray]:
    from ssl_vit.analysis import figures, reconstruction  # only runs with pictures import matplotlib

    def draw(objective: Objective, batch: Batch, step: int) -> np.ndarray:
        path = run / "pictures" / f"reconstruction_step_{step:08d}.png"
        return figures.save_png(reconstruction.sheet(reconstruction.reconstructions(objective, batch)), path)

    return draw
