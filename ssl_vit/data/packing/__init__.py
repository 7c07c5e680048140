"""Packing images into shards.

A shard set is a folder of WebDataset tars (KEY.jpg|png|webp, KEY.cls, optional KEY.json) with `info.json` beside them.
The same source and options give the same bytes, on any number of processes, interrupted or not: `plan` decides what
goes into which shard before anything is written, `writer` writes each shard as a separate job, and `record` knows
which are finished. `ssl_vit.data.verify` reads shard sets back.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import PIL

from ssl_vit import __version__
from ssl_vit.data.packing import record
from ssl_vit.data.packing.parallel import process_count, run
from ssl_vit.data.packing.plan import Options, plan_shards
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.data.packing.writer import ShardJob, WrittenShard, write_shard
from ssl_vit.data.shards.info import INFO, Info
from ssl_vit.files import write_json
from ssl_vit.interfaces import UserError, printable
from ssl_vit.progress import progress_bar

_MOST_LISTED = 20  # images that cannot be read


def pack(
    source: Source,
    out: Path,
    options: Options = Options(),
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[Path, Info]:
    """Write the source as a shard set into `out`, with a holdout as two sets into `out/train` and `out/test`, with
    folds as `out/fold_0`, `out/fold_1` and so on.

    options: what goes into which shard, and how images are stored.
    jobs: processes. Default: one per core, fewer for a small source.
    overwrite: delete the shards in `out` first; they are lost even if packing fails.
    progress: show it on stderr.

    Returns the info.json of each folder. Images that cannot be decoded are skipped and listed there as `dropped`.

    An interrupted `pack` resumes when it is called again: finished shards are not written twice. Whether the source is
    the same is decided by the names and sizes of its images, not by their content. The bytes are the same with the same
    versions of this package and of Pillow; `content_hash` tells.

    Raises UserError for other files in `out` and where no image can be used, RunError where reading or writing fails.
    """
    planned = {out / part: images for part, images in plan_shards(source, options).items()}
    every = [images for shards in planned.values() for images in shards]
    processes = process_count(jobs, len(every), sum(map(len, every)))
    plan = packing_plan(source, options)
    with record.locked(out):
        finished = record.prepare(out, plan, list(planned), overwrite)
        todo = list(_unfinished(source, planned, finished))
        if progress and (count := sum(map(len, finished.values()))):
            print(f"{count} of {count + len(todo)} shards are finished already", file=sys.stderr)
        with progress_bar("packing", sum(len(job.items) for job in todo), progress) as advance:

            def receive(job: ShardJob, shard: WrittenShard) -> None:
                finished[job.path.parent][shard.entry.file] = shard
                record.add(job.path.parent, shard)
                advance(len(job.items))

            run(partial(write_shard, source.read, options), todo, max(1, min(processes, len(todo))), receive)
        infos = {folder: _info(source, options, folder.name, shards) for folder, shards in finished.items()}
        for folder, info in infos.items():
            if not info.samples:
                record.clear(out, list(planned))
                first = info.dropped[0]
                raise UserError(
                    f"{source.name}: none of the {len(info.dropped)} images for {folder} can be used "
                    f"(first: {first.file}: {first.reason})"
                )
        for folder, info in infos.items():
            write_json(folder / INFO, info.model_dump(exclude={"splits"}))
        dropped = [item for info in infos.values() for item in info.dropped] if progress else []
        for item in dropped[:_MOST_LISTED]:
            print(f"skipped {printable(item.file)}: {printable(item.reason)}", file=sys.stderr)
        if more := len(dropped[_MOST_LISTED:]):
            print(f"skipped {more} more; info.json lists them", file=sys.stderr)
        return infos


def packing_plan(source: Source, options: Options) -> record.PackingPlan:
    """All that decides the bytes of a shard set."""
    return {
        "software": f"ssl-vit {__version__}, Pillow {PIL.__version__}",  # the latter encodes what is resized
        "source": source.name,
        "license": source.license,
        "images": {"count": source.count, "listing": source.listing},
        "classes": source.classes,
        "labels": None if source.labels is None else hashlib.sha256(source.labels.tobytes()).hexdigest(),
        **options.model_dump(),
    }


def content_hash(checksums: Iterable[str]) -> str:
    """One sha256 of a whole set: of its shards' (hexadecimal, in order, joined)."""
    return hashlib.sha256("".join(checksums).encode()).hexdigest()


def _unfinished(
    source: Source, planned: dict[Path, list[np.ndarray]], finished: dict[Path, record.Finished]
) -> Iterator[ShardJob]:
    for folder, shards in planned.items():
        first_key = 0
        for number, images in enumerate(shards):
            path = folder / f"{number:06d}.tar"
            if path.name not in finished[folder]:
                labels = None if source.labels is None else source.labels[images].tolist()
                yield ShardJob(path, first_key, [source.items[image] for image in images], labels)
            first_key += len(images)


def _info(source: Source, options: Options, part: str, finished: record.Finished) -> Info:
    written = [shard.entry for _, shard in sorted(finished.items()) if shard.entry.samples]
    name = source.name
    if options.subset and not (options.holdout and part == "test"):
        name += f", {options.subset} {'images' if source.labels is None else 'images per class'}"
    if options.holdout:
        name += f", {part} part of holdout {options.holdout:g}"
    if options.folds:
        name += f", {part} of {options.folds}"
    return Info(
        classes=source.classes,
        samples=sum(shard.samples for shard in written),
        labeled=source.labels is not None,
        shards=written,
        content_hash=content_hash(shard.sha256 for shard in written),
        source=name if name == source.name else f"{name}, seed {options.seed}",
        license=source.license,
        dropped=sorted((item for shard in finished.values() for item in shard.dropped), key=lambda item: item.file),
    )
