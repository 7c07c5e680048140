from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ssl_vit.data.packing import pack
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.packing.sources.base import BrokenImageError, Source
from ssl_vit.data.verify import stats, verify
from ssl_vit.interfaces import RunError, UserError


def encoded(kind: str, seed: int = 0, size: tuple[int, int] = (14, 10), mode: str = "RGB", **options: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def image_folder(root: Path, counts: dict[str, int]) -> dict[str, bytes]:
    """Class folders of JPEG, PNG and WebP in turn; returns relative path -> bytes."""
    written: dict[str, bytes] = {}
    for class_name, count in counts.items():
        (root / class_name).mkdir(parents=True)
        for number in range(count):
            kind, suffix = (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"))[number % 3]
            file = f"{class_name}/{number}.{suffix}"
            written[file] = encoded(kind, seed=len(written))
            (root / file).write_bytes(written[file])
    return written


def members(folder: Path) -> dict[str, bytes]:
    """Member name -> bytes, over all shards of the folder, read by tarfile alone."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                assert member.name not in found
                file = tar.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    return found


def labeled_images(folder: Path) -> dict[bytes, int]:
    found = members(folder)
    return {data: int(found[name.split(".")[0] + ".cls"]) for name, data in found.items() if name[-4:] != ".cls"}


def few_digits(count: int) -> Source:
    whole = open_source("digits", split="train")
    assert whole.labels is not None
    return replace(whole, labels=whole.labels[:count], items=range(count))


def test_folder_round_trip_is_bit_for_bit(tmp_path: Path) -> None:
    files = image_folder(tmp_path / "in", {"ant": 5, "bee": 4})
    info = pack(open_source(str(tmp_path / "in")), tmp_path / "out", shards=3)
    assert labeled_images(tmp_path / "out") == {data: int(file[:3] == "bee") for file, data in files.items()}
    assert info == json.loads((tmp_path / "out" / "info.json").read_text())
    assert [entry["samples"] for entry in info["shards"]] == [3, 3, 3]
    assert info["shards"][0]["bytes"] == (tmp_path / "out" / "000000.tar").stat().st_size
    assert {key: info[key] for key in ("format", "classes", "samples", "labeled", "source", "channels", "dropped")} == {
        "format": 1,
        "classes": ["ant", "bee"],
        "samples": 9,
        "labeled": True,
        "source": "in (folder)",
        "channels": 3,
        "dropped": [],
    }
    assert info["mean_image_size"] == {"height": 10.0, "width": 14.0}
    sums = [hashlib.sha256((tmp_path / "out" / f"{n:06d}.tar").read_bytes()).hexdigest() for n in range(3)]
    assert [entry["sha256"] for entry in info["shards"]] == sums
    assert info["content_hash"] == hashlib.sha256("".join(sums).encode()).hexdigest()
    assert verify(tmp_path / "out") == []
    files_there = {path.name for path in (tmp_path / "out").iterdir()}
    assert files_there == {"000000.tar", "000001.tar", "000002.tar", "info.json"}


def test_keys_are_numbers_and_names_travel_only_when_asked(tmp_path: Path) -> None:
    image_folder(tmp_path / "in", {"a b": 2, "c": 1})
    source = open_source(str(tmp_path / "in"))
    pack(source, tmp_path / "plain", order="source")
    pack(source, tmp_path / "named", order="source", keep_names=True)
    keys = {name.split(".")[0] for name in members(tmp_path / "plain")}
    assert keys == {"00000000", "00000001", "00000002"}
    assert not any(name.endswith(".json") for name in members(tmp_path / "plain"))
    assert json.loads(members(tmp_path / "named")["00000001.json"]) == {"file": "a b/1.png"}
    assert verify(tmp_path / "named") == []


def test_same_input_same_bytes_other_seed_other_order(tmp_path: Path) -> None:
    source = few_digits(50)
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        pack(source, tmp_path / name, shards=2, seed=seed)
    files = ("000000.tar", "000001.tar", "info.json")
    bytes_of = {name: [(tmp_path / name / file).read_bytes() for file in files] for name in ("one", "two", "three")}
    assert bytes_of["one"] == bytes_of["two"]
    assert bytes_of["one"][0] != bytes_of["three"][0]
    assert labeled_images(tmp_path / "one") == labeled_images(tmp_path / "three")


def test_shuffle_mixes_classes(tmp_path: Path) -> None:
    image_folder(tmp_path / "in", {"a": 30, "b": 30})
    pack(open_source(str(tmp_path / "in")), tmp_path / "mixed", shards=2)
    with tarfile.open(tmp_path / "mixed" / "000000.tar") as tar:
        labels = [tar.extractfile(m).read() for m in tar.getmembers() if m.name.endswith(".cls")]  # type: ignore[union-attr]
    assert 5 < labels.count(b"0") < 25


def test_in_the_order_of_the_source_the_members_keep_the_order_of_the_source(tmp_path: Path) -> None:
    source = few_digits(150)
    images = [source.read(index)[1] for index in range(150)]
    info = pack(source, tmp_path / "out", shards=4, order="source")
    assert [entry["samples"] for entry in info["shards"]] == [38, 38, 37, 37]
    found = members(tmp_path / "out")  # in the order of the shards, and of the members in them
    assert list(found) == [f"{number:08d}.{suffix}" for number in range(150) for suffix in ("cls", "png")]
    assert [data for name, data in found.items() if name.endswith(".png")] == images
    assert source.labels is not None
    assert [int(data) for name, data in found.items() if name.endswith(".cls")] == source.labels.tolist()
    pack(source, tmp_path / "split", shards=2, order="source", holdout=0.3)
    for part in ("train", "test"):
        kept = [data for name, data in members(tmp_path / "split" / part).items() if name.endswith(".png")]
        assert kept == [image for image in images if image in kept]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"shards": 7}, [8] * 4 + [7] * 3),
        ({"shard_size": 3}, [3] * 16 + [2]),
        ({"shard_size": 25}, [4] * 12 + [3] * 4),  # 3 shards would feed 3 loader workers
        ({}, [4] * 12 + [3] * 4),
        ({}, [1] * 5),
        ({"shards": 1}, [60]),
    ],
)
def test_shard_sizes_differ_by_at_most_one(tmp_path: Path, options: dict[str, int], sizes: list[int]) -> None:
    source = few_digits(sum(sizes))
    info = pack(source, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert [entry["samples"] for entry in info["shards"]] == sizes
    assert verify(tmp_path / "out") == []


def test_broken_images_are_dropped_and_listed(tmp_path: Path) -> None:
    image_folder(tmp_path / "in", {"a": 6, "b": 5})
    (tmp_path / "in" / "a" / "cut.jpg").write_bytes(encoded("JPEG", size=(64, 64))[:700])
    (tmp_path / "in" / "a" / "cut.png").write_bytes(encoded("PNG", size=(64, 64))[:700])
    (tmp_path / "in" / "b" / "text.jpg").write_text("hello")
    (tmp_path / "in" / "b" / "nothing.webp").write_bytes(b"")
    info = pack(open_source(str(tmp_path / "in")), tmp_path / "out", shards=3)
    assert [item["file"] for item in info["dropped"]] == ["a/cut.jpg", "a/cut.png", "b/nothing.webp", "b/text.jpg"]
    assert [item["reason"] for item in info["dropped"]][2:] == ["empty file", "not an image"]
    assert all("cannot be decoded" in item["reason"] for item in info["dropped"][:2])
    assert sum(entry["samples"] for entry in info["shards"]) == info["samples"] == 11
    assert all(1 <= entry["samples"] <= 5 for entry in info["shards"])
    assert json.loads((tmp_path / "out" / "info.json").read_text())["dropped"] == info["dropped"]
    assert verify(tmp_path / "out") == []


def test_nothing_but_broken_images_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "text.jpg").write_text("hello")
    with pytest.raises(UserError, match=r"none of its 1 images can be used \(first: text.jpg: not an image\)"):
        pack(open_source(str(tmp_path / "in")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unlabeled_flat_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(5):
        (tmp_path / "in" / f"{number}.png").write_bytes(encoded("PNG", number, mode="L"))
    info = pack(open_source(str(tmp_path / "in")), tmp_path / "out")
    assert (info["classes"], info["labeled"], info["channels"]) == (None, False, 1)
    assert all(name.endswith(".png") for name in members(tmp_path / "out"))
    assert verify(tmp_path / "out") == []
    assert stats(tmp_path / "out")["labeled"] is False
    split = pack(open_source(str(tmp_path / "in")), tmp_path / "split", holdout=0.4)
    assert (split["train"]["samples"], split["test"]["samples"]) == (3, 2)


def test_holdout_is_stratified_disjoint_and_repeatable(tmp_path: Path) -> None:
    files = image_folder(tmp_path / "in", {"a": 20, "b": 10, "c": 3, "d": 1})
    source = open_source(str(tmp_path / "in"))
    result = pack(source, tmp_path / "out", holdout=0.2, shards=4)
    pack(source, tmp_path / "again", holdout=0.2, shards=4)
    train, test = labeled_images(tmp_path / "out" / "train"), labeled_images(tmp_path / "out" / "test")
    assert Counter(test.values()) == {0: 4, 1: 2, 2: 1}
    assert not train.keys() & test.keys()
    assert train.keys() | test.keys() == set(files.values())
    assert {**train, **test} == {data: "abcd".index(file[0]) for file, data in files.items()}
    assert test == labeled_images(tmp_path / "again" / "test")
    assert [entry["samples"] for entry in result["train"]["shards"]] == [7, 7, 7, 6]
    assert not (tmp_path / "out" / "info.json").exists()
    for part in ("train", "test"):
        assert json.loads((tmp_path / "out" / part / "info.json").read_text()) == result[part]
        assert result[part]["classes"] == ["a", "b", "c", "d"]
        assert verify(tmp_path / "out" / part) == []
    with pytest.raises(UserError, match="name one of its parts: test, train"):
        verify(tmp_path / "out")


def test_each_part_of_a_holdout_has_shards_for_several_workers(tmp_path: Path) -> None:
    image_folder(tmp_path / "in", {"a": 60, "b": 40})
    result = pack(open_source(str(tmp_path / "in")), tmp_path / "out", holdout=0.1)
    sizes = {part: [entry["samples"] for entry in result[part]["shards"]] for part in ("train", "test")}
    assert sizes == {"train": [6] * 10 + [5] * 6, "test": [1] * 10}


def test_parquet_is_packed_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    images = [encoded("JPEG", number, quality=40) for number in range(6)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])})
    rows = {"image": [{"bytes": data, "path": None} for data in images], "label": [0, 1] * 3}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "p.parquet"))
    info = pack(open_source(str(tmp_path / "p.parquet")), tmp_path / "out")
    assert labeled_images(tmp_path / "out") == dict(zip(images, [0, 1] * 3, strict=True))
    assert info["classes"] == ["x", "y"]


def test_a_full_folder_is_refused_and_overwrite_replaces_only_the_shard_set(tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(few_digits(30), out, shards=3)
    (out / "notes.md").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        pack(few_digits(10), out)
    assert len(list(out.glob("*.tar"))) == 3
    pack(few_digits(2), out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["000000.tar", "000001.tar", "info.json", "notes.md"]
    pack(few_digits(60), out, overwrite=True, holdout=0.5)
    assert sorted(path.name for path in out.iterdir()) == ["notes.md", "test", "train"]
    with pytest.raises(UserError, match="is a file"):
        pack(few_digits(10), out / "notes.md")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": 0}, "shards must be at least 1"),
        ({"shard_size": 0}, "shard_size must be at least 1"),
        ({"resize": 0}, "resize must be at least 1"),
        ({"quality": 101}, "quality must be 1 to 100"),
        ({"holdout": 1.0}, "holdout must be"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"shards": 11}, "shards=11 is more than its 10 images"),
        ({"subset": 0}, "subset must be at least 1"),
        ({"order": "random"}, "order must be one of shuffle, stratified, source"),
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"part": "1/2", "overwrite": True}, "parts cannot overwrite"),
        *(({"part": part}, "part must be i/n") for part in ("3/2", "0/2", "x", "1/0", "-1/2", "1/2/3", "")),
    ],
)
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pack(few_digits(10), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_part_of_a_holdout_without_one_good_image_is_told_and_kept(tmp_path: Path) -> None:
    digits = open_source("digits")

    def read(item: int) -> tuple[str, bytes]:
        if item % 2:
            raise BrokenImageError(f"digit {item}", "not an image")
        return digits.read(item)  # type: ignore[no-any-return]

    source = replace(digits, items=range(20), labels=None, classes=None, read=read)
    for seed in range(9):
        out = tmp_path / str(seed)
        try:
            info = pack(source, out, holdout=0.05, seed=seed, shards=2, progress=False)
        except UserError as error:
            assert "none of its 1 test images can be used" in str(error)
            assert len(list(out.rglob("*.entry.json"))) == 3 and len(list(out.rglob("*.tar"))) == 2
            break
        assert info["test"]["samples"] == 1 and info["train"]["samples"] == 9
    else:
        pytest.fail("no seed puts a broken image into test")


def test_a_folder_that_cannot_be_written_is_named(unprivileged: Path) -> None:
    source = few_digits(10)
    (unprivileged / "locked").mkdir(mode=0o555)
    with pytest.raises(RunError, match=r"locked/out: packing stopped: .*Permission denied"):
        pack(source, unprivileged / "locked" / "out")


def test_packing_over_a_folder_of_other_sets_leaves_them_alone(tmp_path: Path) -> None:
    for part in ("train", "test"):
        pack(few_digits(20), tmp_path / "out" / part, shards=2, progress=False)
    before = members(tmp_path / "out" / "test")
    with pytest.raises(UserError, match="other shard sets, which this packing would not replace"):
        pack(few_digits(20), tmp_path / "out", shards=2, overwrite=True, progress=False)
    assert members(tmp_path / "out" / "test") == before
    pack(few_digits(20), tmp_path / "out", shards=2, holdout=0.5, overwrite=True, progress=False)
    assert members(tmp_path / "out" / "test") != before, "a holdout's pair replaces the pair"
    pack(few_digits(20), tmp_path / "out", shards=2, overwrite=True, progress=False)
    assert not (tmp_path / "out" / "test").exists(), "and what came of one holdout is one set"
    (tmp_path / "out" / "test").mkdir()
    (tmp_path / "out" / "test" / "unfinished.json").write_text("{}")
    with pytest.raises(UserError, match="other shard sets"):
        pack(few_digits(20), tmp_path / "out", shards=2, overwrite=True, progress=False)
