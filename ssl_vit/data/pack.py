"""Packing: `make` writes a source as a shard set.

A shard set is a folder of WebDataset tars (KEY.jpg|png|webp, KEY.cls, optional KEY.json) with `info.json` beside them.
The same source and options give the same bytes. `ssl_vit.data.check` reads shard sets back.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from PIL import Image

from ssl_vit.data.raw import BrokenImageError, RawSample, Source, channels, decode
from ssl_vit.interfaces import RunError, UserError

INFO = "info.json"
LEAST_SHARDS = 16
_OWN_FILES = re.compile(r"(\d{6}\.tar|info\.json)(\.tmp)?")
_Result = TypeVar("_Result")


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
    Without `shards` there are at least 16 (one a sample where there are fewer samples), of the train and the test part
    each: a shard is read by one loader worker of one process, so a small folder in one shard would feed one worker.
    resize: scale each image's shorter side to so many pixels (bicubic, up or down), keeping its file format;
    quality: 1..100, of images that are resized. seed: of the shuffle and of the holdout.
    shuffle: over all samples; without it shard after shard keeps the source's order, also within train and test.
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
        track(_in_order(partial(_examine, source, resize), range(source.count)), source.count, "reading", progress)
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
            if shards is None:
                count = max(-(-len(indices) // shard_size), min(LEAST_SHARDS, len(indices)))
            else:  # of a holdout, `shards` is the number in train; test gets shards of about the same size
                count = max(1, shards * len(indices) // largest)
            samples = _in_order(partial(_packed, source, resize, quality, keep_names), list(enumerate(indices)))
            tracked = track(samples, len(indices), f"writing {part}".rstrip(), progress)
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


def track(items: Iterable[_Result], total: int, what: str, progress: bool) -> Iterable[_Result]:
    from rich import progress as bars
    from rich.console import Console

    quiet = not (progress and sys.stderr.isatty())
    return bars.track(items, what, total, console=Console(stderr=True), transient=True, disable=quiet)


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
        entries.append({"file": path.name, "samples": count, "bytes": path.stat().st_size, "sha256": sha256(path)})
    return entries


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
