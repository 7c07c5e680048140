"""What is wrong with a dataset before anything is trained on it: `check_data`."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import imagehash
import numpy as np
import pandas as pd
from PIL import Image

from ssl_vit.data.images import eight_bits
from ssl_vit.data.overlap import saw_images
from ssl_vit.data.packing.cache import folder_of
from ssl_vit.data.packing.sources import list_splits, open_source
from ssl_vit.data.places import is_shards, parts_of, split_name
from ssl_vit.data.shards.info import Info, open_set
from ssl_vit.data.shards.reading import ShardFile
from ssl_vit.data.verify import check_set, images_by_class, local
from ssl_vit.files import expanded
from ssl_vit.interfaces import UserError, printable

# Unrelated photographs of Imagenette (750,000 pairs) differ in at least 11 bits. Of 517,320 pairs of different digits,
# 27 differ in at most 4 bits, none of them in less than 9 gray levels. Copies that were resized or compressed again
# differ less than both limits.
_BITS, _LEVELS = 4, 5.0
_THUMBNAIL = (16, 16)
_ROWS = 1 << 24  # pairs compared at once


@dataclass(frozen=True)
class DataReport:
    """What `check_data` found in a dataset.

    bad_files: columns part, file, reason: unreadable images, and every other defect of the shards.
    class_counts: images by class (rows) and part (columns); empty without labels.
    missing_classes: classes without images, by part.
    notes: what packing would print, such as the number of files that are not images; for shards none.
    leaks: columns file, part, other_file, other_part, kind: images that two parts share, `exact` (the same bytes) or
        `near` (the same picture, resized or compressed again). An image with several copies in the other part is listed
        once.
    """

    bad_files: pd.DataFrame
    class_counts: pd.DataFrame
    missing_classes: dict[str, list[str]]
    leaks: pd.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.bad_files.empty and self.leaks.empty and not any(self.missing_classes.values())


def check_data(place: str | Path, *others: str | Path, jobs: int | None = None, progress: bool = True) -> DataReport:
    """Read all images of local datasets and list what is wrong with them.

    place: a folder of shards or one that holds shards in train/ and test/; or images, which are packed first; or one
        part, PLACE#PART. Of images without splits the two parts of the automatic holdout are checked.
    others: more such datasets, such as unlabeled images for pretraining. Shared images are searched for in all parts of
        all datasets; images without splits are one part. The names of parts in the report then include the place.
    jobs: processes. Default: one per core, fewer for little data.
    progress: show it on stderr.

    Raises UserError for what cannot be found, and for datasets that contain one another.
    """
    places = [str(one) for one in (place, *others)]
    for number, one in enumerate(places):
        if is_shards(whole := split_name(one)[0]) and not local(whole).exists():
            raise UserError(f"{one}: no such file or folder")
        if twice := next((before for before in places[:number] if saw_images([before], one)), None):
            raise UserError(f"{twice} and {one} contain the same images; give each image once")
    found = [part for one in places for part in _parts(one, named=bool(others), hold_out=one == places[0])]
    bad, pictures = list[tuple[str, str, str]](), dict[str, list[_Picture]]()
    counts = dict[str, dict[str, pd.Series]]()
    for part in found:
        defects, shards = check_set(part.folder, part.info, jobs, progress, visit=_picture)
        if part.packed:  # what packing dropped
            bad += [(part.name, entry.file, entry.reason) for entry in (part.info.dropped if part.info else ())]
        listed = [(f"{entry.shard} {entry.key}".strip(), f"{entry.kind}: {entry.detail}") for entry in defects]
        bad += [(part.name, printable(file), printable(reason)) for file, reason in listed]
        pictures[part.name] = [picture for shard in shards for picture in shard.seen]
        sizes = pd.Series(images_by_class(part.info, shards), dtype=int)
        counts.setdefault(part.place, {})[part.name] = sizes
    tables = {one: pd.DataFrame(of_parts).fillna(0).astype(int) for one, of_parts in counts.items()}
    missing = {
        name: [str(label) for label in table.index[table[name] == 0]] if table[name].any() else []
        for table in tables.values()
        for name in table
    }
    sources = dict.fromkeys(split_name(part.place)[0] for part in found if part.packed)
    notes = dict.fromkeys(note for source in sources for note in _source_notes(source))
    pairs = combinations(pictures, 2)
    leaks = [leak for first, second in pairs for leak in _shared(pictures[first], first, pictures[second], second)]
    return DataReport(
        pd.DataFrame(bad, columns=["part", "file", "reason"]),
        pd.concat(tables.values(), axis=1).fillna(0).astype(int),
        missing,
        pd.DataFrame(leaks, columns=["file", "part", "other_file", "other_part", "kind"]),
        tuple(notes),
    )


@dataclass(frozen=True)
class _Part:
    """place: the dataset that it is a part of. packed: from images."""

    place: str
    name: str
    folder: Path
    info: Info | None
    packed: bool


def _parts(place: str, *, named: bool, hold_out: bool) -> Iterator[_Part]:
    """The parts of a dataset, packed if need be.

    named: their names include the place. hold_out: images without splits are two parts.
    """
    whole, part = split_name(place)
    specs, packed = [place] if part else parts_of(place), not is_shards(whole)
    if specs == [whole] and packed and hold_out:
        specs = [f"{place}#train", f"{place}#test"]
    for spec in specs:
        folder = expanded(folder_of(spec))
        info = open_set(folder)
        if info and len(info.splits) > 1:
            names = ", ".join(info.splits)
            raise UserError(f"{spec} holds several splits ({names}): put the shards of each into its own folder")
        yield _Part(place, spec if named else spec.removeprefix(f"{place}#"), folder, info, packed)


def _source_notes(place: str) -> list[str]:
    """The warnings of listing images, such as of ignored files."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        splits: list[str | None] = [*list_splits(place)]
        for split in splits or [None]:
            open_source(place, split=split)
    return [printable(str(warning.message)) for warning in caught]


