"""Test images on which two arms disagree."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image

from ssl_vit.records import DataRecord
from ssl_vit.report.gallery import Gallery, gallery
from ssl_vit.report.page import write_report
from ssl_vit.report.read import read
from ssl_vit.report.summary import summarize
from ssl_vit.results import Prediction, Result
from tests.report.made import row, write_comparison, write_shards

LABELS = np.arange(100) % 4


def rows(arm: str, wrong: list[list[int]]) -> list[Result]:
    """A row per seed. wrong: places of the images that each seed takes for the next class."""
    found = []
    for seed, places in enumerate(wrong):
        predicted = LABELS.copy()
        predicted[places] = (predicted[places] + 1) % 4
        found.append(row(arm, 5, seed, 0.0, prediction=Prediction(np.arange(100) + 7, LABELS, predicted)))
    return found


def shown(folder: Path, data: dict[str, DataRecord]) -> Gallery:
    """Seeds 0 and 1 of ssl are wrong on images 40 and 41, all of scratch on image 3 and one on image 10."""
    both = rows("ssl", [[40, 41], [40], []]) + rows("scratch", [[3, 10], [3], [3]])
    comparison = read([write_comparison(folder, both, data=data)])
    (head,) = summarize(comparison).headlines
    return gallery(comparison, head)


def test_the_images_are_those_on_which_most_seeds_disagree(tmp_path: Path) -> None:
    found = shown(tmp_path / "c", write_shards(tmp_path / "test"))
    assert [card.truth for card in found.better] == ["three", "two"]
    assert [card.truth for card in found.worse] == ["zero", "one"]
    assert found.better[0].answers == {"ssl": "three (3)", "scratch": "zero (3)"}
    assert found.better[1].answers == {"ssl": "two (3)", "scratch": "two (2), three (1)"}
    assert found.worse[0].answers == {"ssl": "one (2), zero (1)", "scratch": "zero (3)"}
    grays = []
    for card in (*found.better, *found.worse):
        kind, _, content = card.picture.partition(";base64,")
        assert kind == "data:image/png"
        with Image.open(io.BytesIO(base64.b64decode(content))) as picture:
            assert picture.size == (8, 8)
            grays.append(np.asarray(picture.convert("L")).mean())
    assert grays == [2 * (place + 7) for place in (3, 10, 40, 41)], "the pictures of these very images"


def test_images_that_are_gone_or_others_are_not_shown(tmp_path: Path) -> None:
    data = write_shards(tmp_path / "test")
    other = {"digits test": data["digits test"].model_copy(update={"samples": 90})}
    assert "holds other images now" in shown(tmp_path / "fewer", other).missing
    with (tmp_path / "test/000000.tar").open("r+b") as tar:  # the label of image 3
        content = tar.read()
        tar.seek(content.index(b"3", content.index(b"010.cls") + 512))
        tar.write(b"1")
    assert "holds other images now" in shown(tmp_path / "relabeled", data).missing
    (tmp_path / "test/000000.tar").unlink()
    missing = shown(tmp_path / "gone", data)
    assert str(tmp_path / "test") in missing.missing and not missing.better
    text = write_report([tmp_path / "gone"], tmp_path / "report.html").read_text()
    assert f"The images cannot be shown: {tmp_path}/test" in text
