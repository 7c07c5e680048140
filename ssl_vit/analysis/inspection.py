"""All pictures of one trained encoder, computed, drawn, and written with their numbers and an explaining page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from ssl_vit.analysis import attention, components, figures, reconstruction
from ssl_vit.analysis.pages import template
from ssl_vit.data import DataConfig
from ssl_vit.data.evaluation import EvaluationStream, evaluation_batches
from ssl_vit.data.images import check_channels, evaluation_transform
from ssl_vit.data.samples import Preprocess, Skip
from ssl_vit.data.shards import ShardSet
from ssl_vit.files import write_json, write_text
from ssl_vit.interfaces import Batch, Config, Size, UserError
from ssl_vit.models import Resampling, factory
from ssl_vit.objectives import masked_patch
from ssl_vit.training import checkpoint

PICTURES = (
    "filters",
    "position_similarity",
    "attention_distance",
    "attention_rollout",
    "feature_map",
    "reconstructions",
)
_TRIES = 4  # unreadable images are replaced by later ones, among this many times the images asked for


@dataclass(frozen=True)
class Options:
    """image_size: pixels; positions are resampled to it as the run's recipe says (None: the encoder's own).

    images: how many are pictured. distance_images: how many the attention distance is averaged over. layers: whose
    attention is computed for the distances and the rollout, from 0 (None: all).
    """

    image_size: Size | None = None
    images: int = 8
    distance_images: int = 64
    layers: Sequence[int] | None = None


def inspect(
    weights: Path,
    shards: ShardSet,
    out: Path,
    options: Options,
    *,
    objective: Config | None,
    preparation: DataConfig,
    resampling: Resampling,
    device: torch.device,
) -> Path:
    """Write every picture that applies (PNG and SVG), `numbers.json` and the page `index.html` into `out`.

    weights: a run (its newest checkpoint is pictured), a checkpoint or a weights folder.
    shards: their first readable images are pictured, prepared as for evaluation.
    objective: the run's own; None: unknown.
    preparation: how images are prepared.
    resampling: of the positions to `options.image_size`.

    Returns the page. Raises UserError for what cannot be read or written and for sizes that do not fit.
    """
    saved = checkpoint.newest_of(weights)
    model = factory.require_vit(factory.load(saved or weights), "ssl-vit inspect")
    if options.image_size:
        model = factory.at_size(model, options.image_size, resampling)
    head, no_head = _masked_patch_head(model, objective, saved)
    (head or model).to(device)  # the head holds the model
    batch, skipped = _first_images(model, shards, preparation, options, head, device)
    depth = len(model.network.blocks)
    numbers: dict[str, Any] = {
        "weights": str(saved or weights),
        "step": int(saved.name.removeprefix("step_")) if saved else None,
        "model": model.name,
        "objective": getattr(objective, "name", None),
        "parameters": sum(p.numel() for p in model.parameters()),
        "image_size": list(model.image_size),
        "grid": list(model.grid),
        "position_resampling": resampling if options.image_size else None,
        "class_token": model.has_class_token,
        "depth": depth,
        "hybrid": hasattr(model.network.patch_embed, "backbone"),
        "positions": model.positions,
        "registers": model.prefix_tokens - model.has_class_token,
        "data": shards.spec,
        "images": min(options.images, len(batch.images)),
        "distance_images": min(options.distance_images, len(batch.images)),
        "skipped": [asdict(skip) for skip in skipped],
        "layers": sorted({*(range(depth) if options.layers is None else options.layers)}),
    }
    drawn = _draw(model, batch, head, numbers, options)
    missing = {"reconstructions": no_head} if no_head else {}
    try:
        return _write(out, drawn, missing, numbers)
    except OSError as error:
        raise UserError(f"{out}: cannot write the pictures there ({error.strerror}); give another --out") from None


def _masked_patch_head(
    model: factory.ViTEncoder, objective: Config | None, saved: Path | None
) -> tuple[masked_patch.Objective | None, str]:
    """The objective around the encoder, its head loaded; or None and why there is none."""
    if objective is None:
        return None, "these weights come without a recipe, which would name the objective"
    if not isinstance(objective, masked_patch.Config):
        return None, f"the run's objective is {getattr(objective, 'name', 'another')}, not masked_patch"
    if saved is None:
        return None, "there is no checkpoint here, and only a checkpoint keeps the head that predicts the colors"
    head = masked_patch.Objective(model, objective)
    checkpoint.load_head(saved, head)
    return head, ""


def _first_images(
    model: factory.ViTEncoder,
    shards: ShardSet,
    preparation: DataConfig,
    options: Options,
    head: masked_patch.Objective | None,
    device: torch.device,
) -> tuple[Batch, list[Skip]]:
    """The first readable images of the shards, prepared as for evaluation, and those that could not be read."""
    check_channels(model.channels)
    transform = evaluation_transform(model.image_size, preparation)
    preprocess = Preprocess(transform, model.channels, None, noise=head.noise_per_sample() if head else 0)
    count = max(options.images, options.distance_images)
    last = min(_TRIES * count, shards.samples)
    size, parts, keys, skipped = min(count, last), list[dict[str, torch.Tensor]](), list[str](), list[Skip]()
    stream = EvaluationStream(shards, preprocess, batch_size=size, rank=0, ranks=1, workers=0, indices=np.arange(last))
    for batch, chunk in evaluation_batches(stream, device):
        tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        parts.append({name: value[batch.valid] for name, value in tensors.items()})
        keys += batch.keys
        skipped += chunk.skipped
        if len(keys) >= count:
            break
    if not keys:
        why = f" ({skipped[0].key}: {skipped[0].reason})" if skipped else ""
        raise UserError(f"{shards.spec}: none of its first {last} image(s) can be read{why}")
    joined: dict[str, Any] = {name: torch.cat([part[name] for part in parts])[:count] for name in parts[0]}
    return Batch(**joined, keys=keys[:count]), skipped


def _draw(
    model: factory.ViTEncoder,
    batch: Batch,
    head: masked_patch.Objective | None,
    numbers: dict[str, Any],
    options: Options,
) -> dict[str, Figure]:
    """The figures by name; what they show as numbers is added to `numbers`."""
    few, layers = batch.images[: options.images], options.layers
    inputs = few.permute(0, 2, 3, 1).cpu().numpy()
    basis, features = components.filter_components(model), components.feature_map(model, few)
    similarity = components.position_similarity(model)
    distances = attention.attention_distance(model, batch.images[: options.distance_images], layers)
    uniform = float(attention.patch_distances(model).mean())
    numbers["filters"] = {"explained_variance": basis.explained.tolist(), "pixels": list(basis.values.shape[2:])}
    numbers["position_similarity"] = components.neighborhoods(similarity)
    numbers["attention_distance"] = {"pixels": distances.tolist(), "evenly_spread": uniform}
    numbers["feature_map"] = {"explained_variance": features.explained.tolist()}
    drawn = {
        "filters": figures.filters(basis.values),
        "position_similarity": figures.position_similarity(similarity),
        "attention_distance": figures.attention_distance(distances, numbers["layers"], uniform),
        "attention_rollout": figures.attention(inputs, attention.rollout(model, few, layers)),
        "feature_map": figures.sheet({"input": inputs, "features": features.values}, 4),
    }
    if head is not None:
        drawn["reconstructions"] = reconstruction.sheet(reconstruction.reconstructions(head, batch, options.images))
    return drawn


def _write(out: Path, drawn: dict[str, Figure], missing: dict[str, str], numbers: dict[str, Any]) -> Path:
    """PNG, SVG, numbers and the page; pictures of an earlier inspection are deleted."""
    out.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        for suffix in (".png", ".svg"):
            (out / f"{name}{suffix}").unlink(missing_ok=True)
    embedded = {}
    for name, figure in drawn.items():
        figures.save_png(figure, out / f"{name}.png")
        figures.save_svg(figure, out / f"{name}.svg")
        encoded = base64.b64encode((out / f"{name}.png").read_bytes()).decode()
        embedded[name] = f"data:image/png;base64,{encoded}"
    write_json(out / "numbers.json", numbers)
    page = template(Path(__file__).with_name("page.html.j2"))
    write_text(out / "index.html", page.render(pictures=embedded, missing=missing, numbers=numbers))
    return out / "index.html"
