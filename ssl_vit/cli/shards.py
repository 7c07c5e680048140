"""`ssl-vit shards`: make, merge, check and count WebDataset shards."""

from __future__ import annotations

import json
import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ssl_vit.interfaces import UserError

app = typer.Typer(no_args_is_help=True, help="Make, merge, check and count WebDataset shards.")

Jobs = Annotated[int | None, typer.Option(min=1, help="Processes (default: every core, fewer for little data).")]


class Order(StrEnum):
    shuffle = "shuffle"
    stratified = "stratified"
    source = "source"


@app.command("make")
def shards_make(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder of class folders or of images, a `datasets` source, `digits`, or NAME:PLACE (your own)."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Where the shards and info.json go.")],
    split: Annotated[str | None, typer.Option(help="The source's split, such as train or test.")] = None,
    shard_size: Annotated[int, typer.Option(min=1, help="Images in a shard, at most.")] = 1000,
    shards: Annotated[int | None, typer.Option(min=1, help="How many shards, instead of --shard-size.")] = None,
    order: Annotated[
        Order, typer.Option(help="shuffle all; shuffle with each class spread evenly over the shards; or as they come.")
    ] = Order.shuffle,
    holdout: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of each class for OUT/test; the rest: OUT/train.")
    ] = 0.0,
    subset: Annotated[
        int | None,
        typer.Option(
            min=1, help="Images of each class to keep; OUT/test stays whole. Larger subsets hold smaller ones."
        ),
    ] = None,
    resize: Annotated[int | None, typer.Option(min=1, help="Resize the shorter side to this many pixels.")] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="JPEG and WebP quality of resized images.")] = 95,
    seed: Annotated[int, typer.Option(min=0, help="Of order, holdout and subset.")] = 0,
    keep_names: Annotated[
        bool, typer.Option("--keep-names", help="Store each image's file name, as KEY.json.")
    ] = False,
    image_column: Annotated[str | None, typer.Option(help="Image column of a `datasets` source.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Label column of a `datasets` source.")] = None,
    jobs: Jobs = None,
    part: Annotated[str | None, typer.Option(help="i/n: write the i-th of n parts only; see below.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the shards in OUT.")] = False,
) -> None:
    """Pack images into WebDataset shards; JPEG, PNG and WebP bytes are copied as they are. Broken images are left out
    and listed. The same images and options give the same bytes; stopped, the same command goes on where it was.

    Example: `ssl-vit shards make my_images shards --holdout 0.2`

    On several machines: give each the same command with its own `--part 1/4`, `--part 2/4`, ... When all are done (and,
    where the machines share no disk, when the files of all have been copied into one folder), run
    `ssl-vit shards merge-info shards`.
    """
    from ssl_vit.data.packing import pack
    from ssl_vit.data.packing.sources import open_source

    if Path(source).is_dir() and out.resolve().is_relative_to(Path(source).resolve()):
        raise UserError(f"{out} lies inside {source}, where it would look like images; choose a folder outside")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)
        opened = open_source(source, split=split, label_column=label_column, image_column=image_column)
        result = pack(
            opened,
            out,
            shard_size=shard_size,
            shards=shards,
            order=order.value,
            holdout=holdout,
            subset=subset,
            resize=resize,
            quality=quality,
            seed=seed,
            keep_names=keep_names,
            jobs=jobs,
            part=part,
            overwrite=overwrite,
        )
    if part is None:
        _show(out, result)
    else:
        print(f"{out}: part {part} has {result['shards']} shards; after all parts: ssl-vit shards merge-info {out}")
        _list_dropped(result)


@app.command("merge-info")
def shards_merge_info(
    out: Annotated[Path, typer.Argument(help="The folder that holds the shards of all parts.")],
) -> None:
    """Complete shards that were made with --part: see that none is missing, and write info.json.

    Example: `ssl-vit shards merge-info shards`
    """
    from ssl_vit.data.packing import merge

    _show(out, merge(out))


def _show(out: Path, result: dict[str, Any]) -> None:
    folders = {"": result} if "samples" in result else {name: result[name] for name in ("train", "test")}
    for name, info in folders.items():
        classes = f"{len(info['classes'])} classes" if info["classes"] else "no labels"
        print(f"{out / name}: {info['samples']} samples in {len(info['shards'])} shards, {classes}")
        print(f"  content hash {info['content_hash']}")
    _list_dropped(result)


def _list_dropped(result: dict[str, Any], most: int = 20) -> None:
    for dropped in result["dropped"][:most]:
        print(f"left out {dropped['file']}: {dropped['reason']}", file=sys.stderr)
    if more := len(result["dropped"][most:]):
        print(f"left out {more} more; info.json lists them", file=sys.stderr)


@app.command("verify")
def shards_verify(folder: Annotated[Path, typer.Argument(help="A folder of shards.")], jobs: Jobs = None) -> None:
    """Read every byte of every shard and list each defect; exit code 1 if there is one.

    Example: `ssl-vit shards verify shards/train`
    """
    from ssl_vit.data.verify import verify

    defects = verify(folder, jobs=jobs)
    for defect in defects:
        print(f"{defect.shard}: {defect.key or '-'}: {defect.kind}: {defect.detail}")
    print(f"{folder}: {len(defects)} defect(s)" if defects else f"{folder}: no defect found")
    if defects:
        raise typer.Exit(1)


@app.command("stats")
def shards_stats(folder: Annotated[Path, typer.Argument(help="A folder of shards.")]) -> None:
    """Samples, classes and image sizes of a folder of shards, as JSON.

    Example: `ssl-vit shards stats shards/train`
    """
    from ssl_vit.data.verify import stats

    print(json.dumps(stats(folder), indent=1))
