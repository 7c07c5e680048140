from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from ssl_vit.data.packing import pack
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.data.verify import Defect, stats, verify
from ssl_vit.files import sha256
from ssl_vit.interfaces import UserError

from .packing.pictures import encoded


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
        entry.update(bytes=path.stat().st_size, sha256=sha256(path))
    info["content_hash"] = hashlib.sha256("".join(entry["sha256"] for entry in info["shards"]).encode()).hexdigest()
    (folder / "info.json").write_text(json.dumps(info))


def kinds(defects: list[Defect]) -> list[str]:
    return [defect.kind for defect in defects]


@pytest.fixture(scope="module")
def packed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "digits"
    whole = open_source("digits", split="train")
    assert whole.labels is not None
    pack(replace(whole, items=range(60), labels=whole.labels[:60]), out, shards=3)
    return out


@pytest.fixture
def digits(packed_once: Path, tmp_path: Path) -> Path:
    """60 digits in three shards of 20, to be damaged."""
    return Path(shutil.copytree(packed_once, tmp_path / "digits"))


def test_verify_checksum(digits: Path) -> None:
    rewrite(digits / "000001.tar", lambda old: old)  # the same members with another owner and mode
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
    path.write_bytes(path.read_bytes()[: tar.offset])
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
    assert [(d.key[-1], d.kind) for d in verify(digits)] == [("3", "unreadable_image"), ("4", "unreadable_image")]


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
    bad = {f"0000000{number}.cls": label for number, label in enumerate((b"cat", b"10", b"-1", b"3.0", b"9" * 5000))}
    rewrite(digits / "000000.tar", lambda old: [(n, bad.get(n, d)) for n, d in old if n != "00000006.cls"])
    agree(digits)
    defects = verify(digits)
    assert [d.key[-1] for d in defects] == ["0", "1", "2", "3", "4", "6"]
    assert kinds(defects) == ["bad_label", *["label_out_of_range"] * 2, *["bad_label"] * 3]


def test_verify_missing_and_extra_shards(digits: Path) -> None:
    (digits / "000001.tar").rename(digits / "000007.tar")
    defects = [(d.shard, d.kind) for d in verify(digits)]
    assert defects == [("000001.tar", "missing_shard"), ("000007.tar", "extra_shard")]


def test_verify_counts(digits: Path) -> None:
    info = json.loads((digits / "info.json").read_text())
    info["samples"] += 1
    info["shards"][1]["samples"] -= 1
    (digits / "info.json").write_text(json.dumps(info))
    assert [(d.shard, d.kind) for d in verify(digits)] == [("info.json", "count"), ("000001.tar", "count")]


def test_verify_content_hash(digits: Path) -> None:
    info = json.loads((digits / "info.json").read_text())
    info["content_hash"] = "0" * 64
    (digits / "info.json").write_text(json.dumps(info))
    assert [(d.shard, d.kind) for d in verify(digits)] == [("info.json", "checksum")]
    del info["content_hash"]  # as in sets that were packed before it was written
    (digits / "info.json").write_text(json.dumps(info))
    assert verify(digits) == []


def test_verify_lists_the_defects_of_all_shards_on_any_number_of_processes(digits: Path) -> None:
    (digits / "000000.tar").write_bytes((digits / "000000.tar").read_bytes()[:5000])
    bad = {"00000045.cls": b"x", "00000046.png": b"text"}
    rewrite(digits / "000002.tar", lambda old: [(n.replace("47", "21"), bad.get(n, data)) for n, data in old])
    defects = verify(digits, jobs=1)
    assert {
        ("000000.tar", "", "truncated"),
        ("000000.tar", "", "size"),
        ("000002.tar", "", "checksum"),
        ("000002.tar", "00000045", "bad_label"),
        ("000002.tar", "00000046", "unreadable_image"),
        ("000002.tar", "00000021", "duplicate_key"),
    } <= {(d.shard, d.key, d.kind) for d in defects}
    assert verify(digits, jobs=2) == defects


def test_an_unfinished_set_is_not_taken_for_plain_tars(digits: Path) -> None:
    (digits / "info.json").unlink()
    for look in (verify, stats):
        with pytest.raises(UserError, match="packing was not finished; run its `ssl-vit shards make` command again"):
            look(digits)


