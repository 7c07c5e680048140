"""Training steps of our objectives, of other libraries, and the machine's matrix-product rate.

    python tools/bench_step.py [--models vit_small_patch16_224] [--batch 16] [--device cpu|cuda]
                               [--image-size 224] [--patch-size 16] [--precision fp32|bf16] [--compile] [--rounds 9]
                               [--rows NAME ...] [--json FILE]

A step is forward, backward and a fused AdamW update on images that are on the device already: uint8 for ours, which
normalizes and computes its targets in the step; normalized float32 for the others. Every row uses the same optimizer
and precision and runs in its own process. On a CPU the rows alternate, so that other work on the machine affects all
alike; on a GPU each row runs alone, with all of the memory. On a CPU all rows keep freed memory, as `ssl-vit train`
does.

MFU is the share of the rate of a large matrix product, measured in the same rounds, that a row reaches when the
operations of the full model are counted (three times the encoder's forward pass, even if a row computes less). Peers:
timm's encoder only (loss: the mean of its output) and with a classifier; Hugging Face's masked image model and MAE
(which encodes a quarter of the patches). "start" is the time to build the model and to take, and compile, three steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from steps import GEMM, add_options, chosen, encoders, served, timm_vit, title
from torch.utils.flop_counter import FlopCounterMode

from ssl_vit.models import EncoderConfig

PEERS = ("timm: encoder alone", "timm: supervised", "Hugging Face: masked images")


def full_flops(model: EncoderConfig) -> float:
    """FLOPs of the encoder's forward and backward pass for one image."""
    with torch.device("meta"):
        encoder = timm_vit(model)
        pixels = torch.empty(1, 3, *encoder.patch_embed.img_size)
    with FlopCounterMode(display=False) as counter:
        encoder.forward_features(pixels)
    return 3.0 * counter.get_total_flops()


def measure(model: EncoderConfig, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    names = [GEMM, *chosen(arguments)]
    taken: dict[str, list[float]] = {name: [] for name in names}
    began, failures = dict[str, float](), dict[str, str]()
    for together in [names] if arguments.device == "cpu" else [[name] for name in names]:
        with served(together, model, arguments) as (pipes, seconds, failed):
            began, failures = began | seconds, failures | failed
            for _ in range(arguments.rounds):
                for name, pipe in pipes:
                    pipe.send(10 if arguments.device == "cuda" else 1)  # on a GPU, the launches of steps overlap
                    taken[name].append(pipe.recv())
    taken = {name: times for name, times in taken.items() if times}
    rate, full = statistics.median(taken.pop(GEMM)), full_flops(model) * arguments.batch
    rows = [
        {
            "model": model.name,
            "name": name,
            "first_steps_s": began[name],
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
    print(f"\n{title(model, arguments)}; matrix product {rate / 1e12:.3f} TFLOP/s")
    columns = f"{'ms':>9}{'images/s':>10}{'MFU':>7}{'start, s':>10}"
    print(f"{'':34}{columns}{'x timm enc.':>13}{'x timm sup.':>13}{'x HF masked':>13}")
    for row in rows:
        ratios = [row.get(f"vs {peer}") for peer in PEERS]
        cells = "".join(f"{ratio:13.3f}" if ratio else f"{'-':>13}" for ratio in ratios)
        about = f"{row['ms']:9.1f}{row['images_per_s']:10.1f}{row['mfu']:7.1%}{row['first_steps_s']:10.1f}"
        print(f"{row['name']:34}{about}{cells}", flush=True)
    for name, why in failures.items():
        print(f"{name:34} does not run: {why[:100]}")
    return rows + [{"model": model.name, "name": name, "failure": why} for name, why in failures.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    arguments = parser.parse_args()
    rows = [row for model in encoders(arguments) for row in measure(model, arguments)]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
