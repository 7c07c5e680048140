"""`ssl-vit shards`: make, check and count WebDataset shards."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Annotated, Literal

import typer

from ssl_vit.interfaces import UserError, printable

app = typer.Typer(no_args_is_help=True, help="Make, check and count WebDataset shards.")

# Arguments that may be URLs are no paths here: a path turns s3:// into s3:/.
Folder = Annotated[str, typer.Argument(help="A folder of shards.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes. Default: one per core, fewer for little data.")]


@app.command("make")
def shards_make(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder of class folders or of images; a parquet or arrow file; the name of a dataset on the "
            "Hugging Face hub; `digits`; or NAME:PLACE for a source of your own."
        ),
    ],
    out: Annotated[str, typer.Argument(help="Folder for the shards and info.json.")],
    split: Annotated[str | None, typer.Option(help="Split of the source, such as train or test.")] = None,
    shard_size: Annotated[
        int, typer.Option(min=1, help="Maximum number of images per shard. At least 16 shards are made.")
    ] = 1000,
    shards: Annotated[int | None, typer.Option(min=1, help="Number of shards, instead of --shard-size.")] = None,
    order: Annotated[
        Literal["shuffle", "stratified", "source"],
        typer.Option(
            help="shuffle: all images; stratified: each class spread evenly over the shards, too; source: as is."
        ),
    ] = "shuffle",
    holdout: Annotated[
        float,
        typer.Option(
            min=0, max=0.9, help="Fraction of each class, or of unlabeled images, for OUT/test; the rest is OUT/train."
        ),
    ] = 0.0,
    folds: Annotated[
        int | None, typer.Option(min=2, help="Number of folds of a cross-validation: OUT/fold_0, OUT/fold_1 and so on.")
    ] = None,
    subset: Annotated[
        int | None,
        typer.Option(min=1, help="Images per class. Larger subsets contain smaller ones; OUT/test stays whole."),
    ] = None,
    resize: Annotated[int | None, typer.Option(min=1, help="Resize the shorter side to this many pixels.")] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="JPEG and WebP quality of resized images.")] = 95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of order, holdout, folds and subset.")] = 0,
    keep_names: Annotated[bool, typer.Option("--keep-names", help="Store file names, as KEY.json.")] = False,
    image_column: Annotated[str | None, typer.Option(help="Image column of a table.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Label column of a table.")] = None,
    jobs: Jobs = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the shards in OUT first.")] = False,
) -> None:
    """Pack images into WebDataset shards.

    JPEG, PNG and WebP files are copied unchanged, other formats become PNG. Unreadable images are skipped and listed.
    The same images and options give the same bytes. After an interruption, the same command resumes.

    Example: `ssl-vit shards make my_images shards --holdout 0.2`
    """
    from ssl_vit.data.packing import pack
    from ssl_vit.data.packing.plan import Options
    from ssl_vit.data.packing.sources import open_source
    from ssl_vit.data.places import check_outside, split_name
    from ssl_vit.files import expanded

    if "://" in out:
        raise UserError(f"{out}: shards are written to a local folder; upload them afterwards")
    if part := split_name(source)[1]:
        raise UserError(
            f"{source}: name the folder alone; --split {part} packs a split of it, --holdout makes two parts"
        )
    check_outside(out, [source])
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"note: {printable(str(message))}", file=sys.stderr)
        infos = pack(
            open_source(source, split=split, label_column=label_column, image_column=image_column),
            expanded(out),
            Options(
                shard_size=shard_size,
                shards=shards,
                order=order,
                holdout=holdout,
                folds=folds,
                subset=subset,
                resize=resize,
                quality=quality,
                seed=seed,
                keep_names=keep_names,
            ),
            jobs=jobs,
            overwrite=overwrite,
        )
    for folder, info in infos.items():
        classes = f"{len(info.classes)} classes" if info.classes else "no labels"
        print(f"{folder}: {info.samples} samples in {len(info.shards)} shards, {classes}")
        print(f"  content hash {info.content_hash}")


@app.command("verify")
def shards_verify(
    data: Annotated[
        list[str],
        typer.Argument(
            help="Shards, a folder that holds train/ and test/, images, or one part, PLACE#PART. Several datasets are "
            "searched for shared images."
        ),
    ],
    jobs: Jobs = None,
) -> None:
    """Decode every image and list each defect. Exit code 1 if there is one.

    For a dataset with several parts (splits or folds), for images (which are packed first, see `shards make`) and for
    several datasets, also list classes without images, and images that are equal or nearly equal in two parts.

    Example: `ssl-vit shards verify my_images`
    """
    from ssl_vit.data.packing.cache import folder_of
    from ssl_vit.data.places import is_shards, parts_of, split_name
    from ssl_vit.data.verify import local, verify

    shown, first = ", ".join(data), data[0]
    local(first)
    place, part = split_name(first)
    if len(data) == 1 and is_shards(place) and (part or parts_of(first) == data):
        listed = verify(local(folder_of(first)), jobs=jobs)
        for defect in listed:
            print(printable(f"{defect.shard}: {defect.key or '-'}: {defect.kind}: {defect.detail}"))
        print(f"{shown}: {len(listed)} defect(s)" if listed else f"{shown}: no defect found")
        raise typer.Exit(1 if listed else 0)
    from ssl_vit.data.check import check_data

    report = check_data(*data, jobs=jobs)
    for note in report.notes:
        print(f"note: {note}")
    for part, names in report.missing_classes.items():
        for name in names:
            print(printable(f"{part}: class {name} has no image"))
    for row in report.bad_files.itertuples():
        print(printable(f"{row.part}: {row.file}: {row.reason}"))
    for row in report.leaks.itertuples():
        print(printable(f"{row.part}: {row.file}: {row.kind} copy of {row.other_file} in {row.other_part}"))
    for part, counts in report.class_counts.items():
        sizes = counts[counts > 0]
        what = f"{counts.sum():,} labeled images; {len(sizes)} classes of {sizes.min():,} to {sizes.max():,} images"
        print(printable(f"{part}: {what if len(sizes) else 'no labels'}"))
    defects = f"{len(report.bad_files)} bad file(s), {len(report.leaks)} image(s) in two parts"
    print(f"{shown}: {'no defect found' if report.ok else defects}")
    if not report.ok:
        raise typer.Exit(1)


@app.command("stats")
def shards_stats(folder: Folder) -> None:
    """Print samples, classes and image sizes of a folder of shards, as JSON.

    Example: `ssl-vit shards stats shards/train`
    """
    from ssl_vit.data.verify import local, stats

    print(json.dumps(stats(local(folder)), indent=1))
