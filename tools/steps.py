"""Models and their losses, for the benchmarks of training steps: each is served by a process of its own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from ssl_vit.interfaces import Batch
from ssl_vit.models import EncoderConfig
from ssl_vit.models.factory import build
from ssl_vit.objectives import classification, masked_autoencoder, masked_patch
from ssl_vit.training.distributed import keep_freed_memory, set_up_cpu

CLASSES = 1000
Step = Callable[[], torch.Tensor]  # forward pass to a loss
Row = Callable[[EncoderConfig, torch.Tensor], tuple[nn.Module, Step]]  # from an encoder and uint8 images


def batch_of(images: torch.Tensor, noise: int) -> Batch:
    count, device = len(images), images.device
    return Batch(
        images=images,
        labels=torch.randint(0, CLASSES, (count,), device=device),
        noise=torch.rand(count, noise, device=device),
        flip=torch.arange(count, device=device) % 2 == 0,
        indices=torch.arange(count, device=device),
        valid=torch.ones(count, dtype=torch.bool, device=device),
        keys=[""] * count,
        lane_size=count,
    )


def ours(objective: nn.Module, images: torch.Tensor) -> tuple[nn.Module, Step]:
    batch = batch_of(images, objective.noise_per_sample())  # type: ignore[operator]
    return objective, lambda: objective(batch).loss


def timm_vit(model: EncoderConfig, classes: int = 0) -> Any:
    return timm.create_model(model.name, num_classes=classes, img_size=model.image_size, patch_size=model.patch_size)


def timm_encoder(model: EncoderConfig, pixels: torch.Tensor) -> tuple[nn.Module, Step]:
    encoder = timm_vit(model)
    return encoder, lambda: encoder.forward_features(pixels).mean()


def timm_supervised(model: EncoderConfig, pixels: torch.Tensor) -> tuple[nn.Module, Step]:
    classifier = timm_vit(model, CLASSES)
    labels = torch.randint(0, CLASSES, (len(pixels),), device=pixels.device)
    return classifier, lambda: F.cross_entropy(classifier(pixels), labels)


def hugging_face(model: EncoderConfig, pixels: torch.Tensor, mae: bool) -> tuple[nn.Module, Step]:
    import transformers

    encoder = build(model)
    depth, mlp = len(encoder.network.blocks), encoder.network.blocks[0].mlp.fc1.out_features
    sizes: dict[str, Any] = {
        "hidden_size": encoder.width,
        "num_hidden_layers": depth,
        "num_attention_heads": encoder.heads,
    }
    sizes |= {"intermediate_size": mlp, "image_size": encoder.image_size[0], "patch_size": encoder.patch_size}
    if mae:
        whole = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**sizes))
        return whole, lambda: whole(pixel_values=pixels).loss
    config = transformers.ViTConfig(**sizes, encoder_stride=sizes["patch_size"])
    masked = transformers.ViTForMaskedImageModeling(config)
    where = torch.rand(len(pixels), encoder.patches, device=pixels.device) < 0.5
    return masked, lambda: masked(pixel_values=pixels, bool_masked_pos=where).loss


def masked_patches(model: EncoderConfig, images: torch.Tensor) -> tuple[nn.Module, Step]:
    return ours(masked_patch.Objective(build(model), masked_patch.Config()), images)


def masked_autoencoders(
    model: EncoderConfig, images: torch.Tensor, config: masked_autoencoder.Config
) -> tuple[nn.Module, Step]:
    return ours(masked_autoencoder.Objective(build(model), config), images)


def supervised(model: EncoderConfig, images: torch.Tensor) -> tuple[nn.Module, Step]:
    config = classification.Config(head="linear", classes=CLASSES)
    return ours(classification.Objective(build(model), config), images)


def on_pixels(make: Callable[..., tuple[nn.Module, Step]], **more: Any) -> Row:
    return lambda model, images: make(model, images.float() / 127.5 - 1, **more)


GEMM = "matrix product"
ROWS: dict[str, Row] = {
    "ours: masked patches": masked_patches,
    "ours: MAE": partial(masked_autoencoders, config=masked_autoencoder.Config()),
    "ours: MAE, decoder 512x8": partial(
        masked_autoencoders, config=masked_autoencoder.Config(decoder_width=512, decoder_depth=8)
    ),
    "ours: supervised": supervised,
    "timm: encoder alone": on_pixels(timm_encoder),
    "timm: supervised": on_pixels(timm_supervised),
    "Hugging Face: masked images": on_pixels(hugging_face, mae=False),
    "Hugging Face: MAE, decoder 512x8": on_pixels(hugging_face, mae=True),
}
OBJECTIVES = ("masked_patch", "masked_autoencoder", "classification")


def gemm_rate(device: torch.device, dtype: torch.dtype, shared: bool) -> float:
    """Operations per second of a large square product, best of a few."""
    side = 8192 if device.type == "cuda" else 1536
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return max(2 * side**3 / seconds(lambda: left @ right, device, shared) for _ in range(8))


def seconds(act: Callable[[], Any], device: torch.device, shared: bool) -> float:
    """shared: whether other processes of the benchmark use the device at the same time."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    # One thread: processor time, without other work on the machine.
    alone = device.type == "cpu" and torch.get_num_threads() == 1 and not shared
    clock = time.process_time if alone else time.perf_counter
    start = clock()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def training_step(
    module: nn.Module, loss: Step, device: torch.device, bf16: bool, compiled: bool
) -> Callable[[], None]:
    module.to(device).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def forward() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return loss()

    if compiled:
        forward = torch.compile(forward, dynamic=False)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward().backward()
        optimizer.step()

    return step


