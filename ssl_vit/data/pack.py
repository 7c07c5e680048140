"""Shard sets: `make` writes one from a source, `verify` lists what is wrong with one, `stats` says what is in one.

A shard set is a folder of WebDataset tars (KEY.jpg|png|webp, KEY.cls, optional KEY.json) with `info.json` beside them.
The same source and options give the same bytes. Nothing read here is ever unpickled or unpacked to disk.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import numpy as np
from PIL import Image
from pydantic import BaseModel, Field, ValidationError

from ssl_vit.data.sources import BrokenImageError, RawSample, Source, channels, decode, open_header
from ssl_vit.interfaces import RunError, UserError

INFO = "info.json"
_IMAGES = ("jpg", "jpeg", "png", "webp")
_OWN_FILES = re.compile(r"(\d{6}\.tar|info\.json)(\.tmp)?")
_Result = TypeVar("_Result")


class ShardEntry(BaseModel):
    """One shard as info.json lists it; file is a plain name in the same folder."""

    file: str = Field(pattern=r"^[^/\\]+$")
    samples: int
    bytes: int
    sha256: str


class ShardSetInfo(BaseModel):
    """What is read of info.json here."""

    classes: list[str] | None
    samples: int
    labelled: bool
    shards: list[ShardEntry]


@dataclass(frozen=True)
class Defect:
    """kind: checksum, size, truncated, missing_member, unreadable_image, duplicate_key, bad_label, label_out_of_range,
    missing_shard, extra_shard or count. shard: its file name ("info.json" for the set as a whole); key: "" where the
    defect is not one sample's; detail: plain words."""

    shard: str
    key: str
    kind: str
    detail: str


