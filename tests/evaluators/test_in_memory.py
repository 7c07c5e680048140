"""Networks in memory: the numbers of the run that they were loaded from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ssl_vit
from ssl_vit.interfaces import UserError
from ssl_vit.results import Evaluation

FAST: dict[str, dict[str, Any]] = {
    "few_shot": {"labels_per_class": [3], "seeds": [0, 1]},
    "fine_tune": {"training": {"steps": 3, "batch_size": 16}, "sweep": {}, "seeds": [0], "labels_per_class": [5]},
}


def predictions(found: Evaluation) -> list[Any]:
    return [(row.arm, row.seed, row.accuracy, row.prediction.predicted.tolist()) for row in found.results]


@pytest.mark.parametrize("evaluator", FAST)
def test_a_loaded_network_is_evaluated_as_its_run(trained: Path, evaluator: str) -> None:
    run, settings = trained / "run", FAST[evaluator] | {"train": f"{trained}/train", "test": f"{trained}/test"}
    stored, found = (ssl_vit.evaluate(model, evaluator, **settings) for model in (run, ssl_vit.load(run)))
    assert predictions(found) == predictions(stored) and len(found.results) >= 2
    assert found.path is None and found.about.sha256 == stored.about.sha256
    assert found.about.weights == "VisionTransformer in memory"


def test_the_weights_of_now_are_evaluated_without_their_head(trained: Path) -> None:
    data: dict[str, Any] = {"train": f"{trained}/train", "test": f"{trained}/test", "ks": [3]}
    network: Any = ssl_vit.load(trained / "run")
    before = ssl_vit.embed(network, trained / "test", workers=0)
    network.reset_classifier(10)
    found = ssl_vit.evaluate(network, "knn", **data)
    assert predictions(found) == predictions(ssl_vit.evaluate(trained / "run", "knn", **data))
    with torch.no_grad():
        network.norm.bias += 1
    after = ssl_vit.embed(network, trained / "test", workers=0)
    np.testing.assert_allclose(np.stack([*after["embedding"]]), np.stack([*before["embedding"]]) + 1, atol=1e-5)
    with pytest.raises(UserError, match="own_head needs a run"):
        ssl_vit.evaluate(network, "own_head", train=data["train"], test=data["test"])
