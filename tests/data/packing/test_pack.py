"""What packing puts into shards and info.json."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssl_vit.data.packing import pack
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.data.shards.info import Info
from ssl_vit.data.verify import stats, verify
from ssl_vit.interfaces import RunError, UserError

from .pictures import encoded, write


def image_folder(root: Path, counts: dict[str, int]) -> dict[str, bytes]:
    """Class folders of JPEG, PNG and WebP in turn; returns relative path -> bytes."""
    written: dict[str, bytes] = {}
    for class_name, count in counts.items():
        for number in range(count):
            kind, suffix = (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"))[number % 3]
            file = f"{class_name}/{number}.{suffix}"
            written[file] = write(root / file, encoded(kind, seed=len(written)))
    return written


def members(folder: Path) -> dict[str, bytes]:
    """Member name -> bytes, over all shards of the folder in order, read by tarfile alone."""

    def read() -> Iterator[tuple[str, bytes]]:
        for path in sorted(folder.glob("*.tar")):
            with tarfile.open(path) as tar:
                for member in tar:
                    yield member.name, tar.extractfile(member).read()  # type: ignore[union-attr]

    found = list(read())
    assert len(dict(found)) == len(found)
    return dict(found)


def labeled_images(folder: Path) -> dict[bytes, int]:
    found = members(folder)
    return {data: int(found[name.split(".")[0] + ".cls"]) for name, data in found.items() if name[-4:] != ".cls"}


def few_digits(count: int) -> Source:
    whole = open_source("digits", split="train")
    assert whole.labels is not None
    return replace(whole, labels=whole.labels[:count], items=range(count), groups=None)


def sizes(info: Info) -> list[int]:
    return [shard.samples for shard in info.shards]


def test_folder_round_trip_is_bit_for_bit(tmp_path: Path) -> None:
    files, out = image_folder(tmp_path / "in", {"ant": 5, "bee": 4}), tmp_path / "out"
    info = pack(open_source(str(tmp_path / "in")), out, Options(shards=3))[out]
    assert labeled_images(out) == {data: int(file[:3] == "bee") for file, data in files.items()}
    written = json.loads((out / "info.json").read_text())
    assert Info.model_validate(written) == info
    sums = [hashlib.sha256((out / f"{n:06d}.tar").read_bytes()).hexdigest() for n in range(3)]
    assert written == {
        "format": 1,
        "classes": ["ant", "bee"],
        "samples": 9,
        "labeled": True,
        "shards": [
            {"file": f"{n:06d}.tar", "samples": 3, "bytes": (out / f"{n:06d}.tar").stat().st_size, "sha256": sums[n]}
            for n in range(3)
        ],
        "content_hash": hashlib.sha256("".join(sums).encode()).hexdigest(),
        "source": "in (folder)",
        "license": None,
        "dropped": [],
    }
    assert verify(out) == []
    assert {path.name for path in out.iterdir()} == {*(f"{n:06d}.tar" for n in range(3)), "info.json", "packing.jsonl"}


def test_the_bytes_do_not_change_between_versions(tmp_path: Path) -> None:
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
    names, labels = ["a", "b"], np.arange(50) % 2
    items = [f"{n}.png" for n in range(50)]
    gray = Source("gray", None, names, labels, items, lambda _: base64.b64decode(png), "")
    infos = pack(gray, tmp_path, Options(shards=3, order="stratified", keep_names=True, seed=5, holdout=0.2))
    assert [info.content_hash for info in infos.values()] == [
        "5eaaad4cfd05f605c8ef49b39a2a29bc63629d6f4fdd883d1e8644547eca8ef2",
        "d08891145188fec8a4b5c32e305568b69c8572846aecf1e16466d94097c7572c",
    ]


def test_keys_are_numbers_and_names_are_stored_when_asked(tmp_path: Path) -> None:
    image_folder(tmp_path / "in", {"a b": 2, "c": 1})
    source = open_source(str(tmp_path / "in"))
    pack(source, tmp_path / "plain", Options(order="source"))
    pack(source, tmp_path / "named", Options(order="source", keep_names=True))
    assert {name.split(".")[0] for name in members(tmp_path / "plain")} == {"00000000", "00000001", "00000002"}
    assert not any(name.endswith(".json") for name in members(tmp_path / "plain"))
    assert json.loads(members(tmp_path / "named")["00000001.json"]) == {"file": "a b/1.png"}
    assert verify(tmp_path / "named") == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shards": 7}, [8] * 4 + [7] * 3),
        ({"shard_size": 3}, [3] * 16 + [2]),
        ({"shard_size": 25}, [4] * 12 + [3] * 4),
        ({}, [1] * 5),
        ({"shards": 1}, [60]),
    ],
)
def test_shard_sizes_differ_by_at_most_one(tmp_path: Path, options: dict[str, Any], expected: list[int]) -> None:
    assert sizes(pack(few_digits(sum(expected)), tmp_path, Options(**options))[tmp_path]) == expected
    assert verify(tmp_path) == []


def test_broken_images_are_dropped_and_listed(tmp_path: Path) -> None:
    image_folder(tmp_path / "in", {"a": 6, "b": 5})
    broken = {
        "a/cut.jpg": encoded("JPEG", size=(64, 64))[:700],
        "a/cut.png": encoded("PNG", size=(64, 64))[:700],
        "b/nothing.webp": b"",
        f"b/{os.fsdecode(b'b')}\x1b\n.jpg": b"hello",
    }
    for file, data in broken.items():
        write(tmp_path / "in" / file, data)
    out = tmp_path / "out"
    info = pack(open_source(str(tmp_path / "in")), out, Options(shards=3))[out]
    assert [item.file for item in info.dropped] == ["a/cut.jpg", "a/cut.png", r"b/b\x1b\n.jpg", "b/nothing.webp"]
    assert [item.reason for item in info.dropped][2:] == ["not an image", "empty file"]
    assert all("cannot be decoded" in item.reason for item in info.dropped[:2])
    assert sum(sizes(info)) == info.samples == 11
    assert verify(out) == []
    assert len(json.loads((out / "info.json").read_text())["dropped"]) == 4


def test_no_usable_image_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "in" / "text.jpg", b"hello")
    with pytest.raises(UserError, match=r"none of the 1 images .*first: text.jpg: not an image"):
        pack(open_source(str(tmp_path / "in")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unlabeled_flat_folder(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / "in" / f"{number}.png", encoded("PNG", number, mode="L"))
    out = tmp_path / "out"
    info = pack(open_source(str(tmp_path / "in")), out)[out]
    assert (info.classes, info.labeled) == (None, False)
    assert all(name.endswith(".png") for name in members(out))
    assert verify(out) == [] and (stats(out)["labeled"], stats(out)["channels"]) == (False, 1)
    split = pack(open_source(str(tmp_path / "in")), tmp_path / "split", Options(holdout=0.4))
    assert [info.samples for info in split.values()] == [3, 2]


def test_holdout_is_stratified_disjoint_and_repeatable(tmp_path: Path) -> None:
    files, out = image_folder(tmp_path / "in", {"a": 20, "b": 10, "c": 3, "d": 1}), tmp_path / "out"
    source = open_source(str(tmp_path / "in"))
    result = pack(source, out, Options(holdout=0.2, shards=4))
    pack(source, tmp_path / "again", Options(holdout=0.2, shards=4))
    train, test = labeled_images(out / "train"), labeled_images(out / "test")
    assert Counter(test.values()) == {0: 4, 1: 2, 2: 1}
    assert not train.keys() & test.keys()
    assert {**train, **test} == {data: "abcd".index(file[0]) for file, data in files.items()}
    assert test == labeled_images(tmp_path / "again" / "test")
    assert sizes(result[out / "train"]) == [7, 7, 7, 6]
    assert list(result) == [out / "train", out / "test"] and not (out / "info.json").exists()
    for folder, info in result.items():
        assert info.classes == ["a", "b", "c", "d"] and f"{folder.name} part of holdout 0.2" in str(info.source)
        assert verify(folder) == []
    with pytest.raises(UserError, match="name one of its parts: test, train"):
        verify(out)


def test_overwrite_replaces_only_the_shard_set(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out / "notes.md", b"mine")
    with pytest.raises(UserError, match="is not empty"):
        pack(few_digits(30), out, Options(shards=3))
    pack(few_digits(30), out, Options(shards=3), overwrite=True)
    pack(few_digits(2), out, overwrite=True)
    names = {"000000.tar", "000001.tar", "info.json", "packing.jsonl", "notes.md"}
    assert {path.name for path in out.iterdir()} == names
    pack(few_digits(60), out, Options(holdout=0.5), overwrite=True)
    assert {path.name for path in out.iterdir()} == {"notes.md", "test", "train"}
    pack(few_digits(20), out, Options(shards=2), overwrite=True)
    assert {path.name for path in out.iterdir()} == names, "the two sets of a holdout are replaced by one"
    for folds in (3, 2):
        pack(few_digits(60), out, Options(folds=folds), overwrite=True)
    assert {path.name for path in out.iterdir()} == {"notes.md", "fold_0", "fold_1"}
    pack(few_digits(20), out, Options(shards=2), overwrite=True)
    assert {path.name for path in out.iterdir()} == names, "so are folds"
    with pytest.raises(UserError, match="is a file"):
        pack(few_digits(10), out / "notes.md")


def test_overwrite_does_not_touch_other_sets_in_the_folder(tmp_path: Path) -> None:
    for part in ("train", "test"):
        pack(few_digits(20), tmp_path / part, Options(shards=2))
    before = members(tmp_path / "test")
    pack(few_digits(20), tmp_path, Options(shards=2), overwrite=True)
    assert members(tmp_path / "test") == before
    pack(few_digits(20), tmp_path, Options(shards=2, holdout=0.5), overwrite=True)
    assert members(tmp_path / "test") != before, "a holdout's pair replaces the pair"


def test_a_folder_that_cannot_be_written_is_named(unprivileged: Path) -> None:
    write(unprivileged / "in" / "ant" / "1.png", encoded("PNG"))
    source = open_source(str(unprivileged / "in"))
    (unprivileged / "locked").mkdir(mode=0o555)
    with pytest.raises(RunError, match=r"locked/out: packing stopped: .*Permission denied"):
        pack(source, unprivileged / "locked" / "out")


def test_memory_does_not_grow_with_the_images(tmp_path: Path) -> None:
    """Peak memory with 20 and with 120 images of 0.5 MB; the files are one file under many names."""
    image = write(tmp_path / "image.png", encoded("PNG", size=(400, 400)))
    assert len(image) > 450_000
    script = (
        "import resource, sys; from pathlib import Path; from ssl_vit.data.packing import pack;"
        "from ssl_vit.data.packing.plan import Options;"
        "from ssl_vit.data.packing.sources import open_source;"
        "pack(open_source(sys.argv[1]), Path(sys.argv[2]), Options(shards=1), jobs=1);"
        "assert 'torch' not in sys.modules;"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for count in (20, 120):
        (tmp_path / str(count)).mkdir()
        for number in range(count):
            os.link(tmp_path / "image.png", tmp_path / str(count) / f"{number}.png")
        arguments = [str(tmp_path / str(count)), str(tmp_path / f"out{count}")]
        ran = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, check=True)
        peaks.append(int(ran.stdout) / 1024)
    assert peaks[1] - peaks[0] < 20  # MB
