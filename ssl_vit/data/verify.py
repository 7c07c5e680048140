"""Checking shard sets: `verify` lists every defect, `stats` counts what a set holds.

Nothing read here is unpickled or unpacked to disk, and no size is believed that is larger than the file.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from ssl_vit.data.packing import content_hash
from ssl_vit.data.packing.images import channels, decode, open_header
from ssl_vit.data.packing.parallel import end_with_parent, process_count, progress_bar, run
from ssl_vit.data.packing.sources.base import BrokenImageError
from ssl_vit.data.shards.info import IMAGE_EXTENSIONS, Info, ShardList, open_set
from ssl_vit.files import sha256
from ssl_vit.interfaces import UserError

Report = Callable[[str, str, str], None]  # key, kind, detail
_NAME = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)", re.DOTALL)  # key and extension of a member, as in WebDataset
_LABEL = re.compile(rb"\s*-?\d{1,18}\s*")


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong with a shard set.

    shard: file name; "info.json" for the set as a whole.
    key: of the sample; "" where the defect is not of one sample.
    kind: checksum, size, truncated, missing_member, unreadable_image, duplicate_key, bad_label, label_out_of_range,
        missing_shard, extra_shard or count.
    detail: in plain words.
    """

    shard: str
    key: str
    kind: str
    detail: str


def verify(folder: Path, *, jobs: int | None = None, progress: bool = True) -> list[Defect]:
    """Read the whole shard set, decode every image, and list all defects; a sound set has none.

    folder: of shards. Without info.json (or about.json, which lists several splits) tars are only checked by
        themselves.
    jobs: processes. Default: one per core, fewer for a small set.
    progress: show it on stderr.

    Raises UserError where there is no shard set, info.json cannot be read, or packing was not finished.
    """
    listed = open_set(folder)
    present = {path.name: path.stat().st_size for path in folder.glob("*.tar")}
    missing = [name for name in listed.shards if name not in present]
    defects = [Defect(name, "", "missing_shard", f"{listed.file} lists it") for name in missing]
    extra = sorted(present.keys() - listed.shards.keys())
    defects += [Defect(name, "", "extra_shard", f"not in {listed.file}") for name in extra]
    for split, part in listed.parts.items():
        if (total := sum(entry.samples for entry in part.shards)) != part.samples:
            detail = f"says {part.samples} samples{split and f' in {split}'}, its shards have {total}"
            defects.append(Defect(listed.file, "", "count", detail))
        if isinstance(part, Info) and part.content_hash not in (None, content_hash(e.sha256 for e in part.shards)):
            defects.append(Defect(listed.file, "", "checksum", "content_hash differs from that of the shards' sha256"))
    names = [name for name in listed.shards if name in present]
    total = sum(entry.samples for name in names if (entry := listed.shards[name]))
    checked: dict[str, _Checked] = {}
    with progress_bar("verifying", total or None, progress) as advance:

        def receive(name: str, found: _Checked) -> None:
            checked[name] = found
            advance(found.samples)

        processes = process_count(jobs, len(names), sum(present[name] for name in names))
        run(_Checker(folder, listed), names, processes, receive)
    keys_of_family: dict[str, set[str]] = {}  # train-000.tar and val-000.tar may share keys
    for name in names:
        keys = keys_of_family.setdefault(re.sub(r"\d+\.tar$", "", name), set())
        defects += checked[name].defects
        twice = sorted(checked[name].keys & keys)
        defects += [Defect(name, key, "duplicate_key", "a sample of another shard has the same key") for key in twice]
        keys |= checked[name].keys
    return defects


def stats(folder: Path) -> dict[str, Any]:
    """What the shard set holds, counted from the tars (image headers only, no pixels).

    Returns samples, shards, bytes, samples_per_shard and image_size (pixels) as {"mean", "min", "max"}, channels (3 if
    any image has color), labeled, samples_per_class {class name: count}.

    Raises UserError at the first defect, naming it; `verify` lists all of them.
    """
    listed = open_set(folder)
    labels: Counter[int] = Counter()
    sizes: list[tuple[int, int, int]] = []
    per_shard: list[int] = []
    for name in listed.shards:
        path = folder / name

        def stop(key: str, kind: str, detail: str, path: Path = path) -> NoReturn:
            raise UserError(f"{path}: {key}{key and ': '}{kind}: {detail}; `ssl-vit shards verify` lists every defect")

        if not path.is_file():
            stop("", "missing_shard", f"{listed.file} lists it")
        before = len(sizes)
        for key, images, label in _samples(path, listed, stop):
            try:
                image = open_header(images[0], key)
            except BrokenImageError as error:
                stop(key, "unreadable_image", error.reason)
            sizes.append((image.height, image.width, channels(image)))
            if label is not None:
                labels[label] += 1
        per_shard.append(len(sizes) - before)
    if not sizes:
        raise UserError(f"{folder}: its shards hold no samples")

    heights, widths, channel = zip(*sizes, strict=True)
    return {
        "samples": len(sizes),
        "shards": len(per_shard),
        "bytes": sum((folder / name).stat().st_size for name in listed.shards),
        "labeled": labels.total() == len(sizes),
        "samples_per_class": _by_class_name(labels, listed.classes),
        "samples_per_shard": _spread(per_shard),
        "image_size": {"height": _spread(heights), "width": _spread(widths)},
        "channels": max(channel),
    }