@dataclass(frozen=True)
class _Picture:
    """sha256: hash of the image's bytes. bits: perceptual hash. thumbnail: 16x16 gray levels."""

    file: str
    sha256: bytes
    bits: int
    thumbnail: bytes


def _picture(shard: ShardFile, position: int, data: bytes, image: Image.Image) -> _Picture:
    image = eight_bits(image).convert("L")
    return _Picture(
        file=shard.file_name(position) or printable(shard.samples[position].key),
        sha256=hashlib.sha256(data).digest(),
        bits=int.from_bytes(np.packbits(imagehash.phash(image).hash).tobytes()),
        thumbnail=image.resize(_THUMBNAIL).tobytes(),
    )


def _gray(picture: _Picture) -> np.ndarray:
    return np.frombuffer(picture.thumbnail, dtype=np.uint8).astype(int)


def _shared(
    ours: Sequence[_Picture], part: str, theirs: Sequence[_Picture], other: str
) -> list[tuple[str, str, str, str, str]]:
    """The images of a part that another one has too: each with the first equal image there, else a nearly equal one."""
    bits = [np.array([picture.bits for picture in side], dtype=np.uint64) for side in (ours, theirs)]
    step, leaks = max(1, _ROWS // max(len(theirs), 1)), []
    for start in range(0, len(ours), step):
        close = np.bitwise_count(bits[0][start : start + step, None] ^ bits[1][None]) <= _BITS
        for row in np.flatnonzero(close.any(axis=1)).tolist():
            one, likely = ours[start + row], [theirs[column] for column in np.flatnonzero(close[row]).tolist()]
            exact = next((two for two in likely if one.sha256 == two.sha256), None)
            near = (two for two in likely if np.abs(_gray(one) - _gray(two)).mean() < _LEVELS)
            if two := exact or next(near, None):
                leaks.append((one.file, part, two.file, other, "exact" if exact else "near"))
    return leaks
