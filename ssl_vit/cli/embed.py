"""`ssl-vit embed`: embeddings of all images of a shard set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ssl_vit.interfaces import is_main_process, printable
from ssl_vit.models import Pooling


def embed(
    weights: Annotated[Path, typer.Argument(help="A run directory, a checkpoint or a weights folder.")],
    data: Annotated[
        str | None,
        typer.Argument(help="Images or shards; labels are not needed. Default: the run's training data."),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="The file to write: .parquet, or .npz (NumPy).")],
    pooling: Annotated[
        Pooling,
        typer.Option(help="Class token, mean of the patches, both concatenated, or all patches concatenated."),
    ] = "mean",
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 256,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that read images (default: the recipe's).")
    ] = None,
) -> None:
    """Write one embedding per image: columns `key`, `file` (if known), `label` (-1: none) and `embedding`; in a `.npz`
    file the arrays `keys`, `files`, `labels` and `embeddings` (n, d), and `grid`, the (rows, columns) of the patches.

    Example: `ssl-vit embed runs/ssl my_images --out embeddings.parquet`
    """
    from ssl_vit import api

    frame = api.embed(weights, data, pooling=pooling, batch_size=batch_size, workers=workers, out=out)

    if not is_main_process():
        return
    print(f"{out}: {len(frame):,} embeddings of dimension {len(frame['embedding'].iloc[0])}")
    if skipped := frame.attrs["skipped"]:
        first = printable(f"{skipped[0]['key']}: {skipped[0]['reason']}")
        print(f"skipped {len(skipped)} unreadable sample(s), first {first}")