def make(
    source: Source,
    out: Path,
    *,
    shard_size: int = 1000,
    shards: int | None = None,
    resize: int | None = None,
    quality: int = 95,
    seed: int = 0,
    shuffle: bool = True,
    holdout: float = 0.0,
    keep_names: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Write the source as a shard set into `out` and return its info.json.

    shard_size: most samples a shard holds; shards: how many shards instead. Sizes differ by at most one sample.
    resize: scale each image's shorter side to so many pixels (bicubic, up or down), keeping its file format;
    quality: 1..100, of images that are resized. seed: of the shuffle (over all samples) and of the holdout.
    holdout: the fraction of each class that goes to out/test while the rest goes to out/train; both are shard sets,
    and {"train": info, "test": info, "dropped": [...]} is returned. A class of one image stays in train.
    keep_names: store the source's file names, as KEY.json. overwrite: replace the shard set that is in `out`.

    Every image is decoded once, before anything is written: those that cannot be are left out and listed under
    "dropped". info.json is written last, so a folder without it was not finished.
    Raises UserError for options out of range, a non-empty `out`, no usable image; RunError where writing fails.
    """
    _check_options(shard_size=shard_size, shards=shards, resize=resize, quality=quality, seed=seed, holdout=holdout)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder to write the shards into")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(f"{out} is not empty; choose another folder or pass overwrite to replace its shards")

    examined = list(
        _track(_in_order(partial(_examine, source, resize), range(source.count)), source.count, "reading", progress)
    )
    dropped = [{"file": item.key, "reason": item.reason} for item in examined if isinstance(item, BrokenImageError)]
    usable = np.array([i for i, item in enumerate(examined) if not isinstance(item, BrokenImageError)], dtype=np.int64)
    if len(usable) == 0:
        first = f" (first: {dropped[0]['file']}: {dropped[0]['reason']})" if dropped else ""
        raise UserError(f"{source.name}: none of its {source.count} images can be used{first}")
    order = np.random.default_rng([seed, 0]).permutation(usable) if shuffle else usable
    parts = {"": order}
    if holdout:
        held_out = np.isin(order, _held_out(source, usable, holdout, seed))
        parts = {"train": order[~held_out], "test": order[held_out]}
        if not all(map(len, parts.values())):
            raise UserError(f"{source.name}: holdout={holdout} of {len(order)} images leaves train or test empty")
    largest = len(next(iter(parts.values())))
    if shards is not None and shards > largest:
        raise UserError(f"{source.name}: shards={shards} is more than its {largest} images; ask for fewer")

    infos: dict[str, dict[str, Any]] = {}
    try:
        _clear(out)
        for part, indices in parts.items():
            # Of a holdout, `shards` is the number in train; test gets shards of about the same size.
            count = -(-len(indices) // shard_size) if shards is None else max(1, shards * len(indices) // largest)
            samples = _in_order(partial(_packed, source, resize, quality, keep_names), list(enumerate(indices)))
            tracked = _track(samples, len(indices), f"writing {part}".rstrip(), progress)
            entries = _write_shards(out / part, [len(piece) for piece in np.array_split(indices, count)], tracked)
            height, width, channel = np.array([examined[index] for index in indices]).T
            infos[part] = {
                "format": 1,
                "classes": source.classes,
                "samples": len(indices),
                "labelled": source.labels is not None,
                "shards": entries,
                "source": source.name + (f", {part} part of holdout {holdout:g}, seed {seed}" if part else ""),
                "licence": source.licence,
                "mean_image_size": {"height": round(float(height.mean()), 2), "width": round(float(width.mean()), 2)},
                "channels": int(channel.max()),
                "dropped": dropped,
            }
        for part, info in infos.items():
            with _whole_file(out / part / INFO) as file:
                file.write(json.dumps(info, indent=1).encode() + b"\n")
    except OSError as error:
        raise RunError(f"{out}: packing stopped before {INFO} was written: {error}") from error
    return {**infos, "dropped": dropped} if holdout else infos[""]


def _check_options(*, holdout: float, quality: int, **counts: int | None) -> None:
    for name, value in counts.items():
        least = 0 if name == "seed" else 1
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, not {value}")
    if not 1 <= quality <= 100:
        raise UserError(f"quality must be 1 to 100, not {quality}")
    if not 0 <= holdout < 1:
        raise UserError(f"holdout must be at least 0 and below 1, not {holdout}")


def _track(items: Iterable[_Result], total: int, what: str, progress: bool) -> Iterable[_Result]:
    from rich.console import Console
    from rich.progress import track

    quiet = not (progress and sys.stderr.isatty())
    return track(items, what, total, console=Console(stderr=True), transient=True, disable=quiet)


def _in_order(function: Callable[[Any], _Result], items: Sequence[Any]) -> Iterator[_Result]:
    """map() on threads (decoding releases the GIL), a few dozen items at a time so that memory stays flat."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(items), 64):
            yield from pool.map(function, items[start : start + 64])


def _resized(image: Image.Image, side: int | None) -> tuple[int, int]:
    """(width, height) once the shorter side measures `side` pixels."""
    if side is None:
        return image.size
    shorter = min(image.size)
    return round(image.width * side / shorter), round(image.height * side / shorter)


def _examine(source: Source, resize: int | None, index: int) -> tuple[int, int, int] | BrokenImageError:
    """(height, width, channels) as they will be stored."""
    try:
        sample = source.sample(index)
        image = decode(sample.image, sample.key)
    except BrokenImageError as error:
        return error
    width, height = _resized(image, resize)
    return height, width, channels(image)


def _held_out(source: Source, usable: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Indices of the test part: `fraction` of each class, at least one and not all of a class's images."""
    rng = np.random.default_rng([seed, 1])
    groups = [usable]
    if source.labels is not None:
        by_class = usable[np.argsort(source.labels[usable], kind="stable")]
        groups = np.split(by_class, np.flatnonzero(np.diff(source.labels[by_class])) + 1)
    sizes = [min(max(round(fraction * len(group)), 1), len(group) - 1) for group in groups]
    return np.concatenate([rng.permutation(group)[:size] for group, size in zip(groups, sizes, strict=True)])


def _packed(
    source: Source, resize: int | None, quality: int, keep_names: bool, numbered: tuple[int, int]
) -> dict[str, Any]:
    number, index = numbered
    try:
        sample = source.sample(index)
        data = sample.image if resize is None else _scaled(sample, resize, quality)
    except BrokenImageError as error:  # it was whole when it was examined
        raise RunError(f"{source.name} changed while it was packed: {error}") from error
    # The key is a number: file names may hold slashes and dots, which a tar reader would take for something else.
    packed: dict[str, Any] = {"__key__": f"{number:08d}", sample.extension: data}
    if sample.label is not None:
        packed["cls"] = b"%d" % sample.label
    if keep_names and sample.meta is not None:
        packed["json"] = json.dumps(sample.meta).encode()
    return packed


def _scaled(sample: RawSample, side: int, quality: int) -> bytes:
    image = decode(sample.image, sample.key)
    size = _resized(image, side)
    if size == image.size:
        return sample.image
    kind = image.format if image.format in ("PNG", "WEBP") else "JPEG"
    # EXIF goes along (it holds the orientation); a palette or two levels cannot be interpolated.
    kept = {"exif": image.info["exif"]} if "exif" in image.info else {}
    if image.mode in ("P", "1"):
        image = image.convert({"1": "L", "P": "RGBA" if "transparency" in image.info else "RGB"}[image.mode])
    encoded = io.BytesIO()
    image.resize(size, Image.Resampling.BICUBIC).save(encoded, kind, quality=quality, **kept)
    return encoded.getvalue()


def _clear(out: Path) -> None:
    """Remove the shard set that `out` holds, info.json first, and nothing that `make` does not write."""
    for folder in (out, out / "train", out / "test"):
        for file in sorted(folder.glob("*"), reverse=True):
            if file.is_file() and _OWN_FILES.fullmatch(file.name):
                file.unlink()


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name only when all of it is on the disk."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_shards(folder: Path, counts: list[int], samples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    from webdataset.writer import TarWriter  # here, not above: it imports torch

    folder.mkdir(parents=True, exist_ok=True)
    remaining = iter(samples)
    entries = []
    for number, count in enumerate(counts):
        path = folder / f"{number:06d}.tar"
        with _whole_file(path) as file, TarWriter(file, encoder=False, mtime=0) as tar:
            for sample in islice(remaining, count):
                tar.write(sample)
        entries.append({"file": path.name, "samples": count, "bytes": path.stat().st_size, "sha256": _sha256(path)})
    return entries


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open_set(folder: Path) -> tuple[ShardSetInfo | None, list[str]]:
    """info.json where there is one, and the names of the tars that are there."""
    present = sorted(path.name for path in folder.glob("*.tar"))
    file = folder / INFO
    if file.exists():
        try:
            return ShardSetInfo.model_validate_json(file.read_bytes()), present
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"])) or "it"
            raise UserError(f"{file}: {where}: {error.errors()[0]['msg']}; make the shards again") from None
    if not present:
        inside = [path.parent.name for path in sorted(folder.glob(f"*/{INFO}"))]
        hint = f"name one of its parts: {', '.join(inside)}" if inside else "name a folder of .tar shards"
        raise UserError(f"{folder}: {'no shards here' if folder.is_dir() else 'no such folder'}; {hint}")
    return None, present


def _samples(path: Path, report: Callable[[str, str, str], None]) -> Iterator[dict[str, Any]]:
    """The shard's samples as WebDataset groups them: {"__key__": ..., "jpg": bytes, "cls": bytes, ...}.
    What is wrong with the tar itself goes to report(key, kind, detail); reading goes on as far as it can."""
    from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_iterator

    def members(file: BinaryIO) -> Iterator[dict[str, Any]]:
        names: set[str] = set()
        try:
            for member in tar_file_iterator(file):
                key, extension = base_plus_ext(member["fname"])
                if key is None:
                    continue
                name = f"{key}.{extension.lower()}"
                if name in names:  # group_by_keys would raise on it
                    report(key, "duplicate_key", f"{name} is there twice")
                    continue
                names.add(name)
                yield {**member, "__url__": path.name}
            detail = _early_end(path)
        except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
            detail = str(error).split(" @ ")[0]
        if detail:
            report("", "truncated", detail)

    with path.open("rb") as file:
        yield from group_by_keys(members(file))


def _early_end(path: Path) -> str:
    """Why the tar's members end where they do, if that is not its proper end. Readers take a bad header in the middle
    for the end and say nothing, and never see what follows an end mark."""
    with tarfile.open(path, "r:") as tar, path.open("rb") as file:
        tar.getmembers()
        file.seek(tar.offset)
        rest = file.read(1 << 20)
    if len(rest) < tarfile.BLOCKSIZE:
        return "the end mark is missing: the file was cut"
    return f"nothing is read behind byte {tar.offset} of {path.stat().st_size}" if rest.strip(b"\0") else ""


def verify(folder: Path, *, progress: bool = True) -> list[Defect]:
    """Read the whole shard set, decode every image, and list everything that is wrong with it; an empty list is a
    sound set. Without info.json (tars from elsewhere) only what the tars say themselves is checked.

    Raises UserError where there is no shard set or info.json cannot be read.
    """
    info, present = _open_set(folder)
    listed = {} if info is None else {entry.file: entry for entry in info.shards}
    defects = []
    if info is not None:
        defects += [Defect(name, "", "missing_shard", f"{INFO} lists it") for name in listed if name not in present]
        defects += [Defect(name, "", "extra_shard", f"not in {INFO}") for name in present if name not in listed]
        if (total := sum(entry.samples for entry in info.shards)) != info.samples:
            defects.append(Defect(INFO, "", "count", f"says {info.samples} samples, its shards have {total}"))
        present = [name for name in present if name in listed]
    seen: set[tuple[str, str]] = set()
    for name in _track(present, len(present), "verifying", progress):
        defects += _check_shard(folder / name, listed.get(name), info, seen)
    return defects


def _check_shard(
    path: Path, entry: ShardEntry | None, info: ShardSetInfo | None, seen: set[tuple[str, str]]
) -> list[Defect]:
    defects: list[Defect] = []

    def report(key: str, kind: str, detail: str) -> None:
        defects.append(Defect(path.name, key, kind, detail))

    if entry is not None:
        if (size := path.stat().st_size) != entry.bytes:
            report("", "size", f"{size} bytes, {INFO} says {entry.bytes}")
        if _sha256(path) != entry.sha256:
            report("", "checksum", f"not the sha256 that {INFO} lists")
    family = re.sub(r"\d+\.tar$", "", path.name)  # train-000000.tar and val-000000.tar may both start at key 0
    count = 0
    for sample in _samples(path, report):
        count += 1
        key = sample["__key__"]
        if (family, key) in seen:
            report(key, "duplicate_key", "another sample has the same key")
        seen.add((family, key))
        images = [sample[extension] for extension in _IMAGES if extension in sample]
        if not images:
            report(key, "missing_member", f"no image ({', '.join(_IMAGES)})")
        for image in images:
            try:
                decode(image, key)
            except BrokenImageError as error:
                report(key, "unreadable_image", error.reason)
        _check_label(sample, info, report)
    if entry is not None and count != entry.samples:
        report("", "count", f"{count} samples, {INFO} says {entry.samples}")
    return defects


def _check_label(sample: dict[str, Any], info: ShardSetInfo | None, report: Callable[[str, str, str], None]) -> None:
    key, label = sample["__key__"], sample.get("cls")
    if label is None:
        if info is not None and info.labelled:
            report(key, "bad_label", "no .cls member in a labelled set")
    elif not re.fullmatch(rb"\s*-?\d{1,18}\s*", label):
        report(key, "bad_label", f"not an integer: {label[:40]!r}")
    elif int(label) < 0 or (info is not None and info.classes is not None and int(label) >= len(info.classes)):
        limit = f"0 to {len(info.classes) - 1}" if info is not None and info.classes else "0 or more"
        report(key, "label_out_of_range", f"{int(label)} is not {limit}")


def stats(folder: Path) -> dict[str, Any]:
    """What the shard set holds, counted from the tars (image headers only, no pixels): samples, shards, bytes,
    samples_per_shard and image_size (pixels) as {"mean", "min", "max"}, channels (3 if any image has colour),
    labelled, samples_per_class {class name: count}.

    Raises UserError at the first defect it meets, naming it; `verify` lists all of them.
    """
    info, present = _open_set(folder)
    labels: Counter[int] = Counter()
    sizes: list[tuple[int, int, int]] = []
    per_shard: list[int] = []
    stored_bytes = 0
    for name in present if info is None else [entry.file for entry in info.shards]:
        path = folder / name

        def stop(key: str, kind: str, detail: str, path: Path = path) -> NoReturn:
            raise UserError(f"{path}: {key}{key and ': '}{kind}: {detail}; `ssl-vit shards verify` lists every defect")

        if not path.exists():
            stop("", "missing_shard", f"{INFO} lists it")
        before = len(sizes)
        for sample in _samples(path, stop):
            key = sample["__key__"]
            data = next((sample[extension] for extension in _IMAGES if extension in sample), None)
            if data is None:
                stop(key, "missing_member", "no image")
            try:
                image = open_header(data, key)
            except BrokenImageError as error:
                stop(key, "unreadable_image", error.reason)
            sizes.append((image.height, image.width, channels(image)))
            _check_label(sample, info, stop)
            if "cls" in sample:
                labels[int(sample["cls"])] += 1
        per_shard.append(len(sizes) - before)
        stored_bytes += path.stat().st_size
    if not sizes:
        raise UserError(f"{folder}: its shards hold no samples")

    def spread(values: Iterable[int]) -> dict[str, float]:
        numbers = list(values)
        return {"mean": round(sum(numbers) / len(numbers), 2), "min": min(numbers), "max": max(numbers)}

    heights, widths, channel = zip(*sizes, strict=True)
    classes = sorted(labels) if info is None or info.classes is None else range(len(info.classes))
    return {
        "samples": len(sizes),
        "shards": len(per_shard),
        "bytes": stored_bytes,
        "labelled": sum(labels.values()) == len(sizes),
        "samples_per_class": {_class_name(info, index): labels[index] for index in classes},
        "samples_per_shard": spread(per_shard),
        "image_size": {"height": spread(heights), "width": spread(widths)},
        "channels": max(channel),
    }


def _class_name(info: ShardSetInfo | None, index: int) -> str:
    if info is None or info.classes is None:
        return str(index)
    name = info.classes[index]
    return name if info.classes.count(name) == 1 else f"{name} ({index})"  # ImageNet has two classes called crane
