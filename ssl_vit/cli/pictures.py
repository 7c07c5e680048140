"""`ssl-vit inspect`: pictures of a trained encoder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ssl_vit.interfaces import Size, UserError

app = typer.Typer()


@app.command()
def inspect(
    weights: Annotated[Path, typer.Argument(help="A run directory, a checkpoint or a weights folder.")],
    data: Annotated[str, typer.Option(help="Shards whose first images are pictured; labels are not needed.")],
    out: Annotated[
        Path | None, typer.Option(help="Where the pictures go (default: inspect/ in the given directory).")
    ] = None,
    image_size: Annotated[
        str | None, typer.Option(help="Pixels, as N or HEIGHTxWIDTH (default: the encoder's own).", metavar="N|HxW")
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Images pictured.")] = 8,
    distance_images: Annotated[int, typer.Option(min=1, help="Images in the mean attention distance.")] = 64,
    layers: Annotated[
        str | None, typer.Option(help="Layers whose attention is computed, such as 0,5,11 (default: all).")
    ] = None,
) -> None:
    """Picture what a ViT has learned: filters, positions, attention, features, reconstructions. One page, PNG and SVG.

    Example: `ssl-vit inspect runs/demo/ssl --data runs/demo/data/test`
    """
    from ssl_vit import api
    from ssl_vit.analysis.inspection import Options

    options = Options(_size(image_size), images, distance_images, _layers(layers))
    page = api.inspect(weights, data, out or weights / "inspect", options)
    print(f"{page}\ntensorboard --logdir {page.parent}")


def _size(text: str | None) -> Size | None:
    if text is None:
        return None
    sides = [int(side) for side in text.split("x")] if re.fullmatch(r"\d+(x\d+)?", text) else []
    if not sides or min(sides) < 1:
        raise UserError(f"--image-size {text}: give pixels, such as 384 or 256x384 (height x width)")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _layers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UserError(f"--layers {text}: give layers counted from 0, such as 0,5,11")
    return [int(layer) for layer in text.split(",")]
