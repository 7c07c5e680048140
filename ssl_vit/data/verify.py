"""Reading shard sets back: `verify` lists what is wrong with one, `stats` says what is in one.

Both read with the reader that training uses. Nothing read here is ever unpickled or unpacked to disk.
"""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ssl_vit.data.packing import parallel
from ssl_vit.data.packing.images import channels, load, open_header
from ssl_vit.data.packing.journal import content_hash
from ssl_vit.data.packing.sources.base import BrokenImageError
from ssl_vit.data.shards.info import Info, ShardList, open_set
from ssl_vit.files import sha256
from ssl_vit.interfaces import UserError

Report = Callable[[str, str, str], None]  # key, kind, detail


@dataclass(frozen=True)
class Defect:
    """kind: checksum, size, truncated, missing_member, unreadable_image, duplicate_key, bad_label, label_out_of_range,
    missing_shard, extra_shard or count. shard: its file name ("info.json" for the set as a whole); key: "" where the
    defect is not one sample's; detail: plain words."""

    shard: str
    key: str
    kind: str
    detail: str


def verify(folder: Path, *, jobs: int | None = None, progress: bool = True) -> list[Defect]:
    """Read the whole shard set, decode every image, and list everything that is wrong with it; an empty list is a
    sound set. Tars without info.json (or about.json, which lists several splits in one folder) are checked only
    against what they say themselves. jobs: processes (default: all cores, fewer for a small set).

    Raises UserError where there is no shard set, info.json cannot be read, or packing was not finished.
    """
    listed = open_set(folder)
    present = {path.name for path in folder.glob("*.tar")}
    defects = [
        *(
            Defect(name, "", "missing_shard", f"{listed.file} lists it")
            for name in listed.shards
            if name not in present
        ),
        *(Defect(name, "", "extra_shard", f"not in {listed.file}") for name in sorted(present - set(listed.shards))),
    ]
    for split, part in listed.parts.items():
        if (total := sum(entry.samples for entry in part.shards)) != part.samples:
            detail = f"says {part.samples} samples{split and f' in {split}'}, its shards have {total}"
            defects.append(Defect(listed.file, "", "count", detail))
        if isinstance(part, Info) and part.content_hash not in (None, content_hash(e.sha256 for e in part.shards)):
            defects.append(Defect(listed.file, "", "checksum", "content_hash is not that of its shards' sha256"))
    names = [name for name in listed.shards if name in present]
    entries = [entry for name in names if (entry := listed.shards[name])]
    checked = parallel.run(
        ShardChecker(folder, listed),
        names,
        on=parallel.processes(jobs, len(names), sum((folder / name).stat().st_size for name in names)),
        what="verifying",
        total=sum(entry.samples for entry in entries) if len(entries) == len(names) else None,
        progress=progress,
    )
    seen: dict[str, set[str]] = {}
    for name, (found, keys) in zip(names, checked, strict=True):
        family = seen.setdefault(re.sub(r"\d+\.tar$", "", name), set())  # train-000.tar and val-000.tar may share keys
        defects += found
        defects += [
            Defect(name, key, "duplicate_key", "a sample of another shard has the same key")
            for key in sorted(keys & family)
        ]
        family |= keys
    return defects


def stats(folder: Path) -> dict[str, Any]:
    """What the shard set holds, counted from the tars (image headers only, no pixels): samples, shards, bytes,
    samples_per_shard and image_size (pixels) as {"mean", "min", "max"}, channels (3 if any image has color),
    labeled, samples_per_class {class name: count}.

    Raises UserError at the first defect it meets, naming it; `verify` lists all of them.
    """
    listed = open_set(folder)
    labels: Counter[int] = Counter()
    sizes: list[tuple[int, int, int]] = []
    per_shard: list[int] = []
    stored_bytes = 0
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
        stored_bytes += path.stat().st_size
    if not sizes:
        raise UserError(f"{folder}: its shards hold no samples")

    heights, widths, channel = zip(*sizes, strict=True)
    return {
        "samples": len(sizes),
        "shards": len(per_shard),
        "bytes": stored_bytes,
        "labeled": labels.total() == len(sizes),
        "samples_per_class": _by_class_name(labels, listed.classes),
        "samples_per_shard": _spread(per_shard),
        "image_size": {"height": _spread(heights), "width": _spread(widths)},
        "channels": max(channel),
    }


