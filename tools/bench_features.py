"""Time of feature extraction, compared with the forward passes only.

    python tools/bench_features.py [--images 50000] [--rounds 5] [--model vit_tiny_patch16_224] [--image-size 64]
                                   [--patch-size 8]

JPEG shards in memory (/dev/shm if there is one) are decoded by one loader process. Each round extracts an equal part
of the images and runs as many forward passes of the same size, with the same pooling, on one batch that is on the
device already; the two alternate in order. Prints for each pooling the main process's processor time (without waiting
for the loader) and the wall time (where the loader competes for the same cores).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from bench_stream import write_shards

from ssl_vit.data import DataConfig
from ssl_vit.data.shards import open_shards
from ssl_vit.evaluators.features import EvalContext, ImageSet, extract
from ssl_vit.models import EncoderConfig
from ssl_vit.models.encoder import Pooling
from ssl_vit.models.factory import build
from ssl_vit.training.distributed import make_accelerator

PER_SHARD = 1000


def timed(do: Callable[[], object], device: str) -> np.ndarray:
    """Processor seconds of this process, wall seconds."""
    start = time.process_time(), time.perf_counter()
    do()
    if device == "cuda":
        torch.cuda.synchronize()
    return np.array([time.process_time(), time.perf_counter()]) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--patch-size", type=int, default=8)
    chosen = parser.parse_args()
    sizes = {"name": chosen.model, "image_size": chosen.image_size, "patch_size": chosen.patch_size}
    accelerator = make_accelerator()
    device = accelerator.device
    encoder = build(EncoderConfig.model_validate(sizes)).to(device).eval()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        place, images = Path(folder) / "shards", chosen.images // chosen.rounds
        write_shards(place, max(1, images // PER_SHARD), PER_SHARD, chosen.image_size)
        shards = open_shards(str(place))
        data = DataConfig(train=str(place), evaluation_resize=1.0, workers=1, cache_mb=0)
        context = EvalContext(encoder, shards, shards, data, accelerator)
        shape = (context.batch_size, 3, chosen.image_size, chosen.image_size)
        batch = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        batches = -(-shards.samples // context.batch_size)
        print(f"{chosen.rounds * shards.samples} images of {chosen.image_size} pixels, {chosen.model}")
        for pooling in ("token", "mean"):
            measure(context, batch, batches, pooling, chosen.rounds)


@torch.inference_mode()
def measure(context: EvalContext, batch: torch.Tensor, batches: int, pooling: Pooling, rounds: int) -> None:
    encoder, device = context.trained, batch.device.type

    def bare() -> None:
        for _ in range(batches):
            encoder.represent(batch, pooling)

    def extracted() -> None:
        extract(ImageSet(context, "trained", "train"), lambda batch: encoder.represent(batch.images, pooling))

    for do in (bare, extracted):  # one-time costs: threads, caches, memory of the first batch
        do()
    spent = {bare: np.zeros(2), extracted: np.zeros(2)}
    for n in range(rounds):
        for do in (bare, extracted)[:: 1 if n % 2 else -1]:
            spent[do] += timed(do, device)
    ours, alone = spent[extracted], spent[bare]
    for name, total, passes in zip(("processor", "wall"), ours, alone, strict=True):
        print(f"{pooling}: {name} {total:.1f} s, forward passes only {passes:.1f} s: {total / passes:.3f} x")


if __name__ == "__main__":
    main()
