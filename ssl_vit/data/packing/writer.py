"""One shard: read its images, check them, write the tar. Runs in packing processes.

The tar is written with the standard library. WebDataset's TarWriter does the same on top of it, but importing it
imports torch: seconds and hundreds of MB in every process.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_vit.data.packing.images import to_stored
from ssl_vit.data.packing.parallel import end_with_parent
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources.base import BrokenImageError
from ssl_vit.files import atomic_file, sha256
from ssl_vit.interfaces import printable


@dataclass(frozen=True)
class ShardJob:
    """path: of the tar. first_key: number of its first image, counted through all shards of its folder. items: what
    the source's `read` takes, one per image. labels: their class indices, None in an unlabeled source."""

    path: Path
    first_key: int
    items: list[Any]
    labels: list[int] | None


@dataclass(frozen=True)
class WrittenShard:
    """samples: number stored. height, width: sums over the samples, pixels.
    dropped: (name, reason) of images that cannot be read."""

    file: str
    samples: int
    bytes: int
    sha256: str
    height: int
    width: int
    channels: int
    dropped: list[tuple[str, str]]


@dataclass(frozen=True)
class ShardWriter:
    """What is the same for every shard. read: `Source.read`."""

    read: Callable[[Any], tuple[str, bytes]]
    options: Options

    def __call__(self, job: ShardJob) -> WrittenShard:
        """Write the shard; without a readable image there is no tar. Raises OSError where writing fails."""
        sizes: list[tuple[int, int, int]] = []
        dropped: list[tuple[str, str]] = []
        with (
            atomic_file(job.path) as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for number, item in enumerate(job.items):
                end_with_parent()
                try:
                    name, data = self.read(item)
                    stored = to_stored(data, name, self.options.resize, self.options.quality)
                except BrokenImageError as error:
                    dropped.append((printable(error.name), printable(error.reason)))
                    continue
                # The key is a number: file names may hold slashes and dots, which have a meaning to tar readers. It
                # counts the planned images, so a dropped one leaves a gap.
                members = {stored.extension: stored.data}
                if job.labels is not None:
                    members["cls"] = b"%d" % job.labels[number]
                if self.options.keep_names:
                    members["json"] = json.dumps({"file": name}).encode()
                _add(tar, f"{job.first_key + number:08d}", members)
                sizes.append((stored.height, stored.width, stored.channels))
        if not sizes:
            job.path.unlink()
            return WrittenShard(job.path.name, 0, 0, "", 0, 0, 0, dropped)
        heights, widths, channels = zip(*sizes, strict=True)
        facts = (len(sizes), job.path.stat().st_size, sha256(job.path))
        return WrittenShard(job.path.name, *facts, sum(heights), sum(widths), max(channels), dropped)


def _add(tar: tarfile.TarFile, key: str, members: dict[str, bytes]) -> None:
    """Add a sample's members, sorted by extension, with no time, user or group in their headers."""
    for extension, data in sorted(members.items()):
        member = tarfile.TarInfo(f"{key}.{extension}")
        member.size, member.mode = len(data), 0o444
        tar.addfile(member, io.BytesIO(data))
