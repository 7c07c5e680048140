"""The training stream without decoding: time to resume within an epoch, and memory.

    python tools/bench_stream.py [--shards 1000] [--samples 1000]

Resume: starts at several positions of an epoch of many shards, as a checkpoint would, and prints the time to the first
batch and the number of shards opened for it (the current and the next shard of each lane). The shards are hard links
to one file, read from a warm cache. Memory: how much a process grows while it reads one epoch, with 1x and 10x the
samples.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image

from ssl_vit.data import AugmentConfig, DataConfig
from ssl_vit.data.images import train_transform
from ssl_vit.data.order import LanePosition
from ssl_vit.data.samples import Chunk, Preprocess
from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.data.shards import reading as shard_file
from ssl_vit.data.stream import train_source
from ssl_vit.interfaces import Batch

LANES, BATCH = 8, 64


def write_shards(folder: Path, shards: int, samples: int, side: int) -> None:
    folder.mkdir()
    with tarfile.open(folder / "000000.tar", "w") as tar:
        for n in range(samples):
            pixels = np.random.default_rng(n).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).resize((side, side)).save(buffer, "JPEG")
            for extension, data in (("jpg", buffer.getvalue()), ("cls", b"0")):
                member = tarfile.TarInfo(f"{n:08d}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    for number in range(1, shards):
        os.link(folder / "000000.tar", folder / f"{number:06d}.tar")
    listed = [{"file": f"{number:06d}.tar", "samples": samples} for number in range(shards)]
    info = {"classes": ["one"], "samples": shards * samples, "shards": listed}
    (folder / "info.json").write_text(json.dumps(info))


def batches_from(shards: ShardSet, start: LanePosition) -> Iterator[tuple[Batch, Chunk]]:
    """Training batches, decoded in this process, with all lanes at `start`."""
    preprocess = Preprocess(train_transform(32, AugmentConfig()), 3, None)
    data = DataConfig(train=shards.spec, lanes=LANES, workers=0, cache_mb=0)
    cpu = torch.device("cpu")
    return train_source(shards, preprocess, data, batch_size=BATCH, rank=0, ranks=1, device=cpu)([start] * LANES)


def first_batch(folder: Path, position: int) -> tuple[float, int]:
    """Seconds to the first batch, and the number of shards opened for it."""
    opened = []
    whole = shard_file.ShardFile.__init__

    def counted(self: shard_file.ShardFile, *arguments: object) -> None:
        opened.append(arguments)
        whole(self, *arguments)  # type: ignore[arg-type]

    shard_file.ShardFile.__init__ = counted  # type: ignore[method-assign, assignment]
    start = time.perf_counter()
    next(batches_from(open_shards(str(folder)), LanePosition(3, position)))
    shard_file.ShardFile.__init__ = whole  # type: ignore[method-assign]
    return time.perf_counter() - start, len(opened)


def peak_of_an_epoch(folder: Path) -> float:
    """Peak MiB of a new process during one epoch, above its memory after the first batch."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (folder,))


def _peak(folder: Path) -> float:
    shards = open_shards(str(folder))
    batches = batches_from(shards, LanePosition())
    next(batches)
    process = psutil.Process()
    before = process.memory_info().rss
    peak = before
    for _ in islice(batches, shards.samples // BATCH):
        peak = max(peak, process.memory_info().rss)
    return (peak - before) / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1000, help="samples per shard")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "many"
        write_shards(folder, arguments.shards, arguments.samples, 64)
        lane = arguments.shards * arguments.samples // LANES
        print(
            f"resume in an epoch of {arguments.shards} shards x {arguments.samples} samples, {LANES} lanes, 0 workers"
        )
        base = None
        for share in (0.0, 0.1, 0.37, 0.5, 0.731, 0.999):
            seconds, opened = first_batch(folder, int(share * lane))
            base = base or seconds
            ratio = f"{seconds / base:4.2f} x the start"
            print(f"  {share:6.1%} of the epoch: {seconds:6.3f} s ({ratio}), {opened} shards opened")
        print("memory added by reading an epoch of 128 px JPEGs")
        small = None
        for samples in (2_000, 20_000):
            path = Path(scratch) / str(samples)
            write_shards(path, samples // 500, 500, 128)
            added = peak_of_an_epoch(path)
            small = small or added
            print(f"  {samples:6d} samples: {added:6.1f} MiB ({added / max(small, 1e-9):4.2f} x)")


if __name__ == "__main__":
    main()
