"""Weights in and out: import, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ssl_vit.interfaces import UserError, printable

_SHOWN = 12  # names that are printed; all of them are in OUT/config.json


def import_weights(
    weights: Annotated[str, typer.Argument(help="A file, a folder, a timm name, or OWNER/NAME on the hub.")],
    out: Annotated[Path, typer.Argument(help="The new weights folder.")],
    name: Annotated[str | None, typer.Option(help="timm's name of the architecture; bare checkpoints need it.")] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Attention heads, where they differ from the name's.")
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="Pixel mean (of 0 to 1) that the weights expect: one number, or one per channel.")
    ] = None,
    std: Annotated[str | None, typer.Option(help="Pixel standard deviation, likewise.")] = None,
) -> None:
    """Convert weights from elsewhere to a folder that eval, train (init_from=), inspect, embed and export read.

    WEIGHTS: a `.safetensors`, `.pth`, `.pt`, `.bin` or Google's `.npz` file; a timm model folder; a transformers ViT
    or ViTMAE folder; a timm name such as vit_base_patch16_224.augreg_in21k; a model on the hub. No code in the files
    is run. Classification heads and decoders are skipped, and listed.

    Example: `ssl-vit import vit_small_patch16_224.augreg_in21k weights/small`
    """
    from ssl_vit.models.exchange import imports

    numbers = {"mean": _numbers("--mean", mean), "std": _numbers("--std", std)}
    model, imported = imports.import_weights(weights, out, name=name, heads=heads, **numbers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    height, width = model.image_size
    print(f"{model.name}, {parameters:,} parameters, {height}x{width} pixels, {model.channels} channel(s)")
    print(f"mean {model.mean}, std {model.std}")
    for note in imported.notes:
        print(printable(f"note: {note}"))
    if imported.skipped:
        more = f" and {len(imported.skipped) - _SHOWN} more, see {out}/config.json" * (len(imported.skipped) > _SHOWN)
        print(printable(f"skipped: {', '.join(imported.skipped[:_SHOWN])}{more}"))
    print(f"\nweights    {out}\nevaluate   ssl-vit eval {out} few_shot --data SHARDS")
    print(f"train on   ssl-vit train RECIPE init_from={out} encoder.name={model.name}, with its sizes, mean and std")


def export(
    run: Annotated[Path, typer.Argument(help="A run directory, a checkpoint or a weights folder.")],
    out: Annotated[Path, typer.Argument(help="The new folder for the model.")],
    to: Annotated[Literal["timm", "transformers"], typer.Option(help="The library that will load it.")],
    license: Annotated[
        str | None, typer.Option(help="License of the weights for the model card, such as apache-2.0.")
    ] = None,
) -> None:
    """Write the encoder for timm or transformers, with a model card. That library loads the export,
    and its outputs are checked.

    `hf upload OWNER/NAME OUT` publishes the folder.

    Example: `ssl-vit export runs/digits_ssl exported --to timm`
    """
    from ssl_vit import api
    from ssl_vit.files import expanded

    out = expanded(out)
    api.export(run, out, to, license=license)
    print(f"{out}: {', '.join(sorted(file.name for file in out.iterdir()))}; README.md says how to load it")


def _numbers(option: str, text: str | None) -> tuple[float, ...] | float | None:
    if text is None:
        return None
    try:
        numbers = tuple(float(number) for number in text.split(","))
    except ValueError:
        raise UserError(f"{option} {text}: give a number, or one per channel such as 0.485,0.456,0.406") from None
    return numbers if len(numbers) > 1 else numbers[0]
