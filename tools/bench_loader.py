"""Training batches from JPEGs: our loader, common pipelines, and the decoder only.

    python tools/bench_loader.py FOLDER_OF_JPEGS [--size 224] [--images 400] [--rounds 5] [--workers 0 1 2]

Every pipeline makes normalized float32 batches of random crops (5% to 100% of the area), flipped at random, of `size`
pixels from the same files. The pipelines alternate, with a warm file cache. With 0 workers, everything runs in one
process on one thread and the rate is per second of processor time, so that other work on the machine does not count;
with workers it is per second of wall time. The upper limits decode whole images from memory with libjpeg-turbo,
through torchvision's `decode_jpeg` and through simplejpeg, and do nothing else.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import timm.data
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg

from ssl_vit.data import AugmentConfig, DataConfig
from ssl_vit.data.augment import device_images
from ssl_vit.data.images import train_transform
from ssl_vit.data.order import LanePosition
from ssl_vit.data.packing import pack
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.samples import Preprocess
from ssl_vit.data.shards import open_shards
from ssl_vit.data.stream import train_source

BATCH = 40
MEAN = STD = (0.5, 0.5, 0.5)
Pipeline = Callable[[int, int], Iterator[int]]  # size, workers -> batch sizes


def tutorial(size: int) -> transforms.Compose:
    steps = [transforms.RandomResizedCrop(size, (0.05, 1.0)), transforms.RandomHorizontalFlip()]
    return transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


def ours(shards: Path, reduced: bool = True) -> Pipeline:
    def batches(size: int, workers: int) -> Iterator[int]:
        preprocess = Preprocess(train_transform(size, AugmentConfig(reduced_decode=reduced)), 3, None, flip=True)
        data = DataConfig(train=str(shards), lanes=8, workers=workers, cache_mb=0)
        source = train_source(
            open_shards(str(shards)), preprocess, data, batch_size=BATCH, rank=0, ranks=1, device=torch.device("cpu")
        )
        for batch, _ in source([LanePosition()] * 8):
            yield len(device_images(batch).float().div_(127.5).sub_(1))  # what the others do in their loader

    return batches


def webdataset_pil(shards: Path) -> Pipeline:
    def batches(size: int, workers: int) -> Iterator[int]:
        transform = tutorial(size)
        urls = sorted(str(path) for path in shards.glob("*.tar"))
        dataset = (
            webdataset.WebDataset(urls, shardshuffle=len(urls), resampled=False, empty_check=False)
            .shuffle(1000)
            .decode("pil")
            .to_tuple("jpg", "cls")
            .map_tuple(transform, lambda label: label)
        )
        while True:
            for images, _ in DataLoader(dataset.repeat(), BATCH, num_workers=workers):
                yield len(images)

    return batches


def image_folder(folder: Path) -> Pipeline:
    def batches(size: int, workers: int) -> Iterator[int]:
        loader = DataLoader(
            ImageFolder(folder, tutorial(size)), BATCH, shuffle=True, num_workers=workers, drop_last=True
        )
        while True:
            for images, _ in loader:
                yield len(images)

    return batches


def timm_loader(folder: Path) -> Pipeline:
    def batches(size: int, workers: int) -> Iterator[int]:
        loader = timm.data.create_loader(
            timm.data.create_dataset("", root=str(folder), is_training=True),
            (3, size, size),
            BATCH,
            is_training=True,
            scale=(0.05, 1.0),
            color_jitter=None,
            interpolation="bilinear",
            num_workers=workers,
            persistent_workers=False,
            device=torch.device("cpu"),
            pin_memory=False,
        )
        while True:
            for images, _ in loader:
                yield len(images)

    return batches


def full_decode(files: list[Path], decode: Callable[[Any], Any], prepare: Callable[[bytes], Any]) -> Pipeline:
    data = [prepare(path.read_bytes()) for path in files]

    def batches(size: int, workers: int) -> Iterator[int]:
        while True:
            for first in range(0, len(data), BATCH):
                yield len([decode(image) for image in data[first : first + BATCH]])

    return batches


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def rate(pipeline: Pipeline, size: int, workers: int, images: int) -> float:
    """Images per second, without the first batches."""
    batches = pipeline(size, workers)
    for _ in islice(batches, 1 + 2 * workers):
        pass
    clock = time.perf_counter if workers else time.process_time
    seen, start = 0, clock()
    for count in batches:
        seen += count
        if seen >= images:
            return seen / (clock() - start)
    raise AssertionError("a pipeline ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="JPEGs in one subfolder per class")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--images", type=int, default=400, help="images per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(path for path in arguments.folder.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if len(files) < BATCH:
        parser.error(f"{arguments.folder} has {len(files)} JPEGs in subfolders; a batch needs {BATCH}")
    sizes = np.array([Image.open(io.BytesIO(path.read_bytes())).size for path in files[:200]]).mean(0)
    with tempfile.TemporaryDirectory() as scratch:
        shards = Path(scratch) / "shards"
        pack(open_source(str(arguments.folder)), shards, progress=False)
        pipelines: dict[str, Pipeline] = {
            "webdataset + PIL + torchvision": webdataset_pil(shards),
            "ImageFolder + PIL + torchvision": image_folder(arguments.folder),
            "timm loader": timm_loader(arguments.folder),
            "limit: torchvision's decoder alone": full_decode(
                files, partial(decode_jpeg, mode=ImageReadMode.RGB), as_tensor
            ),
            "limit: simplejpeg alone": full_decode(files, simplejpeg.decode_jpeg, bytes),
            "ours, every pixel exact": ours(shards, reduced=False),
            "ours": ours(shards),
        }
        rows: list[dict[str, Any]] = []
        for workers in arguments.workers:
            rates: dict[str, list[float]] = {name: [] for name in pipelines}
            for _ in range(arguments.rounds):
                for name, pipeline in pipelines.items():
                    if workers == 0 or "limit" not in name:
                        rates[name].append(rate(pipeline, arguments.size, workers, arguments.images))
            medians = {name: statistics.median(measured) for name, measured in rates.items() if measured}
            peer = medians["webdataset + PIL + torchvision"]
            rows += [{"workers": workers, "name": n, "images_per_s": m, "ratio": m / peer} for n, m in medians.items()]
    width, height = sizes
    print(f"{len(files)} JPEGs of {width:.0f}x{height:.0f} to {arguments.size}, medians of {arguments.rounds} rounds")
    print(f"{'workers':>7}  {'':34}{'images/s':>9}{'x webdataset':>14}")
    for row in rows:
        print(f"{row['workers']:7d}  {row['name']:34}{row['images_per_s']:9.0f}{row['ratio']:14.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
