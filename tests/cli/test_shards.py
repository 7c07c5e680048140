"""`ssl-vit shards` as it is typed: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssl_vit import cli

pytestmark = pytest.mark.filterwarnings("default::UserWarning")  # as on the command line: shown, no error
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `ssl-vit shards ...` in a directory of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ssl-vit", "shards", *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """20 cats, 10 dogs, 2 broken images and a note."""
    root = tmp_path / "images"
    for number in range(30):
        path = root / ("dog" if number % 3 == 0 else "cat") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 12, 3), number * 8, dtype=np.uint8)).save(path)
    (root / "cat" / "empty.jpg").write_bytes(b"")
    (root / "dog" / "text.jpg").write_text("hello")
    (root / "dog" / "notes.md").write_text("good dogs")
    return root


def test_make_says_what_it_made_and_what_it_left_out(call: Call, images: Path) -> None:
    code, out, err = call("make", "images", "out", "--holdout", "0.2", "--shards", "4", "--jobs", "1")
    assert code == 0
    infos = {part: json.loads(Path("out", part, "info.json").read_text()) for part in ("train", "test")}
    assert out.splitlines() == [
        f"out/train: {infos['train']['samples']} samples in 4 shards, 2 classes",
        f"  content hash {infos['train']['content_hash']}",
        f"out/test: {infos['test']['samples']} samples in 1 shards, 2 classes",
        f"  content hash {infos['test']['content_hash']}",
    ]
    assert err.splitlines() == [
        "note: images: ignored 1 files that are not images",
        "left out cat/empty.jpg: empty file",
        "left out dog/text.jpg: not an image",
    ]


def test_a_long_list_of_broken_images_is_cut(call: Call, images: Path) -> None:
    for number in range(30):
        (images / "cat" / f"broken{number}.jpg").write_text("hello")
    code, _, err = call("make", "images", "out")
    assert (code, err.count("left out ")) == (0, 21)
    assert err.splitlines()[-1] == "left out 12 more; info.json lists them"


def test_subset_order_and_names(call: Call, images: Path) -> None:
    code, out, err = call("make", "images", "out", "--subset", "11", "--order", "stratified", "--keep-names")
    assert code == 0
    assert "note: images (folder): 1 of 2 classes have" not in out
    info = json.loads(Path("out/info.json").read_text())
    assert info["source"] == "images (folder), 11 images a class, seed 0"
    assert info["samples"] + len(info["dropped"]) == 22
    code, out, err = call("make", "images", "more", "--subset", "15")
    assert "note: images (folder): 1 of 2 classes have fewer than subset=15 images (as few as 11)" in err


def test_parts_are_merged(call: Call, images: Path) -> None:
    options = ("make", "images", "out", "--shards", "5")
    code, out, err = call(*options, "--part", "1/2")
    assert (code, out) == (0, "out: part 1/2 has 3 shards; after all parts: ssl-vit shards merge-info out\n")
    code, out, err = call("merge-info", "out")
    assert (code, out) == (2, "")
    assert "2 of 5 shards are missing: 000001.tar, 000003.tar (part 2/2)" in err
    code, out, err = call("verify", "out")
    assert code == 2 and "packing was not finished" in err
    assert call(*options, "--part", "2/2")[0] == 0
    code, out, err = call("merge-info", "out")
    assert (code, out.splitlines()[0]) == (0, "out: 30 samples in 5 shards, 2 classes")
    assert "left out cat/empty.jpg: empty file" in err
    assert call("verify", "out")[:2] == (0, "out: no defect found\n")
    assert json.loads(call("stats", "out")[1])["samples_per_class"] == {"cat": 20, "dog": 10}


def test_verify_lists_defects_and_exits_1(call: Call, images: Path) -> None:
    call("make", "images", "out", "--shards", "2")
    path = Path("out/000001.tar")
    path.write_bytes(path.read_bytes()[:-2048])
    code, out, err = call("verify", "out", "--jobs", "1")
    assert (code, err) == (1, "")
    assert out.splitlines()[0].startswith("000001.tar: -: size: ")
    assert out.splitlines()[-1] == f"out: {len(out.splitlines()) - 1} defect(s)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("images", "images/out"), "images/out lies inside images, where it would look like images"),
        (("images", "images"), "images lies inside images"),
        (("images", "out", "--part", "3/2"), "part must be i/n with i from 1 to n, such as 2/4, not '3/2'"),
        (("images", "out", "--part", "x"), "part must be i/n"),
        (("images", "out", "--part", "1/2", "--overwrite"), "parts cannot overwrite"),
        (("images", "out", "--order", "random"), "'random' is not one of"),
        (("images", "out", "--jobs", "0"), "Invalid value for '--jobs'"),
        (("images", "images/cat/1.png"), "lies inside images"),
        (("digits", "images/cat/1.png"), "images/cat/1.png is a file; name a folder"),
        (("./nothing", "out"), "./nothing: no such file or folder"),
    ],
)
def test_mistakes_are_named_and_exit_2(call: Call, images: Path, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = call("make", *arguments)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err
    assert not Path("out").exists()
