"""One sample, from the bytes in its shard to an augmented tensor, and samples stacked into chunks and batches."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ssl_vit.data import MAX_PIXELS
from ssl_vit.data.augment import ColorAugment
from ssl_vit.data.images import Picture, Pixels, Transform, open_picture
from ssl_vit.data.jpeg import Jpeg
from ssl_vit.data.order import LanePosition
from ssl_vit.data.shards import ShardSet
from ssl_vit.data.shards.reading import OpenShards, decode_label
from ssl_vit.interfaces import BadSample, Batch, UserError
from ssl_vit.records import SkippedSample


@dataclass(frozen=True)
class Preprocess:
    """How samples become tensors: the same for a training and an evaluation stream.

    noise: uniform numbers drawn for each view. classes: upper bound of valid labels (None: unknown).
    color: draws the color augmentation of each view (None: none). views: number of views of each sample.
    max_pixels: most pixels of an image, checked before it is decoded.
    needs_labels: labels are read, and samples without one are skipped. reads_labels: labels are read, -1 where there is
        none. Neither: every label is -1.
    """

    transform: Transform
    channels: int
    classes: int | None
    noise: int = 0
    flip: bool = False
    color: ColorAugment | None = None
    views: int = 1
    seed: int = 0
    needs_labels: bool = False
    reads_labels: bool = False
    max_pixels: int = MAX_PIXELS


@dataclass
class Chunk:
    """One loader worker's part of a step: the tensors of `Batch` by name, and what is not a tensor.

    positions: where the worker's lanes stand after this chunk, by lane.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    positions: dict[int, LanePosition] = field(default_factory=dict)
    skipped: list[SkippedSample] = field(default_factory=list)


@dataclass
class Sample:
    """One view of a sample."""

    image: torch.Tensor
    label: int
    noise: torch.Tensor
    flip: bool
    jitter: torch.Tensor | None
    index: int
    key: str


