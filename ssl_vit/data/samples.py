"""One sample, from raw members to an augmented tensor, and samples stacked into the chunks that workers hand over."""

from __future__ import annotations

import hashlib
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ssl_vit.data.decode import BadSample, decode_label, decode_pixels
from ssl_vit.data.plan import LanePosition, Members
from ssl_vit.data.shards import ShardSet, read_members
from ssl_vit.data.transforms import Transform
from ssl_vit.interfaces import Batch

Raw = Mapping[str, bytes | str] | BadSample


@dataclass(frozen=True)
class View:
    """How samples become tensors: the same for a training and an evaluation stream.

    noise: uniform numbers drawn for each sample. classes: upper bound of valid labels (None: unknown).
    """

    transform: Transform
    channels: int
    classes: int | None
    noise: int = 0
    flip: bool = False
    seed: int = 0
    needs_labels: bool = False


@dataclass
class Skip:
    """A sample that could not be used."""

    shard: str
    key: str
    reason: str


@dataclass
class Chunk:
    """One loader worker's part of a step: the tensors of `Batch` by name, and what is not a tensor.

    positions: where the worker's lanes stand after this chunk, by lane. error: why the stream ends here.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    positions: dict[int, LanePosition] = field(default_factory=dict)
    skipped: list[Skip] = field(default_factory=list)
    error: str = ""

    def pin_memory(self) -> Chunk:
        """Called by the DataLoader where the device is a GPU."""
        self.tensors = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return self


@dataclass
class Sample:
    image: torch.Tensor
    label: int
    noise: torch.Tensor
    flip: bool
    index: int
    key: str


def ignore_signals(worker: int) -> None:
    """For loader workers: SIGINT and SIGTERM reach the whole process group, and the main process must save first.

    Workers end when the main process closes them or dies.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """A 64-bit seed for everything random about one sample in one epoch, whichever process draws it."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class SampleReader:
    """Reads, decodes and augments samples of a shard set; keeps decoded images while `cache_bytes` lasts."""

    def __init__(self, shards: ShardSet, view: View, cache_bytes: int) -> None:
        self.shards, self.view, self.free = shards, view, cache_bytes
        self.first_index = shards.first_index
        self.cache: dict[tuple[int, int], tuple[torch.Tensor, int, str]] = {}

    def raw(self, shard: int, members: Members) -> dict[int, Raw]:
        """The wanted members of a shard that are not cached, undecoded; missing ones become BadSample."""
        wanted = {int(m) for m in members if (shard, int(m)) not in self.cache}
        found: dict[int, Raw] = {}
        reason = "missing: the shard ends before it"
        if wanted:
            last = max(wanted)
            for position, sample in read_members(self.shards.urls[shard]):
                if isinstance(sample, Exception):
                    reason = f"missing: the shard is damaged ({sample})"
                elif position in wanted:
                    found[position] = sample
                if position >= last and not isinstance(sample, Exception):
                    break
        return {m: found.get(m) or BadSample(reason) for m in wanted}

    def sample(self, shard: int, member: int, raw: dict[int, Raw], epoch: int) -> Sample | Skip:
        """Decode (or recall) one sample and draw its augmentation, flip and noise from its own seed."""
        view, key = self.view, f"#{member}"
        if (shard, member) in self.cache:
            pixels, label, key = self.cache[shard, member]
        else:
            try:
                content = raw.pop(member)
                if isinstance(content, BadSample):
                    raise content
                key = str(content["__key__"])
                pixels = decode_pixels(content, view.channels)
                label = decode_label(content, view.classes) if view.needs_labels else -1
                if view.needs_labels and label < 0:
                    raise BadSample("no label (.cls), which this objective needs")
            except BadSample as problem:
                return Skip(self.shards.urls[shard], key, str(problem))
            if pixels.nbytes <= self.free:
                self.free -= pixels.nbytes
                self.cache[shard, member] = (pixels, label, key)
        index = int(self.first_index[shard]) + member
        torch.default_generator.manual_seed(sample_seed(view.seed, epoch, index))
        noise = torch.rand(view.noise)
        flip = view.flip and bool(torch.rand(()) < 0.5)
        return Sample(view.transform(pixels), label, noise, flip, index, key)

    def chunk(self, samples: Sequence[Sample], padded_to: int) -> Chunk:
        """Stack samples; padding repeats zeros with label -1, index -1 and valid False. At least one sample."""
        padding = padded_to - len(samples)
        blank = torch.zeros_like(samples[0].image)
        tensors = {
            "images": torch.stack([s.image for s in samples] + [blank] * padding),
            "labels": torch.tensor([s.label for s in samples] + [-1] * padding),
            "noise": torch.stack([s.noise for s in samples] + [torch.zeros(self.view.noise)] * padding),
            "flip": torch.tensor([s.flip for s in samples] + [False] * padding),
            "indices": torch.tensor([s.index for s in samples] + [-1] * padding),
            "valid": torch.tensor([True] * len(samples) + [False] * padding),
        }
        return Chunk(tensors, keys=[s.key for s in samples])


def join(parts: list[Chunk], device: torch.device, lane_size: int) -> Batch:
    """The workers' chunks in worker order as one batch on the device."""

    def joined(name: str) -> torch.Tensor:
        moved = [part.tensors[name].to(device, non_blocking=True) for part in parts]
        return moved[0] if len(moved) == 1 else torch.cat(moved)

    tensors = {name: joined(name) for name in parts[0].tensors}
    return Batch(**tensors, keys=[key for part in parts for key in part.keys], lane_size=lane_size)


def bookkeeping(parts: list[Chunk]) -> Chunk:
    """What the chunks carry besides tensors: positions and skipped samples."""
    positions = {lane: position for part in parts for lane, position in part.positions.items()}
    return Chunk(positions=positions, skipped=[skip for part in parts for skip in part.skipped])
