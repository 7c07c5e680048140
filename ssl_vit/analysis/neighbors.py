"""How an encoder arranges images: their embeddings in two dimensions, and the nearest neighbors among them."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch

from ssl_vit.models.encoder import Encoder

_BATCH = 64  # images in a forward pass
_UMAP_NEIGHBORS = 15  # the default of umap-learn


@torch.no_grad()
def embeddings(encoder: Encoder, images_NCHW: torch.Tensor) -> np.ndarray:
    """The mean of the output patch tokens of uint8 images: float64 (N, D)."""
    outputs = [encoder.represent(images, "mean").cpu().double() for images in images_NCHW.split(_BATCH)]
    return torch.cat(outputs).numpy()


def nearest(embeddings_ND: np.ndarray, count: int) -> np.ndarray:
    """The other images of highest cosine similarity, nearest first: int64 (N, K), K = min(count, N - 1)."""
    unit = embeddings_ND / np.maximum(np.linalg.norm(embeddings_ND, axis=1, keepdims=True), 1e-12)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -np.inf)
    return np.argsort(-similarity, axis=1, kind="stable")[:, : min(count, len(unit) - 1)]


def maps(embeddings_ND: np.ndarray) -> dict[str, np.ndarray]:
    """Two coordinates of every image, float64 (N, 2): the first two principal components; and those of UMAP, where
    umap-learn is installed and there are more than 15 images."""
    from sklearn.decomposition import PCA  # takes a second to import

    coordinates = {"PCA": PCA(2, svd_solver="full").fit_transform(embeddings_ND)}
    if find_spec("umap") and len(embeddings_ND) > _UMAP_NEIGHBORS:
        from umap import UMAP

        reducer = UMAP(n_neighbors=_UMAP_NEIGHBORS, init="pca", random_state=0, n_jobs=1)
        coordinates["UMAP"] = np.asarray(reducer.fit_transform(embeddings_ND), dtype=np.float64)
    return coordinates
