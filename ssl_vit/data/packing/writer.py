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

from pydantic import BaseModel

from ssl_vit.data.packing.images import to_stored
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.shards.info import Dropped, ShardEntry
from ssl_vit.files import atomic_file, sha256
from ssl_vit.interfaces import BadSample, printable


@dataclass(frozen=True)
class ShardJob:
    """path: of the tar. first_key: number of its first image, counted through all shards of its folder. items: what
    the source's `read` takes, one per image. labels: their class indices, None in an unlabeled source."""

    path: Path
    first_key: int
    items: list[Any]
    labels: list[int] | None


class WrittenShard(BaseModel):
    """What is recorded of a finished shard: its entry in info.json, and the images that cannot be read."""

    entry: ShardEntry
    dropped: list[Dropped]


def write_shard(read: Callable[[Any], bytes], options: Options, job: ShardJob) -> WrittenShard:
    """Write the shard; without a readable image there is no tar. read: `Source.read`. Raises OSError where writing
    fails."""
    count, dropped = 0, list[Dropped]()
    with (
        atomic_file(job.path) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for number, item in enumerate(job.items):
            name = item if isinstance(item, str) else f"row {item}"
            try:
                extension, stored = to_stored(read(item), options.resize, options.quality)
            except BadSample as error:
                dropped.append(Dropped(file=printable(name), reason=printable(str(error))))
                continue
            members = {extension: stored}
            if job.labels is not None:
                members["cls"] = b"%d" % job.labels[number]
            if options.keep_names:
                members["json"] = json.dumps({"file": name}).encode()
            for kind, content in sorted(members.items()):
                # The key is a number: file names may hold slashes and dots, which have a meaning to tar readers. It
                # counts the planned images, so a dropped one leaves a gap. No time, user or group is stored.
                member = tarfile.TarInfo(f"{job.first_key + number:08d}.{kind}")
                member.size, member.mode = len(content), 0o444
                tar.addfile(member, io.BytesIO(content))
            count += 1
    if not count:
        job.path.unlink()
        return WrittenShard(entry=ShardEntry(file=job.path.name, samples=0), dropped=dropped)
    size, checksum = job.path.stat().st_size, sha256(job.path)
    entry = ShardEntry(file=job.path.name, samples=count, bytes=size, sha256=checksum)
    return WrittenShard(entry=entry, dropped=dropped)
