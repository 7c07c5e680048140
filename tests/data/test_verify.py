"""Every kind of defect is found, and nothing in a shard is executed or believed."""

from __future__ import annotations

import gzip
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

from ssl_vit.data.packing import content_hash, pack
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.data.verify import Defect, stats, verify
from ssl_vit.files import sha256
from ssl_vit.interfaces import UserError
from tests.hostile.corpus import Bomb
from tests.tars import write_tar

from .packing.pictures import encoded

Members = list[tuple[str, bytes]]


def rewrite(path: Path, change: Callable[[Members], Members]) -> None:
    """Write the tar again with its (name, bytes) members changed, and bring info.json beside it up to date, so that
    only the deeper checks can find a defect."""
    with tarfile.open(path) as tar:
        old = [(member.name, tar.extractfile(member).read()) for member in tar.getmembers()]  # type: ignore[union-attr]
    write_tar(path, change(old))
    agree(path.parent)


def replaced(bad: dict[str, bytes]) -> Callable[[Members], Members]:
    return lambda old: [(name, bad.get(name, data)) for name, data in old]


def agree(folder: Path) -> None:
    """Bring sizes and checksums in info.json up to date."""

    def change(info: Any) -> None:
        for entry in info["shards"]:
            entry.update(bytes=(folder / entry["file"]).stat().st_size, sha256=sha256(folder / entry["file"]))
        info["content_hash"] = content_hash(entry["sha256"] for entry in info["shards"])

    edit(folder / "info.json", change)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def kinds(defects: list[Defect]) -> list[str]:
    return [defect.kind for defect in defects]


def where(defects: list[Defect]) -> list[tuple[str, str]]:
    return [(defect.shard, defect.kind) for defect in defects]


@pytest.fixture(scope="module")
def packed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "digits"
    whole = open_source("digits", split="train")
    assert whole.labels is not None
    pack(replace(whole, items=range(60), labels=whole.labels[:60]), out, Options(shards=3))
    return out


@pytest.fixture
def digits(packed_once: Path, tmp_path: Path) -> Path:
    """60 digits in three shards of 20, to be damaged."""
    return Path(shutil.copytree(packed_once, tmp_path / "digits"))


def test_size_and_checksum(digits: Path) -> None:
    data = bytearray((digits / "000001.tar").read_bytes())
    data[-1] ^= 1  # in the end mark, where no reader looks
    (digits / "000001.tar").write_bytes(data)
    (digits / "000002.tar").write_bytes((digits / "000002.tar").read_bytes() + bytes(512))
    found = [("000001.tar", "checksum"), ("000001.tar", "truncated")]
    assert where(verify(digits)) == [*found, ("000002.tar", "size"), ("000002.tar", "checksum")]


@pytest.mark.parametrize("cut", [0, 700, 1536, 4096 + 100, -10000])
def test_truncated_wherever_the_cut_is(digits: Path, cut: int) -> None:
    """Inside a header, inside an image, between two members, in the end mark: tar readers notice only some of them."""
    data = (digits / "000001.tar").read_bytes()
    (digits / "000001.tar").write_bytes(data[:cut])
    agree(digits)
    defects = verify(digits)
    assert "truncated" in kinds(defects) and {d.shard for d in defects} == {"000001.tar"}
    assert cut < 0 or "count" in kinds(defects)


def test_an_end_mark_cut_off_and_a_bad_header_in_the_middle(digits: Path) -> None:
    one, two = digits / "000001.tar", digits / "000002.tar"
    with tarfile.open(one) as tar:
        header = tar.getmembers()[10].offset
        end = tar.offset
    one.write_bytes(one.read_bytes()[:end])
    data = bytearray(two.read_bytes())
    data[header + 150] ^= 0xFF
    two.write_bytes(data)
    agree(digits)
    assert where(verify(digits)) == [(one.name, "truncated"), (two.name, "truncated"), (two.name, "count")]


def test_a_compressed_shard(digits: Path) -> None:
    """Training counts and reads plain tars only."""
    (digits / "000001.tar").write_bytes(gzip.compress((digits / "000001.tar").read_bytes()))
    agree(digits)
    assert kinds(verify(digits)) == ["truncated", "count"]


def test_members_images_and_labels(digits: Path) -> None:
    labels = {f"0000000{number}.cls": label for number, label in enumerate((b"cat", b"10", b"-1", b"3.0", b"9" * 5000))}
    images = {"00000021.png": b"text", "00000022.png": encoded("PNG", size=(64, 64))[:500]}
    gone = {"00000006.cls", "00000023.png"}
    rewrite(digits / "000000.tar", lambda old: [m for m in replaced(labels)(old) if m[0] not in gone])
    rewrite(digits / "000001.tar", lambda old: [m for m in replaced(images)(old) if m[0] not in gone])
    assert [(int(d.key), d.kind) for d in verify(digits)] == [
        *[(n, "bad_label") for n in (0, 1, 2, 3, 4, 6)],
        *[(21, "unreadable_image"), (22, "unreadable_image"), (23, "missing_member")],
    ]


