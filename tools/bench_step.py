"""Training steps of our objectives, of other libraries, and the machine's matrix-product rate.

    python tools/bench_step.py [--models vit_small_patch16_224] [--batch 16] [--device cpu|cuda]
                               [--precision fp32|bf16] [--compile] [--rounds 9] [--rows NAME ...]
                               [--peers-keep-memory] [--one-by-one] [--json FILE]

A step is forward, backward and a fused AdamW update on images that are on the device already: uint8 for ours, which
normalizes and computes its targets in the step; normalized float32 for the others. Every row uses the same optimizer
and precision and runs in its own process. On a CPU the rows alternate, so that other work on the machine affects all
alike; on a GPU each row runs alone, with all of the memory. On a CPU ours keeps freed memory, as `ssl-vit train`
does; with --peers-keep-memory the others do too.

MFU is the share of the rate of a large matrix product, measured in the same rounds, that a row reaches when the
operations of the full model are counted (three times the encoder's forward pass, even if a row computes less). Peers:
timm's encoder only (loss: the mean of its output) and with a classifier; Hugging Face's masked image model and MAE
(which encodes a quarter of the patches).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ssl_vit.interfaces import Batch
from ssl_vit.models import EncoderConfig
from ssl_vit.models.factory import build
from ssl_vit.objectives import classification, masked_autoencoder, masked_patch
from ssl_vit.training.distributed import keep_freed_memory, set_up_cpu

CLASSES = 1000
Step = Callable[[], torch.Tensor]  # forward pass to a loss
Row = Callable[[str, torch.Tensor], tuple[nn.Module, Step]]  # from a model's name and uint8 images


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


def timm_encoder(model: str, pixels: torch.Tensor) -> tuple[nn.Module, Step]:
    encoder = timm.create_model(model, num_classes=0)
    return encoder, lambda: encoder.forward_features(pixels).mean()


def timm_supervised(model: str, pixels: torch.Tensor) -> tuple[nn.Module, Step]:
    classifier = timm.create_model(model, num_classes=CLASSES)
    labels = torch.randint(0, CLASSES, (len(pixels),), device=pixels.device)
    return classifier, lambda: F.cross_entropy(classifier(pixels), labels)


def hugging_face(model: str, pixels: torch.Tensor, mae: bool) -> tuple[nn.Module, Step]:
    import transformers

    encoder = build(EncoderConfig(name=model))
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


def masked_patches(model: str, images: torch.Tensor) -> tuple[nn.Module, Step]:
    return ours(masked_patch.Objective(build(EncoderConfig(name=model)), masked_patch.Config()), images)


def masked_autoencoders(model: str, images: torch.Tensor, config: masked_autoencoder.Config) -> tuple[nn.Module, Step]:
    return ours(masked_autoencoder.Objective(build(EncoderConfig(name=model)), config), images)


def supervised(model: str, images: torch.Tensor) -> tuple[nn.Module, Step]:
    config = classification.Config(head="linear", classes=CLASSES)
    return ours(classification.Objective(build(EncoderConfig(name=model)), config), images)


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
PEERS = ("timm: encoder alone", "timm: supervised", "Hugging Face: masked images")


def gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large square product, best of a few."""
    side = 8192 if device.type == "cuda" else 1536
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return max(2 * side**3 / seconds(lambda: left @ right, device) for _ in range(8))


