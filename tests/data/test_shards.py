"""Shard sets: what their fingerprints depend on, and what is refused."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ssl_vit.data.shards import Shard, ShardSet, open_shards
from ssl_vit.interfaces import RunError, UserError
from tests.tars import packed, write_tar


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


def test_remote_shards_of_unknown_content_are_told_apart_by_their_address() -> None:
    def fingerprint(url: str, checksum: str = "") -> str:
        return ShardSet(places=(url,), shards=(Shard(f"{url}/0.tar?sig=1", 5, checksum),)).fingerprint

    first = fingerprint("https://host/train")
    assert fingerprint("https://host/test") != first
    assert fingerprint("https://host/train", "ab") == fingerprint("https://mirror/other", "ab") != first
