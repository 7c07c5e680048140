"""Reading shard sets back: `verify` lists what is wrong with one, `stats` says what is in one.

Both read with the reader that training uses. Nothing read here is ever unpickled or unpacked to disk.
"""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, Field, ValidationError

from ssl_vit.data.pack import INFO, sha256, track
from ssl_vit.data.raw import BrokenImageError, channels, decode, open_header
from ssl_vit.interfaces import UserError

ABOUT = "about.json"

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


class ShardEntry(BaseModel):
    """One shard as it is listed; file is a plain name in the same folder."""

    file: str = Field(pattern=r"^[^/\\]+$")
    samples: int
    sha256: str
    bytes: int | None = None


class Part(BaseModel):
    samples: int
    shards: list[ShardEntry]


class Info(Part):
    """What is read of info.json here."""

    classes: list[str] | None
    labelled: bool


class About(BaseModel):
    """What is read of about.json: one folder with the shards of several splits."""

    classes: list[str] | None
    splits: dict[str, Part]


@dataclass(frozen=True)
class ShardList:
    """The shards of a set by file name, in order, and what `file` (info.json or about.json) says of them. Tars from
    elsewhere have neither file: each entry is None, and parts (by split; "" where there is one only) is empty."""

    shards: Mapping[str, ShardEntry | None]
    parts: Mapping[str, Part]
    classes: list[str] | None = None
    labelled: bool = False
    file: str = INFO


def verify(folder: Path, *, progress: bool = True) -> list[Defect]:
    """Read the whole shard set, decode every image, and list everything that is wrong with it; an empty list is a
    sound set. Tars without info.json (or about.json, which lists several splits in one folder) are checked only
    against what they say themselves.

    Raises UserError where there is no shard set or info.json cannot be read.
    """
    listed = _open_set(folder)
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
    names = [name for name in listed.shards if name in present]
    seen: set[tuple[str, str]] = set()
    for name in track(names, len(names), "verifying", progress):
        defects += _check_shard(folder / name, listed, seen)
    return defects


def stats(folder: Path) -> dict[str, Any]:
    """What the shard set holds, counted from the tars (image headers only, no pixels): samples, shards, bytes,
    samples_per_shard and image_size (pixels) as {"mean", "min", "max"}, channels (3 if any image has colour),
    labelled, samples_per_class {class name: count}.

    Raises UserError at the first defect it meets, naming it; `verify` lists all of them.
    """
    listed = _open_set(folder)
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
        "labelled": labels.total() == len(sizes),
        "samples_per_class": _by_class_name(labels, listed.classes),
        "samples_per_shard": _spread(per_shard),
        "image_size": {"height": _spread(heights), "width": _spread(widths)},
        "channels": max(channel),
    }


def _open_set(folder: Path) -> ShardList:
    try:
        if (file := folder / INFO).exists():
            info = Info.model_validate_json(file.read_bytes())
            entries = {entry.file: entry for entry in info.shards}
            return ShardList(entries, {"": info}, info.classes, info.labelled)
        if (file := folder / ABOUT).exists():
            about = About.model_validate_json(file.read_bytes())
            entries = {entry.file: entry for part in about.splits.values() for entry in part.shards}
            return ShardList(entries, about.splits, about.classes, about.classes is not None, ABOUT)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "it"
        raise UserError(f"{file}: {where}: {error.errors()[0]['msg']}; make the shards again") from None
    present = sorted(path.name for path in folder.glob("*.tar"))
    if not present:
        inside = [path.parent.name for path in sorted(folder.glob(f"*/{INFO}"))]
        hint = f"name one of its parts: {', '.join(inside)}" if inside else "name a folder of .tar shards"
        raise UserError(f"{folder}: {'no shards here' if folder.is_dir() else 'no such folder'}; {hint}")
    return ShardList(dict.fromkeys(present), {})


def _check_shard(path: Path, listed: ShardList, seen: set[tuple[str, str]]) -> list[Defect]:
    defects: list[Defect] = []

    def report(key: str, kind: str, detail: str) -> None:
        defects.append(Defect(path.name, key, kind, detail))

    entry = listed.shards[path.name]
    if entry is not None:
        if entry.bytes is not None and (size := path.stat().st_size) != entry.bytes:
            report("", "size", f"{size} bytes, {listed.file} says {entry.bytes}")
        if sha256(path) != entry.sha256:
            report("", "checksum", f"not the sha256 that {listed.file} lists")
    family = re.sub(r"\d+\.tar$", "", path.name)  # train-000000.tar and val-000000.tar may both start at key 0
    count = 0
    for key, images, _ in _samples(path, listed, report):
        count += 1
        if (family, key) in seen:
            report(key, "duplicate_key", "another sample has the same key")
        seen.add((family, key))
        for image in images:
            try:
                decode(image, key)
            except BrokenImageError as error:
                report(key, "unreadable_image", error.reason)
    if entry is not None and count != entry.samples:
        report("", "count", f"{count} samples, {listed.file} says {entry.samples}")
    return defects


def _samples(path: Path, listed: ShardList, report: Report) -> Iterator[tuple[str, list[bytes], int | None]]:
    """(key, encoded images, label) of each sample. What is wrong with the tar, a sample's members or its label is
    reported (a report that raises ends the reading); the images are the caller's to judge."""
    from webdataset.tariterators import base_plus_ext  # here, not above: it imports torch, and so does the next

    from ssl_vit.data.shards import IMAGE_EXTENSIONS, read_members

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
        if listed.labelled:
            report(key, "bad_label", "no .cls member in a labelled set")
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
