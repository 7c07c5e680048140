"""Checking shard sets: `verify` lists every defect, `stats` counts what a set holds.

Nothing read here is unpickled or unpacked to disk, and sizes that are larger than the file are rejected.
"""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ssl_vit.data.headers import channels, decode, open_header
from ssl_vit.data.packing import content_hash
from ssl_vit.data.packing.parallel import process_count, run
from ssl_vit.data.shards.info import ABOUT, IMAGE_EXTENSIONS, INFO, TARS, Info, Part, ShardEntry, open_set
from ssl_vit.data.shards.reading import ShardFile, decode_label
from ssl_vit.files import expanded, sha256
from ssl_vit.interfaces import BadSample, UserError
from ssl_vit.progress import progress_bar

Report = Callable[[str, str, str], None]  # key, kind, detail
Visit = Callable[[ShardFile, int, bytes, Image.Image], Any]
"""From a shard, the position of a sample in it, and its image, encoded and decoded."""


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong with a shard set.

    shard: file name; "info.json" for the set as a whole.
    key: key of the sample; "" where the defect does not belong to one sample.
    kind: checksum, size, truncated, missing_member, unreadable_image, duplicate_key, bad_label, missing_shard,
        extra_shard or count.
    detail: in plain words.
    """

    shard: str
    key: str
    kind: str
    detail: str


def local(place: str) -> Path:
    """The path that `place` names. Raises UserError for a URL."""
    if "://" in place:
        raise UserError(f"{place}: only local data can be checked; copy the shards to a disk")
    return expanded(place)


def verify(folder: Path, *, jobs: int | None = None) -> list[Defect]:
    """Read the whole shard set, decode every image, and list all defects; a sound set has none.

    folder: folder of shards. Without info.json (or about.json, which lists several splits), each tar is checked only on
        its own.
    jobs: processes. Default: one per core, fewer for a small set.

    Raises UserError where there is no shard set, info.json cannot be read, or packing was not finished.
    """
    return check_set(folder, open_set(folder), jobs, progress=True)[0]


def stats(folder: Path) -> dict[str, Any]:
    """What the shard set holds, counted from the tars (image headers only, no pixels).

    Returns samples, shards, bytes, samples_per_shard and image_size (pixels) as {"mean", "min", "max"}, channels (3 if
    any image has color), labeled, samples_per_class {class name: count}.

    Raises UserError as `verify` does, and for a set with defects, naming the first one.
    """
    info = open_set(folder)
    defects, shards = check_set(folder, info, 1, False, pixels=False)
    for defect in defects:
        where = f"{folder / defect.shard}: {defect.key}{defect.key and ': '}"
        raise UserError(f"{where}{defect.kind}: {defect.detail}; `ssl-vit shards verify` lists every defect")
    heights, widths, depths = np.array([size for shard in shards for size in shard.sizes] or np.empty((0, 3))).T
    if not len(heights):
        raise UserError(f"{folder}: its shards hold no samples")
    counts = images_by_class(info, shards)
    return {
        "samples": len(heights),
        "shards": len(shards),
        "bytes": sum(path.stat().st_size for path in folder.glob(TARS) if path.is_file()),
        "labeled": sum(counts.values()) == len(heights),
        "samples_per_class": counts,
        "samples_per_shard": _spread([len(shard.sizes) for shard in shards]),
        "image_size": {"height": _spread(heights), "width": _spread(widths)},
        "channels": int(max(depths)),
    }


def images_by_class(info: Info | None, shards: Sequence[CheckedShard]) -> dict[str, int]:
    """Readable images of each class that is named; where none is, of each label that occurs."""
    labels = sum((shard.labels for shard in shards), Counter[int]())
    names = dict(enumerate(distinct((info and info.classes) or ()))) or {n: str(n) for n in sorted(labels)}
    return {name: labels[label] for label, name in names.items()}


def _spread(values: Sequence[int] | np.ndarray) -> dict[str, float]:
    return {"mean": round(float(np.mean(values)), 2), "min": int(np.min(values)), "max": int(np.max(values))}


def check_set(
    folder: Path,
    info: Info | None,
    jobs: int | None,
    progress: bool,
    *,
    pixels: bool = True,
    visit: Visit | None = None,
) -> tuple[list[Defect], list[CheckedShard]]:
    """All defects, and what the shards that are there hold.

    pixels: check checksums and pixels, too. visit: called for the first image of every sample, if it can be decoded
    (with `pixels`). For the others, see `verify`.
    """
    present = {path.name for path in folder.glob(TARS) if path.is_file()}
    files: list[tuple[str, ShardEntry | None]] = [(name, None) for name in sorted(present)]
    defects, file = list[Defect](), _listing(info)
    if info:
        listed = {entry.file: entry for entry in info.shards}
        files = [(name, listed[name]) for name in listed if name in present]
        defects += [Defect(name, "", "missing_shard", f"{file} lists it") for name in listed if name not in present]
        defects += [Defect(name, "", "extra_shard", f"not in {file}") for name in sorted(present - listed.keys())]
        parts: dict[str, Info | Part] = {**info.splits} or {"": info}
        for split, part in parts.items():
            if (total := sum(entry.samples for entry in part.shards)) != part.samples:
                detail = f"says {part.samples} samples{split and f' in {split}'}, its shards have {total}"
                defects.append(Defect(file, "", "count", detail))
        if info.content_hash not in (None, content_hash(entry.sha256 for entry in info.shards)):
            defects.append(Defect(file, "", "checksum", "content_hash differs from that of the shards' sha256"))
    samples = sum(entry.samples for _, entry in files if entry) if info else None
    checked: dict[str, CheckedShard] = {}
    with progress_bar("verifying", samples, progress) as advance:

        def receive(job: tuple[str, ShardEntry | None], shard: CheckedShard) -> None:
            checked[job[0]] = shard
            advance(len(shard.sizes))

        # Each job gets a copy of this: without the lists of all shards.
        splits = {name: part.model_copy(update={"shards": []}) for name, part in info.splits.items()} if info else {}
        about = info and info.model_copy(update={"shards": [], "dropped": [], "splits": splits})
        check = partial(_check_shard, folder, about, pixels, visit)
        run(check, files, process_count(jobs, len(files), samples), receive)
    keys_of_family: dict[str, set[str]] = {}  # train-000.tar and val-000.tar may share keys
    for name, _ in files:
        keys = keys_of_family.setdefault(re.sub(r"\d+\.tar$", "", name), set())
        defects += checked[name].defects
        twice = sorted(checked[name].keys & keys)
        defects += [Defect(name, key, "duplicate_key", "a sample of another shard has the same key") for key in twice]
        keys |= checked[name].keys
    return defects, [checked[name] for name, _ in files]


def _listing(info: Info | None) -> str:
    return ABOUT if info and info.splits else INFO


@dataclass(frozen=True)
class CheckedShard:
    """What was found in a shard. sizes: (height, width, channels) of each sample, zeros for one without an image. seen:
    what `visit` returned."""

    defects: list[Defect] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    sizes: list[tuple[int, int, int]] = field(default_factory=list)
    labels: Counter[int] = field(default_factory=Counter)
    seen: list[Any] = field(default_factory=list)


def _check_shard(
    folder: Path, info: Info | None, pixels: bool, visit: Visit | None, job: tuple[str, ShardEntry | None]
) -> CheckedShard:
    (name, entry), facts, listing = job, CheckedShard(), _listing(info)
    path = folder / name

    def report(key: str, kind: str, detail: str) -> None:
        facts.defects.append(Defect(name, key, kind, detail))

    if entry is not None and pixels:
        if entry.bytes is not None and (size := path.stat().st_size) != entry.bytes:
            report("", "size", f"{size} bytes, {listing} says {entry.bytes}")
        if entry.sha256 and sha256(path) != entry.sha256:
            report("", "checksum", f"differs from the sha256 that {listing} lists")
    with path.open("rb") as file:
        try:
            shard = ShardFile(file, name)
        except UserError as error:  # compressed
            report("", "truncated", str(error))
        else:
            _check_samples(shard, info, pixels, visit, facts, report)
            if not shard.damage and shard.size - shard.end < tarfile.BLOCKSIZE:
                shard.damage = "the end mark is missing: the file was cut"
            if shard.damage:
                report("", "truncated", shard.damage)
    if entry is not None and len(facts.sizes) != entry.samples:
        report("", "count", f"{len(facts.sizes)} samples, {listing} says {entry.samples}")
    return facts


def _check_samples(
    shard: ShardFile, info: Info | None, pixels: bool, visit: Visit | None, facts: CheckedShard, report: Report
) -> None:
    for member in shard.duplicates:
        report(member.partition(".")[0], "duplicate_key", f"{member} is there twice")
    classes = info.classes if info else None
    for position, sample in enumerate(shard.samples):
        key = sample.key
        if key in facts.keys:
            report(key, "duplicate_key", "another sample has the same key")
        facts.keys.add(key)
        height, width, depth, readable = 0, 0, 0, False
        members: dict[str, bytes] = {}
        try:
            members = shard.read(position)
            images = [members[extension] for extension in IMAGE_EXTENSIONS if extension in members]
            if not images:
                report(key, "missing_member", f"no image ({', '.join(IMAGE_EXTENSIONS)})")
            for data in images:
                image = open_header(data)
                height, width, depth = image.height, image.width, channels(image)
                if pixels:
                    decode(image, at_least=None if visit else (1, 1))
                if visit and data is images[0]:
                    facts.seen.append(visit(shard, position, data, image))
            readable = bool(images)
        except BadSample as error:
            report(key, "unreadable_image", str(error))
        facts.sizes.append((height, width, depth))
        try:
            label = decode_label(members, len(classes) if classes is not None else None)
        except BadSample as error:
            report(key, "bad_label", str(error))
            continue
        if label >= 0:
            facts.labels[label] += readable
        elif info and info.labeled:
            report(key, "bad_label", "no .cls member in a labeled set")


def distinct(names: Sequence[str]) -> list[str]:
    """Names of classes, those that occur twice with their label: ImageNet has two classes called crane."""
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name} ({label})" for label, name in enumerate(names)]
