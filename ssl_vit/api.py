"""The Python API: what the commands do, as functions. Light: torch is imported after the arguments were checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pandas as pd

from ssl_vit import recipe as recipes
from ssl_vit.comparison.config import Study, load_comparison
from ssl_vit.data import train_and_test
from ssl_vit.files import WEIGHTS, expanded, writable
from ssl_vit.interfaces import Metric, RunError, UserError, is_main_process
from ssl_vit.outcomes import ComparisonRun, PathInput, TrainingRun
from ssl_vit.recipe import Recipe, run_of, run_recipe
from ssl_vit.results import RESULTS, Evaluation, Table, evaluations

if TYPE_CHECKING:
    from torch import nn

    from ssl_vit.models import Pooling
    from ssl_vit.models.exchange import exports


def train(
    recipe: PathInput | Recipe,
    *,
    data: PathInput | Mapping[str, Any] | None = None,
    run: PathInput | None = None,
    quiet: bool = False,
    **keys: Any,
) -> TrainingRun:
    """Run, or resume, the training of a recipe. A finished run stays as it is.

    recipe: a file, a shipped recipe's name, a run directory to resume, or what `ssl_vit.recipe.load_recipe` returned.
    data: the images: `data=PLACE` of the command line, or the keys of `data`.
    run: the run directory (default: runs/NAME).
    quiet: print no progress of training; packing images still does.
    keys: keys of the recipe, nested as mappings: `training={"steps": 100}`.

    Raises UserError for input that cannot work, before the first step wherever that can be seen, RunError for a failure
    during the run (non-finite loss, full disk), and Stopped, with everything saved, after a signal.
    """
    given = _keys(data, run, keys)
    if isinstance(recipe, Recipe) and given:
        raise UserError(f"{', '.join(given)}: a loaded recipe takes no keys; pass them to load_recipe")
    settings = recipe if isinstance(recipe, Recipe) else recipes.load_recipe(os.fspath(recipe), given)
    from ssl_vit import execution

    return TrainingRun(execution.train(settings, quiet=quiet))


def compare(
    recipe: PathInput | Study,
    *,
    data: PathInput | Mapping[str, Any] | None = None,
    run: PathInput | None = None,
    until_decided: bool = False,
    max_seeds: int | None = None,
    command: str = "",
    say: Callable[[str], None] = print,
    **keys: Any,
) -> ComparisonRun:
    """Run what is missing of a comparison.

    recipe: a file, a shipped comparison's name, or what `ssl_vit.comparison.config.load_comparison` returned.
    data: the labeled images: `data=PLACE` of the command line, or the keys of `data`.
    run: directory of the comparison (default: runs/NAME).
    until_decided: add seeds, or pretrainings, until all headlines are decided or there are `max_seeds` seeds (default:
        2.5 times the recipe's); the report's intervals allow for the looks.
    command: shown in the report.
    say: prints progress.
    keys: keys of the comparison, nested as mappings: `seeds=[0, 1]`.

    Raises UserError for input that cannot work, before the first task wherever that can be seen.
    """
    given = _keys(data, run, keys)
    if isinstance(recipe, Study) and given:
        raise UserError(f"{', '.join(given)}: a loaded comparison takes no keys; pass them to load_comparison")
    if max_seeds is not None and not until_decided:
        raise UserError("max_seeds requires until_decided=True")
    study = recipe if isinstance(recipe, Study) else load_comparison(os.fspath(recipe), given)
    from ssl_vit.comparison.run import compare

    finished = compare(study, until_decided=until_decided, max_seeds=max_seeds, command=command, say=say)
    return ComparisonRun(study.comparison.run_directory, finished)


def _keys(data: PathInput | Mapping[str, Any] | None, run: PathInput | None, keys: dict[str, Any]) -> dict[str, Any]:
    given = {"data": data, "run": run}
    return {key: value for key, value in given.items() if value is not None} | keys


def evaluate(
    model: PathInput | nn.Module,
    evaluator: str,
    *,
    data: PathInput | None = None,
    train: PathInput | None = None,
    test: PathInput | None = None,
    name: str = "",
    metric: Metric = "accuracy",
    real_labels: PathInput | None = None,
    say: Callable[[str], None] = print,
    **settings: Any,
) -> Evaluation:
    """Run one evaluator on an encoder. The results of a path are stored in its `results/`.

    model: a run, a checkpoint or a weights folder; or a network in memory that `load` or `timm.create_model` returned,
        copied as it is now. Images of the latter are resized and cropped to the size and `crop_pct` of
        its `pretrained_cfg`, bilinearly, and normalized with its mean and std.
    evaluator: few_shot, linear_probe, attentive_probe, knn, fine_tune, own_head or one of your own.
    data: labeled data with both parts, as `data=PLACE` of a recipe (default: the run's own).
    train, test: the parts, one by one.
    name: what the rows call the dataset (default: `test`).
    metric: the number that tables show, and that settings are selected by.
    real_labels: `real.json` of ImageNet-ReaL: rows of the variant `ReaL` score the same predictions by these labels.
    say: prints progress.
    settings: keys of the evaluator, nested as mappings.

    Raises UserError for wrong input.
    """
    if metric not in get_args(Metric):
        raise UserError(f"metric={metric}: choose one of {', '.join(get_args(Metric))}")
    train, test = labeled_parts(model, data, train, test)
    from ssl_vit import execution

    real = None if real_labels is None else expanded(real_labels)
    return execution.evaluate(
        _opened(model), evaluator, train, test, settings, data=name, metric=metric, real_labels=real, say=say
    )


def _opened(model: PathInput | nn.Module) -> Path | nn.Module:
    return expanded(model) if isinstance(model, str | PathLike) else model


def _own_data(model: PathInput | nn.Module, fix: str) -> str:
    """The data that a run was trained on. Raises UserError where it is not known or not there, and for several sets.
    fix: what to do then."""
    run = None
    if isinstance(model, str | PathLike):
        from ssl_vit.models import factory

        factory.find_weights(os.fspath(model))
        name, run, settings = os.fspath(model), run_of(expanded(model)), run_recipe(expanded(model))
    else:
        from ssl_vit.analysis import loaded

        name, settings = type(model).__name__, loaded.recipe_of(model)
    if settings is None or not isinstance(settings.data.train, str):
        reason = "no recipe" if settings is None else "data.train of its recipe is a list"
        raise UserError(f"{name}: {reason}; {fix}")
    if run is None:
        return settings.data.train
    from ssl_vit import runs

    return runs.own_data(run, settings, fix)


def labeled_parts(
    model: PathInput | nn.Module, data: PathInput | None, train: PathInput | None, test: PathInput | None
) -> tuple[str, str]:
    """The (train, test) data arguments of an evaluation; see `evaluate`. Raises UserError where they are not known."""
    if data is not None and train is not None:
        raise UserError("data names both parts; give either data, or train and test")
    if train is not None and test is not None:
        return os.fspath(train), os.fspath(test)
    if data is None and train is None:
        place = _own_data(model, "name the data, with --data or data=")
        if test is not None:
            return place, os.fspath(test)
        data = place
    chosen = data if train is None else train
    assert chosen is not None
    parts = train_and_test(os.fspath(chosen))
    return (parts[0], os.fspath(test)) if test is not None else parts


def embed(
    model: PathInput | nn.Module,
    data: PathInput | None = None,
    *,
    pooling: Pooling = "mean",
    batch_size: int = 256,
    workers: int | None = None,
    out: PathInput | None = None,
) -> pd.DataFrame:
    """The embedding of every readable image: columns `key`, `file` (if known), `label` (-1: none) and `embedding`.

    model: as in `evaluate`; images are prepared as its recipe evaluates.
    data: shards or images; labels are not needed (default: the run's training data).
    pooling: the class `token`, the `mean` of the patches, `both` concatenated, or all `patches` concatenated:
        `embedding.reshape(*frame.attrs["grid"], -1)`.
    batch_size: images in a forward pass of one process.
    workers: processes that read images; None: as the recipe says.
    out: a file to write too: `.parquet`, or `.npz` with the arrays `keys`, `files` (if known), `labels`, `embeddings`,
        float32 (n, d), and `grid`, the (rows, columns) of the patches.

    Rows are in the order of the shards, on every process; embeddings are float32 (d,). `frame.attrs["skipped"]` lists
    unreadable samples. Raises UserError for wrong input, RunError where `out` cannot be written.
    """
    for key, value, least in (("batch_size", batch_size, 1), ("workers", workers, 0)):
        if value is not None and value < least:
            raise UserError(f"{key}={value}: give {least} or more")
    if out is not None and Path(out).suffix not in (".parquet", ".npz"):
        raise UserError(f"out={out}: give a name that ends in .parquet or .npz")
    if out is not None and is_main_process():
        writable(expanded(out).parent, "name another folder")
    if data is None:
        data = _own_data(model, "name the images to embed")
    from ssl_vit.evaluators import embeddings

    frame = embeddings.embed(_opened(model), os.fspath(data), pooling=pooling, batch_size=batch_size, workers=workers)
    if out is not None and is_main_process():
        try:
            embeddings.write(frame, expanded(out))
        except OSError as error:
            raise RunError(f"{out}: cannot write there: {error}") from None
    return frame


def load(run: PathInput) -> nn.Module:
    """timm's network of a run, a checkpoint or a weights folder, with its weights, in evaluation mode.

    Its `preprocess` takes an image (a path, bytes or PIL) and returns what the network expects, float32 (C, H, W),
    resized, cropped and normalized as in an evaluation: `network.forward_features(network.preprocess(path)[None])`.
    `network(images)` returns the class token or the mean of the patch tokens (B, D), as `objective.pooling` says; with
    `objective.pooling=patches`, and for imported weights, what timm's own pooling gives.
    Its `pretrained_cfg` holds image size, crop, mean and std, for `timm.data.resolve_data_config(model=network)`.
    Raises UserError where there are no readable weights.
    """
    from ssl_vit.analysis import loaded
    from ssl_vit.models import factory

    loaded_model = loaded.load(expanded(run))
    network: Any = loaded_model.encoder.network
    network.pretrained_cfg = network.default_cfg = factory.pretrained_cfg(
        loaded_model.encoder, loaded_model.data.evaluation_resize
    )
    outline = loaded_model.encoder.outline()  # not the encoder, whose network would then refer to itself
    outline.scale, outline.shift = loaded_model.encoder.scale, loaded_model.encoder.shift
    network.preprocess = loaded.Preprocess(replace(loaded_model, encoder=outline))
    return network


def export(run: PathInput, out: PathInput, to: exports.Target, *, license: str | None = None) -> None:
    """Write the encoder for timm or transformers, with a model card, into the new folder `out`. Resize and crop are
    the run's (transformers does not crop where the image size is not square); pooling (timm) is that of its last
    evaluation of the last block at its image size, else of its objective.

    run: a run directory, a checkpoint or a weights folder.
    license: license of the weights, for the model card (the hub's identifier, such as apache-2.0).
    """
    from ssl_vit.models import factory
    from ssl_vit.models.exchange import exports
    from ssl_vit.report import card

    run, out = expanded(run), expanded(out)
    model, use = factory.load(run), card.evaluated(run)
    text = card.write(model, run, to, use, title=out.resolve().name, license=license)
    exports.export(model, out, to, text, use)


def read_results(run: PathInput) -> pd.DataFrame:
    """All measured accuracies of a run's weights or of a comparison: one row per `results.Result`, a column per field.

    For a run, `settings` holds the evaluator's settings as JSON; evaluations with other settings are other rows.
    Raises UserError for a directory that is neither, and for a damaged file.
    """
    from ssl_vit.report.read import PLAN, read_comparison

    run = expanded(run)
    if (run / PLAN).is_file():
        return read_comparison(run).measured.frame
    if not any((run / name).exists() for name in ("recipe.yaml", WEIGHTS, RESULTS)):
        raise UserError(f"{run}: neither a run nor a comparison")
    frames = [evaluation.table for evaluation in evaluations(run)[0].values()]
    return pd.concat(frames, ignore_index=True) if frames else Table([]).frame
