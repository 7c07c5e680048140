from __future__ import annotations

import io
import json
import pickle
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ssl_vit.data import pack
from ssl_vit.data.pack import Defect, make, stats, verify
from ssl_vit.data.sources import RawSample, Source, open_source
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


def labelled_images(folder: Path) -> dict[bytes, int]:
    found = members(folder)
    return {data: int(found[name.split(".")[0] + ".cls"]) for name, data in found.items() if name[-4:] != ".cls"}


def rewrite(path: Path, change: Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]) -> None:
    """Write the tar again with its (name, bytes) members changed."""
    with tarfile.open(path) as tar:
        old = [(member.name, tar.extractfile(member).read()) for member in tar.getmembers()]  # type: ignore[union-attr]
    with tarfile.open(path, "w") as tar:
        for name, data in change(old):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def agree(folder: Path) -> None:
    """Bring sizes and checksums in info.json up to date, so that only the deeper checks can find a defect."""
    info = json.loads((folder / "info.json").read_text())
    for entry in info["shards"]:
        path = folder / entry["file"]
        entry.update(bytes=path.stat().st_size, sha256=pack._sha256(path))
    (folder / "info.json").write_text(json.dumps(info))


def kinds(defects: list[Defect]) -> list[str]:
    return [defect.kind for defect in defects]


@pytest.fixture(scope="module")
def packed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "digits"
    make(few_digits(60), out, shards=3)
    return out


@pytest.fixture
def digits(packed_once: Path, tmp_path: Path) -> Path:
    """60 digits in three shards of 20, to be damaged."""
    return Path(shutil.copytree(packed_once, tmp_path / "digits"))


def few_digits(count: int) -> Source:
    whole = open_source("digits", split="train")
    assert whole.labels is not None
    return Source(whole.name, whole.licence, count, whole.classes, whole.labels[:count], whole.sample)


def test_folder_round_trip_is_bit_for_bit(tmp_path: Path) -> None:
    files = image_folder(tmp_path / "in", {"ant": 5, "bee": 4})
    info = make(open_source(str(tmp_path / "in")), tmp_path / "out", shard_size=4)
    assert labelled_images(tmp_path / "out") == {data: int(file[:3] == "bee") for file, data in files.items()}
    assert info == json.loads((tmp_path / "out" / "info.json").read_text())
    assert [entry["samples"] for entry in info["shards"]] == [3, 3, 3]
    assert info["shards"][0]["bytes"] == (tmp_path / "out" / "000000.tar").stat().st_size
    assert {
        key: info[key] for key in ("format", "classes", "samples", "labelled", "source", "channels", "dropped")
    } == {
        "format": 1,
        "classes": ["ant", "bee"],
        "samples": 9,
        "labelled": True,
        "source": "in (folder)",
        "channels": 3,
        "dropped": [],
    }
    assert info["mean_image_size"] == {"height": 10.0, "width": 14.0}
    assert verify(tmp_path / "out") == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "000000.tar",
        "000001.tar",
        "000002.tar",
        "info.json",
    ]


def test_keys_are_numbers_and_names_travel_only_when_asked(tmp_path: Path) -> None:
    image_folder(tmp_path / "in", {"a b": 2, "c": 1})
    source = open_source(str(tmp_path / "in"))
    make(source, tmp_path / "plain", shuffle=False)
    make(source, tmp_path / "named", shuffle=False, keep_names=True)
    keys = {name.split(".")[0] for name in members(tmp_path / "plain")}
    assert keys == {"00000000", "00000001", "00000002"}
    assert not any(name.endswith(".json") for name in members(tmp_path / "plain"))
    assert json.loads(members(tmp_path / "named")["00000001.json"]) == {"file": "a b/1.png"}
    assert verify(tmp_path / "named") == []


def test_same_input_same_bytes_other_seed_other_order(tmp_path: Path) -> None:
    source = few_digits(50)
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        make(source, tmp_path / name, shards=2, seed=seed)
    bytes_of = {
        n: [(tmp_path / n / f).read_bytes() for f in ("000000.tar", "000001.tar", "info.json")]
        for n in ("one", "two", "three")
    }
    assert bytes_of["one"] == bytes_of["two"]
    assert bytes_of["one"][0] != bytes_of["three"][0]
    assert labelled_images(tmp_path / "one") == labelled_images(tmp_path / "three")


