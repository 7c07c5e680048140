"""A trained ViT's embeddings: principal components of filters and output patch tokens, similarities of positions, and
how it arranges images: a map of their embeddings, and nearest neighbors."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from torch import nn

from ssl_vit.interfaces import UserError
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.vit import ViTEncoder

_FILTERS = 28  # paper, figure 7, left
_BATCH = 16  # images in a forward pass
_UMAP_NEIGHBORS = 15  # the default of umap-learn
_CLIPPED = 1.0  # percent of a component's values clipped at either end of its color range


@dataclass(frozen=True)
class Components:
    """values: the principal components. explained: the share of the variance that each explains, float64."""

    values: np.ndarray
    explained: np.ndarray


def filter_components(encoder: ViTEncoder) -> Components:
    """The first principal components of the filters that read the pixels: values float64 (28, C, P, P).

    In a plain ViT these are the rows of the patch projection (paper, section 4.5); in a hybrid, the first convolution
    of its CNN. At most as many as the filters and their numbers allow. A component's largest number is positive.
    """
    from sklearn.decomposition import PCA  # takes a second to import

    first = next(m for m in encoder.network.patch_embed.modules() if isinstance(m, nn.Conv2d))
    weights = first.weight.detach().cpu().double()
    flat = weights.flatten(1).numpy()
    pca = PCA(min(_FILTERS, *flat.shape), svd_solver="full").fit(flat)
    return Components(pca.components_.reshape(-1, *weights.shape[1:]), pca.explained_variance_ratio_)


def position_similarity(encoder: ViTEncoder) -> np.ndarray:
    """Cosine similarity of every patch's position embedding with every other's, float64 (rows, columns, rows, columns),
    query patch first (paper, section 4.5, figure 7, center)."""
    positions_ND = encoder.network.pos_embed[0, encoder.position_prefix :].detach().cpu().double()
    unit_ND = nn.functional.normalize(positions_ND, dim=-1)
    return (unit_ND @ unit_ND.T).reshape(*encoder.grid, *encoder.grid).numpy()


@torch.no_grad()
def feature_map(encoder: ViTEncoder, images_NCHW: torch.Tensor) -> Components:
    """The output patch tokens' first three principal components over all the images, as colors: values float64
    (N, grid rows, grid columns, 3) in 0..1, one color scale for all images.

    The largest number of each component is positive, so that a model keeps its colors. Raises UserError for one
    patch alone.
    """
    from sklearn.decomposition import PCA

    prefix = encoder.prefix_tokens
    outputs = [encoder(images)[:, prefix:].cpu().double() for images in images_NCHW.split(_BATCH)]
    tokens_TD = torch.cat(outputs).flatten(0, 1).numpy()
    if len(tokens_TD) < 2:
        raise UserError("one patch alone has no feature map: picture more images, or larger ones")
    pca = PCA(min(3, *tokens_TD.shape), svd_solver="covariance_eigh").fit(tokens_TD)
    scores_TK = pca.transform(tokens_TD)
    scores_T3 = np.pad(scores_TK, ((0, 0), (0, 3 - scores_TK.shape[1])))
    low, high = np.percentile(scores_T3, (_CLIPPED, 100 - _CLIPPED), axis=0)
    colors = ((scores_T3 - low) / np.maximum(high - low, 1e-12)).clip(0, 1)
    return Components(colors.reshape(-1, *encoder.grid, 3), pca.explained_variance_ratio_)


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