def serve(pipe: Connection, name: str, model: EncoderConfig, arguments: argparse.Namespace) -> None:
    """Process of one row: builds it, warms up, then takes steps on request and returns the duration of one."""
    torch.manual_seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device, bf16 = torch.device(arguments.device), arguments.precision == "bf16"
    if device.type == "cpu":
        set_up_cpu() if name.startswith("ours") else keep_freed_memory()  # as `ssl-vit train` does
    start, shared = time.perf_counter(), hasattr(arguments, "processes")
    try:
        if name == GEMM:
            product = partial(gemm_rate, device, torch.bfloat16 if bf16 else torch.float32, shared)
            answer: Callable[[int], float] = lambda steps: product()  # noqa: E731
        else:
            shape = (arguments.batch, 3, arguments.image_size, arguments.image_size)
            images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
            with torch.device(device):
                module, loss = ROWS[name](model, images)
            step = training_step(module, loss, device, bf16, arguments.compile)
            for _ in range(3):
                step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            answer = lambda n: seconds(lambda: [step() for _ in range(n)], device, shared) / n  # noqa: E731
    except Exception as error:  # a peer that does not run is a result, not a failure of the benchmark
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return
    pipe.send(time.perf_counter() - start)
    while steps := pipe.recv():
        pipe.send(answer(steps))


@contextmanager
def served(
    names: list[str], model: EncoderConfig, arguments: argparse.Namespace
) -> Iterator[tuple[list[tuple[str, Connection]], dict[str, float], dict[str, str]]]:
    """The processes of these rows, ready for steps: (their pipes, the seconds that they took to build the model and to
    take three steps, errors of those that do not run)."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["timm", *(f"ssl_vit.objectives.{name}" for name in OBJECTIVES)])
    started = []
    for name in names:
        pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, name, model, arguments), daemon=True)
        process.start()
        theirs.close()
        started.append((name, pipe, process))
    pipes, began, failures = [], dict[str, float](), dict[str, str]()
    for name, pipe, _ in started:
        if isinstance(ready := pipe.recv(), str):
            failures[name] = ready
        else:
            began[name] = ready
            pipes.append((name, pipe))
    yield pipes, began, failures
    for _, pipe in pipes:
        pipe.send(0)
    for _, _, process in started:
        process.join()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a row's process."""
    parser.add_argument("--models", nargs="+", default=["vit_small_patch16_224"])
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--patch-size", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", nargs="+", default=[""], help="only rows whose names contain one of these")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")


def encoders(arguments: argparse.Namespace) -> list[EncoderConfig]:
    sizes = {"image_size": arguments.image_size, "patch_size": arguments.patch_size}
    return [EncoderConfig(name=name, **sizes) for name in arguments.models]


def chosen(arguments: argparse.Namespace) -> list[str]:
    return [name for name in ROWS if any(part in name for part in arguments.rows)]


def title(model: EncoderConfig, arguments: argparse.Namespace) -> str:
    how = f"{arguments.precision}{', compiled' if arguments.compile else ''}, {arguments.device}"
    size = f"{model.name} at {model.image_size} px, patches of {model.patch_size}"
    threads = f", {arguments.threads or torch.get_num_threads()} threads" if arguments.device == "cpu" else ""
    return f"{size}, batch {arguments.batch}, {how}{threads}"