@dataclass(frozen=True)
class _Checked:
    samples: int
    keys: set[str]
    defects: list[Defect]


@dataclass(frozen=True)
class _Checker:
    """What every process needs to check shards by their names."""

    folder: Path
    listed: ShardList

    def __call__(self, name: str) -> _Checked:
        path, entry = self.folder / name, self.listed.shards[name]
        defects: list[Defect] = []

        def report(key: str, kind: str, detail: str) -> None:
            defects.append(Defect(name, key, kind, detail))

        if entry is not None:
            if entry.bytes is not None and (size := path.stat().st_size) != entry.bytes:
                report("", "size", f"{size} bytes, {self.listed.file} says {entry.bytes}")
            if entry.sha256 and sha256(path) != entry.sha256:
                report("", "checksum", f"differs from the sha256 that {self.listed.file} lists")
        keys: set[str] = set()
        samples = 0
        for key, images, _ in _samples(path, self.listed, report):
            end_with_parent()
            samples += 1
            if key in keys:
                report(key, "duplicate_key", "another sample has the same key")
            keys.add(key)
            for data in images:
                try:
                    decode(open_header(data, key), key, at_least=(1, 1))
                except BrokenImageError as error:
                    report(key, "unreadable_image", error.reason)
        if entry is not None and samples != entry.samples:
            report("", "count", f"{samples} samples, {self.listed.file} says {entry.samples}")
        return _Checked(samples, keys, defects)


def _samples(path: Path, listed: ShardList, report: Report) -> Iterator[tuple[str, list[bytes], int | None]]:
    """(key, encoded images, label) of each sample. Defects of the tar, of a sample's members and of its label are
    reported (a report that raises ends the reading)."""
    for key, members in _members(path, report):
        images = [data for extension, data in members.items() if extension in IMAGE_EXTENSIONS]
        if not images:
            report(key, "missing_member", f"no image ({', '.join(IMAGE_EXTENSIONS)})")
        yield key, images, _label(key, members.get("cls"), listed, report)


def _members(path: Path, report: Report) -> Iterator[tuple[str, dict[str, bytes]]]:
    """(key, content by extension) of consecutive members with one key. Only images and labels are read."""
    key: str | None = None
    members: dict[str, bytes] = {}
    damage = ""
    with _BoundedFile(path) as file:
        length = os.fstat(file.fileno()).st_size
        try:
            tar = tarfile.open(fileobj=file, mode="r:")
            while member := tar.next():
                if not 0 <= member.size <= length - member.offset_data:
                    raise tarfile.ReadError("unexpected end of data")
                if not member.isreg() or not (found := _NAME.fullmatch(member.name)):
                    continue
                prefix, extension = str(found[1]), found[2].lower()
                if prefix != key:
                    if key is not None:
                        yield key, members
                    key, members = prefix, {}
                if extension in members:
                    report(prefix, "duplicate_key", f"{member.name} is there twice")
                    continue
                members[extension] = b""
                if extension in IMAGE_EXTENSIONS or extension == "cls":
                    file.seek(member.offset_data)
                    members[extension] = file.read(member.size)
            # Readers take a damaged header for the end, and see nothing after an end mark.
            file.seek(tar.offset)
            rest = file.read(1 << 20)
            if len(rest) < tarfile.BLOCKSIZE:
                damage = "the end mark is missing: the file was cut"
            elif rest.strip(b"\0"):
                damage = f"nothing after byte {tar.offset} of {length} can be read"
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            damage = str(error)
    if key is not None:
        yield key, members
    if damage:
        report("", "truncated", damage)


class _BoundedFile(FileIO):
    """Reads no more than is left: headers may claim any size, and memory is allocated for what is asked for."""

    def read(self, size: int | None = -1) -> bytes:
        left = max(os.fstat(self.fileno()).st_size - self.tell(), 0)
        return super().read(left if size is None or size < 0 else min(size, left)) or b""


def _label(key: str, label: bytes | None, listed: ShardList, report: Report) -> int | None:
    if label is None:
        if listed.labeled:
            report(key, "bad_label", "no .cls member in a labeled set")
    elif not _LABEL.fullmatch(label):
        report(key, "bad_label", f"not an integer: {label[:40]!r}")
    elif int(label) < 0 or (listed.classes is not None and int(label) >= len(listed.classes)):
        limit = f"0 to {len(listed.classes) - 1}" if listed.classes else "0 or more"
        report(key, "label_out_of_range", f"{int(label)} is not {limit}")
    else:
        return int(label)
    return None


def _spread(values: Iterable[int]) -> dict[str, float]:
    numbers = list(values)
    return {"mean": round(sum(numbers) / len(numbers), 2), "min": min(numbers), "max": max(numbers)}


def _by_class_name(labels: Counter[int], classes: list[str] | None) -> dict[str, int]:
    if classes is None:
        return {str(index): labels[index] for index in sorted(labels)}
    names = Counter(classes)  # ImageNet has two classes called crane
    return {name if names[name] == 1 else f"{name} ({index})": labels[index] for index, name in enumerate(classes)}
