"""`ssl-vit inspect`: pictures of a trained encoder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ssl_vit.files import expanded
from ssl_vit.interfaces import UserError


def inspect(
    weights: Annotated[Path, typer.Argument(help="A run directory, a checkpoint or a weights folder.")],
    data: Annotated[str, typer.Option(help="Images or shards whose first images are shown; labels are not needed.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the pictures (default: inspect/ in the given directory).")
    ] = None,
    image_size: Annotated[
        str | None, typer.Option(help="Pixels, as N or HEIGHTxWIDTH (default: the encoder's own).", metavar="N|HxW")
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Number of images to visualize.")] = 8,
    distance_images: Annotated[int, typer.Option(min=1, help="Number of images in the mean attention distance.")] = 64,
    map_images: Annotated[
        int, typer.Option(min=1, help="Number of images in the embedding map; nearest neighbors are among them.")
    ] = 400,
) -> None:
    """Visualize what a ViT has learned: filters, positions, attention, features, nearest neighbors,
    reconstructions. One page.

    Example: `ssl-vit inspect runs/demo/ssl-fold0 --data runs/demo/data/fold_0`
    """
    if image_size and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", image_size):
        raise UserError(f"--image-size {image_size}: give pixels, such as 384 or 256x384 (height x width)")
    from ssl_vit.analysis import inspection

    sides = [int(side) for side in (image_size or "").split("x") if side]
    size = (sides[0], sides[-1]) if sides else None
    weights = expanded(weights)
    folder = expanded(out or weights / "inspect")
    print(
        inspection.inspect(
            weights,
            data,
            folder,
            image_size=size,
            images=images,
            distance_images=distance_images,
            map_images=map_images,
        )
    )
