"""All pictures of one trained encoder, computed, drawn, and written with their numbers and an explaining page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from ssl_vit import plugins
from ssl_vit.analysis import attention, components, figures, reconstruction
from ssl_vit.analysis.pages import template
from ssl_vit.data import DataConfig, RemoteConfig
from ssl_vit.data.evaluation import EvaluationStream
from ssl_vit.data.places import check_outside
from ssl_vit.data.samples import join, stacked
from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.files import write_json, write_text
from ssl_vit.interfaces import Batch, RunError, Size, UnknownObjective, UserError, without_credentials
from ssl_vit.models import factory
from ssl_vit.models.objective import Objective
from ssl_vit.recipe import run_recipe
from ssl_vit.records import SkippedSample
from ssl_vit.training import checkpoint
from ssl_vit.training.distributed import make_accelerator

_NEIGHBORS = 7  # pictured of each image
_TRIES = 4  # unreadable images are replaced by later ones, among this many times the images asked for


def inspect(
    weights: Path,
    shards: str,
    out: Path,
    *,
    image_size: Size | None = None,
    images: int = 8,
    distance_images: int = 64,
    map_images: int = 400,
    device: torch.device | None = None,
    remote: RemoteConfig | None = None,
) -> Path:
    """Write every picture that applies (PNG), `numbers.json` and the page `index.html` into `out`; returns the page.

    weights: a run (its newest checkpoint is pictured), a checkpoint or a weights folder.
    shards: their first readable images are pictured, prepared as for evaluation.
    image_size: pixels; positions are resampled to it as the run's recipe says (None: the encoder's own).
    images: how many are pictured. distance_images: how many the attention distance is averaged over.
    map_images: how many the embedding map shows; the nearest neighbors are among them.
    device: None: the one that Accelerate chooses. remote: None: as the run's recipe says.

    Raises UserError for what cannot be read, for sizes that do not fit and where `out` lies inside the images, RunError
    for what cannot be written.
    """
    settings = run_recipe(weights)
    preparation = settings.data if settings else DataConfig(train=shards)
    preparation = preparation.model_copy(update={"remote": remote} if remote else {})
    resampling = settings.encoder.position_resampling if settings else "timm"
    saved, device = checkpoint.newest_of(weights), device or make_accelerator().device
    model = factory.require_vit(factory.load(saved or weights), "ssl-vit inspect")
    opened = open_shards(shards, preparation.remote)
    check_outside(out, [shards])
    if image_size:
        model = factory.at_size(model, image_size, resampling)
    unknown = settings is not None and isinstance(settings.objective, UnknownObjective)
    head = None
    if saved and settings and not unknown:
        objective_class = plugins.load("objectives", settings.objective.name).Objective
        if hasattr(objective_class, "reconstruct"):
            head = objective_class(model, settings.objective)
            checkpoint.load_head(saved, head)
    (head or model).to(device)  # the head holds the model
    batch, skipped = _first_images(model, opened, preparation, max(images, distance_images, map_images), head, device)
    numbers: dict[str, Any] = {
        "weights": str(saved or weights),
        "step": checkpoint.step_of(saved) if saved else None,
        "model": model.name,
        "objective": settings.objective.name if settings else None,
        "objective_is_unknown": unknown,
        "parameters": sum(p.numel() for p in model.parameters()),
        "image_size": list(model.image_size),
        "grid": list(model.grid),
        "position_resampling": resampling if image_size else None,
        "class_token": model.has_class_token,
        "hybrid": hasattr(model.network.patch_embed, "backbone"),
        "positions": model.positions,
        "registers": model.prefix_tokens - model.has_class_token,
        "data": shards,
        "images": min(images, len(batch.images)),
        "distance_images": min(distance_images, len(batch.images)),
        "map_images": min(map_images, len(batch.images)),
        "skipped": [skip.model_dump() for skip in skipped],
    }
    drawn = _draw(model, batch, head, numbers, opened.classes or ())
    try:
        return _write(out, drawn, numbers)
    except OSError as error:
        raise RunError(f"{out}: cannot write the pictures there ({error.strerror}); give another --out") from None


def _first_images(
    model: factory.ViTEncoder,
    shards: ShardSet,
    preparation: DataConfig,
    count: int,
    head: Objective | None,
    device: torch.device,
) -> tuple[Batch, list[SkippedSample]]:
    """The first `count` readable images of the shards, prepared as for evaluation, and those that could not be read."""
    last = min(_TRIES * count, shards.samples)
    noise = head.noise_per_sample() if head else 0
    stream = EvaluationStream(shards, preparation, model.image_size, model.channels, noise=noise)
    good, skipped = [], list[SkippedSample]()
    for sample in stream.samples(np.arange(last)):
        if isinstance(sample, SkippedSample):
            skipped.append(sample)
        else:
            good.append(sample)
        if len(good) == count:
            break
    if not good:
        why = f" ({skipped[0].key}: {skipped[0].reason})" if skipped else ""
        raise UserError(f"{shards.spec}: none of its first {last} image(s) can be read{why}")
    batch, _ = join([stacked(good, len(good), stream.preprocess)], device, 0)
    return batch, skipped


def _draw(
    model: factory.ViTEncoder,
    batch: Batch,
    head: Objective | None,
    numbers: dict[str, Any],
    classes: Sequence[str],
) -> dict[str, Figure]:
    """The figures by name; what they show as numbers is added to `numbers`."""
    few = batch.images[: numbers["images"]]
    inputs = few.permute(0, 2, 3, 1).cpu().numpy()
    basis, features = components.filter_components(model), components.feature_map(model, few)
    distances = attention.attention_distance(model, batch.images[: numbers["distance_images"]])
    uniform = float(attention.patch_distances(model).mean())
    numbers["filters"] = {"explained_variance": basis.explained.tolist(), "pixels": list(basis.values.shape[2:])}
    numbers["attention_distance"] = {"pixels": distances.tolist(), "evenly_spread": uniform}
    numbers["feature_map"] = {"explained_variance": features.explained.tolist()}
    drawn = {
        "filters": figures.filters(basis.values),
        "attention_distance": figures.attention_distance(distances, uniform),
        "attention_rollout": figures.attention(inputs, attention.rollout(model, few)),
        "feature_map": figures.sheet({"input": inputs, "features": features.values}, 4),
    }
    if model.network.pos_embed is not None:
        drawn["position_similarity"] = figures.position_similarity(components.position_similarity(model))
    numbers["neighbors"] = None
    if numbers["map_images"] > 2:
        drawn |= _neighbors(model, batch, numbers, classes)
    if head is not None:
        drawn["reconstructions"] = reconstruction.sheet(reconstruction.reconstructions(head, batch, len(few)))
    return drawn


def _neighbors(
    model: factory.ViTEncoder, batch: Batch, numbers: dict[str, Any], classes: Sequence[str]
) -> dict[str, Figure]:
    """The embedding map and the nearest neighbors of the pictured images."""
    images, labels = batch.images[: numbers["map_images"]], batch.labels[: numbers["map_images"]].cpu().numpy()
    vectors = components.embeddings(model, images)
    nearest, maps = components.nearest(vectors, _NEIGHBORS), components.maps(vectors)
    labeled = (labels >= 0) & (labels[nearest[:, 0]] >= 0)  # the image and its nearest neighbor
    same = float((labels[nearest[labeled, 0]] == labels[labeled]).mean()) if labeled.any() else None
    numbers["neighbors"] = {"same_class": same, "maps": list(maps)}
    pixels, rows = images.permute(0, 2, 3, 1).cpu().numpy(), np.arange(min(numbers["images"], len(images)))
    columns = {"image": pixels[rows]} | {f"{n + 1}": pixels[nearest[rows, n]] for n in range(nearest.shape[1])}
    return {
        "embedding_map": figures.embedding_map(maps, labels, classes),
        "nearest_neighbors": figures.sheet(columns, 1),
    }


def _write(out: Path, drawn: dict[str, Figure], numbers: dict[str, Any]) -> Path:
    """PNG, numbers and the page; what an earlier inspection drew and this one does not is deleted."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("reconstructions", "position_similarity", "embedding_map", "nearest_neighbors"):
        (out / f"{name}.png").unlink(missing_ok=True)
    embedded = {}
    for name, figure in drawn.items():
        figures.save_png(figure, out / f"{name}.png")
        encoded = base64.b64encode((out / f"{name}.png").read_bytes()).decode()
        embedded[name] = f"data:image/png;base64,{encoded}"
    numbers = without_credentials(numbers)
    write_json(out / "numbers.json", numbers)
    page = template(Path(__file__).with_name("page.html.j2"))
    write_text(out / "index.html", page.render(pictures=embedded, numbers=numbers))
    return out / "index.html"