def sample_seed(seed: int, epoch: int, index: int, view: int = 0) -> int:
    """A 64-bit seed for everything random about one view of a sample in one epoch, whichever process draws it."""
    numbers = struct.pack("<qqq", seed, epoch, index) + (struct.pack("<q", view) if view else b"")
    digest = hashlib.blake2b(numbers, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class SampleReader:
    """Reads, decodes and augments samples of a shard set; keeps decoded images while `cache_bytes` lasts.

    streams: how many shards are read in turns. reads: samples read from shards so far.
    """

    def __init__(self, shards: ShardSet, preprocess: Preprocess, cache_bytes: int, streams: int = 1) -> None:
        self.shards, self.preprocess = shards, preprocess
        self.files = OpenShards(shards.open, 3 * streams + 2)  # of each: the current one, the next and the last
        self.first_index = shards.first_index
        # One block, as many small tensors would fragment the memory that training steps free.
        try:
            self.kept, self.end = torch.empty(cache_bytes, dtype=torch.uint8), 0
        except RuntimeError:
            raise UserError(f"data.cache_mb={cache_bytes >> 20}: this memory cannot be allocated; lower it") from None
        self.cache: dict[tuple[int, int], tuple[int, int, int, int, str]] = {}
        self.reads = 0
        self.least: tuple[int, int] | None = getattr(preprocess.transform, "least", None)

    def sample(self, shard: int, member: int, epoch: int) -> list[Sample] | SkippedSample:
        """Read and decode (or recall) one sample; draw noise, flip and augmentation of each view from its own seed."""
        preprocess, key = self.preprocess, f"#{member}"
        try:
            picture: Picture
            if (shard, member) in self.cache:
                start, height, width, label, key = self.cache[shard, member]
                picture = Pixels(self._recall(start, height, width))
            else:
                self.reads += 1
                file = self.files.get(shard)
                content = file.read(member)
                key = file.samples[member].key
                picture = open_picture(content, preprocess.channels, preprocess.max_pixels)
                label = -1
                if preprocess.needs_labels or preprocess.reads_labels:
                    try:
                        label = decode_label(content, preprocess.classes)
                    except BadSample:
                        if preprocess.needs_labels:
                            raise
                if preprocess.needs_labels and label < 0:
                    raise BadSample("no label (.cls)")
                picture = self._keep(shard, member, picture, label, key)
            index = int(self.first_index[shard]) + member
            views = []
            for view in range(preprocess.views):
                torch.default_generator.manual_seed(sample_seed(preprocess.seed, epoch, index, view))
                noise = torch.rand(preprocess.noise)
                flip = preprocess.flip and bool(torch.rand(()) < 0.5)
                jitter = preprocess.color.draw() if preprocess.color else None
                views.append(Sample(preprocess.transform(picture), label, noise, flip, jitter, index, key))
            return views
        except BadSample as problem:
            return SkippedSample(shard=self.shards.urls[shard], key=key, reason=str(problem))

    def _keep(self, shard: int, member: int, picture: Picture, label: int, key: str) -> Picture:
        """The picture, decoded and kept while `data.cache_mb` allows it.

        JPEGs whose crops may be decoded at a reduced size are not kept: pixels must not depend on the cache.
        """
        height, width, start = picture.height, picture.width, self.end
        size, least = height * width * self.preprocess.channels, self.least if isinstance(picture, Jpeg) else None
        if start + size > len(self.kept) or (least and height >= 2 * least[0] and width >= 2 * least[1]):
            return picture
        try:
            pixels = picture.whole()
        except BadSample:  # its crops decide, as they do where nothing is kept: some end before the damage
            return picture
        self.end += size
        self._recall(start, height, width).copy_(pixels)
        self.cache[shard, member] = (start, height, width, label, key)
        return Pixels(pixels)

    def _recall(self, start: int, height: int, width: int) -> torch.Tensor:
        """Kept pixels, uint8 (C, height, width), in rows of pixels as a decoder gives them."""
        channels = self.preprocess.channels
        return self.kept[start : start + height * width * channels].view(height, width, channels).permute(2, 0, 1)


def stacked(samples: Sequence[Sample], size: int, preprocess: Preprocess) -> Chunk:
    """Views of samples as a chunk of `size`; padding is black with label -1, index -1 and valid False."""
    padding = [_blank(preprocess)] * (size - len(samples)) if len(samples) < size else []
    every = [*samples, *padding]
    # As rows of pixels, which is how the resize left them: a copy, not a transposition.
    tensors = {
        "images": torch.stack([sample.image.permute(1, 2, 0) for sample in every]).permute(0, 3, 1, 2),
        "labels": torch.tensor([sample.label for sample in every]),
        "noise": torch.stack([sample.noise for sample in every]),
        "flip": torch.tensor([sample.flip for sample in every]),
        "indices": torch.tensor([sample.index for sample in every]),
        "valid": torch.arange(size) < len(samples),
    }
    if preprocess.color:
        tensors["jitter"] = torch.stack([sample.jitter for sample in every if sample.jitter is not None])
    return Chunk(tensors, keys=[sample.key for sample in samples])


@contextmanager
def one_thread() -> Iterator[None]:
    """Context for work on small tensors. More threads would wait for one another where loader workers or other programs
    use the cores, for many times as long as the work takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _blank(preprocess: Preprocess) -> Sample:
    """Padding: black, of the size that the transform gives."""
    image = preprocess.transform(Pixels(torch.zeros(preprocess.channels, 8, 8, dtype=torch.uint8)))
    jitter = torch.ones(preprocess.color.columns) if preprocess.color else None
    return Sample(torch.zeros_like(image), -1, torch.zeros(preprocess.noise), False, jitter, -1, "")


def join(
    parts: Sequence[Chunk], device: torch.device, lane_size: int, *, views: int = 1, shared: bool = False
) -> tuple[Batch, Chunk]:
    """The workers' chunks in worker order as one batch on the device; and what they carry besides tensors.

    shared: the tensors lie in memory that a worker will overwrite, and are copied.
    """
    pinned = device.type == "cuda"  # for an asynchronous copy

    def joined(name: str) -> torch.Tensor:
        tensors = [part.tensors[name] for part in parts]
        first = tensors[0]
        if len(tensors) == 1 and not shared and not pinned:
            return first.to(device)
        shape = (sum(map(len, tensors)), *first.shape[1:])
        whole = torch.empty_strided(shape, first.stride(), dtype=first.dtype, pin_memory=pinned)
        return torch.cat(tensors, out=whole).to(device, non_blocking=pinned)

    with one_thread():
        tensors: dict[str, Any] = {name: joined(name) for name in parts[0].tensors}
    batch = Batch(**tensors, keys=[key for part in parts for key in part.keys], lane_size=lane_size, views=views)
    positions = {lane: position for part in parts for lane, position in part.positions.items()}
    return batch, Chunk(positions=positions, skipped=[skip for part in parts for skip in part.skipped])