def test_shuffle_mixes_classes_and_no_shuffle_keeps_the_order(tmp_path: Path) -> None:
    image_folder(tmp_path / "in", {"a": 30, "b": 30})
    source = open_source(str(tmp_path / "in"))
    make(source, tmp_path / "mixed", shards=2)
    make(source, tmp_path / "kept", shards=2, shuffle=False)
    with tarfile.open(tmp_path / "mixed" / "000000.tar") as tar:
        labels = [tar.extractfile(m).read() for m in tar.getmembers() if m.name.endswith(".cls")]  # type: ignore[union-attr]
    assert 5 < labels.count(b"0") < 25
    kept = members(tmp_path / "kept")
    assert [kept[f"{number:08d}.cls"] for number in range(60)] == [b"0"] * 30 + [b"1"] * 30


@pytest.mark.parametrize(("options", "sizes"), [({"shards": 7}, [8] * 4 + [7] * 3), ({"shard_size": 25}, [20] * 3)])
def test_shard_sizes_differ_by_at_most_one(tmp_path: Path, options: dict[str, int], sizes: list[int]) -> None:
    source = few_digits(sum(sizes))
    info = make(source, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert [entry["samples"] for entry in info["shards"]] == sizes
    assert verify(tmp_path / "out") == []


def test_broken_images_are_dropped_and_listed(tmp_path: Path) -> None:
    image_folder(tmp_path / "in", {"a": 6, "b": 5})
    (tmp_path / "in" / "a" / "cut.jpg").write_bytes(encoded("JPEG", size=(64, 64))[:700])
    (tmp_path / "in" / "a" / "cut.png").write_bytes(encoded("PNG", size=(64, 64))[:700])
    (tmp_path / "in" / "b" / "text.jpg").write_text("hello")
    (tmp_path / "in" / "b" / "nothing.webp").write_bytes(b"")
    info = make(open_source(str(tmp_path / "in")), tmp_path / "out", shards=3)
    assert [item["file"] for item in info["dropped"]] == ["a/cut.jpg", "a/cut.png", "b/nothing.webp", "b/text.jpg"]
    assert [item["reason"] for item in info["dropped"]][2:] == ["empty file", "not an image"]
    assert all("cannot be decoded" in item["reason"] for item in info["dropped"][:2])
    assert [entry["samples"] for entry in info["shards"]] == [4, 4, 3]
    assert json.loads((tmp_path / "out" / "info.json").read_text())["dropped"] == info["dropped"]
    assert verify(tmp_path / "out") == []


def test_nothing_but_broken_images_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "text.jpg").write_text("hello")
    with pytest.raises(UserError, match=r"none of its 1 images can be used \(first: text.jpg: not an image\)"):
        make(open_source(str(tmp_path / "in")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unlabelled_flat_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(5):
        (tmp_path / "in" / f"{number}.png").write_bytes(encoded("PNG", number, mode="L"))
    info = make(open_source(str(tmp_path / "in")), tmp_path / "out")
    assert (info["classes"], info["labelled"], info["channels"]) == (None, False, 1)
    assert all(name.endswith(".png") for name in members(tmp_path / "out"))
    assert verify(tmp_path / "out") == []
    assert stats(tmp_path / "out")["labelled"] is False
    split = make(open_source(str(tmp_path / "in")), tmp_path / "split", holdout=0.4)
    assert (split["train"]["samples"], split["test"]["samples"]) == (3, 2)


def test_holdout_is_stratified_disjoint_and_repeatable(tmp_path: Path) -> None:
    files = image_folder(tmp_path / "in", {"a": 20, "b": 10, "c": 3, "d": 1})
    source = open_source(str(tmp_path / "in"))
    result = make(source, tmp_path / "out", holdout=0.2, shards=4)
    make(source, tmp_path / "again", holdout=0.2, shards=4)
    train, test = labelled_images(tmp_path / "out" / "train"), labelled_images(tmp_path / "out" / "test")
    assert Counter(test.values()) == {0: 4, 1: 2, 2: 1}
    assert not train.keys() & test.keys()
    assert train.keys() | test.keys() == set(files.values())
    assert {**train, **test} == {data: "abcd".index(file[0]) for file, data in files.items()}
    assert test == labelled_images(tmp_path / "again" / "test")
    assert [entry["samples"] for entry in result["train"]["shards"]] == [7, 7, 7, 6]
    assert not (tmp_path / "out" / "info.json").exists()
    for part in ("train", "test"):
        assert json.loads((tmp_path / "out" / part / "info.json").read_text()) == result[part]
        assert result[part]["classes"] == ["a", "b", "c", "d"]
        assert verify(tmp_path / "out" / part) == []
    with pytest.raises(UserError, match="name one of its parts: test, train"):
        verify(tmp_path / "out")


def test_resize_scales_the_shorter_side_and_keeps_the_kind(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    original = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    original.save(tmp_path / "in" / "a.jpg", exif=exif)
    original.save(tmp_path / "in" / "b.png")
    original.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "in" / "c.webp")
    original.convert("P").save(tmp_path / "in" / "d.png")
    original.resize((25, 20)).save(tmp_path / "in" / "e.png")
    info = make(open_source(str(tmp_path / "in")), tmp_path / "out", resize=20, shuffle=False)
    stored = {name: Image.open(io.BytesIO(data)) for name, data in members(tmp_path / "out").items()}
    assert {name: (image.format, image.size) for name, image in stored.items()} == {
        "00000000.jpg": ("JPEG", (30, 20)),
        "00000001.png": ("PNG", (30, 20)),
        "00000002.webp": ("WEBP", (20, 30)),
        "00000003.png": ("PNG", (30, 20)),
        "00000004.png": ("PNG", (25, 20)),
    }
    expected = original.resize((30, 20), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(np.asarray(stored["00000001.png"]), np.asarray(expected))
    assert members(tmp_path / "out")["00000004.png"] == (tmp_path / "in" / "e.png").read_bytes()
    assert stored["00000000.jpg"].getexif()[0x0112] == 6
    assert info["mean_image_size"] == {"height": 22.0, "width": 27.0}
    assert verify(tmp_path / "out") == []


def test_quality_is_that_of_resized_jpegs(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(encoded("JPEG", size=(80, 80)))
    sizes = []
    for quality in (30, 95):
        make(open_source(str(tmp_path / "in")), tmp_path / str(quality), resize=40, quality=quality)
        sizes.append(len(members(tmp_path / str(quality))["00000000.jpg"]))
    assert sizes[0] < sizes[1] / 2


def test_parquet_is_packed_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    images = [encoded("JPEG", number, quality=40) for number in range(6)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])})
    rows = {"image": [{"bytes": data, "path": None} for data in images], "label": [0, 1] * 3}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "p.parquet"))
    info = make(open_source(str(tmp_path / "p.parquet")), tmp_path / "out", keep_names=True)
    assert labelled_images(tmp_path / "out") == dict(zip(images, [0, 1] * 3, strict=True))
    assert info["classes"] == ["x", "y"]


