"""Packing: `make` writes a source as a shard set; `merge` completes one that was written in parts.

A shard set is a folder of WebDataset tars (KEY.jpg|png|webp, KEY.cls, optional KEY.json) with `info.json` beside them.
The same source and options give the same bytes, on any number of processes and machines, interrupted or not: what goes
into which shard is decided before anything is written (`layout`), each shard is then a job of its own (`writer`), and
the folder knows what is done (`journal`). `ssl_vit.data.verify` reads shard sets back.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from ssl_vit import __version__
from ssl_vit.data.packing import parallel
from ssl_vit.data.packing.journal import INFO, UNFINISHED, Journal, Shard, dropped, read_plan, writing
from ssl_vit.data.packing.plan import Options, Order, lay_out
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.data.packing.writer import ShardJob, ShardWriter
from ssl_vit.interfaces import UserError


def pack(
    source: Source,
    out: Path,
    *,
    shard_size: int = 1000,
    shards: int | None = None,
    resize: int | None = None,
    quality: int = 95,
    seed: int = 0,
    order: Order = "shuffle",
    holdout: float = 0.0,
    subset: int | None = None,
    keep_names: bool = False,
    jobs: int | None = None,
    part: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Write the source as a shard set into `out` and return its info.json; with a holdout {"train": info, "test":
    info, "dropped": both parts' lists}.

    shard_size to keep_names: see `ssl_vit.data.layout.Options`. jobs: processes (default: all cores, fewer for a small
    source). overwrite: replace the shard set that is in `out` (an unfinished one of this very packing goes on).
    part: "i/n" writes the i-th of n parts of the shards only, and returns {"shards": how many these are, "dropped":
    [...]}; when the files of all parts lie in one folder, `merge` completes them.

    An interrupted `make` goes on where it was when it is called again: finished shards are not written twice. Whether
    the source is still the same is judged by the images' names and sizes, not by their content. The bytes are the same
    with the same versions of this package and of Pillow; "content_hash" in info.json tells.
    Images that cannot be decoded are left out and listed under "dropped" as {"file", "reason"}. info.json is written
    last, so a folder without it was not finished.

    Raises UserError for options out of range, a non-empty `out`, another packing in it, no usable image; RunError
    where reading or writing fails.
    """
    options = Options(shard_size, shards, resize, quality, seed, order, holdout, subset, keep_names)
    number, parts = _parse_part(part)
    if part is not None and overwrite:
        raise UserError("parts cannot overwrite: one would delete what another has written; delete the folder first")
    layout = lay_out(source, options)
    planned = sum(len(piece) for pieces in layout.values() for piece in pieces)
    on = parallel.processes(jobs, sum(map(len, layout.values())), source.size * planned // source.count)
    journal = Journal(out, _plan(source, options, layout), f"{number}of{parts}")
    with writing(out, journal.tag):
        journal.begin(overwrite)
        own = journal.shards[number - 1 :: parts]
        todo = [] if journal.complete else [shard for shard in own if journal.entry(shard) is None]
        if progress and len(todo) < len(own):
            print(f"{len(own) - len(todo)} of {len(own)} shards are there already", file=sys.stderr)
        parallel.run(
            ShardWriter(source.read, resize, quality, keep_names, journal.fingerprint, journal.tag),
            _shard_jobs(source, layout, todo),
            on=max(1, min(on, len(todo))),
            what="packing",
            total=sum(len(layout[shard.folder][shard.number]) for shard in todo),
            progress=progress,
        )
        if part is not None:
            entries = [entry for shard in own if (entry := journal.entry(shard))]
            return {"shards": len(own), "dropped": dropped(entries)}
        return journal.finish()


def merge(out: Path) -> dict[str, Any]:
    """Write info.json for the shards that `make` wrote with `part`, and return what `make` returns without it.

    Raises UserError where shards are missing or belong to another packing.
    """
    if not (out / UNFINISHED).is_file():
        complete = any(out.glob(INFO)) or any(out.glob(f"*/{INFO}"))
        why = (
            "is complete already"
            if complete
            else f"has no {UNFINISHED}: name the folder that the parts were written to"
        )
        raise UserError(f"{out} {why}")
    with writing(out, "merge"):
        return Journal(out, read_plan(out), "merge").finish()


def _parse_part(part: str | None) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", "1/1" if part is None else part)
    number, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= parts:
        raise UserError(f"part must be i/n with i from 1 to n, such as 2/4, not {part!r}")
    return number, parts


def _plan(source: Source, options: Options, layout: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """All that decides the bytes: two makes with equal plans write the same files."""
    return {
        "software": f"ssl-vit {__version__}, Pillow {PIL.__version__}",  # the latter encodes what is resized
        "source": source.name,
        "license": source.license,
        "images": {"count": source.count, "listing": source.listing},
        "classes": source.classes,
        "labels": None if source.labels is None else hashlib.sha256(source.labels.tobytes()).hexdigest(),
        **asdict(options),
        "layout": {folder: len(pieces) for folder, pieces in layout.items()},
    }


def _shard_jobs(source: Source, layout: dict[str, list[np.ndarray]], todo: list[Shard]) -> Iterator[ShardJob]:
    first_keys = {folder: np.cumsum([0, *map(len, pieces)]) for folder, pieces in layout.items()}
    for shard in todo:
        shard.path.parent.mkdir(exist_ok=True)
        images = layout[shard.folder][shard.number]
        labels = None if source.labels is None else source.labels[images].tolist()
        first_key = int(first_keys[shard.folder][shard.number])
        yield ShardJob(shard.path, first_key, [source.items[image] for image in images], labels)
