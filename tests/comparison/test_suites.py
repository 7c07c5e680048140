"""Sets that are given by a source are packed once, and a folder of another source is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from ssl_vit.comparison.sets import DataSet
from ssl_vit.comparison.suites import prepare
from ssl_vit.interfaces import UserError
from tests.tars import packed

DIGITS = {"digits": DataSet(source="digits")}


@pytest.mark.usefixtures("fewer_digits")
def test_sources_are_packed_once_and_checked(tmp_path: Path) -> None:
    folder, said = tmp_path / "packed", list[str]()
    with pytest.raises(UserError, match=r"digits is not packed yet.*--list"):
        prepare(DIGITS, folder, write=False)
    assert not folder.exists()
    found = prepare(DIGITS, folder, said.append)["digits"]
    assert (found.source, found.test) == (None, str(folder / "digits" / "test"))
    assert prepare(DIGITS, folder, said.append) == prepare(DIGITS, folder, write=False) == {"digits": found}
    assert len(said) == 2, "train and test, once"
    for other in (DataSet(source="other"), DataSet(source="digits", splits=("test", "train"))):
        with pytest.raises(UserError, match="was packed from digits"):
            prepare({"digits": other}, folder, said.append)
    shutil.rmtree(folder / "digits" / "train")
    packed("digits", folder / "digits" / "train", "train", subset=2, shards=1)
    with pytest.raises(UserError, match="train holds other shards than all of digits"):
        prepare(DIGITS, folder, said.append)
    shutil.rmtree(folder / "digits")
    packed("digits", folder / "digits" / "test", "test", shards=1)
    with pytest.raises(UserError, match="test holds shards that no suite packed"):
        prepare(DIGITS, folder, said.append)


@pytest.mark.usefixtures("fewer_digits")
def test_shards_of_others_are_not_replaced(tmp_path: Path) -> None:
    shard = tmp_path / "digits" / "train" / "000000.tar"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"mine")
    with pytest.raises(UserError, match=r"dataset digits: .*is not empty"):
        prepare(DIGITS, tmp_path)
    assert shard.read_bytes() == b"mine"


def test_images_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("bee", "wasp"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / "images" / split / name / "0.png")
    (tmp_path / "images" / "train" / "bee" / "broken.png").write_bytes(b"no image")
    said = list[str]()
    prepare({"own": DataSet(source=str(tmp_path / "images"))}, tmp_path / "packed", said.append)
    (note,) = [line for line in said if "cannot be read" in line]
    assert note.startswith("note: 1 images cannot be read") and "own/train/info.json" in note