def test_a_full_folder_is_refused_and_overwrite_replaces_only_the_shard_set(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(few_digits(30), out, shards=3)
    (out / "notes.md").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        make(few_digits(10), out)
    assert len(list(out.glob("*.tar"))) == 3
    make(few_digits(10), out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["000000.tar", "info.json", "notes.md"]
    make(few_digits(60), out, overwrite=True, holdout=0.5)
    assert sorted(path.name for path in out.iterdir()) == ["notes.md", "test", "train"]
    with pytest.raises(UserError, match="is a file"):
        make(few_digits(10), out / "notes.md")


def test_an_interrupted_make_leaves_no_info_and_no_half_shard(tmp_path: Path) -> None:
    whole = few_digits(40)
    calls: list[int] = []

    def failing(index: int) -> RawSample:
        calls.append(index)
        if len(calls) > 40 + 30:  # all are examined first, then written
            raise OSError(28, "No space left on device")
        return whole.sample(index)

    source = Source("breaks", None, 40, whole.classes, whole.labels, failing)
    with pytest.raises(RunError, match="No space left"):
        make(source, tmp_path / "out", shards=8)
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert "info.json" not in left
    assert all(name.endswith(".tar") for name in left)
    make(whole, tmp_path / "out", shards=2, overwrite=True)
    assert verify(tmp_path / "out") == []


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
    ],
)
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(few_digits(10), tmp_path / "out", **options)


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "000001.tar").read_bytes())
    data[108] ^= 1  # the owner's number: read by no one, seen by the checksum
    with tarfile.open(folder / "000001.tar") as tar:
        data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
        assert tar.getmembers()
    (folder / "000001.tar").write_bytes(data)


def test_verify_checksum(digits: Path) -> None:
    flip_a_byte(digits)
    assert [(d.shard, d.kind) for d in verify(digits)] == [("000001.tar", "checksum")]


