"""What a shard specification names on a web server, and how a failing server is told from a missing file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ssl_vit.data import RemoteConfig
from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.data.shards.info import Info, ShardEntry
from ssl_vit.data.shards.listing import _expanded, list_shards
from ssl_vit.interfaces import RunError, UserError

pytestmark = pytest.mark.usefixtures("no_waiting")
REMOTE = RemoteConfig(timeout=20, retries=2)


@pytest.fixture
def folder(digit_shards: Path, tmp_path: Path) -> Path:
    shutil.copytree(digit_shards, tmp_path / "web" / "shards")
    return tmp_path / "web"


@pytest.fixture
def server(serve: Callable[[Path], Any], folder: Path) -> Any:
    return serve(folder)


def same_samples(one: ShardSet, other: ShardSet) -> bool:
    pairs = [(one.open(shard), other.open(shard)) for shard in range(len(one.urls))]
    return all(a.read(n) == b.read(n) for a, b in pairs for n in range(len(a.samples)))


@pytest.mark.parametrize("spec", ["shards", "shards/", "shards/{000000..000007}.tar"])
def test_a_set_on_a_server_is_the_set_on_the_disk(server: Any, folder: Path, spec: str) -> None:
    local, remote = open_shards(str(folder / "shards")), open_shards(f"{server.url}/{spec}", REMOTE)
    assert remote.urls == tuple(f"{server.url}/shards/{n:06d}.tar" for n in range(8))
    for name in ("counts", "classes", "source", "license", "fingerprint"):
        assert getattr(remote, name) == getattr(local, name)
    assert [(one.checksum, one.size) for one in remote.shards] == [(one.checksum, one.size) for one in local.shards]
    assert not any(server.gets(f"shards/{n:06d}.tar") for n in range(8))  # info.json says it all
    assert same_samples(remote, local)


@pytest.mark.parametrize("spec", ["shards", "shards/*.tar", "**/0.tar"])
def test_files_behind_http_must_be_named_where_no_info_json_does(server: Any, folder: Path, spec: str) -> None:
    (folder / "shards" / "info.json").unlink()
    with pytest.raises(UserError, match=r"name the shards, such as URL/\{000000\.\.000009\}\.tar"):
        open_shards(f"{server.url}/{spec}", REMOTE)


def test_without_info_json_the_samples_are_counted_by_reading(
    server: Any, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    known = open_shards(str(folder / "shards"))
    (folder / "shards" / "info.json").unlink()
    (folder / "shards" / "packing.jsonl").unlink()
    server.always["shards/info.json"] = ("status", 403)  # as stores answer that may not be listed
    found = open_shards(f"{server.url}/shards/{{000000..000007}}.tar", REMOTE)
    assert (found.counts, found.classes, {shard.size for shard in found.shards}) == (known.counts, None, {None})
    assert "8 shard(s) are in no info.json and are downloaded to be counted" in capsys.readouterr().err


def test_a_server_in_trouble_is_waited_for_and_not_taken_for_an_empty_one(server: Any) -> None:
    server.faults["shards/info.json"] = [("status", 503), ("cut", 20)]
    assert len(open_shards(f"{server.url}/shards", REMOTE).urls) == 8
    server.always["shards/info.json"] = ("status", 503)
    with pytest.raises(RunError, match=r"shards/info.json: HTTP status 503.*3 tries"):
        open_shards(f"{server.url}/shards", REMOTE)


def test_signed_urls_keep_their_query_and_do_not_change_the_set(server: Any, folder: Path) -> None:
    one, two = (open_shards(f"{server.url}/shards/00000{{0..3}}.tar?Signature=a/{n}&E=*", REMOTE) for n in (1, 2))
    assert one.urls[3] == f"{server.url}/shards/000003.tar?Signature=a/1&E=*"
    assert one.fingerprint == two.fingerprint == open_shards(f"{folder}/shards/00000{{0..3}}.tar").fingerprint
    assert one.counts == (177, 177, 177, 177) and one.classes


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("shards/000099.tar", "000099.tar: no such shard"),
        ("empty", r"no shards \(\*.tar\) there|holds no images"),
        ("", "did you mean .*/train"),
    ],
)
def test_what_is_not_there_is_named(server: Any, folder: Path, spec: str, said: str) -> None:
    (folder / "empty").mkdir()
    shutil.copytree(folder / "shards", folder / "train")
    with pytest.raises(UserError, match=said):
        open_shards(f"{server.url}/{spec}", REMOTE)
    with pytest.raises(UserError, match=said):
        open_shards(f"{folder}/{spec}")


def test_a_folder_that_a_server_refuses_is_not_taken_for_an_empty_one(server: Any) -> None:
    server.always["shards/info.json"] = ("status", 403)
    with pytest.raises(UserError, match=r"access is refused.*check the credentials; or name the shards"):
        open_shards(f"{server.url}/shards", REMOTE)


@pytest.mark.parametrize("content", ["<html>hello</html>", "[]", '{"shards": [{"file": "000000.tar"}]}', "{}"])
def test_an_info_json_that_is_none_is_named(server: Any, folder: Path, content: str) -> None:
    (folder / "shards" / "info.json").write_text(content)
    for spec in (f"{server.url}/shards", f"{folder}/shards"):
        with pytest.raises(UserError, match=r"shards/info.json: "):
            open_shards(spec, REMOTE)


def test_a_brace_range_has_a_limit_and_a_shard_no_name_that_chains_file_systems(folder: Path) -> None:
    for braces in ("{0..900000000}", "{a-{0000..9999},b}{0000..9999}"):
        with pytest.raises(UserError, match="more than 1,000,000 shards"):
            list_shards(f"{folder}/shards/{braces}.tar", REMOTE)
    paths = {"{a-{0000..1023},b-{0000..1023}}.tar": 2048, "{0..10000000..1000}.tar": 10_001}
    assert {braces: len(_expanded(braces)) for braces in paths} == paths
    for name in ("000000.tar::file", "::", "a/b.tar"):
        with pytest.raises(ValueError, match="file"):
            ShardEntry(file=name, samples=1)
    assert ShardEntry(file="12:30:05.tar", samples=1)


def test_braces_that_do_not_pair_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match="000000"):
        open_shards(f"{folder}/shards/{{000000..000003.tar")


def test_files_of_the_local_disk_have_their_scheme_taken_off(folder: Path) -> None:
    assert open_shards(f"file://{folder}/shards").urls == open_shards(f"{folder}/shards").urls


def test_any_protocol_of_fsspec_will_do() -> None:
    content = {"samples": 1, "shards": [{"file": "a?.tar", "samples": 1}]}
    memory = fsspec.filesystem("memory")
    memory.pipe({"/set/info.json": json.dumps(content).encode(), "/set/a?.tar": b""})
    info = Info.model_validate(content)
    assert list_shards("memory://set", REMOTE) == (["memory:///set/a?.tar"], info)
    memory.rm("/set/a?.tar")
    memory.pipe("/set/ab.tar", b"")
    assert list_shards("memory://set/a?.tar", REMOTE) == (["memory:///set/ab.tar"], info)


def test_a_listed_shard_that_a_store_lacks_is_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    shards = [{"file": f"{n}.tar", "samples": 1} for n in range(3)]
    memory.pipe({"/part/info.json": json.dumps({"samples": 3, "shards": shards}).encode(), "/part/0.tar": b""})
    memory.pipe("/part/9.tar", b"")
    with pytest.raises(UserError, match=r"2 of its 3 shards are missing \(1\.tar, 2\.tar\)"):
        list_shards("memory://part", REMOTE)

    memory.pipe("/plain/0.tar", b"")
    for error, said in (
        (PermissionError("no"), "access is refused"),
        (NotImplementedError("no"), "cannot be read: no"),
    ):

        def refused(*args: Any, error: Exception = error, **options: Any) -> list[str]:
            raise error

        monkeypatch.setattr(type(memory), "ls", refused)  # of a bucket whose objects may be read
        assert len(list_shards("memory://part", REMOTE)[0]) == 3
        with pytest.raises(UserError, match=said):
            list_shards("memory://plain", REMOTE)


def test_side_files_of_tars_are_no_shards(digit_shards: Path, tmp_path: Path) -> None:
    shutil.copy(digit_shards / "000000.tar", tmp_path / "a.tar")
    for name in ("a.tar.md5", "a.tar.idx", "._a.tar", ".a.tar.Xy12ab", ".b.tar.gz"):
        (tmp_path / name).write_bytes(b"")
    assert list_shards(str(tmp_path), REMOTE)[0] == [str(tmp_path / "a.tar")]
    (tmp_path / "b.tar.gz").write_bytes(b"")
    assert len(list_shards(str(tmp_path), REMOTE)[0]) == 2, "compressed: an error when it is read"


def test_shards_that_info_json_does_not_list_are_refused(folder: Path) -> None:
    shutil.copy(folder / "shards/000000.tar", folder / "shards/000999.tar")
    with pytest.raises(UserError, match=r"1 shards there are not listed .* \(000999\.tar\)"):
        open_shards(str(folder / "shards"))


def test_a_folder_of_several_splits_is_not_taken_for_one(folder: Path) -> None:
    shards = folder / "shards"
    info = json.loads((shards / "info.json").read_text())
    parts = {"train": info["shards"][:6], "val": info["shards"][6:]}
    splits = {name: {"samples": 0, "shards": part} for name, part in parts.items()}
    (shards / "about.json").write_text(json.dumps({"classes": info["classes"], "splits": splits}))
    (shards / "info.json").unlink()
    (shards / "packing.jsonl").unlink()
    with pytest.raises(UserError, match=r"holds several splits \(train, val\): name the shards of one"):
        open_shards(str(shards))
    train = open_shards(f"{shards}/{{000000..000005}}.tar")
    assert train.classes == tuple(info["classes"])
    assert train.counts == tuple(entry["samples"] for entry in parts["train"]) and all(
        shard.checksum for shard in train.shards
    )


@pytest.mark.parametrize("about", [{"title": "x"}, {"splits": ["train"]}, {"splits": None}, [1]])
def test_an_about_json_of_another_kind_is_let_be(digit_shards: Path, tmp_path: Path, about: Any) -> None:
    shutil.copytree(digit_shards, tmp_path / "set")
    (tmp_path / "set" / "info.json").unlink()
    (tmp_path / "set" / "packing.jsonl").unlink()
    (tmp_path / "set" / "about.json").write_text(json.dumps(about))
    assert open_shards(str(tmp_path / "set")).samples == open_shards(str(digit_shards)).samples
    (tmp_path / "set" / "about.json").write_text(json.dumps({"splits": {"train": 5}}))
    with pytest.raises(UserError, match=r"about\.json: "):
        open_shards(str(tmp_path / "set"))


def test_a_folder_with_braces_in_its_name_is_meant_as_it_stands(digit_shards: Path, tmp_path: Path) -> None:
    shutil.copytree(digit_shards, tmp_path / "a{1,2}")
    assert len(open_shards(f"{tmp_path}/a{{1,2}}").urls) == 8
    shutil.copytree(digit_shards, tmp_path / "a[1]")
    assert len(open_shards(f"{tmp_path}/a[1]/000000.tar").urls) == 1


def test_a_pattern_of_all_files_takes_the_shards_alone(digit_shards: Path, tmp_path: Path) -> None:
    shutil.copytree(digit_shards, tmp_path / "set")
    (tmp_path / "set" / "extracted.tar").mkdir()
    shards = list_shards(str(tmp_path / "set" / "0*"), RemoteConfig())[0]
    assert shards and list_shards(str(tmp_path / "set" / "[0i]*"), RemoteConfig())[0] == shards
    assert list_shards(str(tmp_path / "set"), RemoteConfig())[0] == shards