def test_verify_plain_tars_without_info(digits: Path) -> None:
    (digits / "info.json").unlink()
    (digits / "packing.jsonl").unlink()
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

    bombs = [(f"00000019.{suffix}", pickle.dumps(Bomb())) for suffix in ("pyd", "pickle", "pth")]
    rewrite(digits / "000000.tar", lambda old: old + bombs)
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
        "labeled": True,
        "samples_per_class": {str(digit): target[digit] for digit in range(10)},
        "samples_per_shard": {"mean": 20.0, "min": 20, "max": 20},
        "image_size": {"height": {"mean": 8.0, "min": 8, "max": 8}, "width": {"mean": 8.0, "min": 8, "max": 8}},
        "channels": 1,
    }
    assert json.loads(json.dumps(found)) == found


def test_stats_of_mixed_images_and_of_classes_with_one_name(tmp_path: Path) -> None:
    images = [encoded("PNG", 0, (10, 6), "L"), encoded("PNG", 1, (20, 8)), encoded("PNG", 2, (30, 10))]
    labels = np.array([0, 2, 2])
    names = ["crane", "ox", "crane"]
    pack(Source("three", None, names, labels, range(3), lambda n: (str(n), images[n]), ""), tmp_path / "out")
    found = stats(tmp_path / "out")
    size = {"height": {"mean": 8.0, "min": 6, "max": 10}, "width": {"mean": 20.0, "min": 10, "max": 30}}
    assert found["image_size"] == size
    assert found["samples_per_class"] == {"crane (0)": 1, "ox": 0, "crane (2)": 2}
    assert found["channels"] == 3


def test_stats_names_the_first_defect(digits: Path) -> None:
    rewrite(digits / "000001.tar", lambda old: [(n, b"x" if n == "00000021.png" else d) for n, d in old])
    with pytest.raises(UserError, match=r"000001\.tar: 00000021: unreadable_image"):
        stats(digits)
    (digits / "000001.tar").unlink()
    with pytest.raises(UserError, match=r"000001\.tar: missing_shard"):
        stats(digits)


@pytest.fixture
def splits(digits: Path, tmp_path: Path) -> Path:
    """40 train and 20 val samples, some with the same keys, in one folder with about.json."""
    folder, parts = tmp_path / "splits", {}
    folder.mkdir()
    for split, shards in {"train": 2, "val": 1}.items():
        names = [f"{split}-{number:06d}.tar" for number in range(shards)]
        for name in names:
            shutil.copy(digits / name[-10:], folder / name)
        entries = [{"file": name, "samples": 20, "sha256": sha256(folder / name)} for name in names]
        parts[split] = {"samples": 20 * shards, "shards": entries}
    (folder / "about.json").write_text(json.dumps({"classes": list("0123456789"), "splits": parts, "note": "made"}))
    return folder


def test_several_splits_in_one_folder(splits: Path) -> None:
    assert verify(splits) == []
    found = stats(splits)
    assert (found["samples"], found["shards"], found["samples_per_shard"]["max"]) == (60, 3, 20)
    assert sum(found["samples_per_class"].values()) == 60


def test_verify_holds_splits_against_about_json(splits: Path) -> None:
    about = json.loads((splits / "about.json").read_text())
    about["splits"]["val"]["samples"] = 21
    (splits / "about.json").write_text(json.dumps(about))
    rewrite(splits / "train-000000.tar", lambda old: [(n, b"10" if n == "00000001.cls" else d) for n, d in old])
    (splits / "train-000001.tar").rename(splits / "train-000002.tar")
    defects = verify(splits)
    assert kinds(defects) == ["missing_shard", "extra_shard", "count", "checksum", "label_out_of_range"]
    assert [d.shard[-10:] for d in defects] == ["000001.tar", "000002.tar", "about.json", *["000000.tar"] * 2]
    about["splits"]["val"]["shards"][0]["file"] = "../val.tar"
    (splits / "about.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"about\.json: .*file"):
        verify(splits)


def test_a_compressed_shard_is_a_defect_not_a_crash(digits: Path) -> None:
    """Training counts and reads plain tars only."""
    (digits / "000001.tar").write_bytes(gzip.compress((digits / "000001.tar").read_bytes()))
    agree(digits)
    assert kinds(verify(digits)) == ["truncated", "count"]