def test_verify_size(digits: Path) -> None:
    with (digits / "000002.tar").open("ab") as file:
        file.write(bytes(512))
    assert [(d.shard, d.kind) for d in verify(digits)] == [("000002.tar", "size"), ("000002.tar", "checksum")]


@pytest.mark.parametrize("cut", [0, 700, 1536, 4096 + 100, -10000])
def test_verify_truncated_wherever_the_cut_is(digits: Path, cut: int) -> None:
    """Inside a header, inside an image, between two members, in the end mark: tar readers notice only some of them."""
    data = (digits / "000001.tar").read_bytes()
    (digits / "000001.tar").write_bytes(data[:cut])
    agree(digits)
    defects = verify(digits)
    assert [d for d in defects if d.kind == "truncated" and d.shard == "000001.tar"]
    assert {d.shard for d in defects} == {"000001.tar"}
    if cut >= 0:
        assert "count" in kinds(defects)


def test_verify_end_mark_cut_off(digits: Path) -> None:
    path = digits / "000001.tar"
    with tarfile.open(path) as tar:
        tar.getmembers()
        end = tar.offset
    path.write_bytes(path.read_bytes()[:end])
    agree(digits)
    assert [(d.kind, d.detail) for d in verify(digits)] == [("truncated", "the end mark is missing: the file was cut")]


def test_verify_bad_header_in_the_middle(digits: Path) -> None:
    path = digits / "000001.tar"
    with tarfile.open(path) as tar:
        header = tar.getmembers()[10].offset
    data = bytearray(path.read_bytes())
    data[header + 150] ^= 0xFF
    path.write_bytes(data)
    agree(digits)
    assert kinds(verify(digits)) == ["truncated", "count"]


def test_verify_missing_member(digits: Path) -> None:
    rewrite(digits / "000000.tar", lambda old: [item for item in old if item[0] != "00000003.png"])
    agree(digits)
    assert [(d.key, d.kind) for d in verify(digits)] == [("00000003", "missing_member")]


def test_verify_unreadable_image(digits: Path) -> None:
    bad = {"00000003.png": b"text", "00000004.png": encoded("PNG", size=(64, 64))[:500]}
    rewrite(digits / "000000.tar", lambda old: [(name, bad.get(name, data)) for name, data in old])
    agree(digits)
    assert [(d.key, d.kind) for d in verify(digits)] == [
        ("00000003", "unreadable_image"),
        ("00000004", "unreadable_image"),
    ]


def test_verify_duplicate_key_side_by_side_apart_and_across_shards(digits: Path) -> None:
    rewrite(digits / "000000.tar", lambda old: [*old[:2], *old])
    agree(digits)
    assert [(d.key, d.kind) for d in verify(digits)] == [("00000000", "duplicate_key")] * 2
    rewrite(digits / "000000.tar", lambda old: [*old[2:], ("00000007.webp", encoded("WEBP"))])
    rewrite(digits / "000001.tar", lambda old: [(name.replace("00000021", "00000005"), data) for name, data in old])
    agree(digits)
    duplicates = [(d.shard, d.key) for d in verify(digits) if d.kind == "duplicate_key"]
    assert duplicates == [("000000.tar", "00000007"), ("000001.tar", "00000005")]


def test_verify_labels(digits: Path) -> None:
    bad = {
        "00000001.cls": b"cat",
        "00000002.cls": b"10",
        "00000003.cls": b"-1",
        "00000004.cls": b"3.0",
        "00000005.cls": b"9" * 5000,
    }
    rewrite(digits / "000000.tar", lambda old: [(n, bad.get(n, d)) for n, d in old if n != "00000006.cls"])
    agree(digits)
    assert [(d.key[-1], d.kind) for d in verify(digits)] == [
        ("1", "bad_label"),
        ("2", "label_out_of_range"),
        ("3", "label_out_of_range"),
        ("4", "bad_label"),
        ("5", "bad_label"),
        ("6", "bad_label"),
    ]


def test_verify_missing_and_extra_shards(digits: Path) -> None:
    (digits / "000001.tar").rename(digits / "000007.tar")
    assert [(d.shard, d.kind) for d in verify(digits)] == [
        ("000001.tar", "missing_shard"),
        ("000007.tar", "extra_shard"),
    ]


def test_verify_counts(digits: Path) -> None:
    info = json.loads((digits / "info.json").read_text())
    info["samples"] += 1
    info["shards"][1]["samples"] -= 1
    (digits / "info.json").write_text(json.dumps(info))
    assert [(d.shard, d.kind) for d in verify(digits)] == [("info.json", "count"), ("000001.tar", "count")]