@dataclass(frozen=True)
class ShardChecker:
    """What every process needs to check shards: their folder and what is said of them."""

    folder: Path
    listed: ShardList

    def __call__(self, name: str, advance: Callable[[], None]) -> tuple[list[Defect], set[str]]:
        """The shard's defects and its keys; `advance` is called after every sample."""
        path, entry = self.folder / name, self.listed.shards[name]
        defects: list[Defect] = []

        def report(key: str, kind: str, detail: str) -> None:
            defects.append(Defect(name, key, kind, detail))

        if entry is not None:
            if entry.bytes is not None and (size := path.stat().st_size) != entry.bytes:
                report("", "size", f"{size} bytes, {self.listed.file} says {entry.bytes}")
            if sha256(path) != entry.sha256:
                report("", "checksum", f"not the sha256 that {self.listed.file} lists")
        keys: set[str] = set()
        count = 0
        for key, images, _ in _samples(path, self.listed, report):
            count += 1
            if key in keys:
                report(key, "duplicate_key", "another sample has the same key")
            keys.add(key)
            for image in images:
                try:
                    load(open_header(image, key), key, at_least=(1, 1))
                except BrokenImageError as error:
                    report(key, "unreadable_image", error.reason)
            advance()
        if entry is not None and count != entry.samples:
            report("", "count", f"{count} samples, {self.listed.file} says {entry.samples}")
        return defects, keys


def _samples(path: Path, listed: ShardList, report: Report) -> Iterator[tuple[str, list[bytes], int | None]]:
    """(key, encoded images, label) of each sample. What is wrong with the tar, a sample's members or its label is
    reported (a report that raises ends the reading); the images are the caller's to judge."""
    from webdataset.tariterators import base_plus_ext  # here, not above: it imports torch, and so does the next

    from ssl_vit.data.shards import read_members
    from ssl_vit.data.shards.info import IMAGE_EXTENSIONS

    damage = ""
    for _, sample in read_members(str(path)):
        if isinstance(sample, ValueError):  # WebDataset's error for a member that is there twice
            name = str(sample.args[0]).partition(": ")[0]
            report(base_plus_ext(name)[0], "duplicate_key", f"{name} is there twice")
        elif isinstance(sample, Exception):
            damage = damage or str(sample).partition(" @ ")[0] or type(sample).__name__
        else:
            key = str(sample["__key__"])
            images = [data for extension in IMAGE_EXTENSIONS if isinstance(data := sample.get(extension), bytes)]
            if not images:
                report(key, "missing_member", f"no image ({', '.join(IMAGE_EXTENSIONS)})")
            yield key, images, _label(key, sample.get("cls"), listed, report)
    if damage := damage or _early_end(path):
        report("", "truncated", damage)


def _label(key: str, label: bytes | str | None, listed: ShardList, report: Report) -> int | None:
    if label is None:
        if listed.labeled:
            report(key, "bad_label", "no .cls member in a labeled set")
    elif not isinstance(label, bytes) or not re.fullmatch(rb"\s*-?\d{1,18}\s*", label):
        report(key, "bad_label", f"not an integer: {label[:40]!r}")
    elif int(label) < 0 or (listed.classes is not None and int(label) >= len(listed.classes)):
        limit = f"0 to {len(listed.classes) - 1}" if listed.classes else "0 or more"
        report(key, "label_out_of_range", f"{int(label)} is not {limit}")
    else:
        return int(label)
    return None


def _early_end(path: Path) -> str:
    """Why the tar's members end where they do, if that is not its proper end. Readers take a bad header in the middle
    for the end and say nothing, and never see what follows an end mark."""
    try:
        with tarfile.open(path, "r:") as tar, path.open("rb") as file:
            tar.getmembers()
            file.seek(tar.offset)
            rest = file.read(1 << 20)
    except tarfile.TarError as error:
        return str(error)
    if len(rest) < tarfile.BLOCKSIZE:
        return "the end mark is missing: the file was cut"
    return f"nothing is read behind byte {tar.offset} of {path.stat().st_size}" if rest.strip(b"\0") else ""


def _spread(values: Iterable[int]) -> dict[str, float]:
    numbers = list(values)
    return {"mean": round(sum(numbers) / len(numbers), 2), "min": min(numbers), "max": max(numbers)}


def _by_class_name(labels: Counter[int], classes: list[str] | None) -> dict[str, int]:
    if classes is None:
        return {str(index): labels[index] for index in sorted(labels)}
    names = Counter(classes)  # ImageNet has two classes called crane
    return {name if names[name] == 1 else f"{name} ({index})": labels[index] for index, name in enumerate(classes)}
