"""Whether `training.precision=auto` chooses the faster precision on a CPU, over widths and numbers of patches.

    python tools/bench_precision.py [--widths 64 192 384 768] [--patches 16 64 196] [--batch 16] [--rounds 7]

For each size it prints the choice of the short trial, and the time of whole training steps (forward, backward,
clipping, AdamW) in float32 and bfloat16, alternating; medians, in processor time, since other programs may run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path

from ssl_vit import precision, stage
from ssl_vit.data.order import LanePosition
from ssl_vit.data.packing import pack
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.shards import open_training
from ssl_vit.recipe import Recipe, load_recipe
from ssl_vit.training import Precision
from ssl_vit.training.distributed import make_accelerator
from ssl_vit.training.loop import Trainer

PATCH = 8
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


def recipe_of(shards: Path, width: int, patches: int, batch: int) -> Recipe:
    side = math.isqrt(patches) * PATCH
    keys = [
        f"data.train={shards}",
        f"encoder.width={width}",
        f"encoder.image_size={side}",
        f"encoder.patch_size={PATCH}",
    ]
    keys += [f"encoder.heads={max(1, width // 64)}", "encoder.depth=4", "encoder.mlp_ratio=4.0"]
    return load_recipe("digits_ssl", [*keys, f"training.batch_size={batch}"])


def step_seconds(settings: Recipe, rounds: int) -> dict[str, float]:
    """Median processor time of a training step, by precision."""
    trainers, seconds = {}, dict[str, list[float]]()
    for name in PRECISIONS:
        accelerator = make_accelerator(name)
        job = stage.build(settings, open_training(settings.data), accelerator, quiet=True)
        batch, _ = next(job.batches([LanePosition()] * job.lanes))
        trainers[name] = Trainer(job), batch
        trainers[name][0].model.train()
    for _ in range(rounds + 1):
        for name, (trainer, batch) in trainers.items():
            start = time.process_time()
            trainer.train_step(batch)
            seconds.setdefault(name, []).append(time.process_time() - start)
    return {name: statistics.median(took[1:]) for name, took in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 192, 384, 768])
    parser.add_argument("--patches", type=int, nargs="+", default=[16, 64, 196])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if make_accelerator().device.type != "cpu":
        raise SystemExit("this benchmark measures processor time: hide the GPU (CUDA_VISIBLE_DEVICES=)")
    right = 0
    print(f"{'width':>6} {'patches':>8} {'fp32 ms':>9} {'bf16 ms':>9} {'ratio':>6}  chosen")
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder) / "digits"
        pack(open_source("digits", split="test"), shards, Options(shards=4), progress=False)
        for width in arguments.widths:
            for patches in arguments.patches:
                settings = recipe_of(shards, width, patches, arguments.batch)
                chosen = precision.fastest(precision.measure(settings))
                seconds = step_seconds(settings, arguments.rounds)
                right += chosen == min(seconds, key=seconds.__getitem__)
                ratio = seconds["fp32"] / seconds["bf16"]
                milliseconds = " ".join(f"{1000 * seconds[name]:9.1f}" for name in PRECISIONS)
                print(f"{width:6} {patches:8} {milliseconds} {ratio:6.2f}  {chosen}", flush=True)
    print(f"the faster one was chosen in {right} of {len(arguments.widths) * len(arguments.patches)}")


if __name__ == "__main__":
    main()
