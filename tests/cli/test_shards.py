"""`ssl-vit shards`: what it prints where, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.filterwarnings("default::UserWarning")  # as on the command line: shown, no error
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shards(called: Call) -> Call:
    """Run `ssl-vit shards ...`: exit code, stdout, stderr."""
    return partial(called, "shards")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """20 cats, 10 dogs, 2 broken images and a note."""
    root = tmp_path / "images"
    for number in range(30):
        path = root / ("dog" if number % 3 == 0 else "cat") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 12, 3), number * 8, dtype=np.uint8)).save(path)
    (root / "cat" / "empty.jpg").write_bytes(b"")
    (root / "dog" / "text\x1b[2J.jpg").write_text("hello")
    (root / "dog" / "notes.md").write_text("good dogs")
    return root


def test_make_prints_what_it_wrote_and_what_it_skipped(shards: Call, images: Path) -> None:
    options = ("make", "images", "out", "--holdout", "0.2", "--shards", "4", "--jobs", "1")
    code, out, err = shards(*options)
    assert code == 0
    infos = {part: json.loads(Path("out", part, "info.json").read_text()) for part in ("train", "test")}
    assert out.splitlines() == [
        f"out/train: {infos['train']['samples']} samples in 4 shards, 2 classes",
        f"  content hash {infos['train']['content_hash']}",
        f"out/test: {infos['test']['samples']} samples in 1 shards, 2 classes",
        f"  content hash {infos['test']['content_hash']}",
    ]
    assert "note: images: ignored 1 files of other types" in err
    assert "skipped cat/empty.jpg: empty file" in err and r"skipped dog/text\x1b[2J.jpg: not an image" in err
    again = shards(*options)
    assert again[:2] == (0, out) and "5 of 5 shards are finished already" in again[2]
    code, out, err = shards(*options, "--seed", "1")
    assert (code, out) == (2, "") and "different seed" in err and "--overwrite" in err
    assert shards(*options, "--seed", "1", "--overwrite")[0] == 0


def test_a_long_list_of_broken_images_is_cut(shards: Call, images: Path) -> None:
    for number in range(30):
        (images / "cat" / f"broken{number}.jpg").write_text("hello")
    code, _, err = shards("make", "images", "out")
    assert (code, err.count("skipped ")) == (0, 21)
    assert err.splitlines()[-1].startswith("skipped 12 more")


def test_subset_order_and_names(shards: Call, images: Path) -> None:
    code, _, err = shards("make", "images", "out", "--subset", "15", "--order", "stratified", "--keep-names")
    assert code == 0
    info = json.loads(Path("out/info.json").read_text())
    assert info["source"] == "images (folder), 15 images per class, seed 0"
    assert info["samples"] + len(info["dropped"]) == 26
    assert "1 of 2 classes have fewer than subset=15 images (as few as 11)" in err
    assert json.loads(shards("stats", "out")[1])["samples"] == info["samples"]


def test_verify_lists_defects_and_exits_1(shards: Call, images: Path) -> None:
    shards("make", "images", "out", "--shards", "2")
    assert shards("verify", "out")[:2] == (0, "out: no defect found\n")
    path = Path("out/000001.tar")
    path.write_bytes(path.read_bytes()[:-2048].replace(b"00000020.", b"\x1b[31m\n20."))
    code, out, err = shards("verify", "out", "--jobs", "1")
    assert (code, err) == (1, "")
    assert out.splitlines()[0].startswith("000001.tar: -: size: ")
    assert out.splitlines()[-1] == f"out: {len(out.splitlines()) - 1} defect(s)"
    assert "\x1b" not in out
    Path("out/info.json").write_text(Path("out/info.json").read_text().replace("000001.tar", "\\u001b[31m.tar"))
    code, out, err = shards("stats", "out")
    assert code == 2 and r"\x1b[31m.tar: missing_shard" in err and "\x1b" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("images", "images/out"), "images/out lies inside images"),
        (("images", "images"), "images lies inside images"),
        (("imagefolder:images", "images/out"), "images/out lies inside imagefolder:images"),
        (("images", "out", "--order", "random"), "'random' is not one of"),
        (("images", "out", "--jobs", "0"), "Invalid value for '--jobs'"),
        (("digits", "images/cat/1.png"), "images/cat/1.png is a file; name a folder"),
        (("./nothing", "out"), "./nothing: no such file or folder"),
        (("images#train", "out"), "images#train: name the folder alone; --split train"),
        (("digits", "s3://bucket/out"), "s3://bucket/out: shards are written to a local folder"),
    ],
)
def test_mistakes_are_named_and_exit_2(shards: Call, images: Path, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = shards("make", *arguments)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err
    assert not Path("out").exists()


@pytest.mark.parametrize("command", ["verify", "stats"])
def test_urls_are_not_taken_for_paths(shards: Call, command: str) -> None:
    code, out, err = shards(command, "s3://bucket/out")
    assert (code, out) == (2, "") and "s3://bucket/out: only local data can be checked" in err