def test_a_key_twice_side_by_side_apart_and_across_shards(digits: Path) -> None:
    rewrite(digits / "000000.tar", lambda old: [*old[:2], *old])
    assert [(d.key, d.kind) for d in verify(digits)] == [("00000000", "duplicate_key")] * 2
    rewrite(digits / "000000.tar", lambda old: [*old[2:], ("00000007.webp", encoded("WEBP"))])
    rewrite(digits / "000001.tar", lambda old: [(name.replace("00000021", "00000005"), data) for name, data in old])
    duplicates = [(d.shard, d.key) for d in verify(digits) if d.kind == "duplicate_key"]
    assert duplicates == [("000000.tar", "00000007"), ("000001.tar", "00000005")]


def test_missing_and_extra_shards_and_counts(digits: Path) -> None:
    def change(info: Any) -> None:
        info["samples"] += 1
        info["shards"][2]["samples"] -= 1

    edit(digits / "info.json", change)
    (digits / "000001.tar").rename(digits / "000007.tar")
    found = [("000001.tar", "missing_shard"), ("000007.tar", "extra_shard"), ("info.json", "count")]
    assert where(verify(digits)) == [*found, ("000002.tar", "count")]


def test_content_hash(digits: Path) -> None:
    edit(digits / "info.json", lambda info: info.update(content_hash="0" * 64))
    assert where(verify(digits)) == [("info.json", "checksum")]
    edit(digits / "info.json", lambda info: info.pop("content_hash"))
    assert verify(digits) == []


def test_an_unfinished_set_is_not_taken_for_plain_tars(digits: Path) -> None:
    (digits / "info.json").unlink()
    for look in (verify, stats):
        with pytest.raises(UserError, match=r"not finished, .*; run its `ssl-vit shards make` command again"):
            look(digits)


def test_plain_tars_without_info(digits: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    write_tar(plain / "._train-000000.tar", {"00000000.txt": b""})  # of macOS
    for family in ("train", "val"):  # two families may share keys
        shutil.copy(digits / "000000.tar", plain / f"{family}-000000.tar")
    assert verify(plain, jobs=1) == []
    rewrite(digits / "000000.tar", replaced({"00000001.cls": b"77"}))
    shutil.copy(digits / "000000.tar", plain / "val-000000.tar")
    assert verify(plain, jobs=1) == []
    rewrite(digits / "000000.tar", replaced({"00000001.cls": b"dog"}))
    shutil.copy(digits / "000000.tar", plain / "val-000001.tar")
    assert kinds(verify(plain, jobs=1)) == ["bad_label", *["duplicate_key"] * 20]


def test_pickles_in_a_shard_are_not_loaded(digits: Path, tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "exploded")
    bombs = [(f"00000019.{suffix}", pickle.dumps(bomb)) for suffix in ("pyd", "pickle", "pth")]
    rewrite(digits / "000000.tar", lambda old: old + bombs)
    assert verify(digits) == [] and stats(digits)["samples"] == 60
    assert not (tmp_path / "exploded").exists()


def test_broken_or_absent_info(digits: Path, tmp_path: Path) -> None:
    edit(digits / "info.json", lambda info: info["shards"][0].update(file="../elsewhere.tar"))
    with pytest.raises(UserError, match=r"shards\.0\.file"):
        verify(digits)
    (digits / "info.json").write_text("{")
    with pytest.raises(UserError, match=r"info\.json"):
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
    rewrite(digits / "000001.tar", replaced({"00000021.png": b"x"}))
    with pytest.raises(UserError, match=r"000001\.tar: 00000021: unreadable_image"):
        stats(digits)


def test_stats_of_mixed_images_and_of_classes_with_one_name(tmp_path: Path) -> None:
    images = [encoded("PNG", 0, (10, 6), "L"), encoded("PNG", 1, (20, 8)), encoded("PNG", 2, (30, 10))]
    names = ["crane", "ox", "crane"]
    pack(Source("three", None, names, np.array([0, 2, 2]), range(3), lambda n: images[n], ""), tmp_path)
    found = stats(tmp_path)
    size = {"height": {"mean": 8.0, "min": 6, "max": 10}, "width": {"mean": 20.0, "min": 10, "max": 30}}
    assert (found["image_size"], found["channels"]) == (size, 3)
    assert found["samples_per_class"] == {"crane (0)": 1, "ox": 0, "crane (2)": 2}


def test_several_splits_in_one_folder(digits: Path, tmp_path: Path) -> None:
    """40 train and 20 val samples, some with the same keys, with about.json."""
    folder, parts = tmp_path / "splits", {}
    folder.mkdir()
    for split, shards in {"train": 2, "val": 1}.items():
        names = [f"{split}-{number:06d}.tar" for number in range(shards)]
        for name in names:
            shutil.copy(digits / name[-10:], folder / name)
        entries = [{"file": name, "samples": 20, "sha256": sha256(folder / name)} for name in names]
        parts[split] = {"samples": 20 * shards, "shards": entries}
    (folder / "about.json").write_text(json.dumps({"classes": list("0123456789"), "splits": parts, "note": "made"}))
    assert verify(folder) == []
    assert (stats(folder)["samples"], stats(folder)["shards"]) == (60, 3)
    edit(folder / "about.json", lambda about: about["splits"]["val"].update(samples=21))
    (folder / "train-000001.tar").rename(folder / "train-000002.tar")
    rewrite(digits / "000000.tar", replaced({"00000001.cls": b"10"}))
    shutil.copy(digits / "000000.tar", folder / "train-000000.tar")
    assert kinds(verify(folder)) == ["missing_shard", "extra_shard", "count", "checksum", "bad_label"]
