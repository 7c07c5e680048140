"""Embedding map and nearest neighbors, against SciPy and a singular value decomposition."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from ssl_vit.analysis import components, figures

VECTORS = np.random.default_rng(0).normal(size=(40, 6)) * [5, 3, 1, 1, 1, 1]


def test_the_nearest_have_the_smallest_cosine_distance() -> None:
    distances = cdist(VECTORS, VECTORS, "cosine")
    np.fill_diagonal(distances, np.inf)
    assert (components.nearest(VECTORS, 5) == np.argsort(distances, axis=1)[:, :5]).all()
    assert components.nearest(VECTORS[:3], 5).shape == (3, 2), "there are no more others"


def test_the_map_shows_the_first_two_principal_components() -> None:
    found = components.maps(VECTORS[:15])["PCA"]
    centered = VECTORS[:15] - VECTORS[:15].mean(axis=0)
    left, scale, _ = np.linalg.svd(centered, full_matrices=False)
    assert np.abs(found) == pytest.approx(np.abs(left[:, :2] * scale[:2]))


def test_umap_is_drawn_where_it_is_installed() -> None:
    pytest.importorskip("umap")
    first, again = (components.maps(VECTORS)["UMAP"] for _ in range(2))
    assert first.shape == (40, 2) and (first == again).all()
    assert list(components.maps(VECTORS[:15])) == ["PCA"], "too few images"


def test_the_ten_most_frequent_classes_have_colors_and_names() -> None:
    labels = np.array([*np.repeat(np.arange(12), 3), 5, 7, -1, -1])
    figure = figures.embedding_map({"PCA": VECTORS[:, :2], "UMAP": VECTORS[:, :2]}, labels, ["$a$", "_b"])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["other classes", "$a$", "_b", *map(str, range(2, 10))]
    assert [axes.get_title() for axes in figure.axes] == ["PCA", "UMAP"]
    alone = figures.embedding_map({"PCA": VECTORS[:, :2]}, np.full(40, -1), [])
    assert [text.get_text() for text in alone.legends[0].get_texts()] == ["no labels"]
