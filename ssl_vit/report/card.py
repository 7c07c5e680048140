"""The model card of exported weights: how to load them, what they are, how they were trained and evaluated."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCardData

from ssl_vit import __version__
from ssl_vit.analysis.pages import template
from ssl_vit.data import DataConfig
from ssl_vit.data.images import PIL_MODES
from ssl_vit.data.shards import ShardSet, open_training
from ssl_vit.files import read_json
from ssl_vit.interfaces import RunError, UserError, without_credentials
from ssl_vit.models import Pooling, factory
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.exchange.exports import Use
from ssl_vit.models.vit import ViTEncoder
from ssl_vit.overrides import flatten
from ssl_vit.recipe import Recipe, run_of, run_recipe
from ssl_vit.report import tables
from ssl_vit.report.export import escaped, markdown
from ssl_vit.report.intervals import interval
from ssl_vit.report.read import read_runs
from ssl_vit.report.runs import Run, read_run, text
from ssl_vit.report.summary import summarize
from ssl_vit.report.verdict import notes
from ssl_vit.results import evaluations

Facts = dict[str, object]  # None: unknown


def write(model: Encoder, given: Path, to: str, use: Use, *, title: str, license: str | None) -> str:
    """The text of README.md for `model` in the format `to`, with the hub's YAML in front.

    given: the run, checkpoint or weights folder that is exported, whose `results/` are shown.
    use: how it was evaluated, as `evaluated` returns it.
    license: license of the weights (the hub's identifier, such as apache-2.0); None: not stated.
    """
    weights = factory.find_weights(given)
    folder = run_of(given)
    run = read_run(folder) if (folder / "recipe.yaml").is_file() else None
    settings = run_recipe(given) if run else None
    shards = _shards(settings) if settings else None
    measured = read_runs([given]) if (given / "results").is_dir() else None
    summary = summarize(measured) if measured else None
    shown = tables.all_tables(measured, summary) if measured and summary else []
    imported = read_json(weights / "config.json").get("imported")
    metadata = ModelCardData(
        library_name=to, license=license, pipeline_tag="image-feature-extraction", tags=["ssl-vit"]
    )
    terms = f"The weights: {license or 'not stated'}."
    if imported and imported.get("license") and not license:
        terms = f"The weights were imported under {imported['license']}, which still applies."
    if shards and shards.license:
        terms += f" The training images: {shards.license}."
    card = template(Path(__file__).with_name("card.md.j2"), html=False).render(
        metadata=metadata.to_yaml(),
        title=title,
        to=to,
        version=__version__,
        shape=f"2, {model.channels}, {model.image_size[0]}, {model.image_size[1]}",
        mode=PIL_MODES.get(model.channels) if to == "timm" or model.channels == 3 else None,
        pooled=_pooled(model, use, to),
        pooling=use.pooling,
        mean=list(model.mean),
        std=list(model.std),
        reading=_tokens(model),
        model={
            "Architecture": f"timm's {model.name}, width {model.width}",
            "Parameters": sum(parameter.numel() for parameter in model.parameters()),
            "Images": f"{model.image_size[0]} x {model.image_size[1]} pixels, {model.channels} channel(s)",
            "Patches": f"{model.grid[0]} x {model.grid[1]}" if model.patches else None,
            "Resize": f"the shorter side to {round(use.resize * min(model.image_size))} pixels, then the center"
            if model.image_size[0] == model.image_size[1]
            else f"to {model.image_size[0]} x {model.image_size[1]} pixels, without a crop"
            if to == "transformers"
            else None,
            "Pooling": use.pooling,
            "Normalization": f"pixels in [0, 1], minus {text(model.mean)}, over {text(model.std)}",
        },
        training=_training(run, settings, weights) if run and settings else {},
        recipe=run.recipe.strip() if run else "",
        imported=imported,
        data={"Source": shards.source, "Images": shards.samples, "License": shards.license} if shards else {},
        results=[markdown(table) for table in shown[:-1]],  # without the costs
        notes=[interval(measured, summary), *notes(measured)] if measured and summary else [],
        license=escaped(terms),
        cell=lambda value: escaped(" ".join(text(value).split())).replace("|", "\\|"),
        plain=lambda value: escaped(" ".join(str(value).split())),
    )
    return without_credentials(card)


def evaluated(run: Path) -> Use:
    """The resize of the run's recipe, and the pooling of its last evaluation, else of its objective.

    Evaluations of another block or image size do not count: an export has the last block and the run's own size.
    run: a run directory, a checkpoint or a weights folder.
    """
    recipe, poolings = run_recipe(run), []
    own: Pooling | None = getattr(recipe.objective, "pooling", None) if recipe else None
    for evaluation in sorted(evaluations(run)[0].values(), key=lambda evaluation: evaluation.about.saved):
        settings = flatten(evaluation.about.settings)
        if not (settings.get("block") or settings.get("image_size")):
            of_head = own if evaluation.about.evaluator == "own_head" else None
            poolings.append(settings.get("pooling") or settings.get("head.pooling") or of_head)
    last = next(filter(None, reversed(poolings)), own)
    return Use((recipe.data if recipe else DataConfig(train="")).evaluation_resize, last)


def _shards(settings: Recipe) -> ShardSet | None:
    try:
        return open_training(settings.data)
    except (UserError, RunError, OSError):
        return None  # moved or out of reach: the card says so


def _pooled(model: Encoder, use: Use, to: str) -> str | None:
    """Code for the vector that was evaluated, from `tokens`; None where there is no short one."""
    if not isinstance(model, ViTEncoder):
        return None
    if to == "timm" and use.pooling in ("token", "mean"):
        return "model.forward_head(tokens)"
    first = model.prefix_tokens
    pooled = {
        "token": "tokens[:, 0]",
        "mean": f"tokens[:, {first}:].mean(1)",
        "patches": f"tokens[:, {first}:].flatten(1)",
    }
    pooled["both"] = f"torch.cat([{pooled['token']}, {pooled['mean']}], 1)"
    norm_after_pooling = bool([*model.network.fc_norm.parameters()])
    return None if norm_after_pooling or use.pooling is None else pooled[use.pooling]


def _tokens(model: Encoder) -> str:
    if not isinstance(model, ViTEncoder):
        return f"`tokens` is what `forward_features` of timm's {type(model.network).__name__} returns."
    rows, columns = model.grid
    registers = model.prefix_tokens - model.has_class_token
    tokens = ["the class token"] * model.has_class_token + [f"{registers} registers"] * bool(registers)
    shape = f"(n, {model.prefix_tokens + rows * columns}, {model.width})"
    return f"`tokens` is float32 {shape}: {', then '.join([*tokens, f'{rows} x {columns} patches, row by row'])}."


def _training(run: Run, settings: Recipe, weights: Path) -> Facts:
    done: Facts = {}
    if run.summary:
        done = {"Steps": run.summary.steps, "Images seen": run.summary.images_seen, "Seconds": run.summary.seconds}
    if (weights / "state.json").is_file():  # a checkpoint of a run that continued
        progress = read_json(weights / "state.json")["progress"]
        seen = progress["step"] * settings.training.batch_size
        done = {"Steps": progress["step"], "Images seen": seen, "Seconds": progress["seconds"]}
    keys = {"Hardware": "hardware.gpus", "Processor": "hardware.processor", "Processes": "world_size", "Commit": "git"}
    return done | {name: run.environment.get(key) for name, key in keys.items()}