def seconds(act: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    # One thread: processor time, without other work on the machine.
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def full_flops(model: str) -> float:
    """FLOPs of the encoder's forward and backward pass for one image."""
    with torch.device("meta"):
        encoder = timm.create_model(model, num_classes=0)
        pixels = torch.empty(1, *encoder.pretrained_cfg["input_size"])
    with FlopCounterMode(display=False) as counter:
        encoder.forward_features(pixels)
    return 3.0 * counter.get_total_flops()


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


def serve(pipe: Connection, name: str, model: str, arguments: argparse.Namespace) -> None:
    """Process of one row: builds it, warms up, then takes a step on request and returns its duration."""
    torch.manual_seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device, bf16 = torch.device(arguments.device), arguments.precision == "bf16"
    if device.type == "cpu" and name.startswith("ours"):
        set_up_cpu()  # as `ssl-vit train` does
    elif device.type == "cpu" and arguments.peers_keep_memory:
        keep_freed_memory()
    try:
        if name == GEMM:
            product = partial(gemm_rate, device, torch.bfloat16 if bf16 else torch.float32)
            answer: Callable[[], float] = product
        else:
            images = torch.randint(0, 256, (arguments.batch, 3, 224, 224), dtype=torch.uint8, device=device)
            with torch.device(device):
                module, loss = ROWS[name](model, images)
            step = training_step(module, loss, device, bf16, arguments.compile)
            for _ in range(3):
                step()
            answer = partial(seconds, step, device)
    except Exception as error:  # a peer that does not run is a result, not a failure of the benchmark
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return
    pipe.send(torch.get_num_threads())
    while pipe.recv():
        pipe.send(answer())


def take(
    names: list[str], model: str, arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, str], int]:
    """(durations of these rows by round, errors of those that do not run, threads); the rows alternate and end."""
    pipes, failures, threads, context = {}, {}, 0, get_context("forkserver")
    context.set_forkserver_preload(["timm", *(f"ssl_vit.objectives.{name}" for name in OBJECTIVES)])
    processes = []
    for name in names:
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, name, model, arguments), daemon=True))
        processes[-1].start()
        theirs.close()
        if isinstance(ready := pipes[name].recv(), str):
            failures[name] = ready
            del pipes[name]
        else:
            threads = ready
    taken: dict[str, list[float]] = {name: [] for name in pipes}
    for _ in range(arguments.rounds):
        for name, pipe in pipes.items():
            pipe.send(True)
            taken[name].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(False)
    for process in processes:
        process.join()
    return taken, failures, threads


def measure(model: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    names = [GEMM, *(name for name in ROWS if any(part in name for part in arguments.rows))]
    taken: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    threads = 0
    for together in [[name] for name in names] if arguments.one_by_one else [names]:
        seconds, failed, used = take(together, model, arguments)
        taken, failures, threads = taken | seconds, failures | failed, max(threads, used)
    rate, full = statistics.median(taken.pop(GEMM)), full_flops(model) * arguments.batch
    rows = [
        {
            "model": model,
            "name": name,
            "ms": 1000 * statistics.median(times),
            "images_per_s": arguments.batch / statistics.median(times),
            "mfu": full / statistics.median(times) / rate,
            # The median of the ratios within rounds: other work on the machine affects both alike.
            **{
                f"vs {peer}": statistics.median(a / b for a, b in zip(times, taken[peer], strict=True))
                for peer in PEERS
                if peer in taken
            },
        }
        for name, times in taken.items()
    ]
    how = f"{arguments.precision}{', compiled' if arguments.compile else ''}, {arguments.device}"
    print(f"\n{model}, batch {arguments.batch}, {how}, {threads} threads; matrix product {rate / 1e12:.3f} TFLOP/s")
    print(f"{'':34}{'ms':>9}{'images/s':>10}{'MFU':>7}{'x timm enc.':>13}{'x timm sup.':>13}{'x HF masked':>13}")
    for row in rows:
        ratios = [row.get(f"vs {peer}") for peer in PEERS]
        cells = "".join(f"{ratio:13.3f}" if ratio else f"{'-':>13}" for ratio in ratios)
        print(f"{row['name']:34}{row['ms']:9.1f}{row['images_per_s']:10.1f}{row['mfu']:7.1%}{cells}")
    for name, why in failures.items():
        print(f"{name:34} does not run: {why[:100]}")
    return rows + [{"model": model, "name": name, "failure": why} for name, why in failures.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit_small_patch16_224"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", nargs="+", default=[""], help="only rows whose names contain one of these")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--peers-keep-memory", action="store_true", help="see above")
    parser.add_argument("--one-by-one", action="store_true", help="one row after the other (always on a GPU)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    arguments.one_by_one |= arguments.device != "cpu"
    rows = [row for model in arguments.models for row in measure(model, arguments)]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