def test_verify_lists_the_defects_of_all_shards(digits: Path) -> None:
    (digits / "000000.tar").write_bytes((digits / "000000.tar").read_bytes()[:5000])
    rewrite(
        digits / "000002.tar", lambda old: [(name, b"x" if name.endswith("45.cls") else data) for name, data in old]
    )
    found = {(d.shard, d.kind) for d in verify(digits)}
    assert {("000000.tar", "truncated"), ("000000.tar", "size"), ("000002.tar", "bad_label")} <= found


def test_verify_plain_tars_without_info(digits: Path) -> None:
    (digits / "info.json").unlink()
    assert verify(digits) == []
    rewrite(digits / "000000.tar", lambda old: [(n, b"77" if n == "00000001.cls" else d) for n, d in old])
    assert verify(digits) == []
    rewrite(digits / "000000.tar", lambda old: [(n, b"dog" if n == "00000001.cls" else d) for n, d in old])
    assert kinds(verify(digits)) == ["bad_label"]


def test_two_families_of_plain_tars_may_share_keys(digits: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.mkdir()
    for family in ("train", "val"):
        shutil.copy(digits / "000000.tar", both / f"{family}-000000.tar")
    assert verify(both) == []
    shutil.copy(digits / "000000.tar", both / "val-000001.tar")
    assert kinds(verify(both)) == ["duplicate_key"] * 20


def test_pickles_in_a_shard_are_not_loaded(digits: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    bomb = pickle.dumps(Bomb())
    rewrite(
        digits / "000000.tar",
        lambda old: [*old, ("00000019.pyd", bomb), ("00000019.pickle", bomb), ("00000019.pth", bomb)],
    )
    agree(digits)
    assert verify(digits) == []
    assert stats(digits)["samples"] == 60
    assert not (tmp_path / "exploded").exists()


def test_broken_or_absent_info(digits: Path, tmp_path: Path) -> None:
    info = json.loads((digits / "info.json").read_text())
    (digits / "info.json").write_text("{")
    with pytest.raises(UserError, match=r"info\.json"):
        verify(digits)
    info["shards"][0]["file"] = "../elsewhere.tar"
    (digits / "info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"shards\.0\.file"):
        verify(digits)
    with pytest.raises(UserError, match="no such folder"):
        verify(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no shards here"):
        stats(tmp_path / "empty")


def test_stats(digits: Path) -> None:
    found = stats(digits)
    target = Counter(load_digits().target[:60].tolist())
    assert found == {
        "samples": 60,
        "shards": 3,
        "bytes": sum(path.stat().st_size for path in digits.glob("*.tar")),
        "labelled": True,
        "samples_per_class": {str(digit): target[digit] for digit in range(10)},
        "samples_per_shard": {"mean": 20.0, "min": 20, "max": 20},
        "image_size": {"height": {"mean": 8.0, "min": 8, "max": 8}, "width": {"mean": 8.0, "min": 8, "max": 8}},
        "channels": 1,
    }
    assert json.loads(json.dumps(found)) == found


def test_stats_of_mixed_images_and_of_classes_with_one_name(tmp_path: Path) -> None:
    images = [encoded("PNG", 0, (10, 6), "L"), encoded("PNG", 1, (20, 8)), encoded("PNG", 2, (30, 10))]
    labels = np.array([0, 2, 2])
    source = Source(
        "three",
        None,
        3,
        ["crane", "ox", "crane"],
        labels,
        lambda i: RawSample(str(i), images[i], "png", int(labels[i])),
    )
    make(source, tmp_path / "out")
    found = stats(tmp_path / "out")
    assert found["image_size"]["width"] == {"mean": 20.0, "min": 10, "max": 30}
    assert found["image_size"]["height"] == {"mean": 8.0, "min": 6, "max": 10}
    assert found["samples_per_class"] == {"crane (0)": 1, "ox": 0, "crane (2)": 2}
    assert found["channels"] == 3


def test_stats_names_the_first_defect(digits: Path) -> None:
    rewrite(digits / "000001.tar", lambda old: [(n, b"x" if n == "00000021.png" else d) for n, d in old])
    with pytest.raises(UserError, match=r"000001\.tar: 00000021: unreadable_image"):
        stats(digits)
    (digits / "000001.tar").unlink()
    with pytest.raises(UserError, match=r"000001\.tar: missing_shard"):
        stats(digits)
