"""The model card of exported weights: how to load them, what they are, how they were made and judged, on what terms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import ModelCardData

from ssl_vit import __version__
from ssl_vit.analysis.pages import template
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.report.cells import text
from ssl_vit.report.read import of_weights, read_directory
from ssl_vit.report.tables import Table, measurement_notes, skipped_note

if TYPE_CHECKING:
    from ssl_vit.data.shards import ShardSet
    from ssl_vit.models.encoder import Encoder

SOURCES = {"trained": "These weights", "untrained": "Untrained", "pixels": "Raw pixels"}


def write(
    model: Encoder, given: Path, weights: Path, to: str, *, title: str, address: str | None, license: str | None
) -> str:
    """The text of README.md for `model` in the format `to`, with the hub's YAML in front.

    given: the run, checkpoint or weights folder that is exported, whose `results.json` is shown; weights: the folder in
    it that holds the weights. address: the name on the hub that the text says to load from (None: the folder itself).
    license: of the weights (the hub's identifier, such as apache-2.0). The recipe, the machine and the training shards'
    source and license are read from the run that the weights belong to, where there is one.
    """
    folder = next((path for path in (given, given.parent.parent) if (path / "recipe.yaml").is_file()), None)
    run = read_directory(folder) if folder else None
    recipe: dict[str, Any] = yaml.safe_load(run["recipe"]) if run else {}
    shards = _shards(recipe["data"]) if recipe else None
    imported = json.loads((weights / "config.json").read_text()).get("imported")
    results = read_directory(given)["results"] if (given / "results.json").is_file() else None
    measured = (of_weights(results, weights) or {}).get("evaluations") or []
    metadata = ModelCardData(
        library_name=to, license=license, pipeline_tag="image-feature-extraction", tags=["ssl-vit"]
    )
    return template(Path(__file__).with_name("card.md.j2"), html=False).render(
        metadata=metadata.to_yaml(),
        title=title,
        to=to,
        version=__version__,
        address=address,
        code=_code(model, to, address),
        reading=_reading(model, to),
        facts=_facts(model),
        training=_training(run, recipe, weights) if run else [],
        recipe=run["recipe"].strip() if run else "",
        imported=imported,
        data=_data(shards) if shards else [],
        results=[
            (_table(found), [*measurement_notes(found), *filter(None, [skipped_note(found)])]) for found in measured
        ],
        license=_license(license, shards, imported),
    )


def _shards(settings: dict[str, Any]) -> ShardSet | None:
    from ssl_vit.data import DataConfig
    from ssl_vit.data.shards import open_training

    try:
        return open_training(DataConfig.model_validate(settings))
    except (UserError, RunError, OSError, ValueError):
        return None  # moved, out of reach, or of another version's recipe: the card says so


def _code(model: Encoder, to: str, address: str | None) -> str:
    shape = f"2, {model.channels}, {model.image_size[0]}, {model.image_size[1]}"
    mean, std = ([*value] if isinstance(value, tuple) else [value] for value in (model.mean, model.std))
    if to == "onnx":
        file = f'hf_hub_download("{address}", "model.onnx")' if address else '"model.onnx"'
        return "\n".join(
            [
                "import numpy as np",
                "import onnxruntime",
                *(["from huggingface_hub import hf_hub_download"] if address else []),
                "",
                f'session = onnxruntime.InferenceSession({file}, providers=["CPUExecutionProvider"])',
                f"images = np.random.rand({shape}).astype(np.float32)  # pixels from 0 to 1, any number of images",
                f"mean, std = (np.array(n, dtype=np.float32).reshape(-1, 1, 1) for n in ({mean}, {std}))",
                '(tokens,) = session.run(None, {"pixel_values": (images - mean) / std})',
            ]
        )
    if to == "timm":
        source = f"hf-hub:{address}" if address else "local-dir:."
        load = ["import timm", "import torch", "", f'model = timm.create_model("{source}", pretrained=True).eval()']
        call = "model.forward_features((images - mean) / std)"
    else:
        load = ["import torch", "from transformers import ViTModel", ""]
        load += [f'model = ViTModel.from_pretrained("{address or "."}", add_pooling_layer=False).eval()']
        call = "model((images - mean) / std).last_hidden_state"
    return "\n".join(
        [
            *load,
            f"images = torch.rand({shape})  # pixels from 0 to 1, any number of images",
            f"mean, std = (torch.tensor(n).reshape(-1, 1, 1) for n in ({mean}, {std}))",
            "with torch.no_grad():",
            f"    tokens = {call}",
        ]
    )


def _reading(model: Encoder, to: str) -> str:
    rows, columns = model.grid
    registers = model.prefix_tokens - model.has_class_token
    tokens = ["the class token"] * model.has_class_token + [f"{registers} registers"] * bool(registers)
    shape = f"(2, {model.prefix_tokens + rows * columns}, {model.width})"
    if to == "timm" and not hasattr(model, "vit"):
        shape = f"(2, {model.width}, {rows}, {columns})"  # timm's CNNs keep the map
    return f"`tokens` is float32 {shape}: {', then '.join([*tokens, f'{rows} x {columns} patches, row by row'])}."


def _facts(model: Encoder) -> list[tuple[str, str]]:
    height, width = model.image_size
    return [
        ("Architecture", f"timm's {model.name}, width {model.width}"),
        ("Parameters", f"{sum(parameter.numel() for parameter in model.parameters()):,}"),
        ("Images", f"{height} x {width} pixels, {model.channels} channel(s)"),
        ("Patches", f"{model.grid[0]} x {model.grid[1]}"),
        ("Normalization", f"pixels in [0, 1], minus {_numbers(model.mean)}, over {_numbers(model.std)}"),
    ]


def _training(run: dict[str, Any], recipe: dict[str, Any], weights: Path) -> list[tuple[str, str]]:
    summary = run["summary"] or {}
    if (weights / "state.json").is_file():  # a checkpoint on the way
        state = json.loads((weights / "state.json").read_text())
        seen = (state["step"] + state.get("undone", 0)) * recipe["training"]["batch_size"]
        summary = {"steps": state["step"], "images_seen": seen, "seconds": state["seconds"]}
    machine = run["environment"] or {}
    hardware, versions = machine.get("hardware") or {}, machine.get("versions") or {}
    gpus = hardware.get("gpus") or []
    device = f"{len(gpus)} x {gpus[0]}" if gpus else f"{hardware.get('processor')}, {hardware.get('cores')} cores"
    start = recipe.get("init_from")
    rows = {
        "Recipe": recipe.get("name"),
        "Objective": recipe["objective"]["name"],
        "Started from": start or "random weights",
        "Steps": summary.get("steps"),
        "Images seen": summary.get("images_seen"),
        "Seconds": summary.get("seconds"),
        "Hardware": f"{device}; {machine.get('world_size')} process(es)" if machine else None,
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or None,
        "Commit": machine.get("git"),
    }
    return [(name, _cell(value)) for name, value in rows.items() if value is not None]


def _data(shards: ShardSet) -> list[tuple[str, str]]:
    classes = len(shards.classes) if shards.classes else None
    rows = {"Source": shards.source, "Images": shards.samples, "Classes": classes, "License": shards.license}
    return [(name, _cell(value)) for name, value in rows.items()]


def _table(evaluation: dict[str, Any]) -> Table:
    """Rows measures, columns whose they are; seeds are summed up by their mean and standard deviation."""
    values = evaluation["values"]
    sources = [source for source in SOURCES if any(name.startswith(f"{source}/") for name in values)]
    settings = ", ".join(f"{key} {_cell(value)}" for key, value in evaluation["settings"].items() if value is not None)
    name = evaluation.get("title") or evaluation["evaluator"]
    counted = " (mean of the classes' accuracies)" if evaluation.get("metric") == "mean_per_class" else ""
    table = Table(
        f"{name}{counted}, test images {evaluation['data']['test']} ({settings})",
        ["", *(SOURCES[source] for source in sources)],
    )
    measures = dict.fromkeys(name.partition("/")[2] for name in values)
    for measure in measures:
        spread = measure.removesuffix("mean") + "std"
        if "seed" in measure.rpartition("/")[2] or (measure.endswith("std") and measure[:-3] + "mean" in measures):
            continue
        prefix = measure.removesuffix("mean") + "seed"
        seeds = [other for other in measures if other.startswith(prefix)]
        has_spread = measure.endswith("mean") and spread in measures and len(seeds) > 1
        cells = []
        for source in sources:
            value, deviation = values.get(f"{source}/{measure}"), values.get(f"{source}/{spread}")
            cells.append(_cell(value) + (f" ± {_cell(deviation)}" if has_spread and deviation is not None else ""))
        table.add(None, measure.removesuffix("mean").rstrip("/") + " mean ± std" * has_spread, *cells)
    return table


def _license(license: str | None, shards: ShardSet | None, imported: dict[str, Any] | None) -> str:
    if license:
        weights = f"The weights: {license}."
    elif imported and imported.get("license"):
        weights = f"The weights were imported under {imported['license']}, which goes on to bind them."
    else:
        weights = "The weights: not stated."
    return weights + (f" The training images: {shards.license}." if shards and shards.license else "")


def _numbers(value: float | tuple[float, ...]) -> str:
    return ", ".join(f"{number:g}" for number in (value if isinstance(value, tuple) else (value,)))


def _cell(value: Any) -> str:
    return " ".join(text(value).split()).replace("|", "\\|")
