"""Shard sets: what their fingerprints depend on, and what is refused."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ssl_vit.data.overlap import overlaps, redrawn, saw_images
from ssl_vit.data.shards import Shard, ShardSet, open_shards
from ssl_vit.interfaces import RunError, UserError
from tests.tars import encoded, packed, write_tar


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed("digits", tmp_path_factory.mktemp("shards"), "test", shards=3)


def test_repacked_shards_have_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    packed("digits", tmp_path / "same", "test", shards=3)
    packed("digits", tmp_path / "other", "test", shards=3, seed=5)
    first = open_shards(str(folder))
    assert open_shards(str(tmp_path / "same")).fingerprint == first.fingerprint
    assert open_shards(str(tmp_path / "other")).counts == first.counts
    assert open_shards(str(tmp_path / "other")).fingerprint != first.fingerprint


def test_shards_whose_classes_were_renamed_have_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    renamed = shutil.copytree(folder, tmp_path / "renamed")
    info = (renamed / "info.json").read_text()
    (renamed / "info.json").write_text(info.replace('"7"', '"seven"'))
    ours, theirs = open_shards(str(folder)), open_shards(str(renamed))
    assert ours.classes != theirs.classes and ours.fingerprint != theirs.fingerprint


@pytest.mark.parametrize("spec", ["pipe:cat x.tar", "nosuchscheme://bucket/x.tar"])
def test_what_cannot_be_opened_is_refused(spec: str) -> None:
    with pytest.raises(UserError, match=r"shell commands are not run|unsupported URL"):
        open_shards(spec)


def test_a_shard_that_is_listed_twice_is_refused(folder: Path, tmp_path: Path) -> None:
    twice = shutil.copytree(folder, tmp_path / "twice")
    info = json.loads((twice / "info.json").read_text())
    (twice / "info.json").write_text(json.dumps(info | {"shards": [*info["shards"], info["shards"][0]]}))
    with pytest.raises(UserError, match=r"lists 000000.tar more than once"):
        open_shards(str(twice))


def test_a_list_of_more_samples_than_a_shard_can_hold_is_refused(folder: Path, tmp_path: Path) -> None:
    many = shutil.copytree(folder, tmp_path / "many")
    info = json.loads((many / "info.json").read_text())
    first = info["shards"][0]
    info["samples"] += 10**6 - first["samples"]
    first["samples"] = 10**6
    (many / "info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"000000\.tar: it holds \d+ samples, and info\.json lists 1000000"):
        open_shards(str(many)).open(0)


def test_a_pattern_that_matches_folders_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="is a folder; name the shards in it"):
        open_shards(f"{folder.parent}/*")


def test_too_many_open_files_name_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, mode: str) -> Any:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    shards = open_shards(str(folder))
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(RunError, match=r"data\.lanes"):
        shards.open(0)


def test_tars_without_info_json_are_distinguished_by_their_headers_and_labels(tmp_path: Path) -> None:
    def packed(name: str, label: bytes, image: bytes = b"pixels") -> str:
        write_tar(tmp_path / name / "0.tar", {"a.jpg": image, "a.cls": label})
        return open_shards(str(tmp_path / name)).fingerprint

    first = packed("one", b"1")
    assert packed("same", b"1") == first
    assert len({first, packed("label", b"2"), packed("image", b"1", b"more pixels")}) == 3


def test_an_empty_first_shard_says_nothing_of_the_labels(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", {})
    write_tar(tmp_path / "1.tar", {"a.jpg": b"pixels", "a.cls": b"1"})
    assert open_shards(str(tmp_path)).labeled


def test_remote_shards_of_unknown_content_are_told_apart_by_their_address() -> None:
    def fingerprint(url: str, checksum: str = "") -> str:
        return ShardSet(places=(url,), shards=(Shard(f"{url}/0.tar?sig=1", 5, checksum),)).fingerprint

    first = fingerprint("https://host/train")
    assert fingerprint("https://host/test") != first
    assert fingerprint("https://host/train", "ab") == fingerprint("https://mirror/other", "ab") != first


def test_shards_in_common_have_an_address_a_checksum_or_headers_in_common() -> None:
    def among(*shards: Shard) -> int:
        ours = (Shard("a.tar", 2, "sum"), Shard("b.tar", 2, header="head"), Shard("c.tar", 2), Shard("d.tar", 2))
        return ShardSet(("ours",), ours).in_common(ShardSet(("theirs",), shards))

    assert among(Shard("x.tar", 2), Shard("y.tar", 2)) == 0, "what is unknown is not alike"
    assert among(Shard("x.tar", 2, "sum")) == among(Shard("x.tar", 2, header="head")) == among(Shard("c.tar", 2)) == 1
    assert among(Shard("c.tar", 2), Shard("d.tar", 2), Shard("x.tar", 2, "sum")) == 3


def test_training_shards_under_other_names_overlap_where_this_machine_has_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test, copy = open_shards(str(folder)), str(shutil.copytree(folder, tmp_path / "copy"))
    other = str(write_tar(tmp_path / "other.tar", {"0.png": encoded(Image.new("L", (8, 8)))}))
    monkeypatch.setenv("SSL_VIT_CACHE", str(tmp_path / "cache"))
    for name in ("bee", "wasp"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("L", (8, 8), number).save(tmp_path / "images" / name / f"{number}.png")
    elsewhere = ["http://127.0.0.1:9/a.tar", f"{tmp_path}/gone", f"{tmp_path}/images", f"{tmp_path}/images#train"]
    assert not overlaps([*elsewhere, other], test)
    assert overlaps(elsewhere, ShardSet((f"{tmp_path}/images#test",), ())), "by its name"
    assert not (tmp_path / "cache").exists(), "no images are packed for this"
    assert overlaps([copy], test) and overlaps([*elsewhere, other, copy], test) and overlaps([test.spec], test)
    assert overlaps([f"{tmp_path}/gone"], test, open_shards(copy)), "opened before"
    assert overlaps([other, copy], test, open_shards(other)) and not overlaps([other], test, open_shards(other))


def test_shards_inside_a_folder_of_shards_are_others(folder: Path, tmp_path: Path) -> None:
    outer, inner = shutil.copytree(folder, tmp_path / "outer"), shutil.copytree(folder, tmp_path / "outer" / "more")
    (tmp_path / "link").symlink_to(inner)
    assert saw_images([f"{tmp_path}/link"], str(inner))
    assert not saw_images([str(outer)], str(inner)) and not saw_images([str(inner)], str(outer))


@pytest.mark.parametrize(
    ("trained", "test", "drawn"),
    [
        ("flat#train", "flat#test", True),
        ("./flat#train", "imagefolder:flat#test", True),
        ("flat#train", "flat", False),
        ("other#train", "flat#test", False),
        ("parts#train", "parts#test", False),  # folders, which stay
    ],
)
def test_a_holdout_is_drawn_again_with_the_folder_of_its_training_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: str, test: str, drawn: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("flat/bee", "other/bee", "parts/train/bee", "parts/test/bee"):
        Path(name).mkdir(parents=True)
    assert redrawn([trained], test) == drawn
    assert saw_images([test], test)
