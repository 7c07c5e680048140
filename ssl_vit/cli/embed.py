"""`ssl-vit embed`: embeddings of all images of a shard set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ssl_vit.interfaces import UserError, printable

app = typer.Typer()


@app.command()
def embed(
    weights: Annotated[Path, typer.Argument(help="A run directory, a checkpoint or a weights folder.")],
    data: Annotated[
        str | None,
        typer.Argument(help="Images or shards; labels are not needed. Default: the run's training data."),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="The .parquet file to write.")],
    pooling: Annotated[
        Literal["token", "mean", "both", "patches"],
        typer.Option(help="Class token, mean of the patches, both side by side, or all patches side by side."),
    ] = "mean",
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 256,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that read images (default: the recipe's).")
    ] = None,
) -> None:
    """Write one embedding per image: columns `key`, `file` (if known), `label` (-1: none) and `embedding`.

    Example: `ssl-vit embed runs/ssl my_images --out embeddings.parquet`
    """
    if out.suffix != ".parquet":
        raise UserError(f"--out {out}: give a name that ends in .parquet")
    from ssl_vit import functions
    from ssl_vit.files import atomic_file
    from ssl_vit.training.distributed import is_main

    frame = functions.embed(weights, data, pooling=pooling, batch_size=batch_size, workers=workers)
    if not is_main():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as file:
        frame.to_parquet(file, index=False)
    print(f"{out}: {len(frame):,} embeddings of {len(frame['embedding'].iloc[0])} numbers")
    if skipped := frame.attrs["skipped"]:
        first = printable(f"{skipped[0]['key']}: {skipped[0]['reason']}")
        print(f"skipped {len(skipped)} unreadable sample(s), first {first}")
