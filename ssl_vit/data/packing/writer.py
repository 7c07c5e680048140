"""One shard: read its images, check them, write the tar. Runs in packing processes, so it imports little.

The tar is written with the standard library: WebDataset's writer is a thin coat over it that would import torch into
every process. WebDataset's reader, which training and `ssl_vit.data.verify` use, reads it back.
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
from ssl_vit.data.packing.sources.base import BrokenImageError
from ssl_vit.files import atomic_file, sha256, write_json


@dataclass(frozen=True)
class ShardJob:
    """path: the tar. first_key: the number of its first image, counted through the part's shards. items: what `read`
    takes, an image each; labels: their class indices, None in an unlabeled source."""

    path: Path
    first_key: int
    items: list[Any]
    labels: list[int] | None


@dataclass(frozen=True)
class ShardWriter:
    """What is the same for every shard. plan: the plan's fingerprint; tag: tells writers of one folder apart."""

    read: Callable[[Any], tuple[str, bytes]]
    resize: int | None
    quality: int
    keep_names: bool
    plan: str
    tag: str

    def __call__(self, job: ShardJob, advance: Callable[[], None]) -> dict[str, Any]:
        """Write the shard, then its entry beside it, and return the entry; `advance` is called after every image.

        Images that cannot be read are left out and listed as dropped, as [name, reason]; where none is left there is
        no tar. height and width are sums over the images. Raises OSError where writing fails.
        """
        entry: dict[str, Any] = {
            "plan": self.plan,
            "tag": self.tag,
            "file": job.path.name,
            "samples": 0,
            "bytes": 0,
            "sha256": "",
        }
        entry |= {"height": 0, "width": 0, "channels": 0, "dropped": []}
        with (
            atomic_file(job.path, self.tag) as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for number, item in enumerate(job.items):
                try:
                    key, data = self.read(item)
                    stored = to_stored(data, key, self.resize, self.quality)
                except BrokenImageError as error:
                    entry["dropped"].append([error.key, error.reason])
                else:
                    # The key is a number: file names may hold slashes and dots, which a tar reader would take for
                    # something else. It counts the images of the plan, so a dropped one leaves a gap.
                    members = {stored.extension: stored.data}
                    if job.labels is not None:
                        members["cls"] = b"%d" % job.labels[number]
                    if self.keep_names:
                        members["json"] = json.dumps({"file": key}).encode()
                    _add(tar, f"{job.first_key + number:08d}", members)
                    entry["samples"] += 1
                    entry["height"] += stored.height
                    entry["width"] += stored.width
                    entry["channels"] = max(entry["channels"], stored.channels)
                advance()
        if entry["samples"]:
            entry |= {"bytes": job.path.stat().st_size, "sha256": sha256(job.path)}
        else:
            job.path.unlink()
        write_json(entry_path(job.path), entry, self.tag)
        return entry


def entry_path(shard: Path) -> Path:
    """Where it is noted that a shard is finished, until info.json says so of the whole set."""
    return shard.with_suffix(".entry.json")


def _add(tar: tarfile.TarFile, key: str, members: dict[str, bytes]) -> None:
    """Add a sample's members, sorted by extension, with nothing of this machine or hour in their headers."""
    for extension, data in sorted(members.items()):
        member = tarfile.TarInfo(f"{key}.{extension}")
        member.size, member.mode = len(data), 0o444
        tar.addfile(member, io.BytesIO(data))
    tar.members.clear()  # type: ignore[attr-defined]  # else every header stays in memory
