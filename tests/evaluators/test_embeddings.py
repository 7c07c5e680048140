"""`embed`, `load` and the command `embed`: what comes out is what the encoder computes for each image."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from PIL import Image

import ssl_vit
from ssl_vit.evaluators import embeddings
from ssl_vit.models import factory
from tests.tars import encoded, write_tar

Make = Callable[..., Any]
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def weights(make_encoder: Make, saved: Make, tmp_path: Path) -> Path:
    folder: Path = saved(tmp_path / "weights", make_encoder(mean=0.4, std=(0.1, 0.2, 0.3)))
    return folder


def pixels(number: int) -> np.ndarray:
    """One color, which resizing and cropping keep."""
    return np.random.default_rng(number).integers(0, 256, (1, 1, 3), dtype=np.uint8).repeat(16, 0).repeat(16, 1)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards of three images; the first has no label, the fifth cannot be read."""
    for shard in range(2):
        members: dict[str, bytes] = {}
        for number in range(3 * shard, 3 * shard + 3):
            image = encoded(Image.fromarray(pixels(number)))
            members[f"image{number}.png"] = b"damaged" if number == 4 else image
            if number:
                members[f"image{number}.cls"] = b"%d" % (number % 2)
        write_tar(tmp_path / "shards" / f"00000{shard}.tar", members)
    return tmp_path / "shards"


@pytest.mark.parametrize("pooling", ["token", "both"])
def test_embeddings_are_the_encoders(weights: Path, shards: Path, pooling: Any) -> None:
    frame = ssl_vit.embed(weights, str(shards), pooling=pooling, batch_size=4, workers=0)
    good = [0, 1, 2, 3, 5]
    assert frame["key"].tolist() == [f"image{number}" for number in good]
    assert frame["label"].tolist() == [-1, 1, 0, 1, 1]
    assert [skip["key"] for skip in frame.attrs["skipped"]] == ["image4"]
    images = torch.stack([torch.from_numpy(pixels(number)).permute(2, 0, 1) for number in good])
    with torch.no_grad():
        expected = factory.load(weights).represent(images, pooling)
    np.testing.assert_allclose(np.stack([*frame["embedding"]]), expected.numpy(), atol=1e-5)


def test_the_loaded_network_is_timms_with_its_normalization(weights: Path) -> None:
    network = ssl_vit.load(weights)
    assert not network.training
    data = timm.data.resolve_data_config(model=network)
    assert (data["input_size"], data["mean"]) == ((3, 16, 16), (0.4,) * 3)
    encoder = factory.load(weights)
    images = torch.from_numpy(pixels(0)).permute(2, 0, 1)[None]
    transform = timm.data.create_transform(**data, is_training=False)
    with torch.no_grad():
        found = network.forward_features(transform(Image.fromarray(pixels(0)))[None])  # type: ignore[operator]
        torch.testing.assert_close(found, encoder(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pooling", ["token", "patches"])
def test_the_command_writes_a_table_or_arrays(
    weights: Path, shards: Path, tmp_path: Path, call: Call, pooling: Any
) -> None:
    frame = ssl_vit.embed(weights, str(shards), pooling=pooling, workers=0)
    expected = np.stack([*frame["embedding"]])
    for name in ("new/embeddings.parquet", "embeddings.npz"):
        assert call("embed", weights, shards, "--out", tmp_path / name, "--workers", 0, "--pooling", pooling) == (0, "")
    table = pd.read_parquet(tmp_path / "new" / "embeddings.parquet")
    assert table["embedding"][0].dtype == np.float32
    with np.load(tmp_path / "embeddings.npz", allow_pickle=False) as arrays:
        assert {*arrays} == {"keys", "labels", "embeddings", "grid"}, "these shards name no files"
        assert arrays["grid"].tolist() == frame.attrs["grid"] and arrays["embeddings"].dtype == np.float32
        for keys, labels, embeddings in (
            (table["key"], table["label"], np.stack([*table["embedding"]])),
            (arrays["keys"], arrays["labels"], arrays["embeddings"]),
        ):
            assert (keys.tolist(), labels.tolist()) == (frame["key"].tolist(), frame["label"].tolist())
            np.testing.assert_allclose(embeddings, expected, atol=1e-6)


def test_a_written_table_has_no_credentials_of_urls(weights: Path, shards: Path, tmp_path: Path) -> None:
    frame = ssl_vit.embed(weights, str(shards), pooling="mean", workers=0)
    frame.attrs["skipped"][0]["shard"] = "https://host/a.tar?sig=SECRET"
    embeddings.write(frame, tmp_path / "e.parquet")
    assert b"SECRET" not in (tmp_path / "e.parquet").read_bytes()
    assert pd.read_parquet(tmp_path / "e.parquet").attrs["skipped"][0]["shard"] == "https://host/a.tar?..."
    assert frame.attrs["skipped"][0]["shard"].endswith("SECRET")


def test_keys_that_are_not_utf8_are_escaped(weights: Path, tmp_path: Path, call: Call) -> None:
    write_tar(tmp_path / "shards" / "0.tar", {"caf\udce9.png": encoded(Image.fromarray(pixels(0)))})
    for name, read in (
        ("e.parquet", lambda file: pd.read_parquet(file)["key"]),
        ("e.npz", lambda f: np.load(f)["keys"]),
    ):
        assert call("embed", weights, tmp_path / "shards", "--out", tmp_path / name, "--workers", 0) == (0, "")
        assert read(tmp_path / name).tolist() == [r"caf\udce9"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["nowhere", "SHARDS", "--out", "e.parquet"], ["nowhere", "no such run"]),
        (["WEIGHTS", "nowhere", "--out", "e.parquet"], ["nowhere"]),
        (["WEIGHTS", "SHARDS", "--out", "e.csv"], ["out=e.csv", ".parquet or .npz"]),
    ],
)
def test_wrong_input_is_named(weights: Path, shards: Path, call: Call, arguments: list[str], parts: list[str]) -> None:
    code, error = call("embed", *({"WEIGHTS": weights, "SHARDS": shards}.get(word, word) for word in arguments))
    assert code == 2 and all(part in error for part in parts)


def test_a_file_that_cannot_be_written_is_refused_before_embedding(call: Call) -> None:
    code, error = call("embed", "nowhere", "SHARDS", "--out", "/dev/null/e.npz")
    assert code == 1 and "/dev/null: cannot write there" in error


def test_a_full_disk_is_named(
    weights: Path, shards: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ssl_vit.evaluators.embeddings.atomic_file", full)
    code, error = call("embed", weights, shards, "--out", tmp_path / "e.npz", "--workers", 0)
    assert code == 1 and "e.npz: cannot write there" in error and "No space left" in error


def test_the_python_api_is_imported_on_first_use() -> None:
    names = {"train", "evaluate", "compare", "embed", "load", "few_shot_accuracy", "read_results"}
    assert names <= set(dir(ssl_vit)) and all(callable(getattr(ssl_vit, name)) for name in names)
    with pytest.raises(AttributeError, match="fit"):
        _ = ssl_vit.fit  # type: ignore[attr-defined]
    code = "import sys, ssl_vit\nassert not {'torch', 'pandas', 'pydantic'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
