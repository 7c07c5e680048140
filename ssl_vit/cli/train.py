"""`ssl-vit train`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ssl_vit.cli.keys import Overrides
from ssl_vit.interfaces import UserError, is_main_process


def train(
    recipe: Annotated[
        str,
        typer.Argument(help="A recipe file, a shipped recipe's name, or a run directory to resume."),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the run's data, size, memory and time, and do not train.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The dry run as JSON, with the whole recipe.")] = False,
    overrides: Overrides = None,
) -> None:
    """Train one stage: pretraining, supervised training or fine-tuning, as the recipe says. Resumes by itself.
    `ssl-vit keys OBJECTIVE` lists the keys of an objective.

    Example: `ssl-vit train pretrain_vit_tiny data=my_images training.steps=500`

    Several GPUs: `accelerate launch --multi_gpu --num_processes 2 -m ssl_vit train pretrain_vit_tiny data=my_images`
    """
    from ssl_vit import recipe as recipes

    settings = recipes.load_recipe(recipe, overrides or [])
    if dry_run:
        from ssl_vit import execution  # torch, after the keys were checked
        from ssl_vit.cli import previewed

        measured = execution.dry_run(settings)
        if is_main_process():
            previewed.stage(measured, as_json)
        return
    if as_json:
        raise UserError("--json requires --dry-run")
    from ssl_vit import api

    run = api.train(settings).dir
    if is_main_process():
        name, train = shlex.quote(str(run)), settings.data.train
        place = Path(train if isinstance(train, str) else "")  # a mixture has no test part
        has_test_part = place.name.endswith("#train") or (place.name == "train" and place.with_name("test").is_dir())
        print(
            f"\nrun        {run}  (recipe, metrics.jsonl, TensorBoard events, checkpoints, encoder.safetensors)\n"
            f"evaluate   ssl-vit eval {name} few_shot{'' if has_test_part else ' --data TRAIN --test TEST'}\n"
            f"look       ssl-vit report {name}   and   tensorboard --logdir {name}"
        )
        encoder = settings.encoder
        if encoder.norm_eps is None and encoder.positions != "relative":  # timm's config has a place for neither
            print(f'in timm    timm.create_model("local-dir:{run}", pretrained=True)')
